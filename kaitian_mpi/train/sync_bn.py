"""How a rank takes part in the batch norm statistics of all ranks, in a step of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.distributed.sync_batch_norm import Participation
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.clock import StepClock
from kaitian_mpi.train.step import StepInProgress


class StepParticipation(Participation):
    """Takes part with what counts of the step's share, and counts waiting as waiting.

    Args:
        clock: of the steps.
        slowdown: this rank's emulated slowdown, which waiting does not prolong.
        step: returns the step in progress.
    """

    def __init__(
        self, clock: StepClock, slowdown: Slowdown, step: Callable[[], StepInProgress]
    ) -> None:
        super().__init__(lambda: step().own_weight)
        self._clock, self._slowdown, self._step = clock, slowdown, step
        self._number = 0
        self._outputs: list[torch.Tensor] = []

    @property
    def counts(self) -> bool:
        """Whether anything of this rank's share counts."""
        return self._step().own_weight > 0

    def begin_step(self, number: int) -> None:
        """Begin a step, counted from 1."""
        self._number, self._outputs = number, []

    @contextmanager
    def waits(self) -> Iterator[None]:
        """Return the context of a collective, which may wait for other ranks."""
        self._slowdown.catch_up()
        began = self._clock.wait_begins()
        enter_phase("the sums of a batch norm", step=self._number, waits=True)
        yield
        enter_phase("forward or backward", step=self._number)
        self._clock.wait_ends(began)
        self._slowdown.start()

    def computed(self, output: torch.Tensor) -> None:
        """Remember an output of a share that does not count: its loss may have no gradient."""
        if not self.counts and output.requires_grad:
            self._outputs.append(output)

    def take_part_in_backward(self) -> None:
        """Join the other ranks' backward, where this rank's loss has no gradient. Collective."""
        outputs, self._outputs = self._outputs, []
        if outputs:
            torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
