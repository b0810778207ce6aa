"""Trains and evaluates on some ranks, step by step."""

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
from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.benchmark.plan import Plan
from kaitian_mpi.collectives.torch_releases import NO_BUFFERS_IN_FORWARD
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.data.loader import make_loader
from kaitian_mpi.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.engine.clock import StepClock, StepTimes
from kaitian_mpi.engine.computation import make_schedule
from kaitian_mpi.engine.evaluation import Evaluation, evaluate
from kaitian_mpi.engine.setup import Setup
from kaitian_mpi.engine.state import Progress, TrainingState
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import StepLimit, enter_phase, first_step_limit, set_phase_limit
from kaitian_mpi.training.step_exchange import StepReport

_WARM_UP_STEPS = 3  # kernels may still be compiled in them


@dataclass(frozen=True)
class Step:
    """A global step that all ranks have done, as seen by one of them."""

    number: int
    """Counted from 1."""
    samples: int
    """All ranks' samples."""
    own_samples: int
    """This rank's samples."""
    loss: torch.Tensor
    """Mean over this rank's samples, on its device; reading it waits for the device."""
    is_finite: bool
    """Whether its gradient is finite; if not, all ranks have skipped the optimizer's step."""
    times: StepTimes
    """Times of the steps that the device has finished since the previous step."""
    data_sec: float
    """Time spent getting this rank's batch."""

    def report(self, wants_checkpoint: bool = False) -> StepReport:
        """Return the report of this step for the other ranks."""
        steps, computed, waited = self.times
        return StepReport(
            self.own_samples, steps, computed, waited, self.data_sec, wants_checkpoint
        )


class Trainer:
    """Trains on some ranks from the state's current step on.

    Every method is collective.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        setup: Setup,
        state: TrainingState,
        plan: Plan,
        slowdown: Slowdown,
        commit: Callable[[bool], None] | None = None,
    ) -> None:
        """Build the sampler and DDP for these ranks, around a state that outlives them.

        Args:
            config: the settings.
            world: the ranks of the default process group.
            setup: the data.
            state: the same on every rank.
            plan: the ranks' batch sizes.
            slowdown: this rank's emulated slowdown.
            commit: called before a step or evaluation takes effect, with whether this rank has done
                it; raises if some rank has not.
        """
        data = setup.data
        self.world, self.state = world, state
        self._config, self._data = config, data
        self._computation, self._slowdown = state.computation, slowdown
        self._commit = commit
        state.roll_back()
        self.sampler = LoadAdaptiveSampler(
            data.train,  # type: ignore[arg-type]
            plan.batch_sizes,
            world.rank,
            seed=config.seed,
            min_batch=plan.min_batch,
        )
        self._micro_batch, self._min_batch = plan.micro_batch_size, plan.min_batch
        self._gradients = WeightedSum(on_bucket=self._bucket_ready)
        # The state is already the same on all ranks, except for buffers, which must stay different.
        self._ddp = DistributedDataParallel(
            state.model, init_sync=False, gradient_as_bucket_view=True, **NO_BUFFERS_IN_FORWARD
        )
        # Its type is not imported here: that would start MPI, also in data loading workers, which
        # import the module of their dataset.
        self._group = cast("Any", dist.group.WORLD)
        if commit is not None:
            self._group.record_losses()
        self._gradients.attach(self._ddp)
        # In channels_last a 1x1 filter's gradient has other strides, but the same order of bytes.
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
        """The progress of the run."""
        return self.state.progress

    def steps(self) -> Iterator[Step]:
        """Train a step per iteration, until the end of the epoch or `--max-steps`."""
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
        self.state.begin_unit()
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
        is_warm = self._steps_seen >= _WARM_UP_STEPS
        set_phase_limit(
            self._limit.limit_sec if is_warm else first_step_limit(self._config.step_timeout)
        )
        self._commit_unit()
        return result

    def step(self, inputs: torch.Tensor, labels: torch.Tensor, data_sec: float) -> Step:
        """Train on this rank's share of the next global batch.

        Args:
            inputs: in host memory.
            labels: in host memory.
            data_sec: seconds spent getting them.
        """
        samples = self.sampler.samples_of_step(self.progress.position)
        self._set_rate(samples)
        if self._commit is not None:
            self.state.begin_unit()
        step_in_epoch = self.progress.step_in_epoch
        self.state.statistics.before_step(step_in_epoch, len(labels), samples)
        self._gradients.weight = len(labels) / samples
        self._slowdown.go_to(self.progress.step + 1)
        self.clock.start()
        self._slowdown.start()
        enter_phase("forward", step=self.progress.step + 1)
        loss = self._gradients_of(inputs, labels)
        is_finite = self._gradients.is_finite(self.state.model)
        self._commit_unit()
        self.clock.gradients_summed()
        self._slowdown.start()
        self._apply(is_finite, samples)
        self._slowdown.catch_up()
        self.clock.stop()
        times = self.clock.take()
        self._watch(times, data_sec)
        number, own_samples = self.progress.step, len(labels)
        return Step(number, samples, own_samples, loss, is_finite, times, data_sec)

    def _commit_unit(self) -> None:
        """Agree with the other ranks that all have done the step or evaluation."""
        if self._commit is not None:
            self._commit(not self._group.is_broken)
        self.state.end_unit()

    def _apply(self, is_finite: bool, samples: int) -> None:
        """Apply a step to the state; every rank does so with the same gradient."""
        enter_phase("the optimizer", step=self.progress.step + 1)
        with self.state.lock:
            # With fp16 the scaler itself skips the step, and lowers its scale.
            if is_finite or self._computation.scaler.is_enabled():
                self._computation.update(self.state.optimizer)
            self.state.optimizer.zero_grad()
            self.progress.step_done(samples)

    def _gradients_of(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the global batch's gradient; return this rank's mean loss.

        A share too large for the memory is split into equal micro-batches, whose gradients add up
        to exactly that of the share. Only the last one is summed over the ranks.
        """
        sizes = split_micro_batches(len(labels), self._micro_batch, self._min_batch)
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
        """Update the watchdog's time limit; a phase of waiting for other ranks starts."""
        self._steps_seen += 1
        if times.steps:
            step_sec = (times.computed + times.waited) / times.steps
            limit = self._limit.observe(step_sec + data_sec)
            if limit is not None or self._steps_seen == _WARM_UP_STEPS:
                set_phase_limit(self._limit.limit_sec)
        enter_phase("reporting the step", step=self.progress.step, waits=True)

    def _forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(labels):
            self.state.statistics.before_batch(len(labels))
            return self._computation.loss(self._ddp, inputs, labels)
        # In an epoch's last, partial step this rank may have no samples but must take part in the
        # sum: it computes one sample of zeros with weight 0 and no effect on batch norm.
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
        epoch_samples = len(self._data.train)  # type: ignore[arg-type]
        rate = self._rate(self.progress.fraction_done(self._config, samples, epoch_samples))
        self.progress.learning_rate = rate
        for group in self.state.optimizer.param_groups:
            group["lr"] = rate
