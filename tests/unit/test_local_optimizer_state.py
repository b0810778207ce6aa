"""The state of a rank's rows in an optimizer, which other ranks read after steps of their own."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.local_optimizer_state import LocalOptimizerState, StatePiece
from kaitian_mpi.integrations.shard.optimizer_state_view import OptimizerStateView
from kaitian_mpi.integrations.shard.remote_reads import NOT_YET
from kaitian_mpi.integrations.shard.state_reader import StateReader

MODEL = 3
ROWS = nn.Parameter(torch.zeros(2, 5))
OF_NO_MODEL = nn.Parameter(torch.zeros(2))
WHOLE = nn.Parameter(torch.zeros(4, 5))


def owned_by(*, states):
    """Return the state of rows 1 and 2 of a model's only parameter, after a step each."""
    parts = [(Part(0, 1, 3, 0), ROWS)]
    rows = SimpleNamespace(index=MODEL, parts_of=lambda number: parts)
    model = SimpleNamespace(rows=rows, parameters=[WHOLE])
    owned = LocalOptimizerState(0, lambda parameter: model if parameter is WHOLE else None)
    owned.set_models([model])
    for state in states:
        with owned.lock:
            owned.take_back(defaultdict(dict, {ROWS: state}))
            owned.end_step()
    return owned


def moments(value):
    return {"step": torch.tensor(value), "exp_avg": torch.full((2, 5), value)}


def test_a_rank_reads_small_values_at_once_and_rows_of_large_tensors_by_name():
    owned = owned_by(states=[moments(1.0)])
    (piece,) = owned.serve(MODEL, 1)
    piece = StatePiece(*piece)
    assert (piece.number, piece.begin, piece.end) == (0, 1, 3)
    assert piece.names == ["step", "exp_avg"]
    assert piece.small == {"step": torch.tensor(1.0)}
    assert piece.large == {"exp_avg": (torch.float32, (2, 5), (5, 1))}
    ((begin, end, rows),) = owned.serve(MODEL, 1, 0, *b"exp_avg")
    assert (begin, end, rows.tolist()) == (1, 3, [[1.0] * 5] * 2)
    owned.current[ROWS]["exp_avg"].zero_()  # while they are sent
    assert rows.sum() == 10
    owned.current[ROWS]["step"].zero_()
    assert piece.small == {"step": torch.tensor(1.0)}
    assert owned.serve(MODEL + 1, 1) == []


def test_an_owner_that_is_behind_waits_and_one_that_is_ahead_refuses():
    owned = owned_by(states=[moments(1.0)])
    assert owned.serve(MODEL, 2) is NOT_YET
    owned.end_step()
    assert len(owned.serve(MODEL, 2)) == 1
    with pytest.raises(UserError, match="read it before the next backward"):
        owned.serve(MODEL, 1)


def test_a_state_that_the_script_has_replaced_can_be_read_until_the_next_backward():
    owned = owned_by(states=[moments(1.0)])
    owned.replace(defaultdict(dict, {ROWS: moments(2.0)}))
    assert [owned.serve(MODEL, steps, 0, *b"exp_avg")[0][2].mean().item() for steps in (1, 2)] == [
        1.0,
        2.0,
    ]
    owned.end_backward()
    with pytest.raises(UserError):
        owned.serve(MODEL, 1)
    assert len(owned.serve(MODEL, 2)) == 1


def test_a_kept_state_dict_has_the_state_of_its_step_of_parameters_in_no_model_too():
    owned = owned_by(states=[moments(1.0)])
    owned.current[OF_NO_MODEL] = {"step": 1}
    reader = StateReader(owned, [OF_NO_MODEL], reads=None)  # no other rank has it
    owned.replace(defaultdict(dict, {OF_NO_MODEL: {"step": 2}}))
    assert reader.collect() == {0: {"step": 1}}
    owned.end_backward()
    with pytest.raises(UserError, match="read it before the next backward"):
        reader.collect()


def test_an_optimizer_shows_its_rows_and_no_state_of_a_whole_parameter():
    owned = owned_by(states=[moments(1.0)])
    shown = OptimizerStateView(owned)
    assert list(shown) == [ROWS]
    with pytest.raises(UserError, match=r"use optimizer\.state_dict\(\)"):
        shown[WHOLE]
    shown[OF_NO_MODEL] = {"step": 4}
    assert shown.get(OF_NO_MODEL) == {"step": 4}
    assert shown.pop(OF_NO_MODEL) == {"step": 4}
    shown.clear()
    assert (len(shown), owned.steps) == (0, 2)
    assert len(owned.serve(MODEL, 1)) == 1  # which another rank may still read


def test_every_way_to_change_a_shown_state_reaches_the_optimizer():
    owned = owned_by(states=[moments(1.0)])
    shown = OptimizerStateView(owned)
    shown.setdefault(OF_NO_MODEL, {})["ema"] = 1
    assert owned.current[OF_NO_MODEL] == {"ema": 1}
    assert shown.setdefault(OF_NO_MODEL, {}) == {"ema": 1}
    shown.update({OF_NO_MODEL: {"ema": 2}})
    assert owned.current[OF_NO_MODEL] == {"ema": 2}
    for change in (shown.setdefault, lambda key, state: shown.update({key: state})):
        with pytest.raises(UserError):
            change(WHOLE, {})
    other = nn.Parameter(torch.zeros(1))
    with pytest.raises(KeyError):
        shown.pop(other)
    assert (shown.get(other), other in shown) == (None, False)
    assert [*shown.items()] == [*owned.current.items()]
    assert str(shown) == str(dict(owned.current))
    assert [shown.popitem()[0] for _ in range(2)] == [ROWS, OF_NO_MODEL]
    assert not owned.current
