"""The loop: trains and evaluates on one set of ranks, step by step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.runtime.watchdog import StepLimit, enter_phase
from kaitian_mpi.train.data.batches import MicroBatch
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.data.sampler import RankShares, steps_per_epoch
from kaitian_mpi.train.engine import Engine
from kaitian_mpi.train.progress import Progress, count_steps, most_epochs
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state import State, copy_from
from kaitian_mpi.train.step import Step, StepObserver
from kaitian_mpi.train.step_times import StepExchange
from kaitian_mpi.train.task import aside

_SAMPLES_OF_STATISTICS = 256
_WARM_UP_STEPS = 3


class Agreement(Protocol):
    """Decides whether a step or an evaluation takes effect: on all ranks or on none.

    `Membership` is one.
    """

    @property
    def survives(self) -> bool:
        """Whether the job survives the loss of a rank; if not, `commit` does nothing."""

    def commit(self, ok: bool = True) -> None:
        """Return once every rank has done its part, as `ok` says of this one. Collective.

        Raises:
            NotCommittedError: on every rank, if some rank has not, or is lost.
        """


class Loop:
    """Trains on one set of ranks, from the state's current step on, until one of them is lost.

    A step begins with `fetch`, continues with what the `engine` computes of this rank's share, and
    ends with `finish`; `train` does the last two. Then `step_done` calls the observers. The state
    and the loader outlive the loop. Every method is collective, unless stated otherwise.
    """

    def __init__(
        self,
        config: TrainingConfig,
        setup: Setup,
        engine: Engine,
        loader: ShareLoader,
        agreement: Agreement,
    ) -> None:
        """Prepare to train on the engine's ranks, those of the default process group.

        The `agreement` is asked before a step or an evaluation takes effect. The loop closes the
        engine, but not the loader.
        """
        world = engine.world
        self.exchange = StepExchange(world.comm)
        self.world = world
        self.state = engine.state
        self.plan = engine.plan
        self.engine = engine
        self.sampler = engine.sampler
        self.shares = RankShares(
            loader, engine.sampler, engine.split_indices, config.seed, world.rank, world.size
        )
        self._config = config
        self._setup = setup
        self._agreement = agreement
        if agreement.survives:
            _default_group().record_losses()
        self._limit = StepLimit(config.step_timeout, _WARM_UP_STEPS)
        self._evaluation_limit = StepLimit(config.step_timeout)
        self.observers: list[StepObserver] = []
        self.is_outdated = False
        """Whether the training continues in another loop, with another plan."""
        self._is_in_epoch = False

    @property
    def progress(self) -> Progress:
        return self.state.progress

    def close(self, together: bool = True) -> None:
        """Stop training on these ranks; if not `together`, wait for no other rank.

        In that case some rank may be lost, and this is not collective.
        """
        self.shares.drop()
        self.engine.close(together)
        for observer in self.observers:
            observer.close(together)
        self.exchange.close(together)

    def next_share(self, crosses_epochs: bool = True) -> list[MicroBatch] | None:
        """Return this rank's share of the next step; an epoch that ends before it is evaluated.

        Returns None if the run is done. If not `crosses_epochs`, returns None at the end of an
        epoch as well, which the caller evaluates with `end_epoch`.
        """
        while not (self.progress.is_done or self.is_outdated):
            if not self._is_in_epoch:
                self._is_in_epoch = True
                for observer in self.observers:
                    observer.epoch_begins()
            micro_batches = self.fetch()
            if micro_batches is not None:
                return micro_batches
            if not crosses_epochs:
                self._end_steps()
                self.state.buffers.save()
                self.engine.pool_statistics()
                self._commit()
                self.progress.epoch_is_over = True
                return None
            self.end_epoch()
        return None

    @property
    def steps_in_epoch(self) -> int:
        """The steps that are left in the epoch."""
        progress = self.progress
        global_batch = sum(self.sampler.batch_sizes)
        samples_left = len(self._setup.train) - progress.position
        steps = steps_per_epoch(samples_left, global_batch, self.sampler.min_batch)
        return min(steps, progress.total_steps - progress.step)

    def step_done(self, step: Step, script_follows: bool = True) -> None:
        """Call the observers after a step; if `script_follows`, the script uses the weights next.

        Raises:
            CollectiveError: a rank was lost, so values that the weights need will not arrive.
        """
        if self.engine.keeps_state and script_follows:
            self.engine.gradients.check_values()
        wants_checkpoint = any(observer.wants_checkpoint() for observer in self.observers)
        reports = self.exchange.swap(step.report(wants_checkpoint))
        for observer in self.observers:
            observer.step_done(step, reports)

    def skip_epoch(self) -> None:
        """Skip the rest of the epoch, because the script has left its loop."""
        self.shares.drop()
        self.progress.position = len(self._setup.train)
        self.progress.epoch_is_over = True
        self._update_total_steps()

    def copy_state(self, receivers: Collection[int]) -> None:
        """Copy the state, as the others' scripts have left it, to the ranks that are joining."""
        source = next(rank for rank in range(self.world.size) if rank not in receivers)
        copy_from(self.state, self.world, source, receivers)
        self._update_total_steps()

    def _update_total_steps(self) -> None:
        total_steps = count_steps(
            self._config,
            samples=len(self._setup.train),
            global_batch_size=sum(self.sampler.batch_sizes),
            min_batch=self.sampler.min_batch,
            progress=self.progress,
        )
        self.state.set_total_steps(total_steps)

    def end_epoch(self) -> None:
        """Count the epoch and let the observers save it.

        Evaluates it first, unless the script has done so after the last step.
        """
        if self._is_in_epoch:
            self._end_steps()
        epoch = self.progress.epoch
        if self.progress.lacks_results:  # it was counted before its results were lost
            epoch -= 1
        means = self.progress.evaluated
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
        """Return this rank's share of the next global batch; None if the epoch or the run ends.

        Not collective.
        """
        if self.progress.has_all_steps:
            self.shares.drop()
            return None
        if not self.shares.are_loading:
            self.state.model.train()
        enter_phase("getting a batch", step=self.progress.step + 1)
        return self.shares.next_share(self.progress.epoch, self.progress.position)

    def train(self, micro_batches: Sequence[MicroBatch]) -> Step:
        """Train on this rank's share of the next global batch, and end the step."""
        self.engine.train(list(micro_batches))
        return self.finish()

    def split_shares(self, is_wanted: bool) -> None:
        """Set whether shares are split into micro-batches from the next step on. Not collective."""
        if self.engine.split_shares(is_wanted):
            self._load_again()

    def mark_outdated(self) -> None:
        """Let the training continue in another loop, with another plan. Not collective."""
        self.is_outdated = True

    def undo(self) -> None:
        """Undo a step that was begun; its samples come again. Not collective."""
        self._load_again()
        self.engine.undo()

    def _load_again(self) -> None:
        """Load the shares from the next step on again."""
        self.shares.drop()
        for observer in self.observers:
            observer.shares_dropped()

    def finish(self) -> Step:
        """End the step: apply the summed gradient on all ranks, or skip it if it is not finite."""
        step = self.engine.step
        progress = self.progress
        data_sec = self.shares.waited_sec
        summed = self.engine.finish()
        self._commit()
        step.gradients_summed()
        epoch = progress.epoch
        enter_phase("the optimizer", step=progress.step + 1)
        self.engine.apply(summed.is_finite)
        times = step.stop_clock()
        if times.steps:
            self._limit.observe((times.computed + times.waited) / times.steps + data_sec)
        enter_phase("reporting the step", step=progress.step, waits=True)
        return Step(
            number=progress.step,
            epoch=epoch,
            samples=step.samples,
            batch_sizes=step.batch_sizes,
            mean_loss=summed.mean_loss,
            rank_samples=step.rank_samples,
            is_finite=summed.is_finite,
            times=times,
            data_sec=data_sec,
        )

    def evaluate(self) -> dict[str, float]:
        """Pool the ranks' batch norm statistics, and evaluate on the validation data, if any.

        Statistics that lag behind the weights are recomputed first, except in the open form, in
        which only the script can compute a batch.

        Returns:
            The means of the loss and the metrics by name; {} without validation data.
        """
        self.state.buffers.save()
        can_compute = self._setup.task.loss is not None and self.engine.computes_whole_model
        if can_compute and self.state.statistics.lag(self.progress.step_in_epoch):
            _recompute_statistics(self.engine, self.shares, self.state, self._setup)
        self.engine.pool_statistics()
        means: dict[str, float] = {}
        if self._setup.validation is not None:
            from kaitian_mpi.train.evaluation import evaluate

            self._evaluation_limit.apply()
            results = self.engine.results(self._evaluation_limit.observe)
            means = evaluate(self._setup.task, self.world, results)
        self._limit.apply()
        self._commit()
        self.progress.evaluated = means if self.progress.epoch_is_over else None
        return means

    def _commit(self) -> None:
        """Continue only if every rank got this far."""
        if self.engine.keeps_state:  # otherwise the job does not survive a loss
            self._agreement.commit(not _default_group().is_broken)
        self.state.buffers.commit()


@torch.no_grad()
def _recompute_statistics(engine: Engine, shares: RankShares, state: State, setup: Setup) -> None:
    """Recompute batch norm's statistics from the epoch's first samples and the current weights.

    They are computed as in training, with dropout, but random numbers of training are not used up.
    Collective.
    """
    count = min(len(setup.train), _SAMPLES_OF_STATISTICS)
    rank_shares = shares.first_indices(state.progress.epoch, count)
    with aside(state.computation.device), engine.forwards():
        state.statistics.before_step(0, sum(map(len, rank_shares)), count)
        for indices in filter(None, rank_shares):
            enter_phase("getting a batch")
            for micro_batch in shares.read(indices):
                batch = engine.place(micro_batch)
                enter_phase("forward")
                state.computation.loss(setup.task, state.model, batch)


def _default_group() -> Any:
    """Return the ranks' process group.

    Its type is not imported here, as that would start MPI: data loading workers import this module
    with that of their dataset.
    """
    return dist.group.WORLD
