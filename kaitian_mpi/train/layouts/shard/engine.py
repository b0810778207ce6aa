"""The engine of layout shard: gradients are summed to their owners, which step their parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kaitian_mpi.distributed.shard_reducer import ShardReducer
from kaitian_mpi.distributed.sharded_model import ShardedModel
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch, split_share
from kaitian_mpi.train.engine import Engine, sums_loss
from kaitian_mpi.train.layouts.divided_step import apply_step
from kaitian_mpi.train.layouts.shard.shards import Shards


class ShardEngine(Engine):
    """Computes the whole model, whose parameters are whole on each rank or brought when used.

    Each micro-batch is summed, as no rank has memory for the gradients of a share.
    """

    gradients: ShardReducer

    def _prepare(self) -> None:
        self._rounds = 1  # the micro-batches of the rank with most, in the current step
        # The largest micro-batch of each rank, in samples.
        self._micro_batch_sizes = gather_values(self.world.comm, self.plan.micro_batch_size)

    def _make_gradients(self) -> ShardReducer:
        step = self.step
        return self._shards.reducer(
            self.state.model,
            on_bucket=step.bucket_ready,
            waits=step.waits,
            gathering=self._shards.gathering(self.world, step.waits),
        )

    def close(self, together: bool = True) -> None:
        self._end_forward(keeps_changes=False)
        super().close(together)

    def undo(self) -> None:
        self._end_forward(keeps_changes=False)
        super().undo()

    def begin(self, micro_batches: list[MicroBatch]) -> list[int]:
        order = super().begin(micro_batches)
        self._rounds = self._most_micro_batches(self.step.batch_sizes)
        self.gradients.begin_step(self._rounds)
        return order

    def _most_micro_batches(self, shares: Sequence[int]) -> int:
        """Return the number of micro-batches of the rank with most; the same on every rank."""
        if not self.splits_shares:
            return 1
        least = self.sampler.min_batch
        counts = [
            len(split_share(range(share), limit, least))
            for share, limit in zip(shares, self._micro_batch_sizes, strict=True)
        ]
        return max(counts)

    def place(self, micro_batch: MicroBatch) -> Any:
        gathering = self.gradients.gathering
        if gathering is not None:
            self._sharded_model.begin(gathering.unshard, gathering.write_back)
        return super().place(micro_batch)

    def _arm(self, index: int, is_last: bool) -> None:
        gradients = self.gradients
        if gradients.is_outdated:
            if gradients.has_begun or gradients.gathering is not None:
                raise UserError(
                    "--layout shard: freeze and unfreeze parameters between training.step() and "
                    "the next batch, not within a step"
                )
            self._follow_unfreezing()
            self.gradients.begin_step(self._rounds)
        with_loss = is_last and sums_loss(self.gradients, self._config)
        loss = self.step.rank_loss() if with_loss else None
        self.gradients.arm(self.step.weight_of_micro_batch(index), loss)

    def _backward_done(self) -> None:
        if self.gradients.gathering is not None:
            self._end_forward()
            self.gradients.end_round()

    def apply(self, is_finite: bool) -> None:
        apply_step(self.gradients, self._task, self.state, is_finite, self.step.samples)

    @contextmanager
    def forwards(self) -> Iterator[None]:
        gathering = self.gradients.gathering
        if gathering is None:
            yield
            return
        self._sharded_model.begin(gathering.independent.unshard, gathering.write_back)
        try:
            yield
        finally:
            self._sharded_model.end()
        enter_phase("waiting for the other ranks' forwards", waits=True, limited=False)
        gathering.independent.join_others()

    def _end_forward(self, keeps_changes: bool = True) -> None:
        """Release the parameters that were gathered. Not collective."""
        if self.gradients.gathering is not None:
            self._sharded_model.end(keeps_changes=keeps_changes)

    @property
    def _shards(self) -> Shards:
        assert isinstance(self.state.partition, Shards)
        return self.state.partition

    @property
    def _sharded_model(self) -> ShardedModel:
        model = self._shards.sharded_model
        assert model is not None
        return model
