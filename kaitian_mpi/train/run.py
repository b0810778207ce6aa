"""A run as this rank knows it, and `start`: everything before its first step, top to bottom.

Each stage is a function that is collective over the ranks that it is given, and does not change the
run. If a rank is lost during a stage, the stage is repeated on the surviving ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
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
from kaitian_mpi.observe.folder_lock import collecting_in
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
    """A signal's request to save; it outlives the loss of a rank, until it is done."""

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
    """The places of the ranks that were too slow to train with."""
    script_sinks: Sequence[MetricsSink] = ()
    """The script's own sinks."""
    sinks: Sinks = field(default_factory=Sinks)
    """All sinks of the metrics; empty on a rank that does not write the files."""
    costs: dict[str, RankCost] = field(default_factory=dict)
    """The ranks' costs as estimated while training, by place."""
    has_started: bool = False
    """Whether this job has begun a loop."""
    planned_bytes: Sequence[int | None] = ()
    """By rank, the most bytes that its device is to use, None if unknown; empty if no rank's
    memory is planned, as the layout does not divide the state."""
    peak_bytes: int = 0
    """The most bytes that this rank's device has used, except while saving."""
    request: CheckpointRequest = field(default_factory=CheckpointRequest)
    signals: ExitStack = field(default_factory=ExitStack)
    """Restores the signal handlers that are set while the run trains or its ranks regroup."""
    is_joining: bool = False
    """Whether this rank was on standby, and has not yet begun a step with the others."""
    fault: AgreedError | None = None
    """The error by which all ranks end the run, if any."""

    def __post_init__(self) -> None:
        pins_memory = self.membership.all_ranks.device_kind.pins_memory
        # Its processes stay alive between epochs, and when a rank is lost.
        self.loader = ShareLoader(self.setup.train, self.config.workers, pins_memory)
        self.checkpoints = Checkpoints(self.config, self.setup.path)
        self.summary = self.earlier.summary

    def joined(self) -> None:
        """Note that this rank, which was on standby, is now at the same step as the others."""
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
    def saving(self, world: World) -> Iterator[Callable[[], None]]:
        """Return the context of saving, whose memory is not counted in `peak_bytes`.

        It maps files, which would count as memory of a device that is the host. A supervisor sees
        that the job is saving: the result is to be called as pieces of other ranks' state arrive.
        """
        device = world.device_kind
        index = world.device_index
        self.peak_bytes = max(self.peak_bytes, device.memory_peak_bytes(index))
        writer = self.checkpoints.on_disk if self.owns_files else None
        with collecting_in(None if writer is None else writer.files.folder) as on_piece:
            yield on_piece
        device.restart_memory_peak(index)

    def describe_memory(self, world: World, with_peak: bool = False) -> Any:
        """Return the entry of `summary.json` about the ranks' memory. Collective if `with_peak`."""
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
        """Close the sinks, end the loading processes, and release the run folder."""
        self.signals.close()
        self.sinks.close(finished=self.summary.finished)
        self.loader.close()
        self.setup.folder.close()


def start(make_task: MakeTask, config: TrainingConfig, membership: Membership) -> Run:
    """Do everything that comes before the first step. Collective.

    If an earlier job has finished the run (`run.earlier.is_finished`), the model has its weights.
    """
    world = membership.all_ranks
    world.communication.adopt(config)
    show_topology(world, membership.survives)
    on_all = membership.attempt  # runs a stage on all surviving ranks: none is on standby yet
    # The first stages need neither device, data nor model.
    on_all(lambda world: check_same(world.comm, config.shared_values(), SAME_SETTINGS))
    on_all(check_run_folder, config)
    if config.has_trackers:
        from kaitian_mpi.observe.trackers import check_trackers

        on_all(check_trackers, config)
    proposed_job = os.environ.get(SUPERVISED) or secrets.token_hex(8)
    # All ranks learn it now, before rank 0, which proposes it, can be lost.
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
    on_all = membership.attempt
    world = membership.all_ranks
    if config.resume and run.earlier.metadata is None:
        on_all(start_from_file, config, setup.task.model)
    remembered = run.earlier.remembered(Invalidated.COSTS)
    known_profiles = {} if remembered is None else remembered.profiles
    if config.may_divide_state:
        world.device_kind.grow_segments()  # memory may be tight
    run.layout = on_all(partial(find_layout, config, setup))
    config = run.config = replace(config, layout=run.layout.name)
    setup = run.setup = run.layout.place(config, setup, membership.all_ranks)
    run.profiles = on_all(
        lambda world: run.layout.find_profiles(config, world, setup, known_profiles)
    )
    run.allreduce_algorithm, reasons = on_all(_choose_allreduce_and_ranks, run)
    run.excluded_places = [info.place for info in reasons]
    excluded = [info.world_rank for info in reasons]
    kinds_agree = on_all(compare_kinds, run, excluded)
    run.state = on_all(_make_state, run)
    if run.earlier.metadata is not None:
        from kaitian_mpi.train.checkpoint.resume import resume

        run.earlier = on_all(resume, config, setup, run.earlier, excluded, run.state)
    membership.put_on_standby(config.spares, excluded)
    if membership.active is None:
        run.is_joining = True
        run.state.mark_initial()
    run.summary = replace(
        run.earlier.summary,
        emulated=is_emulated(world),
        excluded=[{"rank": info.world_rank, "reason": why} for info, why in reasons.items()],
        parity=kinds_agree,
    )


