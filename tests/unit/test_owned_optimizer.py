"""A script's optimizer, of which a rank keeps its rows."""

import pytest
import torch
from torch import nn

from kaitian_mpi.integrations.shard.owned_optimizer import OwnedOptimizer


@pytest.mark.parametrize("has_begun", [True, False])
def test_hooks_of_load_state_dict_see_the_whole_state_once(has_begun):
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)
    owned = OwnedOptimizer(0, lambda parameter: None)
    if has_begun:
        owned.begin(optimizer)
    state = {place: {"buffer": torch.full((2,), float(place))} for place in range(2)}
    calls = []

    def convert(optimizer, content):
        calls.append([*content["state"]])
        renamed = {n: {"momentum_buffer": s["buffer"]} for n, s in content["state"].items()}
        content["state"] = renamed

    optimizer.register_load_state_dict_pre_hook(convert)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
    load = torch.optim.Optimizer.load_state_dict
    content = {**optimizer.state_dict(), "state": state}
    owned.load(optimizer, content, load)
    if not has_begun:
        owned.begin(optimizer)
    assert calls == [[0, 1], "loaded"]
    assert content["state"] is state
    loaded = [owned.state.current[parameter]["momentum_buffer"] for parameter in parameters]
    assert [buffer.tolist() for buffer in loaded] == [[0, 0], [1, 1]]
