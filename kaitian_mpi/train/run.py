"""A run as this rank knows it, and everything before its first step, from top to bottom in `start`.

Each stage is a function that changes nothing of the run, collective over the ranks that it is
given. If a rank is lost meanwhile, the stage is repeated on the surviving ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import SAME_SETTINGS, agree_on_errors, check_same, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import show_topology, warn_rank_0
from kaitian_mpi.observe.run_folder import NoFolder, check_run_folder
from kaitian_mpi.observe.sink import MetricsSink, Sinks
from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.runtime.watchdog import first_step_limit, set_phase_limit
from kaitian_mpi.train.checkpoint.metadata import EarlierJob, Invalidated, RunMetadata
from kaitian_mpi.train.checkpoint.writer import Checkpoints
from kaitian_mpi.train.data.loader import ShareLoader
from kaitian_mpi.train.layouts import find_layout
from kaitian_mpi.train.layouts.layout import Layout
from kaitian_mpi.train.measure.allreduce import choose_allreduce, gradient_buckets
from kaitian_mpi.train.measure.plan import Plan, Profiles, excluded_line
from kaitian_mpi.train.measure.rank_benchmark import is_emulated, record_allreduce
from kaitian_mpi.train.membership import Membership
from kaitian_mpi.train.progress import Progress, count_steps
from kaitian_mpi.train.setup import (
    MakeTask,
    Setup,
    describe_optimizers,
    describe_start,
    prepare,
    start_from_file,
)
from kaitian_mpi.train.state import State
from kaitian_mpi.train.summary import NAME, Summary, describe_losses
from kaitian_mpi.train.task import Computation

_SMALL_SUM_BYTES = 4096


@dataclass
class CheckpointRequest:
    """A signal's request to save; kept over losses until it is done."""

    is_made: bool = False
    ends_job: bool = False
    """Whether the job is to end once the checkpoint is written."""

    def make(self, ends_job: bool) -> None:
        """Request a checkpoint, from any thread."""
        self.is_made = True
        self.ends_job = self.ends_job or ends_job

    def clear(self) -> None:
        """Forget what was requested."""
        self.is_made = self.ends_job = False


@dataclass
class Run:
    """This rank's view of the run; each loop continues from there. No method is collective."""

    config: TrainingConfig
    membership: Membership
    setup: Setup
    earlier: EarlierJob
    layout: Layout = field(init=False)
    state: State = field(init=False)
    profiles: Profiles = field(default_factory=lambda: Profiles({}))
    allreduce_algorithm: str = ""
    """The algorithm that sums gradients across device kinds, or did while there were several."""
    excluded_places: list[str] = field(default_factory=list)
    own_sinks: Sequence[MetricsSink] = ()
    sinks: Sinks = field(default_factory=Sinks)
    """Take the metrics; empty on a rank that does not write the files."""
    costs: dict[str, RankCost] = field(default_factory=dict)
    """The ranks' costs as estimated while training, by place."""
    has_started: bool = False
    planned_bytes: Sequence[int | None] = ()
    """The most memory that each rank's device is to use; None if unknown; empty if whole."""
    peak_bytes: int = 0
    """The most memory that this rank's device was found to have used, besides for saving."""
    request: CheckpointRequest = field(default_factory=CheckpointRequest)
    signals: ExitStack = field(default_factory=ExitStack)
    """Has what signals do to the run, while it is trained and while its ranks regroup."""
    is_joining: bool = False
    """Whether this rank was on standby, and has not yet begun a step with the others."""
    fault: AgreedError | None = None
    """The error by which all ranks end the run, if any."""

    def __post_init__(self) -> None:
        pins_memory = self.membership.all_ranks.device_kind.pins_memory
        # Its processes stay over the epochs and the losses.
        self.loader = ShareLoader(self.setup.train, self.config.workers, pins_memory)
        self.checkpoints = Checkpoints(self.config, self.setup.path)
        self.summary = self.earlier.summary

    def joined(self) -> None:
        """End the joining of a rank that was on standby: it is at the same step as the others."""
        self.is_joining = False

    def plan(self, world: World) -> Plan:
        """Plan for these ranks. Collective."""
        return self.layout.plan(self.config, world, self.profiles)

    @property
    def owns_files(self) -> bool:
        return not isinstance(self.setup.folder, NoFolder)

    def failures(self) -> list[dict[str, Any]]:
        """Return the losses that the run has survived, in this job and earlier ones."""
        metadata = self.earlier.metadata
        earlier = metadata.failures if metadata is not None else []
        return earlier + describe_losses(self.membership.losses)

    def metadata(self, world: World, batch_sizes: list[int]) -> RunMetadata:
        """Return the metadata to save with the state, for the active ranks and their plan."""
        return RunMetadata(
            asdict(self.config),
            dict(self.profiles.by_place),
            self.excluded_places,
            self.allreduce_algorithm,
            [info.place for info in world.infos],
            batch_sizes,
            self.failures(),
            self.setup.dataset_size,
        )

    @contextmanager
    def saving(self, world: World) -> Iterator[None]:
        """Return the context of saving: what it maps of files is not the device's memory."""
        device, index = world.device_kind, world.device_index
        self.peak_bytes = max(self.peak_bytes, device.memory_peak_bytes(index))
        yield
        device.restart_memory_peak(index)

    def describe_memory(self, world: World, with_peak: bool = False) -> Any:
        """Return an entry of `summary.json` on the ranks' memory. Collective if `with_peak`."""
        if not self.planned_bytes:
            return None
        peaks = gather_values(world.comm, self.peak_bytes) if with_peak else [None] * world.size
        columns = zip(world.infos, self.planned_bytes, peaks, strict=True)
        return [
            {"limit_bytes": info.memory_bytes, "planned_bytes": planned, "peak_bytes": peak}
            for info, planned, peak in columns
        ]

    def current_summary(self, **changes: Any) -> Summary:
        """Return the summary as of now, with some fields changed."""
        writer = self.checkpoints.on_disk
        fault = None if writer is None else writer.fault
        return replace(self.summary, failures=self.failures(), checkpoint_fault=fault, **changes)

    def write_summary(self, **changes: Any) -> None:
        """Change fields of the summary, and write it."""
        self.summary = self.current_summary(**changes)
        self.setup.folder.write(NAME, self.summary.to_json())

    def close(self) -> None:
        """End the sinks, the loading processes and the claim on the run folder."""
        self.signals.close()
        self.sinks.close(finished=self.summary.finished)
        self.loader.close()
        self.setup.folder.close()


