"""The times of an adaptive trainer's steps, by which its batches are planned."""

import pytest

from kaitian_mpi.integrations.step_timer import StepTimer


class Clock:
    """A device, whose clock tests set."""

    is_host = True

    def __init__(self):
        self.seconds = 0.0

    def mark(self):
        return Moment(self.seconds)


class Moment(float):
    """A mark that is reached."""

    def is_reached(self):
        return True

    def seconds_since(self, earlier):
        return self - earlier


class OneRank:
    """A communicator of one rank."""

    size = 1

    def Iallgather(self, own, found):  # noqa: N802
        found[:] = own
        return self

    def Test(self):  # noqa: N802
        return True


def test_waits_for_other_ranks_before_the_gradients_are_computed_are_no_computation():
    clock = Clock()
    times = StepTimer(OneRank(), clock)
    for begin in (0.0, 10.0):
        clock.seconds = begin + 1
        with times.waiting():
            clock.seconds = begin + 4
        clock.seconds = begin + 6
        times.computed()
        clock.seconds = begin + 10
        times.summed(rows=5)
    steps = times.receive()
    assert (steps.steps[0], steps.samples[0]) == (1, 5)
    assert steps.work_sec[0] == pytest.approx(6 - 3)
    assert steps.wait_sec[0] == pytest.approx(4 + 3)