def compare_kinds(run: Run, excluded: Collection[int], world: World) -> bool | None:
    """Return whether the device kinds that train compute alike; None if that is not compared.

    Collective.
    """
    kinds = {info.kind for info in world.infos if info.world_rank not in excluded}
    # All gradients and their copies are compared. A rank that has only a part of the state may
    # lack the memory for them.
    if not run.config.parity or len(kinds) < 2 or run.layout.divides_state:
        return None
    from kaitian_mpi.train.measure.parity import check_parity

    return check_parity(run.setup, run.profiles, excluded, run.config.seed, world)


def _choose_allreduce_and_ranks(run: Run, world: World) -> tuple[str, dict[RankInfo, str]]:
    """Return the allreduce algorithm, and the ranks to exclude with the reasons. Collective."""
    places = [info.place for info in world.infos]
    metadata = run.earlier.remembered(Invalidated.ALLREDUCE)
    request = run.config.allreduce
    if metadata is not None and metadata.active_places == places:
        request = metadata.allreduce_algorithm or request
    algorithm, seconds = choose_allreduce(request, world, buckets_to_measure(run))
    record_allreduce(run.setup, seconds)
    excluded = _find_excluded(run, world)
    reasons = {world.infos[rank]: reason for rank, reason in excluded.items()}
    for info, reason in reasons.items():
        warn_rank_0(world, run.config.word(excluded_line(info, reason)))
    return algorithm, reasons


def _find_excluded(run: Run, world: World) -> dict[int, str]:
    """Return why ranks are excluded from training, by rank. Collective."""
    config = run.config
    profiles = run.profiles
    metadata = run.earlier.remembered(Invalidated.EXCLUSION)
    if metadata is not None and profiles.are_remembered:
        places = [info.place for info in world.infos]
        # A rank was excluded in comparison with those that trained: all must be present again.
        if set(places).issuperset(metadata.active_places):
            ranks = [n for n, place in enumerate(places) if place in metadata.excluded_places]
            return dict.fromkeys(ranks, "as in the earlier job")
    if config.keep_all or config.spares or config.batch_policy == "paper":
        return {}
    if run.layout.divides_state:  # a slow rank's memory is of use
        return {}
    costs = profiles.costs(world.infos)
    if costs is None or config.balance == "off" or world.size == 1:
        return {}
    from kaitian_mpi.train.measure.exclusion import ranks_to_exclude

    errors = profiles.fit_errors(world.infos)
    buckets = buckets_to_measure(run)
    return ranks_to_exclude(config, world, costs, errors, buckets, profiles.min_batch)


def buckets_to_measure(run: Run) -> list[int]:
    """Return the bytes of each allreduce of a step, by which the algorithm is chosen."""
    if run.layout.divides_state:
        return [_SMALL_SUM_BYTES]
    return gradient_buckets(run.setup.task.model)


def _make_state(run: Run, world: World) -> State:
    """Create the training state. Collective.

    On ranks that will be on standby as well: creating it takes a second the first time.
    """
    config = run.config
    setup = run.setup
    profiles = run.profiles
    earlier_progress = run.earlier.progress
    set_phase_limit(first_step_limit(config.step_timeout))
    profile = profiles.by_place[world.info.place]
    global_batch = sum(run.plan(world).batch_sizes)
    progress = Progress(**earlier_progress) if earlier_progress else None
    total_steps = count_steps(config, len(setup.train), global_batch, profiles.min_batch, progress)
    with agree_on_errors(world.comm):
        computation = Computation(world.device, profile.precision, profile.memory_format)
        state = run.layout.make_state(config, setup, computation, total_steps)
        state.check_restorable()
    advice = "give every rank the same code and settings"
    check_same(world.comm, {"the optimizer": describe_optimizers(state.optimizers)}, advice)
    return state