def start(make_task: MakeTask, config: TrainingConfig, membership: Membership) -> Run:
    """Do everything that comes before the first step. Collective.

    If an earlier job has finished the run (`run.earlier.is_finished`), the model has its weights.
    """
    world = membership.all_ranks
    world.relay.adopt(config)
    show_topology(world, membership.survives)
    on_all = membership.attempt  # all surviving ranks: none is on standby yet
    # These need neither device, data nor model.
    on_all(lambda world: check_same(world.comm, config.shared_values(), SAME_SETTINGS))
    on_all(check_run_folder, config)
    if config.has_trackers:
        from kaitian_mpi.observe.trackers import check_trackers

        on_all(check_trackers, config)
    proposed_job = os.environ.get(SUPERVISED) or secrets.token_hex(8)
    # Before any rank that knows it may be lost.
    job = on_all(lambda world: gather_values(world.comm, proposed_job)[0])
    with ExitStack() as unless_started:
        setup = on_all(prepare, make_task, config, job)
        unless_started.callback(setup.folder.close)
        earlier = EarlierJob()
        if config.resume:
            from kaitian_mpi.train.checkpoint.resume import find_earlier_job, load_finished

            earlier = on_all(find_earlier_job, config, setup)
        run = Run(config, membership, setup, earlier)
        if earlier.is_finished:
            run.state = on_all(load_finished, config, setup, earlier)
        else:
            on_all(describe_start, config, setup.folder)
            _choose_ranks(run)
        unless_started.pop_all()
    return run


