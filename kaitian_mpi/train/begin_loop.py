"""Begins to train a run on one set of ranks: at the start, and again after each loss."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import lost_line, print_rank_0, warn_rank_0
from kaitian_mpi.observe.progress import Outcome, open_progress
from kaitian_mpi.observe.run_folder import DiskFolder, NoFolder, RunFolderSink
from kaitian_mpi.observe.sink import BackgroundSink, MetricsSink, Sinks
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.runtime.watchdog import current_watchdog, setup_limit
from kaitian_mpi.train.checkpoint.metadata import Invalidated
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.allreduce import choose_allreduce
from kaitian_mpi.train.measure.plan import FROM_BENCHMARK, Plan, excluded_line
from kaitian_mpi.train.measure.rank_benchmark import record_allreduce, show_benchmark
from kaitian_mpi.train.membership import RankLoss
from kaitian_mpi.train.observers import Events, Metrics
from kaitian_mpi.train.presence import Presence
from kaitian_mpi.train.progress import count_steps
from kaitian_mpi.train.rebalancing import Balancing, record_plan
from kaitian_mpi.train.run import Run, buckets_to_measure
from kaitian_mpi.train.saving import Saving
from kaitian_mpi.train.state import sync_to_latest
from kaitian_mpi.train.step import StepObserver

_NO_CHECKPOINT = (
    "a lost rank's part of the state is lost, and there is no checkpoint to continue from; start "
    "the job again"
)
_NO_RUN_FOLDER = f"{_NO_CHECKPOINT}, with a run folder"


def begin_loop(run: Run, world: World, logged: dict[str, float]) -> tuple[Loop, Saving]:
    """Begin a loop on these ranks at the run's current step. Collective.

    Returns:
        The loop, and the observer that saves the run.
    """
    _assign_files(run, world)
    _choose_allreduce_again(run, world)
    plan = _plan_batch_sizes(run, world)
    _restore_state(run, world, plan)
    survives = run.membership.survives
    engine = run.layout.engine(run.config, world, run.setup, run.state, plan, survives)
    loop = Loop(run.config, run.setup, engine, run.loader, run.membership)
    try:
        _report_start(run, loop, plan)
        loop.observers.extend(_observers(run, loop, logged))
        saving = Saving(run, world, loop.sampler)
        loop.observers.append(saving)
    except Exception:
        loop.close(together=False)
        raise
    return loop, saving


def _observers(run: Run, loop: Loop, logged: dict[str, float]) -> Iterator[StepObserver]:
    """Yield the observers of each step, in order, except saving. Collective."""
    config = run.config
    world = loop.world
    state = run.state
    balancing = Balancing(config, loop, run.setup.folder, run.sinks, run.layout.divides_samples)
    yield balancing
    yield Metrics(run, loop, balancing, logged)
    yield Events(run, loop)
    yield from run.layout.observers(config, loop)
    if recorder.current is not None:
        from kaitian_mpi.train.timeline import Timeline

        yield Timeline(world, run.setup.path, recorder.current, state)
    watchdog = current_watchdog()
    if watchdog is not None and world.size > 1:
        yield Presence(world, watchdog, setup_limit(config.step_timeout))


def _assign_files(run: Run, world: World) -> None:
    """Make the first active rank the one that writes the files."""
    if world.rank != 0:
        run.setup.folder.close()
        run.setup = replace(run.setup, folder=NoFolder())
        run.sinks.close(finished=False)
        return
    if not run.owns_files and run.setup.path is not None:
        folder = DiskFolder(run.setup.path)
        folder.claim(run.setup.job)
        run.setup = replace(run.setup, folder=folder)
        print_rank_0(world, f"{world.info} now writes the files")
    if not run.sinks:
        run.sinks = Sinks(_open_sinks(run))


def _open_sinks(run: Run) -> Iterator[MetricsSink]:
    """Yield the sinks of the metrics, on the rank that writes the files."""
    config = run.config
    folder = run.setup.folder
    emulated = bool(run.summary.emulated)
    path = "" if isinstance(folder, NoFolder) else str(folder.path)
    words = [Path(sys.argv[0]).name, path, "(emulated)" if emulated else ""]
    title = " ".join(word for word in words if word)
    yield RunFolderSink(folder)
    infos = run.membership.all_ranks.infos
    # The live view ends before the outcome is printed.
    yield open_progress(config, infos, title)
    hosts = {info.node for info in infos}
    yield Outcome(
        path,
        emulated,
        waits_within=run.layout.waits_within,
        crosses_hosts=not run.layout.divides_state and config.wire == "fp32" and len(hosts) > 1,
        word=config.word,
    )
    if recorder.current is not None:
        from kaitian_mpi.observe.timeline.trace_file import TimelineSink

        yield TimelineSink(recorder.current)
    if config.has_trackers:
        from kaitian_mpi.observe.trackers import open_trackers

        yield from open_trackers(config, folder)
    yield from map(_in_background, run.script_sinks)


def _in_background(sink: MetricsSink) -> BackgroundSink:
    return BackgroundSink(type(sink).__name__, lambda: sink)


def _choose_allreduce_again(run: Run, world: World) -> None:
    """Set the allreduce algorithm for these ranks, if possible the one chosen before."""
    if not (run.membership.losses or run.membership.has_standby):
        return  # these are the ranks that the job started with
    before = run.allreduce_algorithm
    request = run.config.allreduce if before == "direct" else before
    algorithm, seconds = choose_allreduce(request, world, buckets_to_measure(run))
    record_allreduce(run.setup, seconds)
    # If a loss has left only one kind, keep the algorithm that was used between kinds.
    if algorithm != "direct" or not run.membership.losses:
        run.allreduce_algorithm = algorithm


def _plan_batch_sizes(run: Run, world: World) -> Plan:
    """Plan the batch sizes from the latest costs of these ranks. Collective.

    If the same ranks resume an earlier job, they keep its batch sizes.
    """
    run.profiles = run.profiles.learn(world, run.costs)
    plan = run.plan(world)
    metadata = run.earlier.remembered(Invalidated.PLAN)
    if metadata is None or run.membership.losses or not run.layout.divides_samples:
        return plan
    has_same_ranks = metadata.active_places == [info.place for info in world.infos]
    if has_same_ranks and min(metadata.batch_sizes) >= plan.min_batch:
        return replace(plan, batch_sizes=metadata.batch_sizes)
    return plan


def _restore_state(run: Run, world: World, plan: Plan) -> None:
    """Give every rank the run's state: a surviving rank's, a checkpoint's or a fresh one.

    Collective.
    """
    state = run.state
    has_lost_ranks = bool(run.membership.losses)
    lacks_values = _forget_incomplete_state(run, world)
    if has_lost_ranks and not any(gather_values(world.comm, state.is_begun)):
        _restore_checkpoint(run, world, lacks_values)
    sync_to_latest(state, world, run.is_joining)
    if not run.has_started:
        run.setup.folder.cut_after(state.progress.step or -1)
    run.layout.assign(run.config, world, state, plan)
    if has_lost_ranks:
        run.membership.share_history(world)
    if has_lost_ranks and run.layout.compares_weights:
        from kaitian_mpi.train.divergence import repair_divergence

        repair_divergence(world, state, run.sinks)
    _fit_progress(run, world, plan)


def _forget_incomplete_state(run: Run, world: World) -> bool:
    """Forget the state if these ranks have only a part of it. Collective.

    Returns:
        Whether the values of some parameters are lost as well.
    """
    state = run.state
    partition = state.partition
    if any(gather_values(world.comm, state.is_begun)) and not state.is_begun:
        partition.drop()  # this rank has the initial state, which is outdated
    if partition.is_complete(world.comm):
        return False
    state.forget()
    return bool(partition.owned)


def _restore_checkpoint(run: Run, world: World, lacks_values: bool) -> None:
    """Continue from the newest checkpoint after the loss of all state. Collective.

    Raises:
        AgreedError: some of the state is lost, and there is no checkpoint.
    """
    from kaitian_mpi.train.checkpoint.resume import find_checkpoint, restore

    state = run.state
    # Before the first step the state is no more than the parameters. Ranks that have all of these
    # have lost nothing.
    steps = max(gather_values(world.comm, state.progress.step if run.has_started else 0))
    has_part_lost = not state.partition.is_whole and (steps > 0 or lacks_values)
    checkpoint = find_checkpoint(run.config, world, run.setup.path, "auto", has_part_lost)
    if checkpoint.metadata is not None:
        restore(world, state, checkpoint, run.config.seed, world.infos)
        run.earlier = replace(checkpoint, file=None)
        if has_part_lost:
            step = f"step {state.progress.step} ({checkpoint.name})"
            warn_rank_0(world, f"a lost rank had a part of the state: continuing from {step}")
    elif has_part_lost:
        raise AgreedError(_NO_RUN_FOLDER if run.setup.path is None else _NO_CHECKPOINT)


def _fit_progress(run: Run, world: World, plan: Plan) -> None:
    """Update the progress for this plan and this job's flags. Collective."""
    state = run.state
    progress = state.progress
    samples = len(run.setup.train)
    # Earlier steps may have had another global batch size.
    global_batch = sum(plan.batch_sizes)
    total_steps = count_steps(run.config, samples, global_batch, plan.min_batch, progress)
    state.set_total_steps(total_steps)
    has_results = all(gather_values(world.comm, run.summary.steps == progress.step))
    progress.is_done = progress.is_done and progress.has_all_steps and has_results
    if run.membership.losses and all(gather_values(world.comm, run.is_joining)):
        # No rank is left whose script was between two epochs: what it did there is done again.
        progress.epoch_is_over &= progress.script_is_done
    # If this job makes more steps, it continues an epoch that the last step of an earlier job cut.
    progress.epoch_is_over &= progress.has_all_steps or progress.position >= samples
    progress.script_is_done &= progress.epoch_is_over


