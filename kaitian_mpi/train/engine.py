"""The engine: computes steps on one set of ranks, from this rank's samples to new weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.optim import Optimizer

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.sync_batch_norm import participate
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import MicroBatch, split_share
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import StepInProgress
from kaitian_mpi.train.step_times import StepClock
from kaitian_mpi.train.task import Task


class GradientSums(Protocol):
    """Sums the gradients of a step: a `GradientReducer`, or a layout's own class."""

    @property
    def carries_number(self) -> bool: ...
    @property
    def number(self) -> torch.Tensor: ...
    @property
    def is_outdated(self) -> bool: ...
    def arm(
        self,
        weight: float | Callable[[], float | None] | None,
        number: torch.Tensor | None = None,
    ) -> None: ...
    def finish(self) -> None: ...
    def is_finite(self) -> bool: ...
    def check_values(self) -> None: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class StepSum(NamedTuple):
    """The result of summing a step's gradients, the same on all ranks."""

    is_finite: bool
    """Whether the gradient has no NaN or infinity; if not, it is not applied."""
    mean_loss: torch.Tensor
    """The mean loss over the global batch, without dimensions."""


class Engine:
    """Computes the whole model on this rank's share of each global batch.

    So it is in layout replicate; others derive from this. A step is `begin`, `place` and `backward`
    once for each micro-batch, `finish` and `apply`; `train` does all but the last two. Every method
    is collective, unless stated otherwise.
    """

    computes_whole_model: ClassVar[bool] = True
    """Whether each rank does; else it computes some of the layers, or of the experts."""
    sampler_class: ClassVar[type[LoadAdaptiveSampler]] = LoadAdaptiveSampler
    """What yields the samples that this rank reads in each step."""

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        setup: Setup,
        state: State,
        plan: Plan,
        keeps_state: bool,
    ) -> None:
        """Prepare to compute steps on `world`, the ranks of the default process group.

        Undoes what an earlier engine has begun of a step. `keeps_state`: whether each step keeps
        what it changes, so that it can be undone.
        """
        state.restore()
        self.step = StepInProgress(world.device_kind)
        # Whether a share is split into micro-batches: in the open form, only for a script that asks
        # for them; with `--sync-bn` never, as the ranks have to compute equally often.
        self.splits_shares = setup.task.loss is not None and not config.sync_bn
        self._config = config
        self.world = world
        self._setup = setup
        self.state = state
        self.plan = plan
        self.keeps_state = keeps_state
        self._task: Task = setup.task
        self._computation = state.computation
        self._pace = world.device_kind.pace
        self.sampler = self.sampler_class(
            setup.train,
            plan.batch_sizes,
            world.rank,
            shuffle=setup.task.shuffles,
            seed=config.seed,
            min_batch=plan.min_batch,
        )
        # Before anything of the model changes: if a rank is lost here, there is nothing to undo.
        self._prepare()
        self.gradients: GradientSums = self._make_gradients()
        """Sums the current step's gradients; replaced when parameters are unfrozen."""
        participate(state.model, self.step)

    def _prepare(self) -> None:
        """Make what the engine of a layout has besides: here, nothing."""

    def _make_gradients(self) -> GradientSums:
        return GradientReducer(
            self.state.model, on_bucket=self.step.bucket_ready, residuals=self.state.residuals
        )

    def close(self, together: bool = True) -> None:
        """Compute no more; if not `together`, wait for no rank: one may be lost."""
        if together:
            self.gradients.check_values()
        self.gradients.close()
        participate(self.state.model, None)

    def script_has_run(self) -> None:
        """Continue after a script's own code between two steps: here, it concerns nobody else."""

    def split_shares(self, is_wanted: bool) -> bool:
        """Split shares into micro-batches or not; return whether this changes. Not collective."""
        if self.splits_shares == is_wanted or self._config.sync_bn:
            return False
        self.splits_shares = is_wanted
        return True

    def split_indices(self, indices: list[int]) -> list[tuple[int, list[int]]]:
        """Return the micro-batches of this rank's samples of a step. Not collective.

        Each as its number of samples and their indices; 0 samples have a stand-in's indices.
        """
        limit = self.plan.micro_batch_size if self.splits_shares else None
        least = self.sampler.min_batch
        # A stream, which should not begin again, stands in with the samples that it read last.
        stand_in = 0 if self.sampler.shuffle else self.sampler.position - least
        return split_share(indices, limit, least, stand_in)

    def train(self, micro_batches: list[MicroBatch]) -> None:
        """Compute this rank's share of the next global batch.

        A share that is larger than what fits the memory is taken in micro-batches, whose gradients
        add up to exactly that of the share. Only the last sums over the ranks. Those of weight 0
        come first: their gradient is zero and not missing, as it is in a batch with others.
        """
        order = self.begin(micro_batches)
        for index in order:
            batch = self.place(micro_batches[index])
            counts = self.step.weights[index] > 0
            loss = self._computation.loss(self._task, self.state.model, batch, counts)
            enter_phase("backward", step=self.state.progress.step + 1)
            self.backward(loss, index, is_last=index == order[-1])

    def begin(self, micro_batches: list[MicroBatch]) -> list[int]:
        """Begin a step with this rank's share; return in which order to take its micro-batches.

        A layout may add some without samples to the list, which the ranks compute together.
        """
        step = self.step
        number = self.state.progress.step + 1
        step.begin(
            number, self._task, micro_batches, self.sampler.shares_at(self.state.progress.position)
        )
        self._follow_unfreezing()
        samples = step.samples
        set_learning_rates(self._config, self.state, samples, len(self._setup.train))
        if self.keeps_state or step.rank_samples == 0 or self._task.loss is None:
            self.state.buffers.save()
        statistics = self.state.statistics
        step_in_epoch = self.state.progress.step_in_epoch
        if statistics.norms:
            statistics.before_step(step_in_epoch, step.rank_samples, samples)
        self._pace.go_to(number)
        step.start_clock()
        enter_phase("forward", step=number)
        return sorted(range(len(micro_batches)), key=lambda index: self.step.weights[index] > 0)

    def _follow_unfreezing(self) -> None:
        """Sum the gradients of the parameters that the script has unfrozen, on every rank, too."""
        if self.gradients.is_outdated:
            self.gradients.check_values()
            self.gradients.close()
            self.gradients = self._make_gradients()

    def undo(self) -> None:
        """Undo what was begun of a step; its samples are repeated. Not collective."""
        self.gradients.reset()
        self.state.restore()

    def place(self, micro_batch: MicroBatch) -> Any:
        """Return a micro-batch on this rank's device, which the next forward is to compute."""
        if micro_batch.samples and self.state.statistics.norms:
            self.state.statistics.before_batch(micro_batch.samples)
        return self._computation.place(micro_batch.batch)

    def backward(self, loss: torch.Tensor, index: int = 0, is_last: bool = True) -> None:
        """Add a micro-batch's gradient to the share's; with the last, sum over the ranks."""
        self._pace.catch_up()
        self.step.clock.enter(StepClock.BACKWARD)
        loss = self.step.weight_loss(loss, index)
        self._arm(index, is_last)
        scaled = self._computation.scaler.scale(loss)
        if scaled.requires_grad:  # it may not if nothing of the share counts
            scaled.backward()
        else:
            self.step.join_backward()
        self._backward_done()
        if not is_last:
            if not self.step.weights[index]:  # leave nothing but that there are gradients
                for parameter in self.state.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            self._pace.catch_up()
            self.step.clock.enter(StepClock.FORWARD)

    def _arm(self, index: int, is_last: bool) -> None:
        """Have the next backward sum over the ranks, if it is the step's last."""
        if is_last:
            self._follow_unfreezing()
            with_loss = sums_loss(self.gradients, self._config)
            loss = self.step.rank_loss() if with_loss else None
            self.gradients.arm(self.step.weight_of_micro_batch(index), loss)

    def _backward_done(self) -> None:
        """Do what follows the backward of a micro-batch: here, nothing."""

    def finish(self) -> StepSum:
        """Complete the sums of the step's gradients."""
        step = self.step
        self.gradients.finish()
        is_finite = self.gradients.is_finite()
        with_loss = sums_loss(self.gradients, self._config)
        mean_loss = self.gradients.number if with_loss else step.mean_loss()
        if step.rank_samples == 0:
            state = self.state
            state.buffers.put_back(besides=state.statistics.synchronized_buffers())
        return StepSum(is_finite, mean_loss)

    def apply(self, is_finite: bool) -> None:
        """Apply the step to the state; the weights stay if its gradient is not finite."""
        apply_step(self._task, self.state, is_finite, self.step.samples)

    def pool_statistics(self) -> None:
        """Give every rank the batch norm statistics of all."""
        shares = self.sampler.batch_sizes
        enter_phase("the statistics of batch norm", waits=True)
        self.state.statistics.pool(shares[self.world.rank] / sum(shares))

    def forwards(self) -> AbstractContextManager[None]:
        """Return the context of forwards only, of any number on each rank."""
        return nullcontext()

    def results(self, observe: Callable[[float], None]) -> Iterator[tuple[Any, Any, int]]:
        """Yield the task's metrics, or its loss, of each batch of this rank's validation data.

        Each with the batch, on the host, and its number of samples. `observe` is called with the
        seconds that each batch took.
        """
        from kaitian_mpi.train.evaluation import MAX_BATCH, Reader, evaluation_indices

        function = self._task.metrics or self._task.loss
        assert function is not None
        data = self._setup.validation
        size = self.plan.micro_batch_size or MAX_BATCH
        shares = self.sampler.batch_sizes
        reader = Reader(data)
        rank = self.world.rank
        most = min(MAX_BATCH, size)
        with self.forwards():
            for indices in evaluation_indices(len(data), rank, shares, most):
                batch = reader.read(indices)
                began = time.perf_counter()
                enter_phase("evaluation")
                with self._computation.autocast():
                    result = function(self._task.model, self._computation.place(batch))
                yield result, batch, len(indices)
                observe(time.perf_counter() - began)


