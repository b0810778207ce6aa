"""The engine of layout experts: tokens go to the ranks that hold their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kaitian_mpi.balance.experts import DEFAULT_CHUNKS
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.train.data.batches import MicroBatch, split_share
from kaitian_mpi.train.engine import Engine, StepSum
from kaitian_mpi.train.evaluation import MAX_BATCH, evaluation_indices
from kaitian_mpi.train.layouts.divided_step import apply_step
from kaitian_mpi.train.layouts.experts.exchange import TokenExchange
from kaitian_mpi.train.layouts.experts.expert_owners import ExpertOwners
from kaitian_mpi.train.layouts.experts.gradients import ExpertGradients
from kaitian_mpi.train.step_times import StepClock


class ExpertsEngine(Engine):
    """Computes the whole model on this rank's samples, and its experts on all ranks' tokens.

    Every rank computes equally many micro-batches, as each is a forward over all ranks: one with
    fewer adds some whose tokens are not computed. Losses are weighted before backward, as an expert
    adds up the gradients of all ranks.
    """

    computes_whole_model = False  # ranks must compute it together
    gradients: ExpertGradients

    def _prepare(self) -> None:
        owners = self._owners
        # The largest micro-batch of each rank, in samples.
        self._micro_batch_sizes = gather_values(self.world.comm, self.plan.micro_batch_size)
        # Of the micro-batches of the current step: which are left, and what part of the global
        # batch all ranks compute at the same time.
        self._order: list[int] = []
        self._shares: list[float] = []
        self._saved_buffers: list[torch.Tensor] = []
        chunks = self._config.expert_chunks
        self.exchange = TokenExchange(
            self.world,
            owners.mixtures,
            owners.owners_by_mixture(),
            DEFAULT_CHUNKS if chunks == "auto" else int(chunks),
            self.step.waits,
            self._pace.catch_up,
        )
        """Computes the experts of all ranks."""

    @property
    def _owners(self) -> ExpertOwners:
        assert isinstance(self.state.partition, ExpertOwners)
        return self.state.partition

    def _make_gradients(self) -> ExpertGradients:
        step = self.step
        return ExpertGradients(
            self._owners,
            self.state.model,
            self.exchange,
            self.world.rank,
            step.waits,
            step.bucket_ready,
            clips=self._task.clip_norm is not None,
        )

    def close(self, together: bool = True) -> None:
        super().close(together)
        self.exchange.close()

    def undo(self) -> None:
        self.exchange.reset()
        super().undo()

    def script_has_run(self) -> None:
        self.exchange.finish_forwards()

    def _sizes_by_rank(self) -> list[list[int]]:
        """Return the samples of each rank's micro-batches in the next step."""
        shares = self.sampler.shares_at(self.state.progress.position)
        if not self.splits_shares:
            return [[share] for share in shares]
        least = self.sampler.min_batch
        return [
            [size for size, _ in split_share(range(share), limit, least)]
            for share, limit in zip(shares, self._micro_batch_sizes, strict=True)
        ]

    def begin(self, micro_batches: list[MicroBatch]) -> list[int]:
        by_rank = self._sizes_by_rank()
        missing = max(map(len, by_rank)) - len(micro_batches)
        micro_batches[:0] = [MicroBatch(0, micro_batches[0].batch)] * missing
        order = super().begin(micro_batches)
        rounds = [0] * len(micro_batches)
        for sizes in by_rank:  # those that were added come first
            for index, size in enumerate(reversed(sizes)):
                rounds[-1 - index] += size
        self._shares = [size / sum(rounds) for size in rounds]
        self._order = list(order)
        return order

    def place(self, micro_batch: MicroBatch) -> Any:
        index = self._order.pop(0)
        share = self._shares[len(self._shares) - len(self._order) - 1]
        self.exchange.begin(micro_batch.samples > 0, self._weight_of(index), share)
        self._saved_buffers = []
        if not micro_batch.samples and self.step.rank_samples:
            self._saved_buffers = [buffer.clone() for buffer in self.state.model.buffers()]
        return super().place(micro_batch)

    def _weight_of(self, index: int) -> float:
        """Return the factor of a micro-batch's loss in that of the global batch."""
        step = self.step
        weight_of_share = step.weight_of_share
        if not step.weights[index] or weight_of_share is None:
            return 0.0
        return weight_of_share() * step.weights[index] / step.rank_weight

    def backward(self, loss: torch.Tensor, index: int = 0, is_last: bool = True) -> None:
        self.exchange.finish_forwards()
        self._pace.catch_up()
        self.step.clock.enter(StepClock.BACKWARD)
        weight = self._weight_of(index)
        if weight:
            loss = loss * weight
            self.gradients.add_loss(loss)
        if is_last:
            self._follow_unfreezing()
            counts = 1.0 if self.step.counts else 0.0
            self.gradients.arm(counts if self.step.rank_samples else None)
        scaled = self._computation.scaler.scale(loss)
        if scaled.requires_grad:
            scaled.backward()
        self.exchange.finish_backward()
        with torch.no_grad():
            for buffer, saved in zip(self.state.model.buffers(), self._saved_buffers, strict=False):
                buffer.copy_(saved)
        if not is_last:
            if not weight:  # leave nothing but that there are gradients
                self.gradients.zero_dense()
            self._pace.catch_up()
            self.step.clock.enter(StepClock.FORWARD)

    def finish(self) -> StepSum:
        self.gradients.finish()
        self.exchange.begin()  # what the script computes between steps is of tokens that count
        if self.step.rank_samples == 0:
            state = self.state
            state.buffers.put_back(besides=state.statistics.synchronized_buffers())
        return StepSum(self.gradients.is_finite(), self.gradients.number)

    def apply(self, is_finite: bool) -> None:
        apply_step(self.gradients, self._task, self.state, is_finite, self.step.samples)

    def pool_statistics(self) -> None:
        """Give every rank the batch norm statistics of all, and the buffers of all experts."""
        self._owners.share_buffers(self.world)
        super().pool_statistics()

    def results(self, observe: Callable[[float], None]) -> Iterator[tuple[Any, Any, int]]:
        """Yield results as `Engine.results` does; every rank computes equally many batches."""
        self.exchange.begin()
        done = 0
        for result in super().results(observe):
            self.exchange.finish_forwards()
            done += 1
            yield result
        length = len(self._setup.validation)
        shares = self.sampler.batch_sizes
        most = max(
            len(evaluation_indices(length, rank, shares, min(MAX_BATCH, size or MAX_BATCH)))
            for rank, size in enumerate(self._micro_batch_sizes)
        )
        function = self._task.metrics or self._task.loss
        assert function is not None
        self.exchange.begin(has_tokens=False)
        for _ in range(most - done):
            batch = self._computation.place(self._setup.validation[[0]])
            with self._computation.autocast():
                function(self._task.model, batch)
            self.exchange.finish_forwards()
        self.exchange.begin()
