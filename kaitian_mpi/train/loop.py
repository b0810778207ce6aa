"""The loop: trains and evaluates on one set of ranks, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.sync_batch_norm import participate
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import StepLimit, enter_phase
from kaitian_mpi.train.data.batches import MicroBatch, Share, set_epoch_of, split_share
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler, random_bits, steps_per_epoch
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.progress import Progress, count_steps
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import Step, StepInProgress, StepObserver
from kaitian_mpi.train.step_times import StepClock, StepExchange
from kaitian_mpi.train.task import Task, aside

if TYPE_CHECKING:
    from kaitian_mpi.distributed.gathering import Gathering
    from kaitian_mpi.distributed.late_values import PartedModel
    from kaitian_mpi.train.layouts.shard.shards import Shards

Commit = Callable[[bool], None]
"""Lets a step or an evaluation take effect, which this rank has done or not; raises otherwise."""

_SAMPLES_OF_STATISTICS = 256
_WARM_UP_STEPS = 3


class Loop:
    """Trains on one set of ranks, from the state's current step on, until one of them is lost.

    A step is `fetch`, `begin`, `backward` once for each micro-batch, and `finish`; `train` does all
    but the first. Then `step_done` lets the observers follow it. The state and the loader outlive
    the loop. Every method is collective, unless stated otherwise.
    """

    computes_whole_model: ClassVar[bool] = True
    """Whether each rank does; else it computes some of the layers."""

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        setup: Setup,
        state: State,
        plan: Plan,
        loader: ShareLoader,
        commit: Commit | None = None,
    ) -> None:
        """Prepare to train on `world`, the ranks of the default process group.

        `commit` is called before a step or evaluation takes effect, with whether this rank has done
        it; it raises if some rank has not.
        """
        self.exchange = StepExchange(world.comm)
        self.world = world
        self.state = state
        self.plan = plan
        self._config = config
        self._setup = setup
        self._task = setup.task
        self._computation = state.computation
        self._pace = world.device_kind.pace
        self._commit = commit
        self._loader = loader
        self.workers = loader.workers
        self._rank = world.rank
        self._ranks = world.size
        # Whether a share is split: in the open form, only for a script that asks for its parts;
        # with `--sync-bn`, the ranks have to compute equally often.
        self.has_micro_batches = setup.task.loss is not None and not config.sync_bn
        state.restore()
        self.sampler = self._make_sampler()
        self._loading: Iterator[list[MicroBatch]] | None = None
        self._step = StepInProgress(world.device_kind)
        self.clock = self._step.clock
        self._make_reducer: Callable[[], GradientReducer] = partial(
            GradientReducer,
            state.model,
            on_bucket=self._step.bucket_ready,
            residuals=state.residuals,
        )
        self._apply: Callable[[Task, State, bool, int], None] = apply_step
        self._micro_batches: list[int | None] | None = None
        if not state.partition.is_whole:
            self._use_shards(cast("Shards", state.partition))
        self._gradients = self._make_reducer()
        # Its type is not imported here: that would start MPI, also in data loading workers, which
        # import the module of their dataset.
        self._group = cast("Any", dist.group.WORLD)
        if commit is not None:
            self._group.record_losses()
        self._limit = StepLimit(config.step_timeout, _WARM_UP_STEPS)
        self._evaluation_limit = StepLimit(config.step_timeout)
        participate(state.model, self._step)
        self.observers: list[StepObserver] = []
        self.wants_checkpoint: Callable[[], bool] = lambda: False  # whether this rank requests one
        self.is_outdated = False  # whether another loop is to go on, with another plan
        self._is_unattended = False
        self._is_in_epoch = False

    def _make_sampler(self) -> LoadAdaptiveSampler:
        return LoadAdaptiveSampler(
            self._setup.train,
            self.plan.batch_sizes,
            self._rank,
            shuffle=self._task.shuffles,
            seed=self._config.seed,
            min_batch=self.plan.min_batch,
        )

    def _use_shards(self, shards: Shards) -> None:
        """Sum gradients to their owners, who apply them."""
        from kaitian_mpi.train.layouts.sharded_step import apply_step as apply_to_shards

        step = self._step
        state = self.state
        world = self.world

        def make_reducer() -> GradientReducer:  # does not refer to this loop, whose end frees all
            options: dict[str, Any] = {"on_bucket": step.bucket_ready, "waits": step.waits}
            if state.parted is not None:
                options["gathering"] = shards.gathering(state.parted, world, step.waits)
            return shards.reducer(state.model, **options)

        self._make_reducer = make_reducer
        self._apply = lambda *args: apply_to_shards(cast("Any", self._gradients), *args)
        self._micro_batches = gather_values(self.world.comm, self.plan.micro_batch_size)

    @property
    def _loss_travels(self) -> bool:
        """Whether the loss is summed along with the gradients, which saves a collective.

        Not if these cross rounded, which would round it.
        """
        return self._gradients.carries_number and self._config.relay_dtype == "fp32"

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def describe(self) -> dict[str, Any] | None:
        """Return an entry of `summary.json` on the pipeline, if there is one. Not collective."""
        return None

    def close(self, together: bool = True) -> None:
        """Stop training on these ranks; if not `together`, wait for none: one may be lost."""
        self._loading = None
        if self._gathering is not None:
            self._parted.end(keeps=False)
        if together:
            self._gradients.check_values()
        self._gradients.close()
        participate(self.state.model, None)
        for observer in self.observers:
            observer.close(together)
        self.exchange.close(together)

    def run_finished(self) -> None:
        """Let the observers handle the end of the run, after `close`."""
        for observer in self.observers:
            observer.run_finished()

    def next_share(self, crosses_epochs: bool = True) -> list[MicroBatch] | None:
        """Return this rank's share of the next step, after evaluating epochs that end on the way.

        None if the run is done; or also at the end of an epoch, if not `crosses_epochs`. What is
        left of that is `end_epoch`.
        """
        while not (self.progress.is_done or self.is_outdated):
            if not self._is_in_epoch:
                self._is_in_epoch = True
                for observer in self.observers:
                    observer.epoch_begins()
            parts = self.fetch()
            if parts is not None:
                return parts
            if not crosses_epochs:
                self._end_steps()
                self.state.save()
                self._pool_statistics()
                self._commit_unit()
                self.progress.epoch_is_over = True
                return None
            self.end_epoch()
        return None

    @property
    def steps_in_epoch(self) -> int:
        """The steps that are left in the epoch."""
        progress, batch = self.progress, sum(self.sampler.batch_sizes)
        left = len(self._setup.train) - progress.position
        steps = steps_per_epoch(left, batch, self.sampler.min_batch)
        return min(steps, progress.total_steps - progress.step)

    def expect_no_script(self) -> None:
        """Take note that nothing of the script's runs between two steps. Not collective."""
        self._is_unattended = True

    def step_done(self, step: Step) -> None:
        """Let the observers follow a step, after which the script may use the weights."""
        if self._commit is not None and not self._is_unattended:
            self._gradients.check_values()  # else they would be wrong if a rank is lost
        reports = self.exchange.swap(step.report(self.wants_checkpoint()))
        for observer in self.observers:
            observer.step_done(step, reports)

    def skip_epoch(self) -> None:
        """Leave out what is left of the epoch, because the script has left its loop."""
        self._loading = None
        self.progress.position = len(self._setup.train)
        self.progress.epoch_is_over = True
        self._count_steps()

    def copy_state(self, receivers: Collection[int]) -> None:
        """Give ranks that are joining the state as the others' scripts have left it."""
        source = next(rank for rank in range(self._ranks) if rank not in receivers)
        self.state.copy_from(self.world, source, receivers)
        self._count_steps()

    def _count_steps(self) -> None:
        samples, batch = len(self._setup.train), sum(self.sampler.batch_sizes)
        least, progress = self.sampler.min_batch, self.progress
        self.state.set_total_steps(count_steps(self._config, samples, batch, least, progress))

    def end_epoch(self) -> None:
        """Count and save the epoch, evaluated unless the script has done so after its last step."""
        if self._is_in_epoch:
            self._end_steps()
        means, epoch = self.progress.evaluated, self.progress.epoch - self.progress.lacks_results
        if means is None:
            means = self.evaluate()
        if self.progress.position >= len(self._setup.train):
            self.progress.epoch_done(self._config.epochs)
        else:
            self.progress.is_done = True  # with more steps it could continue
        for observer in self.observers:
            observer.evaluated(means, epoch)

    def _end_steps(self) -> None:
        enter_phase("the end of the epoch", waits=True)
        self._is_in_epoch = False
        self.progress.evaluated = None
        for observer in self.observers:
            observer.epoch_ends()

    def _pool_statistics(self) -> None:
        shares = self.sampler.batch_sizes
        enter_phase("the statistics of batch norm", waits=True)
        self.state.statistics.pool(shares[self._rank] / sum(shares))

    def fetch(self) -> list[MicroBatch] | None:
        """Return this rank's share of the next global batch; None if the epoch or the run ends."""
        if self.progress.has_all_steps:
            self._loading = None
            return None
        waiting_since = time.perf_counter()
        if self._loading is None:
            self._set_epoch()
            self.sampler.position = self.progress.position
            self._loading = self._loader.load(self._share(indices) for indices in self.sampler)
            self.state.model.train()
        enter_phase("getting a batch", step=self.progress.step + 1)
        parts = next(self._loading, None)
        if parts is None:
            self._loading = None
        self._step.data_sec = time.perf_counter() - waiting_since
        return parts

    def train(self, parts: Sequence[MicroBatch]) -> Step:
        """Train on this rank's share of the next global batch.

        A share that is larger than what fits the memory is taken in micro-batches, whose gradients
        add up to exactly that of the share. Only the last sums over the ranks. Those of weight 0
        come first: their gradient is zero and not missing, as it is in a batch with others.
        """
        order = self.begin(parts)
        for index in order:
            batch, counts = self.place(parts[index]), self.weight(index) > 0
            loss = self._computation.loss(self._task, self.state.model, batch, counts)
            enter_phase("backward", step=self.progress.step + 1)
            self.backward(loss, index, is_last=index == order[-1])
        return self.finish()

    def weight(self, index: int) -> float:
        """Return the weight of a micro-batch of the step. Not collective."""
        return self._step.weights[index]

    def split_shares(self, is_wanted: bool) -> None:
        """Split shares into micro-batches from the next step on, or no longer. Not collective."""
        if self.has_micro_batches != is_wanted and not self._config.sync_bn:
            self.has_micro_batches = is_wanted
            self._loading = None

    def begin(self, parts: Sequence[MicroBatch]) -> list[int]:
        """Begin a step with this rank's share; return in which order to take its micro-batches."""
        step, number = self._step, self.progress.step + 1
        step.begin(number, self._task, parts, self.sampler.shares_at(self.progress.position))
        self._follow_unfreezing()
        if self._micro_batches is not None:
            cast("Any", self._gradients).rounds = self._most_parts(step.batch_sizes)
        samples = step.samples
        set_learning_rates(self._config, self.state, samples, len(self._setup.train))
        if self._commit is not None or step.own_samples == 0 or self._task.loss is None:
            self.state.save()
        statistics, step_in_epoch = self.state.statistics, self.progress.step_in_epoch
        if statistics.norms:
            statistics.before_step(step_in_epoch, step.own_samples, samples)
        self._pace.go_to(number)
        self.start_clock()
        enter_phase("forward", step=number)
        return sorted(range(len(parts)), key=lambda index: self.weight(index) > 0)

    def _follow_unfreezing(self, is_between_steps: bool = True) -> None:
        """Sum the gradients of the parameters that the script has unfrozen, on every rank, too.

        Raises:
            UserError: the reducer has a part of the step's gradients, or its order, already.
        """
        gradients = self._gradients
        if not gradients.is_outdated:
            return
        if not is_between_steps and (gradients.has_begun or self._gathering is not None):
            raise UserError(
                "--layout shard: freeze and unfreeze parameters between training.step() and the "
                "next batch, not within a step"
            )
        gradients.check_values()
        gradients.close()
        self._gradients = self._make_reducer()
        if self._micro_batches is not None:
            cast("Any", self._gradients).rounds = cast("Any", gradients).rounds

    def _most_parts(self, shares: Sequence[int]) -> int:
        """Return the most micro-batches that any rank takes; the same on every rank."""
        if not self.has_micro_batches:
            return 1
        limits, least = self._micro_batches or [], self.sampler.min_batch
        counts = [
            len(split_share(range(share), limit, least))
            for share, limit in zip(shares, limits, strict=True)
        ]
        return max(counts)

    def start_clock(self) -> None:
        """Begin the time of the step, perhaps again. Not collective."""
        self.clock.start()
        self._pace.start()

    def undo(self) -> None:
        """Undo what was begun of a step; its samples are repeated. Not collective."""
        self._loading = None
        self._gradients.reset()
        if self._gathering is not None:
            self._parted.end(keeps=False)
        self.state.restore()

    def place(self, part: MicroBatch) -> Any:
        """Return a micro-batch on this rank's device, which the next forward is to compute."""
        if part.samples and self.state.statistics.norms:
            self.state.statistics.before_batch(part.samples)
        if self._gathering is not None:
            self._parted.begin(self._gathering.bring, self._gathering.keep)
        return self._computation.place(part.batch)

    def backward(self, loss: torch.Tensor, index: int = 0, is_last: bool = True) -> None:
        """Add a micro-batch's gradient to the share's; with the last, sum over the ranks."""
        self._pace.catch_up()
        self.clock.enter(StepClock.BACKWARD)
        step = self._step
        loss = step.weigh(loss, index)
        if is_last or self._micro_batches is not None:
            self._follow_unfreezing(is_between_steps=False)
            loss_of_share = step.own_loss() if is_last and self._loss_travels else None
            self._gradients.arm(step.weight_of_part(index), loss_of_share)
        scaled = self._computation.scaler.scale(loss)
        if scaled.requires_grad:  # it may not if nothing of the share counts
            scaled.backward()
        else:
            step.take_part_in_backward()
        if self._gathering is not None:
            self._parted.end()
            cast("Any", self._gradients).end_round()
        if not is_last:
            if not self.weight(index):  # leave nothing but that there are gradients
                for parameter in self.state.model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            self._pace.catch_up()
            self.clock.enter(StepClock.FORWARD)

    def finish(self) -> Step:
        """End the step: apply the summed gradient on all ranks, or skip it if it is not finite."""
        step = self._step
        self._gradients.finish()
        is_finite = self._gradients.is_finite()
        mean_loss = self._gradients.number if self._loss_travels else step.mean_loss()
        if step.own_samples == 0:
            self.state.restore_buffers(besides=self.state.statistics.synchronized_buffers())
        self._commit_unit()
        self.clock.gradients_summed()
        self._pace.start()
        epoch = self.progress.epoch
        enter_phase("the optimizer", step=self.progress.step + 1)
        self._apply(self._task, self.state, is_finite, step.samples)
        self._pace.catch_up()
        self.clock.stop()
        times = self.clock.take()
        if times.steps:
            self._limit.observe((times.computed + times.waited) / times.steps + step.data_sec)
        enter_phase("reporting the step", step=self.progress.step, waits=True)
        return Step(
            number=self.progress.step,
            epoch=epoch,
            samples=step.samples,
            batch_sizes=step.batch_sizes,
            mean_loss=mean_loss,
            own_samples=step.own_samples,
            is_finite=is_finite,
            times=times,
            data_sec=step.data_sec,
        )

    def evaluate(self) -> dict[str, float]:
        """Pool the ranks' batch norm statistics; return the means over the validation data, if any.

        Statistics that lag behind the weights are recomputed first; not so in the open form,
        in which only the script knows how to compute a batch.
        """
        self.state.save()
        can_compute = self._task.loss is not None and self.computes_whole_model
        if can_compute and self.state.statistics.lag(self.progress.step_in_epoch):
            self._recompute_statistics()
        self._pool_statistics()
        means: dict[str, float] = {}
        if self._setup.validation is not None:
            from kaitian_mpi.train.evaluation import evaluate

            self._evaluation_limit.apply()
            means = evaluate(self._task, self.world, self._results())
        self._limit.apply()
        self._commit_unit()
        self.progress.evaluated = means if self.progress.epoch_is_over else None
        return means

    def _results(self) -> Iterator[tuple[Any, Any, int]]:
        """Yield the results of this rank's part of the validation data, for `evaluate`."""
        from kaitian_mpi.train.evaluation import MAX_BATCH, Reader, evaluation_indices

        task = self._task
        data = self._setup.validation
        computation = self._computation
        size, shares = self.plan.micro_batch_size or MAX_BATCH, self.sampler.batch_sizes
        function, reader = task.metrics or task.loss, Reader(data)
        assert function is not None
        with self._forwards():
            for own in evaluation_indices(len(data), self._rank, shares, min(MAX_BATCH, size)):
                batch, began = reader.read(own), time.perf_counter()
                enter_phase("evaluation")
                with computation.autocast():
                    found = function(task.model, computation.place(batch))
                yield found, batch, len(own)
                self._evaluation_limit.observe(time.perf_counter() - began)

    @contextmanager
    def _forwards(self) -> Iterator[None]:
        """Return the context of forwards only, of any number on each rank."""
        if self._gathering is None:
            yield
            return
        self._parted.begin(self._gathering.bring_any, self._gathering.keep)
        try:
            yield
        finally:
            self._parted.end()
        enter_phase("waiting for the other ranks' forwards", waits=True, limited=False)
        self._gathering.end_any()

    @property
    def _gathering(self) -> Gathering | None:
        return getattr(self._gradients, "gathering", None)

    @property
    def _parted(self) -> PartedModel:
        assert self.state.parted is not None
        return self.state.parted

    @torch.no_grad()
    def _recompute_statistics(self) -> None:
        """Recompute batch norm's statistics from the epoch's first samples and current weights.

        As the training computes them, dropout included; its random numbers are not used up.
        """
        self._set_epoch()
        count = min(len(self._setup.train), _SAMPLES_OF_STATISTICS)
        shares = list(self.sampler.first_shares(count))
        with aside(self._computation.device), self._forwards():
            self.state.statistics.before_step(0, sum(map(len, shares)), count)
            for indices in filter(None, shares):
                enter_phase("getting a batch")
                for part in self._loader.data[self._share(indices)]:
                    batch = self.place(part)
                    enter_phase("forward")
                    self._computation.loss(self._task, self.state.model, batch)

    def _set_epoch(self) -> None:
        set_epoch_of(self._loader.batches, self.progress.epoch)
        self.sampler.set_epoch(self.progress.epoch)

    def _share(self, indices: list[int]) -> Share:
        """Return what to load for the step with these samples, which the sampler is at."""
        limit = self.plan.micro_batch_size if self.has_micro_batches else None
        place = self.sampler.position * self._ranks + self._rank
        seed = int(random_bits(self._config.seed, self.sampler.epoch, [place])[0]) & 0xFFFF_FFFF
        least = self.sampler.min_batch
        # Of a stream, which is not to begin again, those that the step has read last.
        stand_in = 0 if self.sampler.shuffle else self.sampler.position - least
        return Share(self.sampler.epoch, seed, split_share(indices, limit, least, stand_in))

    def _commit_unit(self) -> None:
        """Continue only if every rank got this far."""
        if self._commit is not None:
            self._commit(not self._group.is_broken)
        self.state.commit()


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
            optimizers = [each for each in optimizers if _has_gradient(each)]
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
