"""One training run, from a config to a summary; reads top to bottom like a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kaitian_mpi.benchmark.allreduce import choose_allreduce, gradient_buckets
from kaitian_mpi.benchmark.exclusion import ranks_to_leave_out, tell_left_out
from kaitian_mpi.benchmark.plan import BY_BENCHMARK, Plan, is_emulated, tell_plan
from kaitian_mpi.benchmark.profiles import Profiles
from kaitian_mpi.checkpoint.exit_save import ExitSave
from kaitian_mpi.checkpoint.metadata import Memory
from kaitian_mpi.checkpoint.policy import Checkpointing
from kaitian_mpi.checkpoint.resume_rules import Renewed
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices import device_of
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.elastic.membership import Crew
from kaitian_mpi.elastic.roles import plan_roles
from kaitian_mpi.engine.computation import Computation
from kaitian_mpi.engine.evaluation import Evaluation
from kaitian_mpi.engine.setup import Ingredients, prepare
from kaitian_mpi.engine.state import TrainingState, count_steps, from_bytes, to_bytes
from kaitian_mpi.errors import AgreedError, StorageError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import lost_line, result_line, say, show_topology
from kaitian_mpi.output.run_folder import DiskFolder, NoFolder, check_run_folder
from kaitian_mpi.runtime.polling import wait_quietly
from kaitian_mpi.runtime.signals import last_words, requests
from kaitian_mpi.runtime.watchdog import enter_phase, first_limit, set_phase_limit
from kaitian_mpi.training.divergence import repair_divergence
from kaitian_mpi.training.follow_up import StepFollowUp
from kaitian_mpi.training.results import write_results
from kaitian_mpi.training.resumption import Resumption
from kaitian_mpi.training.summary import NAME, Summary, describe_losses
from kaitian_mpi.training.trainer import Trainer


def train(config: TrainConfig, world: World) -> Summary:
    """Train a model and return its summary. Collective.

    Returns:
        The summary; on a rank that has not trained, little of it.

    Raises:
        AgreedError: a rank cannot make what the config asks for, and nothing has been trained; or
            the results could not be written, with the exit code of `StorageError`.
    """
    crew = Crew(world)
    show_topology(world, crew.survives)
    run = _Run(config, crew)
    crew.attempt(run.check_folder)
    crew.attempt(run.prepare)
    crew.attempt(run.find_checkpoint)
    if run.earlier.was_finished:
        return run.earlier.summary
    crew.attempt(run.benchmark)
    crew.attempt(run.choose_ranks)
    crew.attempt(run.make_state)
    crew.attempt(run.hand_over)
    crew.set_aside(config.spares, run.left_out)
    run.earlier.stood_by = crew.world is None
    crew.attempt(run.train)
    crew.dismiss()
    if run.fault:  # only now, for those that stand by would wait for ever
        raise AgreedError(run.fault, StorageError.exit_code)
    return run.summary


class _Run:
    """What this rank knows of the run; each method is a piece of it, done by all or by none."""

    path: Path
    made: Ingredients
    slowdown: Slowdown
    state: TrainingState
    checkpoints: Checkpointing
    earlier: Resumption

    def __init__(self, config: TrainConfig, crew: Crew) -> None:
        self.config, self.crew = config, crew
        self.summary = Summary()
        self.fault = ""  # why the results are not on disk
        self.profiles = Profiles(config)
        self.left_out: dict[int, str] = {}
        self.places_left_out: list[str] = []
        self.allreduce = ""
        self.trainer: Trainer | None = None
        self.follow_up: StepFollowUp | None = None

    def check_folder(self, world: World) -> None:
        """Check where the files are to go, before anything that takes time."""
        check_run_folder(self.config, world)

    def prepare(self, world: World) -> None:
        """Load the data, build the model, and let every rank know where the files go."""
        self.made = prepare(self.config, world)
        self.path = self.made.path
        self.checkpoints = Checkpointing(self.config, self.path)
        self.earlier = Resumption(self.config, self.path)
        self.slowdown = Slowdown(self.made.slowdowns[world.info.world_rank])
        self.summary = replace(self.summary, emulated=is_emulated(world, self.made))

    def find_checkpoint(self, world: World) -> None:
        """Look for what an earlier job has left, if it is asked for."""
        self.earlier.find(world, self.made)
        self.summary = replace(self.earlier.summary, emulated=self.summary.emulated)

    def benchmark(self, world: World) -> None:
        """Find out what a step costs each rank, unless that is known or not asked for."""
        memory = self.earlier.remembers(Renewed.COSTS)
        known = {} if memory is None else memory.profiles
        self.profiles.find_out(world, self.made, self.slowdown, known)

    def choose_ranks(self, world: World) -> None:
        """Choose how gradients are summed, and which ranks the job is faster without."""
        buckets = gradient_buckets(self.made.model)
        places = [info.place for info in world.infos]
        memory = self.earlier.remembers(Renewed.ALLREDUCE)
        known = memory.algorithm if memory is not None and memory.crew == places else ""
        self.allreduce = choose_allreduce(known or self.config.allreduce, world, buckets)
        memory = self.earlier.remembers_exclusion(world)
        if memory is not None and self.profiles.are_remembered:
            self.left_out = {
                rank: "as in the job before"
                for rank, place in enumerate(places)
                if place in memory.left_out
            }
        else:
            self.left_out = self._find_left_out(world, buckets)
        self.places_left_out = [places[rank] for rank in self.left_out]
        tell_left_out(world, self.left_out)
        left_out = [
            {"rank": world.infos[rank].world_rank, "why": why}
            for rank, why in self.left_out.items()
        ]
        self.summary = replace(self.summary, left_out=left_out)

    def hand_over(self, world: World) -> None:
        """Have the checkpoint at a rank that will train: the one that read it may be excluded."""
        roles = plan_roles(world.infos, self.config.spares, self.left_out)
        self.earlier.hand_over(world, to=roles.working(world.infos)[0])

    def make_state(self, world: World) -> None:
        """Make what is trained, also on those that stand by: the first time takes a second."""
        set_phase_limit(first_limit(self.config.step_timeout))
        profile = self.profiles.by_place[world.info.place]
        how = (world.device, profile.precision, profile.memory_format, self.config.label_smoothing)
        self.state = TrainingState(self.config, self.made.model, Computation(*how), total_steps=0)
        self.state.load_shared(from_bytes(to_bytes(self.state.shared())))
        self.state.is_begun = False

    def train(self, world: World) -> None:
        """Train on these ranks from wherever the run is, and keep the summary up to date."""
        self._own_files(world)
        self._choose_allreduce_again(world)
        plan = self._plan(world)
        state = self._state_on(world, plan)
        self.checkpoints.begin()
        commit = self.crew.commit if self.crew.survives else None
        trainer = Trainer(self.config, world, self.made, state, plan, self.slowdown, commit)
        self.trainer = trainer
        with StepFollowUp(self.config, world, self.made.folder, trainer, plan) as follow_up:
            self.follow_up = follow_up
            self._tell_start(world, trainer, plan)
            self.earlier.begin_course(world, self.checkpoints, state, self._memory())
            with self._saved_at_signals():
                while not state.progress.is_done:
                    self._train_epoch(trainer, follow_up)
                    self._end_epoch(trainer, follow_up, trainer.evaluate())
        enter_phase("writing the last checkpoint", limited=False)
        with self._saved_at_signals():
            self._finish(world)

    def _finish(self, world: World) -> None:
        """Bring the results to disk; without them the run is not finished. Collective."""
        fault = ""
        if world.rank == 0:
            summary = replace(self.summary, failures=self._failures())
            try:
                write_results(self.made.folder, self.checkpoints, self.state, self._memory, summary)
            except StorageError as error:
                fault = str(error)
        wait_quietly(world.comm)
        self.fault = gather_values(world.comm, fault)[0]
        if not self.fault:
            self.checkpoints.close()
            self.summary = replace(self.summary, finished=True)
            say(world, f"results in {self.path}")

    def _train_epoch(self, trainer: Trainer, follow_up: StepFollowUp) -> None:
        """Train what is left of the epoch, and do what follows each step."""
        follow_up.metrics.restart()
        for step in trainer.steps():
            is_wanted = follow_up.step_done(step, self.checkpoints.wants())
            self._tell_recovery(trainer.world, step.number)
            self._check_weights(trainer.world, step.number)
            self._save_if_due(trainer.world, step.number, is_wanted)
        follow_up.epoch_done()

    def _end_epoch(self, trainer: Trainer, follow_up: StepFollowUp, result: Evaluation) -> None:
        progress, samples = trainer.progress, len(self.made.data.train)  # type: ignore[arg-type]
        if progress.position >= samples:
            progress.epoch_done(self.config.epochs)
        else:
            progress.stopped()
        say(
            trainer.world,
            result_line(
                progress.epoch, progress.position, progress.step, result.loss, result.accuracy
            ),
        )
        self.made.folder.save_model(trainer.state.weights())
        self.summary = self.summary.with_epoch(trainer, follow_up, result)
        self._write_summary()
        self.checkpoints.save(trainer.world, trainer.state, self._memory(), result.accuracy)

    def _check_weights(self, world: World, step: int) -> None:
        """Repair weights that differ between ranks, every `--check-every` steps."""
        if self.config.check_every and step % self.config.check_every == 0:
            repair_divergence(world, self.state)

    def _save_if_due(self, world: World, step: int, is_wanted: bool) -> None:
        """Save a checkpoint where it is time for one, and a snapshot."""
        if self.checkpoints.is_due(step, is_wanted):
            enter_phase("saving a checkpoint", limited=False)
            self.checkpoints.save(world, self.state, self._memory())
        self.checkpoints.snapshot(world, self.state, self._memory)

    def _own_files(self, world: World) -> None:
        """Let the files belong to the first of the ranks that train."""
        if world.rank != 0:
            self.made.folder = NoFolder()
        elif isinstance(self.made.folder, NoFolder):
            self.made.folder = DiskFolder(self.path)
            self.made.folder.mend()
            say(world, f"the files are written by {world.info} from now on")

    def _choose_allreduce_again(self, world: World) -> None:
        """Keep the algorithm that was chosen, where these ranks are of several kinds."""
        if self.crew.has_reformed:
            request = self.config.allreduce if self.allreduce == "direct" else self.allreduce
            buckets = gradient_buckets(self.made.model)
            self.allreduce = choose_allreduce(request, world, buckets)

    def _find_left_out(self, world: World, buckets: list[int]) -> dict[int, str]:
        """Return the ranks without which the job is faster; none where any is to stand by."""
        costs = self.profiles.costs(world.infos)
        asked = not (self.config.keep_all or self.config.spares) and self.config.balance != "off"
        if costs is None or not asked or self.config.batch_policy == "paper" or world.size == 1:
            return {}
        return ranks_to_leave_out(self.config, world, costs, buckets, self.profiles.min_batch)

    def _plan(self, world: World) -> Plan:
        """Share the global batch, by what has been seen of these ranks last."""
        infos = self.trainer.world.infos if self.trainer is not None else ()
        costs = self.follow_up.balancing.costs() if self.follow_up is not None else None
        self.profiles.learn(world, infos, costs)
        plan, memory = self.profiles.plan(world), self.earlier.remembers(Renewed.PLAN)
        places = [info.place for info in world.infos]
        is_same_crew = memory is not None and memory.crew == places and not self.crew.losses
        if memory is not None and is_same_crew and min(memory.batch_sizes) >= plan.min_batch:
            return replace(plan, batch_sizes=memory.batch_sizes)
        return plan

    def _state_on(self, world: World, plan: Plan) -> TrainingState:
        """Give every rank the state that the run has come to."""
        state, samples = self.state, len(self.made.data.train)  # type: ignore[arg-type]
        if any(gather_values(world.comm, state.is_begun)):
            state.even_out(world)
        else:
            self.earlier.restore(world, state, self.made, lost=bool(self.crew.losses))
        if self.crew.losses:
            self.crew.share_history(world)
            repair_divergence(world, state)
        progress = state.progress
        # The steps that are done may have had another global batch.
        batch = sum(plan.batch_sizes)
        steps = count_steps(self.config, samples, batch, plan.min_batch, progress)
        progress.total_steps = steps
        has_results = all(gather_values(world.comm, self.summary.steps == progress.step))
        progress.is_done = progress.is_done and progress.step >= steps and has_results
        return state

    def _memory(self) -> Memory:
        assert self.trainer is not None
        infos = self.trainer.world.infos
        return Memory(
            self.config,
            self.profiles.by_place,
            self.places_left_out,
            self.allreduce,
            [info.place for info in infos],
            self.trainer.sampler.batch_sizes,
            self._failures(),
            self.made.data_set,
        )

    def _failures(self) -> list[dict[str, Any]]:
        memory = self.earlier.memory
        earlier = memory.failures if memory is not None else []
        return earlier + describe_losses(self.crew.losses)

    @contextmanager
    def _saved_at_signals(self) -> Iterator[None]:
        """Save what there is when a signal ends the job, or asks for it."""
        state = self.state
        prepare = partial(self.checkpoints.prepare_exit, state)
        exit_save = ExitSave(
            state.lock,
            lambda: self.checkpoints.save_at_exit(state, self._memory()),
            None if device_of(state.computation.device).is_host else prepare,
        )
        owns_files = not isinstance(self.made.folder, NoFolder)
        ending = (exit_save.run, exit_save.interrupt) if owns_files else (lambda: "",)
        with last_words(*ending), requests(self.checkpoints.ask):
            yield

    def _tell_start(self, world: World, trainer: Trainer, plan: Plan) -> None:
        """Show and write the plan, and that these ranks train."""
        step = trainer.progress.step
        if lost := self.crew.begin_step(step + 1):
            why = lost_line(lost)
            say(world, f"step {step}: {why}; {world.size} go on")
        elif step:
            why = "as resumed"
        elif self.profiles.are_measured:
            why = BY_BENCHMARK
            self.profiles.show(world, self.made, plan)
        else:
            why = "equal shares"
        tell_plan(world, self.made, plan, step, why)
        self.summary = self.summary.with_ranks(world, trainer.state, plan, self.allreduce)
        self._write_summary()

    def _tell_recovery(self, world: World, step: int) -> None:
        """Say once how long a loss has held the run up."""
        recovered = self.crew.newly_recovered()
        for loss in recovered:
            say(world, f"step {step} is done, {loss.recovery_sec:.2f} s after the loss was noticed")
        if recovered:
            self._write_summary()

    def _write_summary(self) -> None:
        self.summary = replace(self.summary, failures=self._failures())
        self.made.folder.write(NAME, self.summary.to_json())