def sums_loss(gradients: GradientSums, config: TrainingConfig) -> bool:
    """Return whether the loss is summed along with the gradients, which saves a collective.

    Not if these cross rounded, which would round it.
    """
    return gradients.carries_number and config.relay_dtype == "fp32"


def set_learning_rates(
    config: TrainingConfig, state: State, samples: int, epoch_samples: int
) -> None:
    """Let the schedulers set the learning rates of the next step. Not collective."""
    progress = state.progress
    for scheduler in state.schedulers:
        if hasattr(scheduler, "before_step"):
            scheduler.before_step(progress.fraction_done(config, samples, epoch_samples))
    progress.learning_rate = float(state.optimizers[0].param_groups[0]["lr"])


def apply_step(task: Task, state: State, is_finite: bool, samples: int) -> None:
    """Apply a step of all ranks' `samples` to the state; the weights stay if it is not finite."""
    scaler = state.computation.scaler
    with state.lock:
        optimizers = state.optimizers
        if scaler.is_enabled():  # it accepts none without a gradient
            optimizers = [optimizer for optimizer in optimizers if _has_gradient(optimizer)]
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
        if is_finite:
            if callable(task.clip_norm):
                task.clip_norm(state.model.parameters())
            elif task.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(state.model.parameters(), task.clip_norm)
            for optimizer in optimizers:
                scaler.step(optimizer)
            if state.residuals.wire != "fp32":
                state.residuals.keep()
            for scheduler in state.schedulers:
                if hasattr(scheduler, "step"):
                    scheduler.step()
        if optimizers:
            scaler.update()
        state.zero_gradients()
        state.progress.step_done(samples)


def _has_gradient(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(parameter.grad is not None for group in groups for parameter in group["params"])
