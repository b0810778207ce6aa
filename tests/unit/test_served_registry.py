"""What ranks may read of a model or an optimizer, found by its index."""

import gc

import pytest
import torch
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.local_rows import LocalRows
from kaitian_mpi.integrations.shard.remote_reads import NOT_YET, ReadKind
from kaitian_mpi.integrations.shard.served_registry import ServedRegistry


class Owned:
    def __init__(self, name):
        self.name = name

    def serve(self, *numbers):
        return self.name, *numbers


class Script:
    """A model or an optimizer."""


def test_what_a_rank_owns_is_served_by_its_kind_and_index():
    served = ServedRegistry()
    first, second, optimizer = Script(), Script(), Script()
    served.add(ReadKind.MODEL, Owned("first"), of=first)
    served.add(ReadKind.OPTIMIZER, Owned("optimizer"), of=optimizer)
    assert (served.next_index(ReadKind.MODEL), served.next_index(ReadKind.OPTIMIZER)) == (1, 1)
    assert served.serve(ReadKind.MODEL, 1, 7) is NOT_YET  # another rank's script is ahead
    served.add(ReadKind.MODEL, Owned("second"), of=second)
    assert served.serve(ReadKind.MODEL, 1, 7) == ("second", 7)
    assert served.serve(ReadKind.MODEL, 0) == ("first",)
    assert served.serve(ReadKind.OPTIMIZER, 0, 1, 2) == ("optimizer", 1, 2)


def test_what_the_script_has_deleted_is_served_until_it_is_freed_and_keeps_its_index():
    served = ServedRegistry()
    model, other = Script(), Script()
    served.add(ReadKind.MODEL, Owned("model"), of=model)
    served.add(ReadKind.MODEL, Owned("other"), of=other)
    del model
    gc.collect()
    assert served.serve(ReadKind.MODEL, 0) == ("model",)  # until the backward of all ranks
    assert served.free_deleted() == 0  # it has no rows
    with pytest.raises(UserError, match="delete it on all ranks, or on none"):
        served.serve(ReadKind.MODEL, 0)
    assert served.serve(ReadKind.MODEL, 1) == ("other",)


def test_the_bytes_of_deleted_rows_are_told_once():
    served = ServedRegistry()
    model, other = Script(), Script()
    for script in (model, other):
        rows = LocalRows([nn.Parameter(torch.ones(6, 5))], 0, None, None)
        rows.assign(0, [Part(0, 0, 4, 0), Part(0, 4, 6, 1)], {})
        served.add(ReadKind.MODEL, rows, of=script)
    assert served.free_deleted() == 0
    del model
    gc.collect()
    assert served.free_deleted() == 4 * 5 * 4
    assert served.free_deleted() == 0
