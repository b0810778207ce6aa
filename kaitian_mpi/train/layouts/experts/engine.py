"""The engine of layout experts: tokens go to the ranks that hold their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch, split_share
from kaitian_mpi.train.engine import Engine, StepSum
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

    gradients: ExpertGradients

    def _prepare(self) -> None:
        owners = self._owners
        # The largest micro-batch of each rank, in samples.
        self._micro_batch_sizes = gather_values(self.world.comm, self.plan.micro_batch_size)
        self._added = 0  # micro-batches, in the current step, whose samples are not computed
        self._rounds: list[float] = [1.0]
        self._batches: list[MicroBatch] = []
        self.exchange = TokenExchange(
            self.world,
            owners.mixtures,
            owners.owners_by_mixture(),
            self._chunks(),
            self.step.waits,
            self._pace.catch_up,
        )
        """How tokens travel to their experts."""
        for mixture in owners.mixtures.values():
            mixture.use_exchange(self.exchange)

    def _chunks(self) -> int:
        chunks = self._config.expert_chunks
        return 4 if chunks == "auto" else int(chunks)

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
        )

    def close(self, together: bool = True) -> None:
        super().close(together)
        for mixture in self._owners.mixtures.values():
            mixture.use_exchange(None)
        self.exchange.close()

    def undo(self) -> None:
        self.exchange.reset()
        super().undo()

    def train(self, micro_batches: Sequence[MicroBatch]) -> None:
        missing = self._most_micro_batches() - len(micro_batches)
        stand_ins = [MicroBatch(0, micro_batches[0].batch)] * max(0, missing)
        super().train([*stand_ins, *micro_batches])

    def begin(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        order = super().begin(micro_batches)
        self._batches = list(micro_batches)
        samples = [0] * len(micro_batches)
        for counts in self._micro_batch_counts():
            for index, count in enumerate(reversed(counts)):
                samples[-1 - index] += count
        total = sum(samples)
        self._rounds = [count / total for count in samples]
        self._round = 0
        return order
