"""The loop: trains and evaluates on one set of ranks, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import StepLimit, enter_phase
from kaitian_mpi.train.data.batches import MicroBatch, Share, set_epoch_of
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.data.sampler import random_bits, steps_per_epoch
from kaitian_mpi.train.engine import Engine
from kaitian_mpi.train.measure.plan import Plan
from kaitian_mpi.train.progress import Progress, count_steps, most_epochs
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepExchange
from kaitian_mpi.train.task import aside

Commit = Callable[[bool], None]
"""Lets a step or an evaluation take effect, which this rank has done or not; raises otherwise."""

_SAMPLES_OF_STATISTICS = 256
_WARM_UP_STEPS = 3


class Loop:
    """Trains on one set of ranks, from the state's current step on, until one of them is lost.

    A step is `fetch`, what its `engine` computes of the share, and `finish`; `train` does all but
    the first. Then `step_done` lets the observers follow it. The state and the loader outlive the
    loop. Every method is collective, unless stated otherwise.
    """

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        setup: Setup,
        state: State,
        plan: Plan,
        loader: ShareLoader,
        commit: Commit | None = None,
        engine: type[Engine] = Engine,
    ) -> None:
        """Prepare to train on `world`, the ranks of the default process group.

        `commit` is called before a step or evaluation takes effect, with whether this rank has done
        it; it raises if some rank has not. `engine` is that of the layout.
        """
        self.exchange = StepExchange(world.comm)
        self.world = world
        self.state = state
        self.plan = plan
        self._config = config
        self._setup = setup
        self._pace = world.device_kind.pace
        self._commit = commit
        self._loader = loader
        self.workers = loader.workers
        state.restore()
        self.engine = engine(config, world, setup, state, plan, keeps_state=commit is not None)
        self.sampler = self.engine.sampler
        self.clock = self.engine.step.clock
        self._rank = world.rank
        self._ranks = world.size
        self._loading: Iterator[list[MicroBatch]] | None = None
        self._data_sec = 0.0
        # Its type is not imported here: that would start MPI, also in data loading workers, which
        # import the module of their dataset.
        self._group = cast("Any", dist.group.WORLD)
        if commit is not None:
            self._group.record_losses()
        self._limit = StepLimit(config.step_timeout, _WARM_UP_STEPS)
        self._evaluation_limit = StepLimit(config.step_timeout)
        self.observers: list[StepObserver] = []
        self.wants_checkpoint: Callable[[], bool] = lambda: False  # whether this rank requests one
        self.is_outdated = False  # whether another loop is to go on, with another plan
        self._is_unattended = False
        self._is_in_epoch = False

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def close(self, together: bool = True) -> None:
        """Stop training on these ranks; if not `together`, wait for none: one may be lost."""
        self._loading = None
        self.engine.close(together)
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
                self.engine.pool_statistics()
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

    @property
    def evaluations_left(self) -> int:
        """The ends of epochs, and of the run, that are to come."""
        batch, least = sum(self.sampler.batch_sizes), self.sampler.min_batch
        steps_in_later_epochs = self.progress.total_steps - self.progress.step - self.steps_in_epoch
        return 1 - -steps_in_later_epochs // steps_per_epoch(len(self._setup.train), batch, least)

    def expect_no_script(self) -> None:
        """Take note that nothing of the script's runs between two steps. Not collective."""
        self._is_unattended = True

    def step_done(self, step: Step) -> None:
        """Let the observers follow a step, after which the script may use the weights."""
        if self._commit is not None and not self._is_unattended:
            self.engine.gradients.check_values()  # else they would be wrong if a rank is lost
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
            self.progress.epoch_done(most_epochs(self._config))
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
        self._data_sec = time.perf_counter() - waiting_since
        return parts

    def train(self, parts: Sequence[MicroBatch]) -> Step:
        """Train on this rank's share of the next global batch."""
        self.engine.train(parts)
        return self.finish()

    def split_shares(self, is_wanted: bool) -> None:
        """Split shares into micro-batches from the next step on, or no longer. Not collective."""
        if self.engine.has_micro_batches != is_wanted and not self._config.sync_bn:
            self.engine.has_micro_batches = is_wanted
            self._loading = None

    def undo(self) -> None:
        """Undo what was begun of a step; its samples are repeated. Not collective."""
        self._loading = None
        self.engine.undo()

    def finish(self) -> Step:
        """End the step: apply the summed gradient on all ranks, or skip it if it is not finite."""
        step, progress = self.engine.step, self.progress
        summed = self.engine.finish()
        self._commit_unit()
        self.clock.gradients_summed()
        self._pace.start()
        epoch = progress.epoch
        enter_phase("the optimizer", step=progress.step + 1)
        self.engine.apply(summed.is_finite)
        self._pace.catch_up()
        self.clock.stop()
        times = self.clock.take()
        if times.steps:
            self._limit.observe((times.computed + times.waited) / times.steps + self._data_sec)
        enter_phase("reporting the step", step=progress.step, waits=True)
        return Step(
            number=progress.step,
            epoch=epoch,
            samples=step.samples,
            batch_sizes=step.batch_sizes,
            mean_loss=summed.mean_loss,
            own_samples=step.own_samples,
            is_finite=summed.is_finite,
            times=times,
            data_sec=self._data_sec,
        )

    def evaluate(self) -> dict[str, float]:
        """Pool the ranks' batch norm statistics; return the means over the validation data, if any.

        Statistics that lag behind the weights are recomputed first; not so in the open form,
        in which only the script knows how to compute a batch.
        """
        self.state.save()
        can_compute = self._setup.task.loss is not None and self.engine.computes_whole_model
        if can_compute and self.state.statistics.lag(self.progress.step_in_epoch):
            self._recompute_statistics()
        self.engine.pool_statistics()
        means: dict[str, float] = {}
        if self._setup.validation is not None:
            from kaitian_mpi.train.evaluation import evaluate

            self._evaluation_limit.apply()
            results = self.engine.results(self._evaluation_limit.observe)
            means = evaluate(self._setup.task, self.world, results)
        self._limit.apply()
        self._commit_unit()
        self.progress.evaluated = means if self.progress.epoch_is_over else None
        return means

    @torch.no_grad()
    def _recompute_statistics(self) -> None:
        """Recompute batch norm's statistics from the epoch's first samples and current weights.

        As the training computes them, dropout included; its random numbers are not used up.
        """
        self._set_epoch()
        count = min(len(self._setup.train), _SAMPLES_OF_STATISTICS)
        shares = list(self.sampler.first_shares(count))
        computation, task = self.state.computation, self._setup.task
        with aside(computation.device), self.engine.forwards():
            self.state.statistics.before_step(0, sum(map(len, shares)), count)
            for indices in filter(None, shares):
                enter_phase("getting a batch")
                for part in self._loader.data[self._share(indices)]:
                    batch = self.engine.place(part)
                    enter_phase("forward")
                    computation.loss(task, self.state.model, batch)

    def _set_epoch(self) -> None:
        set_epoch_of(self._loader.batches, self.progress.epoch)
        self.sampler.set_epoch(self.progress.epoch)

    def _share(self, indices: list[int]) -> Share:
        """Return what to load for the step with these samples, which the sampler is at."""
        place = self.sampler.position * self._ranks + self._rank
        seed = int(random_bits(self._config.seed, self.sampler.epoch, [place])[0]) & 0xFFFF_FFFF
        return Share(self.sampler.epoch, seed, self.engine.parts_of(indices))

    def _commit_unit(self) -> None:
        """Continue only if every rank got this far."""
        if self._commit is not None:
            self._commit(not self._group.is_broken)
        self.state.commit()