def _report_start(run: Run, loop: Loop, plan: Plan) -> None:
    """Report the plan, the ranks that train, and those that were lost. Collective."""
    world = loop.world
    step = run.state.progress.step
    losses = [loss for loss in run.membership.losses if loss.step is None]
    for loss in losses:
        loss.step = step + 1
    is_first = not run.has_started
    if is_first and not run.is_joining:
        _report_first_start(run, world)
    run.has_started = True
    if losses:
        reason = _report_losses(run, world, losses)
    elif step:
        reason = "as resumed" if is_first else run.layout.equal_shares
    elif run.profiles.measured:
        reason = FROM_BENCHMARK
        results = [run.profiles.measured[info.place] for info in world.infos]
        show_benchmark(world, results, plan.scores, plan.batch_sizes)
    else:
        reason = run.layout.equal_shares
    text = f"samples per step and rank {plan.batch_sizes} ({reason})"
    if reason != FROM_BENCHMARK:  # the benchmark's table shows the batch sizes
        print_rank_0(world, text)
    fields = {"batch_sizes": plan.batch_sizes, "reason": reason}
    record_plan(world, run.setup.folder, run.sinks, step, text, fields)
    if run.layout.divides_state:
        world.device_kind.release_cached_memory()
        world.device_kind.return_freed_memory()  # that of measurements would count as used
        world.device_kind.restart_memory_peak(world.device_index)
        run.planned_bytes = run.layout.planned_bytes(run.config, world, plan, run.profiles)
        run.peak_bytes = 0
    _write_summary(run, loop, plan)