def _choose_ranks(run: Run) -> None:
    """Find out what each rank can do, choose those that train, and make the state. Collective."""
    config = run.config
    setup = run.setup
    membership = run.membership
    on_all, world = membership.attempt, membership.all_ranks
    if config.resume and run.earlier.metadata is None:
        on_all(start_from_file, config, setup.task.model)
    remembered = run.earlier.remembered(Invalidated.COSTS)
    known = {} if remembered is None else remembered.profiles
    if config.may_divide_state:
        world.device_kind.grow_segments()  # as memory may be tight
    run.layout = on_all(partial(find_layout, config, setup))
    config = run.config = replace(config, layout=run.layout.name)
    setup = run.setup = run.layout.place(config, setup, membership.all_ranks)
    run.profiles = on_all(lambda world: run.layout.find_profiles(config, world, setup, known))
    run.allreduce_algorithm, excluded = on_all(select_ranks, run)
    run.excluded_places = [info.place for info in excluded]
    ranks = [info.world_rank for info in excluded]
    agrees = on_all(compare_kinds, run, ranks)
    run.state = on_all(make_state, run)
    if run.earlier.metadata is not None:
        from kaitian_mpi.train.checkpoint.resume import resume

        run.earlier = on_all(resume, config, setup, run.earlier, ranks, run.state)
    membership.put_on_standby(config.spares, ranks)
    if membership.active is None:
        run.is_joining = True
        run.state.mark_initial()
    run.summary = replace(
        run.earlier.summary,
        emulated=is_emulated(world),
        excluded=[{"rank": info.world_rank, "reason": why} for info, why in excluded.items()],
        parity=agrees,
    )


def compare_kinds(run: Run, excluded: Collection[int], world: World) -> bool | None:
    """Return whether the device kinds that train compute alike; None if that is not compared."""
    kinds = {info.kind for info in world.infos if info.world_rank not in excluded}
    # A rank may have no memory for what is compared, all gradients and copies, where it has a part.
    if not run.config.parity or len(kinds) < 2 or run.layout.divides_state:
        return None
    from kaitian_mpi.train.measure.parity import check_parity

    return check_parity(run.setup, run.profiles, excluded, run.config.seed, world)


def select_ranks(run: Run, world: World) -> tuple[str, dict[RankInfo, str]]:
    """Choose the allreduce algorithm, and the ranks to exclude, with the reasons."""
    config, profiles = run.config, run.profiles
    buckets = buckets_to_measure(run)
    places = [info.place for info in world.infos]
    metadata = run.earlier.remembered(Invalidated.ALLREDUCE)
    is_same = metadata is not None and metadata.active_places == places
    known = metadata.allreduce_algorithm if metadata is not None and is_same else ""
    algorithm, seconds = choose_allreduce(known or config.allreduce, world, buckets)
    record_allreduce(run.setup, seconds)
    metadata = run.earlier.remembered(Invalidated.EXCLUSION)
    costs = profiles.costs(world.infos)
    wanted = not (config.keep_all or config.spares or config.batch_policy == "paper")
    wanted = wanted and not run.layout.divides_state  # then a slow rank's memory counts
    excluded: dict[int, str] = {}
    # It was compared with the ranks that trained, so all of those must be present again.
    is_known = metadata is not None and {*places}.issuperset(metadata.active_places)
    if metadata is not None and is_known and profiles.are_remembered:
        aside = metadata.excluded_places
        excluded = {n: "as in the earlier job" for n, place in enumerate(places) if place in aside}
    elif costs is not None and wanted and config.balance != "off" and world.size > 1:
        from kaitian_mpi.train.measure.exclusion import ranks_to_exclude

        errors = profiles.fit_errors(world.infos)
        excluded = ranks_to_exclude(config, world, costs, errors, buckets, profiles.min_batch)
    reasons = {world.infos[rank]: reason for rank, reason in excluded.items()}
    for info, reason in reasons.items():
        warn_rank_0(world, config.word(excluded_line(info, reason)))
    return algorithm, reasons


def buckets_to_measure(run: Run) -> list[int]:
    """Return the bytes of what an allreduce sums in a step, by which its algorithm is chosen."""
    if run.layout.divides_state:
        return [_SMALL_SUM_BYTES]
    return gradient_buckets(run.setup.task.model)


def make_state(run: Run, world: World) -> State:
    """Create the training state, on later spares too, because creating the first takes a second."""
    config = run.config
    setup = run.setup
    profiles = run.profiles
    done = run.earlier.progress
    set_phase_limit(first_step_limit(config.step_timeout))
    profile = profiles.by_place[world.info.place]
    batch = sum(run.plan(world).batch_sizes)
    progress = Progress(**done) if done else None
    total_steps = count_steps(config, len(setup.train), batch, profiles.min_batch, progress)
    with agree_on_errors(world.comm):
        computation = Computation(world.device, profile.precision, profile.memory_format)
        state = run.layout.make_state(config, setup, computation, total_steps)
        state.check_restorable()
    advice = "give every rank the same code and settings"
    check_same(world.comm, {"the optimizer": describe_optimizers(state.optimizers)}, advice)
    return state
