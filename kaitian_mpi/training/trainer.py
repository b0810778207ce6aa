"""Steps and evaluations, in step with the other ranks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.backend.ddp_hook import WeightedSum
from kaitian_mpi.balance.shares import cut
from kaitian_mpi.benchmark.plan import Plan
from kaitian_mpi.collectives.torch_releases import NO_BUFFERS_IN_FORWARD
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.data.loader import make_loader
from kaitian_mpi.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.engine.clock import StepClock, StepTimes
from kaitian_mpi.engine.computation import make_schedule
from kaitian_mpi.engine.evaluation import Evaluation, evaluate
from kaitian_mpi.engine.setup import Ingredients
from kaitian_mpi.engine.state import Progress, TrainingState
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import StepLimit, enter_phase, first_step_limit, set_phase_limit
from kaitian_mpi.training.step_exchange import StepReport

_STEPS_TO_KNOW = 3  # before that the first step may still compile kernels


@dataclass(frozen=True)
class Step:
    """A global step that all ranks have done, as one of them sees it."""

    number: int
    """From 1."""
    samples: int
    """Of all ranks."""
    own_samples: int
    """Of this rank."""
    loss: torch.Tensor
    """Mean over this rank's samples, where they were computed; reading it waits for the device."""
    is_finite: bool
    """Whether its gradient is; otherwise all ranks have skipped the optimizer's step."""
    times: StepTimes
    """Of the steps that the device has finished since the step before."""
    data_sec: float
    """Spent on getting this rank's batch."""

    def report(self, wants_checkpoint: bool = False) -> StepReport:
        """Return what the other ranks need to know of it."""
        steps, computed, waited = self.times
        return StepReport(
            self.own_samples, steps, computed, waited, self.data_sec, wants_checkpoint
        )