def _write_summary(run: Run, loop: Loop, plan: Plan) -> None:
    """Write how the run is now trained to the summary. Not collective."""
    world = loop.world
    groups: dict[str, list[int]] = {}
    for info in world.infos:
        groups.setdefault(info.kind, []).append(info.world_rank)
    run.write_summary(
        finished=False,
        allreduce=run.allreduce_algorithm,
        relay=world.communication.describe() if len(world.groups) > 1 else None,
        wire=run.state.residuals.wire,
        **run.layout.describe(loop.engine),
        world_size=world.size,
        ranks=[info.world_rank for info in world.infos],
        device_kinds=list(groups),
        groups=groups,
        global_batch_size=sum(plan.batch_sizes),
        batch_sizes=plan.batch_sizes,
        scores=plan.scores,
        memory=run.describe_memory(world),
        parameters=sum(p.numel() for p in run.state.model.parameters()),
        torch_version=world.info.torch_version,
    )


def _report_first_start(run: Run, world: World) -> None:
    """Report that this job starts or resumes the run, and the ranks that it excludes."""
    step = run.state.progress.step
    ranks = [info.world_rank for info in world.infos]
    emulated = run.summary.emulated
    if step:
        name = run.earlier.name
        text = f"resuming from step {step} ({name})"
        run.sinks.event("resume", step, text, ranks, emulated=emulated, checkpoint=name)
    else:
        run.sinks.event("start", step, "starting from scratch", ranks, emulated=emulated)
    reasons = {entry["rank"]: entry["reason"] for entry in run.summary.excluded or ()}
    for info in run.membership.all_ranks.infos:
        if reason := reasons.get(info.world_rank):
            text = run.config.word(excluded_line(info, reason))
            run.sinks.event("exclusion", step, text, [info.world_rank], reason=reason)


def _report_losses(run: Run, world: World, losses: list[RankLoss]) -> str:
    """Report which ranks were lost and which continue; return the reason for a new plan."""
    step = run.state.progress.step
    reason = lost_line([info for loss in losses for info in loss.lost])
    continuing = "1 rank continues" if world.size == 1 else f"{world.size} ranks continue"
    warn_rank_0(world, f"{reason} at step {step}; {continuing}")
    remaining = [info.world_rank for info in world.infos]
    for loss in losses:
        text = f"{lost_line(loss.lost)} at step {step}"
        ranks = [info.world_rank for info in loss.lost]
        run.sinks.event("loss", step, text, ranks, at=loss.noticed_at, remaining=remaining)
    return reason
