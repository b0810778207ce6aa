"""The engine of layout shard: gradients are summed to their owners, which step their parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kaitian_mpi.distributed.late_values import PartedModel
from kaitian_mpi.distributed.shards import ShardReducer
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch, split_share
from kaitian_mpi.train.engine import Engine
from kaitian_mpi.train.layouts.divided_step import apply_step
from kaitian_mpi.train.layouts.shard.shards import Shards


class ShardEngine(Engine):
    """Computes the whole model, whose parameters are whole on each rank or brought when used.

    Each micro-batch is summed, as no rank has memory for the gradients of a share.
    """

    gradients: ShardReducer

    def _prepare(self) -> None:
        # The most samples of a micro-batch, of each rank.
        self._micro_batches = gather_values(self._world.comm, self._plan.micro_batch_size)

    def _make_gradients(self) -> ShardReducer:
        state, step = self._state, self.step
        assert isinstance(state.partition, Shards)
        options: dict[str, Any] = {"on_bucket": step.bucket_ready, "waits": step.waits}
        if state.parted is not None:
            options["gathering"] = state.partition.gathering(state.parted, self._world, step.waits)
        return state.partition.reducer(state.model, **options)

    def close(self, together: bool = True) -> None:
        self._end_forward(keeps=False)
        super().close(together)

    def undo(self) -> None:
        self._end_forward(keeps=False)
        super().undo()

    def begin(self, parts: Sequence[MicroBatch]) -> list[int]:
        order = super().begin(parts)
        self.gradients.rounds = self._most_parts(self.step.batch_sizes)
        return order

    def _most_parts(self, shares: Sequence[int]) -> int:
        """Return the most micro-batches that any rank takes; the same on every rank."""
        if not self.has_micro_batches:
            return 1
        least = self.sampler.min_batch
        counts = [
            len(split_share(range(share), limit, least))
            for share, limit in zip(shares, self._micro_batches, strict=True)
        ]
        return max(counts)

    def place(self, part: MicroBatch) -> Any:
        gathering = self.gradients.gathering
        if gathering is not None:
            self._parted.begin(gathering.bring, gathering.keep)
        return super().place(part)

    def _arm(self, index: int, is_last: bool) -> None:
        gradients, rounds = self.gradients, self.gradients.rounds
        if gradients.is_outdated:
            if gradients.has_begun or gradients.gathering is not None:
                raise UserError(
                    "--layout shard: freeze and unfreeze parameters between training.step() and "
                    "the next batch, not within a step"
                )
            self._follow_unfreezing()
            self.gradients.rounds = rounds
        loss_of_share = self.step.own_loss() if is_last and self._loss_travels else None
        self.gradients.arm(self.step.weight_of_part(index), loss_of_share)

    def _backward_done(self) -> None:
        if self.gradients.gathering is not None:
            self._end_forward()
            self.gradients.end_round()

    def apply(self, is_finite: bool) -> None:
        apply_step(self.gradients, self._task, self._state, is_finite, self.step.samples)

    @contextmanager
    def forwards(self) -> Iterator[None]:
        gathering = self.gradients.gathering
        if gathering is None:
            yield
            return
        self._parted.begin(gathering.bring_any, gathering.keep)
        try:
            yield
        finally:
            self._parted.end()
        enter_phase("waiting for the other ranks' forwards", waits=True, limited=False)
        gathering.end_any()

    def _end_forward(self, keeps: bool = True) -> None:
        """Let go of the parameters in parts that were brought. Not collective."""
        if self.gradients.gathering is not None:
            self._parted.end(keeps=keeps)

    @property
    def _parted(self) -> PartedModel:
        assert self._state.parted is not None
        return self._state.parted
