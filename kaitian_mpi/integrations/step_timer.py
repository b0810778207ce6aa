"""The times of the steps of a script's trainer, which the ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kaitian_mpi.balance.rebalancer import RankSteps
from kaitian_mpi.devices import Device
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.preflight.verdict import by_value, ranks_text
from kaitian_mpi.train.step_times import ReportExchange, StepClock

if TYPE_CHECKING:
    from mpi4py import MPI


class StepTimer:
    """Times each step of this rank, and exchanges the times while the next one begins.

    A step begins when the gradients of the one before are summed.
    """

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        """Exchange times over `comm`, which nothing else exchanges reports over."""
        self.steps = 0
        """The steps so far."""
        self._batches = 0  # since the last step, several if they are accumulated
        self._trained = 0  # batches so far
        self._latest_batch = 0  # its number in its loader's epoch, from 1
        self._epochs = 0  # that this rank's latest batch has begun before its own
        self._reported = 0  # the step of the report that is exchanged
        self._clock = StepClock(device)
        self._reports = ReportExchange(comm, fields=7)

    def add_batch(self) -> None:
        """Count a batch of the current step, which has several if they are accumulated."""
        self._batches += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting for other ranks, not as computing."""
        before = self._clock.enter("waiting for other ranks")
        yield
        if before:
            self._clock.enter(before)

    def computed(self) -> None:
        """Mark that this rank's gradients of the step are computed."""
        self._clock.gradients_ready()

    def batch_trained(self, number: int) -> None:
        """Record that the gradients of a batch are computed: the `number`th of its epoch."""
        self._trained += 1
        self._epochs += number <= self._latest_batch
        self._latest_batch = number

    def summed(self, rows: int) -> None:
        """Start to exchange the times of a step whose gradients are summed. Collective.

        Args:
            rows: how many rows this rank's last batch has.
        """
        self.steps += 1
        batches = max(self._batches, 1)
        self._batches = 0
        if self.steps > 1:  # the first step's begin is not known
            self._clock.gradients_summed()
            self._clock.stop()
            times = self._clock.take()
            per_batch = 1 / (max(times.steps, 1) * batches)
            self.receive()
            seconds = times.computed * per_batch, times.waited * per_batch
            progress = self._trained, self._epochs, self._latest_batch
            self._reports.start((times.steps, rows, *seconds, *progress))
            self._reported = self.steps
        self._clock.start()

    def receive(self) -> RankSteps | None:
        """Return the ranks' times exchanged since the last call, if any. Collective.

        Raises:
            AgreedError: the ranks have not trained on the same batches, so that gradients of
                different batches were summed.
        """
        gathered = self._reports.receive()
        if gathered is None:
            return None
        steps, rows, computed, waited, *progress = gathered.T.copy()
        self._check_same_batches([*zip(*progress, strict=True)])
        return RankSteps(steps.astype(int), rows.astype(int), computed, waited)

    def _check_same_batches(self, progress: Sequence[tuple[float, float, float]]) -> None:
        """Check that all ranks have trained on the same batches.

        `progress` is, by rank, how many batches it has trained on, and the epoch and the number of
        the latest one. Raises an `AgreedError` if they differ.
        """
        if len(set(progress)) == 1:
            return
        # A rank that leaves a batch out is further in the loader, or has trained on fewer batches.
        reached = [(epoch, number, -trained) for trained, epoch, number in progress]
        skipping = [rank for rank, place in enumerate(reached) if place == max(reached)]
        texts = {
            rank: f"{int(trained)} batches up to batch {int(number)} of an epoch"
            for rank, (trained, _, number) in enumerate(progress)
        }
        raise AgreedError(
            f"--adaptive: in step {self._reported}, {ranks_text(skipping)} left out a batch that "
            f"the others have trained on: {by_value(texts)}; if the script catches an error, such "
            "as of memory, leave that batch out on every rank, or let the error end the job"
        )
