"""Which sinks receive the metrics of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.outcome import Outcome
from kaitian_mpi.observe.progress import open_progress
from kaitian_mpi.observe.run_folder import NoFolder, RunFolder, RunFolderSink
from kaitian_mpi.observe.sink import BackgroundSink, MetricsSink, Sinks
from kaitian_mpi.observe.timeline import recorder

_METHODS = ("on_reading", "on_evaluation", "on_logged", "on_event", "close")


def check_sinks(config: TrainingConfig, world: World) -> None:
    """Check that the programs to log to can be used, before anything is created. Collective.

    Their packages are imported on rank 0 now: later it would slow down the first steps.

    Raises:
        AgreedError: a package is missing, or the user is not logged in to Weights & Biases.
    """
    with agree_on_errors(world.comm):
        writes = world.rank == 0
        if config.tensorboard:
            from kaitian_mpi.observe import tensorboard

            check_package("--tensorboard", "tensorboard", tensorboard.MODULE if writes else "")
        if config.wandb:
            from kaitian_mpi.observe import wandb

            check_package("--wandb", "wandb", "wandb" if writes else "")
            if writes:
                wandb.check_login()
        if config.mlflow:
            from kaitian_mpi.observe import mlflow

            mlflow.prepare_environment()
            check_package("--mlflow", "mlflow", "mlflow" if writes else "")


def check_package(flag: str, name: str, module: str = "") -> None:
    """Check that a package is installed.

    Args:
        flag: the flag that needs it.
        name: the name of the package, and of the extra that installs it.
        module: a module of the package to import now, which may take seconds; empty for none.

    Raises:
        UserError: it is not installed, or cannot be imported.
    """
    advice = f"pip install 'kaitian-mpi[{name}]', or leave out {flag}"
    if find_spec(name) is None:
        raise UserError(
            f"{flag}: the package {name} is not installed, and is needed on every host; {advice}"
        )
    if not module:
        return
    try:
        import_module(module)
    except Exception as error:  # a broken installation raises anything
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{flag}: the package {name} cannot be imported: {type(error).__name__}: {reason}; "
            f"{advice}"
        ) from error


def check_own_sinks(sinks: Sequence[MetricsSink]) -> None:
    """Check what a script passes as `Training(sinks=...)`.

    Raises:
        UserError: one of them is not a sink.
    """
    for sink in sinks:
        missing = [name for name in _METHODS if not callable(getattr(sink, name, None))]
        if missing or isinstance(sink, type):
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
    timeline: list[MetricsSink] = []
    if recorder.current is not None:
        from kaitian_mpi.observe.timeline.trace_file import TimelineSink

        timeline = [TimelineSink(recorder.current)]
    path = "" if isinstance(folder, NoFolder) else str(folder.path)
    title = " ".join(filter(None, [Path(sys.argv[0]).name, path, "(emulated)" * emulated]))
    progress = open_progress(config, infos, title)
    background = (BackgroundSink(name, make) for name, make in _slow_sinks(config, folder, own))
    # In this order: the live view ends before the outcome is printed.
    shown = (progress, Outcome(path, emulated))
    return Sinks([RunFolderSink(folder), *shown, *timeline, *background])


def _slow_sinks(
    config: TrainingConfig, folder: RunFolder, own: Sequence[MetricsSink]
) -> Iterator[tuple[str, Callable[[], MetricsSink]]]:
    """Yield the name of each sink that must not delay training, and what creates it."""
    settings = asdict(config)
    if config.tensorboard:
        from kaitian_mpi.observe import tensorboard

        yield "TensorBoard", partial(tensorboard.TensorBoardSink, folder.path)
    if config.wandb:
        from kaitian_mpi.observe import wandb

        yield "Weights & Biases", partial(wandb.WandbSink, config.wandb, settings, folder)
    if config.mlflow:
        from kaitian_mpi.observe import mlflow

        yield "MLflow", partial(mlflow.MlflowSink, config.mlflow, settings, folder)
    for sink in own:
        yield type(sink).__name__, partial(_same, sink)


def _same(sink: MetricsSink) -> MetricsSink:
    return sink
