"""Which sinks receive the metrics of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe import trackers
from kaitian_mpi.observe.outcome import Outcome
from kaitian_mpi.observe.progress import open_progress
from kaitian_mpi.observe.run_folder import NoFolder, RunFolder, RunFolderSink
from kaitian_mpi.observe.sink import BackgroundSink, MetricsSink, Sinks
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.trace_file import TimelineSink


def check_sinks(config: TrainingConfig, world: World) -> None:
    """Check that the programs to log to can be used, before anything is created. Collective.

    Their packages are imported on rank 0 now: later it would slow down the first steps.

    Raises:
        AgreedError: a package is missing, or the user is not logged in to Weights & Biases.
    """
    with agree_on_errors(world.comm):
        if world.rank != 0:
            return
        if config.tensorboard:
            import_tracker("--tensorboard", "tensorboard", "torch.utils.tensorboard")
        if config.wandb:
            import_tracker("--wandb", "wandb", "wandb")
            trackers.check_wandb_login()
        if config.mlflow:
            trackers.prepare_mlflow()
            import_tracker("--mlflow", "mlflow", "mlflow")


def import_tracker(flag: str, extra: str, module: str) -> None:
    """Import a package, which may take seconds.

    Raises:
        UserError: it is not installed, or cannot be imported.
    """
    try:
        import_module(module)
    except Exception as error:  # a broken installation raises anything
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{flag}: the package {extra} is not installed, or cannot be imported: "
            f"{type(error).__name__}: {reason}; pip install 'kaitian-mpi[{extra}]', or leave out "
            f"{flag}"
        ) from error


def check_own_sinks(sinks: Sequence[MetricsSink]) -> None:
    """Check what a script passes as `Training(sinks=...)`.

    Raises:
        UserError: one of them is not a sink.
    """
    for sink in sinks:
        if not isinstance(sink, MetricsSink):
            found = f"the class {sink.__name__}" if isinstance(sink, type) else type(sink).__name__
            raise UserError(
                "Training(sinks=...) takes instances of subclasses of kaitian_mpi.MetricsSink, not "
                f"{found}"
            )


def open_sinks(
    config: TrainingConfig,
    folder: RunFolder,
    infos: Sequence[RankInfo],
    emulated: bool,
    own: Sequence[MetricsSink],
) -> Sinks:
    """Return the sinks of the rank that writes the files."""
    path = "" if isinstance(folder, NoFolder) else str(folder.path)
    title = " ".join(filter(None, [Path(sys.argv[0]).name, path, "(emulated)" * emulated]))
    # The live view ends before the outcome is printed.
    sinks = [RunFolderSink(folder), open_progress(config, infos, title), Outcome(path, emulated)]
    if recorder.current is not None:
        sinks.append(TimelineSink(recorder.current))
    background = (BackgroundSink(name, make) for name, make in _slow_sinks(config, folder, own))
    return Sinks([*sinks, *background])


def _slow_sinks(
    config: TrainingConfig, folder: RunFolder, own: Sequence[MetricsSink]
) -> Iterator[tuple[str, Callable[[], MetricsSink]]]:
    """Yield the name of each sink that must not delay training, and what creates it."""
    settings = asdict(config)
    if config.tensorboard:
        yield "TensorBoard", partial(trackers.TensorBoardSink, folder.path)
    if config.wandb:
        yield "Weights & Biases", partial(trackers.WandbSink, config.wandb, settings, folder)
    if config.mlflow:
        yield "MLflow", partial(trackers.MlflowSink, config.mlflow, settings, folder)
    for sink in own:
        yield type(sink).__name__, partial(_same, sink)


def _same(sink: MetricsSink) -> MetricsSink:
    return sink
