"""A script's optimizer, of which a rank keeps its rows."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kaitian_mpi.balance.ownership import Part
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


def test_a_state_of_rows_that_the_script_sets_is_kept():
    """As it has looped over optimizer.state, which shows rows, and made another one."""
    whole, rows = (nn.Parameter(torch.zeros(length, 5)) for length in (4, 2))
    of_no_model = nn.Parameter(torch.zeros(2))
    model = SimpleNamespace(
        rows=SimpleNamespace(
            index=0,
            lock=threading.RLock(),
            of=lambda number: [rows],
            parts_of=lambda number: [(Part(0, 1, 3, 0), rows)],
        ),
        number=lambda parameter: 0,
    )
    owned = OwnedOptimizer(0, lambda parameter: model if parameter is whole else None)
    optimizer = torch.optim.SGD([whole, of_no_model], lr=1.0, momentum=0.9)
    owned.follow(optimizer, [model])
    owned.begin(optimizer)
    for parameter in (rows, of_no_model):
        owned.state.current[parameter] = {"momentum_buffer": torch.ones_like(parameter)}
    doubled = {p: {n: 2 * value for n, value in s.items()} for p, s in optimizer.state.items()}
    optimizer.state = defaultdict(dict, doubled)
    owned.follow(optimizer, [model])
    for parameter in (rows, of_no_model):
        assert optimizer.state[parameter]["momentum_buffer"].mean() == 2
        assert owned.state.current[parameter]["momentum_buffer"].mean() == 2
    optimizer.state = defaultdict(dict)
    owned.follow(optimizer, [model])
    assert not owned.state.current