class Trainer:
    """Trains on some ranks, in step with each other, from wherever the state is.

    Every method is collective.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        made: Ingredients,
        state: TrainingState,
        plan: Plan,
        slowdown: Slowdown,
        commit: Callable[[bool], None] | None = None,
    ) -> None:
        """Make what belongs to these ranks, for a state that outlives them.

        Args:
            config: the settings.
            world: the ranks, which are those of the default process group.
            made: the data.
            state: the same on every rank.
            plan: the batch sizes of these ranks.
            slowdown: this rank's emulated slowdown.
            commit: called with whether this rank has done a step or an evaluation, before anything
                is changed by it; raises where some rank has not.
        """
        data = made.data
        self.world, self.state = world, state
        self._config, self._data = config, data
        self._computation, self._slowdown = state.computation, slowdown
        self._commit = commit
        state.undo_piece()
        self.sampler = LoadAdaptiveSampler(
            data.train,  # type: ignore[arg-type]
            plan.batch_sizes,
            world.rank,
            seed=config.seed,
            min_batch=plan.min_batch,
        )
        self._micro_batch, self._min_batch = plan.micro_batch_size, plan.min_batch
        self._gradients = WeightedSum(on_bucket=self._bucket_ready)
        # The state is the same on all ranks, except the buffers, which must stay different.
        self._ddp = DistributedDataParallel(
            state.model, init_sync=False, gradient_as_bucket_view=True, **NO_BUFFERS_IN_FORWARD
        )
        # Its type cannot be named here: the import would start MPI, also in the processes
        # that load data, which import the module that their data set comes from.
        self._group = cast("Any", dist.group.WORLD)
        if commit is not None:
            self._group.record_losses()
        self._gradients.attach(self._ddp)
        # A 1x1 filter's gradient in channels_last names other strides for the same order of bytes.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        self._rate = make_schedule(config)
        self.clock = StepClock(world.device_kind)
        self._limit = StepLimit(config.step_timeout)
        self._evaluation_limit = StepLimit(
            config.step_timeout, first_step_limit(config.step_timeout)
        )
        self._steps_seen = 0

    @property
    def progress(self) -> Progress:
        """How far the run is."""
        return self.state.progress

    def steps(self) -> Iterator[Step]:
        """Train a step each time that the next one is asked for.

        Ends with the epoch, or where `--max-steps` does.
        """
        if self.progress.step >= self.progress.total_steps:
            return
        self._data.set_epoch(self.progress.epoch)
        self.sampler.set_epoch(self.progress.epoch)
        self.sampler.position = self.progress.position
        pin_memory = self.world.device_kind.pins_memory
        progress, workers = self.progress, self._config.workers
        seed = (self._config.seed + progress.step) * self.world.size + self.world.rank
        loader = make_loader(self._data.train, self.sampler, workers, pin_memory, seed)
        self._ddp.train()
        waiting_since = time.perf_counter()
        enter_phase("getting a batch", step=self.progress.step + 1)
        for inputs, labels in loader:
            data_sec = time.perf_counter() - waiting_since
            yield self.step(inputs, labels, data_sec)
            if self.progress.step >= self.progress.total_steps:
                break
            waiting_since = time.perf_counter()
            enter_phase("getting a batch", step=self.progress.step + 1)

    def evaluate(self) -> Evaluation:
        """Pool the ranks' batch norm statistics, then evaluate on the validation data."""
        shares = self.sampler.batch_sizes
        self.state.begin_piece()
        self.state.statistics.pool(shares[self.world.rank] / sum(shares))
        result = evaluate(
            self.state.model,
            self._data.validation,
            self._computation,
            self.world.rank,
            shares,
            self._micro_batch,
            self._evaluation_limit,
        )
        known = self._steps_seen >= _STEPS_TO_KNOW
        set_phase_limit(
            self._limit.limit_sec if known else first_step_limit(self._config.step_timeout)
        )
        self._commit_piece()
        return result

    def step(self, inputs: torch.Tensor, labels: torch.Tensor, data_sec: float) -> Step:
        """Train on this rank's share of the next global batch.

        Args:
            inputs: on the host.
            labels: on the host.
            data_sec: seconds that getting them took.
        """
        samples = self.sampler.samples_of_step(self.progress.position)
        self._set_rate(samples)
        if self._commit is not None:
            self.state.begin_piece()
        step_in_epoch = self.progress.step_in_epoch
        self.state.statistics.before_step(step_in_epoch, len(labels), samples)
        self._gradients.weight = len(labels) / samples
        self._slowdown.go_to(self.progress.step + 1)
        self.clock.start()
        self._slowdown.start()
        enter_phase("forward", step=self.progress.step + 1)
        loss = self._gradients_of(inputs, labels)
        is_finite = self._gradients.is_finite(self.state.model)
        self._commit_piece()
        self.clock.gradients_summed()
        self._slowdown.start()
        self._apply(is_finite, samples)
        self._slowdown.catch_up()
        self.clock.stop()
        times = self.clock.take()
        self._watch(times, data_sec)
        number, own_samples = self.progress.step, len(labels)
        return Step(number, samples, own_samples, loss, is_finite, times, data_sec)

    def _commit_piece(self) -> None:
        """Go on only if every rank has come so far."""
        if self._commit is not None:
            self._commit(not self._group.is_broken)
        self.state.piece_done()

    def _apply(self, is_finite: bool, samples: int) -> None:
        """Change the state by a step: all ranks do, by the same gradient."""
        enter_phase("the optimizer", step=self.progress.step + 1)
        with self.state.lock:
            # With fp16 the scaler leaves the step out itself, and lowers its scale.
            if is_finite or self._computation.scaler.is_enabled():
                self._computation.update(self.state.optimizer)
            self.state.optimizer.zero_grad()
            self.progress.step_done(samples)

    def _gradients_of(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Leave the global batch's gradient in the parameters; return this rank's mean loss.

        A share that is larger than what fits the memory is taken in equal micro-batches, whose
        gradients add up to exactly that of the share. Only the last sums over the ranks.
        """
        sizes = cut(len(labels), self._micro_batch, self._min_batch)
        parts = list(zip(inputs.split(sizes), labels.split(sizes), strict=True))
        losses = []
        for part_inputs, part_labels in parts[:-1]:
            with self._ddp.no_sync():
                losses.append(self._backward(part_inputs, part_labels, len(labels)))
        losses.append(self._backward(*parts[-1], len(labels)))
        return torch.stack(losses).sum()

    def _backward(
        self, inputs: torch.Tensor, labels: torch.Tensor, of_samples: int
    ) -> torch.Tensor:
        inputs, labels = self._computation.place(inputs, labels)
        loss = self._forward(inputs, labels)
        if len(labels) < of_samples:
            loss = loss * (len(labels) / of_samples)
        enter_phase("backward", step=self.progress.step + 1)
        self._computation.scaler.scale(loss).backward()
        return loss.detach()

    def _watch(self, times: StepTimes, data_sec: float) -> None:
        """Tell the watchdog how long a step takes, and that the ranks wait for each other now."""
        self._steps_seen += 1
        if times.steps:
            step_sec = (times.computed + times.waited) / times.steps
            limit = self._limit.observe(step_sec + data_sec)
            if limit is not None or self._steps_seen == _STEPS_TO_KNOW:
                set_phase_limit(self._limit.limit_sec)
        enter_phase("reporting the step", step=self.progress.step, waits=True)

    def _forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels):
            self.state.statistics.before_batch(len(labels))
            return self._computation.loss(self._ddp, inputs, labels)
        # No sample falls to this rank in an epoch's last, partial step, yet it must take part in
        # the sum: one of zeros, with no effect on batch norm, and a weight of zero.
        self._ddp.eval()
        logits = self._computation.logits(self._ddp, inputs.new_zeros((1, *inputs.shape[1:])))
        self._ddp.train()
        return logits.sum() * 0.0

    def _bucket_ready(self, is_last: bool) -> None:
        self._slowdown.catch_up()
        self.clock.bucket_ready()
        if is_last:
            enter_phase("the sum of gradients", step=self.progress.step + 1, waits=True)

    def _set_rate(self, samples: int) -> None:
        of_epoch = len(self._data.train)  # type: ignore[arg-type]
        rate = self._rate(self.progress.fraction_done(self._config, samples, of_epoch))
        self.progress.learning_rate = rate
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate
