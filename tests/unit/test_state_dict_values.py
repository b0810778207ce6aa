"""What a script's `state_dict`s have of sharded parameters, which owners would be asked for."""

import pytest
import torch
from torch import nn

from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.state_dict_values import StateDictValues


class Owners:
    """Have the values of two parameters, and count what is read and taken of them."""

    def __init__(self):
        self.parameters = {3: nn.Parameter(torch.zeros(2)), 5: nn.Parameter(torch.zeros(3))}
        self.values = {3: torch.full((2,), 3.0), 5: torch.full((3,), 5.0)}
        self.versions = {3: 0, 5: 0}
        self.reads, self.takes = [], 0
        self.in_state_dicts = StateDictValues(
            self.parameters, self.read_into, self.versions.__getitem__, self.take_changes
        )

    def read_into(self, number, values):
        self.reads.append(number)
        values.copy_(self.values[number])

    def take_changes(self):
        self.takes += 1

    def state_dict(self):
        with self.in_state_dicts.making():
            return [self.in_state_dicts.value_of(p) for p in self.parameters.values()]


def test_values_are_read_when_they_are_used_and_again_once_they_have_changed():
    owners = Owners()
    first, second = owners.state_dict()
    assert (first.shape, second.dtype, owners.reads) == ((2,), torch.float32, [])
    assert second.sum().item() == 15
    assert (first * 2).tolist() == [6, 6]
    assert second.tolist() == [5, 5, 5]
    assert owners.reads == [5, 3]
    owners.values[5] += 1
    owners.versions[5] += 1
    assert second.tolist() == [6, 6, 6]
    assert owners.reads == [5, 3, 5]


def test_what_the_script_has_changed_is_taken_before_a_version_is_compared():
    owners = Owners()
    first, _ = owners.state_dict()
    assert owners.takes == 1
    first.sum()
    assert owners.takes == 2


def test_only_while_a_state_dict_is_made_something_stands_for_a_parameter():
    owners = Owners()
    parameter = owners.parameters[3]
    assert owners.in_state_dicts.value_of(parameter) is None
    with owners.in_state_dicts.making():
        value = owners.in_state_dicts.value_of(parameter)
        with owners.in_state_dicts.making():  # of a submodule
            assert owners.in_state_dicts.value_of(parameter) is value
        assert owners.in_state_dicts.value_of(parameter) is value
    assert owners.in_state_dicts.value_of(parameter) is None


def test_an_earlier_state_dict_follows_the_parameters():
    owners = Owners()
    early = torch.zeros(3)
    owners.in_state_dicts.let_follow(5, early)
    assert early.tolist() == [5, 5, 5]
    with pytest.raises(UserError, match="changed in place"):
        early.mul_(2)
