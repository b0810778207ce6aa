"""Everything before the first step of a run, from top to bottom in `start`.

Each stage is a function from frozen results to a frozen result, collective over the ranks that it
is given. If a rank is lost meanwhile, the stage is repeated on the surviving ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.config.profile import parse_profile
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import SAME_SETTINGS, agree_on_errors, check_same, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import show_topology
from kaitian_mpi.observe.run_folder import check_run_folder
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.runtime import startup_clock
from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.runtime.watchdog import first_step_limit, set_phase_limit
from kaitian_mpi.train.checkpoint.policy import Checkpointing
from kaitian_mpi.train.checkpoint.resume import hand_over
from kaitian_mpi.train.checkpoint.resume_rules import Invalidated
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.measure.allreduce import choose_allreduce, gradient_buckets
from kaitian_mpi.train.measure.exclusion import log_excluded, ranks_to_exclude
from kaitian_mpi.train.measure.plan import is_emulated, record_allreduce
from kaitian_mpi.train.measure.profiles import Profiles, find_profiles
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.progress import Progress, count_steps
from kaitian_mpi.train.results import load_finished
from kaitian_mpi.train.resumption import EarlierJob, find_earlier_job
from kaitian_mpi.train.run import Run
from kaitian_mpi.train.setup import MakeTask, Setup, prepare, start_from_file
from kaitian_mpi.train.sinks import check_sinks
from kaitian_mpi.train.standby import plan_standby
from kaitian_mpi.train.state import State
from kaitian_mpi.train.weight_files import check_export, check_initial_file


@dataclass(frozen=True)
class Selection:
    """Which ranks train, and the algorithm by which they sum gradients."""

    allreduce_algorithm: str
    excluded: Mapping[RankInfo, str]
    """The ranks without which the job is faster, and why."""

    @property
    def excluded_ranks(self) -> list[int]:
        """The excluded world ranks."""
        return [info.world_rank for info in self.excluded]


def start(
    make_task: MakeTask,
    config: TrainingConfig,
    membership: Membership,
    own_sinks: Sequence[MetricsSink] = (),
) -> Run:
    """Do everything that comes before the first step. Collective.

    Returns:
        The run. If an earlier job has finished it (`run.is_finished`), the model has its weights.

    Raises:
        AgreedError: a rank cannot make what is asked for, and nothing has been trained.
    """
    world = membership.all_ranks
    world.relay.adopt(config)
    show_topology(world, membership.survives)
    for check in _CHECKS:  # these need neither device, data nor model
        membership.attempt(partial(check, config))
    on_all = partial(_on_all_ranks, membership)
    startup_clock.begin("data and model")
    job: str = on_all(_agree_on_job)  # before any rank that knows it may be lost
    with ExitStack() as unless_started:
        setup: Setup = on_all(partial(prepare, make_task, config, job))
        unless_started.callback(setup.folder.close)
        earlier: EarlierJob = on_all(partial(find_earlier_job, config, setup))
        if earlier.is_finished:
            run = _finished_run(config, membership, setup, earlier)
        else:
            if config.resume and earlier.found.metadata is None:
                on_all(partial(start_from_file, config, setup.task.model))
            run = _new_run(config, world, membership, setup, earlier, own_sinks)
        unless_started.pop_all()
    return run


def check_settings(config: TrainingConfig, world: World) -> None:
    """Check that every rank has the same settings, except those that may differ. Collective.

    Raises:
        AgreedError: they differ.
    """
    check_same(world.comm, config.shared_values(), SAME_SETTINGS)


def check_profile(config: TrainingConfig, world: World) -> None:
    """Check that the job has the ranks that `--profile` names; the same on every rank.

    Raises:
        AgreedError: the value is malformed, or names a rank that the job does not have.
    """
    if config.profile:
        try:
            parse_profile(config.profile).check_ranks(world.size)
        except UserError as error:
            raise AgreedError(str(error)) from error


_CHECKS = (
    check_settings,
    check_run_folder,
    check_initial_file,
    check_export,
    check_profile,
    check_sinks,
)


def _agree_on_job(world: World) -> str:
    """Return an ID of the job, the same on every rank. Collective."""
    own = os.environ.get(SUPERVISED) or secrets.token_hex(8)
    return gather_values(world.comm, own)[0]


def _new_run(
    config: TrainingConfig,
    started_with: World,
    membership: Membership,
    setup: Setup,
    earlier: EarlierJob,
    own_sinks: Sequence[MetricsSink],
) -> Run:
    """Find out what each rank can do, and choose those that train. Collective.

    Raises:
        AgreedError: a rank cannot train the task, or the kinds of devices differ.
    """
    on_all = partial(_on_all_ranks, membership)
    startup_clock.begin("benchmark")
    profiles: Profiles = on_all(partial(profile_ranks, config, setup, earlier))
    selection: Selection = on_all(partial(select_ranks, config, setup, earlier, profiles))
    excluded = selection.excluded_ranks
    agrees = membership.attempt(partial(compare_kinds, config, setup, profiles, excluded))
    startup_clock.begin("first step")
    state: State = on_all(partial(make_state, config, setup, profiles, earlier))
    earlier = on_all(partial(hand_over_checkpoint, config, earlier, selection, state))
    membership.put_on_standby(config.spares, excluded)
    summary = replace(
        earlier.summary,
        emulated=is_emulated(started_with),
        excluded=[
            {"rank": info.world_rank, "reason": why} for info, why in selection.excluded.items()
        ],
        parity=agrees,
    )
    return Run(
        config=config,
        membership=membership,
        setup=setup,
        earlier=replace(earlier, was_on_standby=membership.active is None),
        profiles=profiles,
        allreduce_algorithm=selection.allreduce_algorithm,
        excluded_places=[info.place for info in selection.excluded],
        state=state,
        loader=ShareLoader(setup.train, config.workers, started_with.device_kind.pins_memory),
        checkpoints=Checkpointing(config, setup.path),
        own_sinks=own_sinks,
        summary=summary,
    )


def compare_kinds(
    config: TrainingConfig,
    setup: Setup,
    profiles: Profiles,
    excluded: Collection[int],
    world: World,
) -> bool | None:
    """Return whether the device kinds that train compute alike; None if that is not compared."""
    kinds = {info.kind for info in world.infos if info.world_rank not in excluded}
    if not config.parity or len(kinds) < 2:
        return None
    from kaitian_mpi.train.measure.parity import check_parity

    return check_parity(config, setup, profiles, excluded, world)


def _finished_run(
    config: TrainingConfig, membership: Membership, setup: Setup, earlier: EarlierJob
) -> Run:
    """Load a run that an earlier job has finished, on all ranks. Collective."""
    state: State = _on_all_ranks(membership, partial(load_finished, config, setup, earlier))
    return Run(
        config=config,
        membership=membership,
        setup=setup,
        earlier=earlier,
        profiles=Profiles({}),
        allreduce_algorithm="",
        excluded_places=[],
        state=state,
        loader=ShareLoader(setup.train, 0, pin_memory=False),
        checkpoints=Checkpointing(config, setup.path),
        summary=earlier.summary,
    )


def _on_all_ranks(membership: Membership, stage: Callable[[World], Any]) -> Any:
    """Run a stage while no rank is on standby."""
    result = membership.attempt(stage)
    assert membership.active is not None
    return result


def profile_ranks(
    config: TrainingConfig, setup: Setup, earlier: EarlierJob, world: World
) -> Profiles:
    """Benchmark the ranks, unless their costs are known or no benchmark is wanted."""
    metadata = earlier.remembered(Invalidated.COSTS)
    return find_profiles(config, world, setup, {} if metadata is None else metadata.profiles)


def select_ranks(
    config: TrainingConfig, setup: Setup, earlier: EarlierJob, profiles: Profiles, world: World
) -> Selection:
    """Choose the allreduce algorithm and the ranks to exclude."""
    buckets = gradient_buckets(setup.task.model)
    places = [info.place for info in world.infos]
    metadata = earlier.remembered(Invalidated.ALLREDUCE)
    known = (
        metadata.allreduce_algorithm
        if metadata is not None and metadata.active_places == places
        else ""
    )
    choice = choose_allreduce(known or config.allreduce, world, buckets)
    record_allreduce(setup, choice.seconds)
    metadata = earlier.remembered_exclusion(world)
    if metadata is not None and profiles.are_remembered:
        excluded = {
            rank: "as in the earlier job"
            for rank, place in enumerate(places)
            if place in metadata.excluded_places
        }
    else:
        excluded = _find_excluded(config, profiles, buckets, world)
    log_excluded(world, excluded)
    reasons = {world.infos[rank]: reason for rank, reason in excluded.items()}
    return Selection(choice.algorithm, reasons)


def _find_excluded(
    config: TrainingConfig, profiles: Profiles, buckets: Sequence[int], world: World
) -> dict[int, str]:
    """Return the ranks without which the job is faster; none if there are spares."""
    costs = profiles.costs(world.infos)
    wanted = not (config.keep_all or config.spares) and config.balance != "off"
    if costs is None or not wanted or config.batch_policy == "paper" or world.size == 1:
        return {}
    errors = profiles.fit_errors(world.infos)
    return ranks_to_exclude(config, world, costs, errors, buckets, profiles.min_batch)


def make_state(
    config: TrainingConfig, setup: Setup, profiles: Profiles, earlier: EarlierJob, world: World
) -> State:
    """Create the training state, on later spares too, because creating the first takes a second."""
    set_phase_limit(first_step_limit(config.step_timeout))
    profile = profiles.by_place[world.info.place]
    batch = sum(profiles.plan(config, world).batch_sizes)
    done = Progress(**earlier.found.progress) if earlier.found.progress else None
    total_steps = count_steps(config, len(setup.train), batch, profiles.min_batch, done)
    with agree_on_errors(world.comm):
        computation = Computation(world.device, profile.precision, profile.memory_format)
        state = State(setup.task, computation, total_steps, config.wire)
        state.check_restorable()
    return state


def hand_over_checkpoint(
    config: TrainingConfig,
    earlier: EarlierJob,
    selection: Selection,
    state: State,
    world: World,
) -> EarlierJob:
    """Move the checkpoint to a rank that will train: the one that read it may be excluded."""
    standby = plan_standby(world.infos, config.spares, selection.excluded_ranks)
    first = standby.active(world.infos)[0]
    return replace(earlier, found=hand_over(world, earlier.found, first, state))
