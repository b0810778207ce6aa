"""Reports the events of a run outside its steps: start, lost ranks, checkpoints, end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import lost_line
from kaitian_mpi.observe.reading import Event
from kaitian_mpi.observe.run_folder_sink import RunFolderSink
from kaitian_mpi.runtime import startup_clock
from kaitian_mpi.train.measure.exclusion import excluded_line
from kaitian_mpi.train.membership import RankLoss
from kaitian_mpi.train.run import Run


def report_start(run: Run, world: World) -> None:
    """Report that this job starts or resumes the run, and the ranks that it excludes."""
    step = run.state.progress.step
    since = {"start_time": startup_clock.started_at(), "emulated": run.summary.emulated}
    ranks = [info.world_rank for info in world.infos]
    if step:
        name = run.earlier.found.name
        text = f"resuming from step {step} ({name})"
        run.sinks.event("resume", step, text, ranks, checkpoint=name, **since)
    else:
        run.sinks.event("start", step, "starting from scratch", ranks, **since)
    infos = {info.world_rank: info for info in run.membership.all_ranks.infos}
    for entry in run.summary.excluded or ():
        rank, reason = entry["rank"], entry["reason"]
        if rank in infos:
            text = excluded_line(infos[rank], reason)
            run.sinks.event("exclusion", step, text, [rank], reason=reason)


def report_losses(run: Run, world: World, losses: Sequence[RankLoss]) -> None:
    """Report which ranks were lost, and which continue."""
    step = run.state.progress.step
    left = [info.world_rank for info in world.infos]
    for loss in losses:
        text = f"{lost_line(loss.lost)} at step {step}"
        lost = [info.world_rank for info in loss.lost]
        run.sinks.event("loss", step, text, lost, at=loss.noticed_at, remaining=left)


def report_recovery(run: Run, step: int, loss: RankLoss, text: str) -> None:
    """Report that the first step after a loss is done."""
    ranks = [info.world_rank for info in loss.lost]
    run.sinks.event("recovery", step, text, ranks, recovery_sec=loss.recovery_sec)


def report_checkpoints(run: Run) -> None:
    """Report the checkpoint written in the background since the last call, if any."""
    step = run.checkpoints.newly_written()
    if step is not None:
        run.sinks.event("checkpoint", step, f"the checkpoint of step {step} is written")


def report_finish(run: Run) -> None:
    """Report that the run is finished."""
    progress, validation = run.state.progress, run.summary.validation
    text = f"finished after {progress.epoch} epochs, {progress.step} steps"
    run.sinks.event("finish", progress.step, text, run.summary.ranks or (), validation=validation)


def report_stop(run: Run, text: str) -> None:
    """Report that the job ends before the run is finished."""
    run.sinks.event("stop", run.state.progress.step, text)


def report_failure(run: Run, error: BaseException) -> None:
    """Report that an error ends the job."""
    lines = str(error).strip().splitlines() or [""]
    report_stop(run, f"{type(error).__name__}: {lines[0]}".rstrip(": "))


def report_signal(run: Run, text: str) -> None:
    """Report that a signal ends the job: to events.jsonl only, from a forked process."""
    event = Event(step=run.state.progress.step, time=time.time(), kind="stop", text=text)
    RunFolderSink(run.setup.folder).happened(event)
