"""Sinks for TensorBoard, Weights & Biases, and MLflow."""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.reading import Event, Figures, Reading, logged_values, reading_values
from kaitian_mpi.observe.sink import BackgroundSink, MetricsSink

if TYPE_CHECKING:
    from kaitian_mpi.observe.run_folder import RunFolder

_log = logging.getLogger(__name__)

_WANDB_ID = "wandb.json"
_MLFLOW_ID = "mlflow.json"
_ONLINE = ("online", "run")
_SETTINGS: dict[str, Any] = {
    "console": "off",  # stdout is shared by all of mpirun's ranks
    "silent": True,
    "finish_timeout": 25.0,  # otherwise a process without a network would not end
    "init_timeout": 20.0,
    "login_timeout": 1,
}
_MAX_METRICS = 1000  # in one request to MLflow
_MAX_PARAM = 500  # characters


def check_trackers(config: TrainingConfig, world: World) -> None:
    """Check that the chosen trackers can be used, before anything is created. Collective.

    Rank 0, which writes the files, imports their packages now, because a later import would slow
    down the first steps. A rank that replaces it may lack the packages.

    Raises:
        AgreedError: a package is missing, or the user is not logged in to Weights & Biases.
    """
    with agree_on_errors(world.comm):
        if world.rank != 0:
            return
        if config.tensorboard:
            import_tracker("tensorboard", "torch.utils.tensorboard")
        if config.wandb:
            import_tracker("wandb")
            check_wandb_login()
        if config.mlflow:
            prepare_mlflow()
            import_tracker("mlflow")


def import_tracker(name: str, module: str = "") -> None:
    """Import the package of a tracker, which may take seconds.

    Args:
        name: the tracker's flag and package.
        module: the module to import; the package by default.

    Raises:
        UserError: the package is not installed, or cannot be imported.
    """
    try:
        import_module(module or name)
    except Exception as error:  # a broken installation raises anything
        reason = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"--{name}: the package {name} is not installed, or cannot be imported: "
            f"{type(error).__name__}: {reason}; run pip install 'kaitian-mpi[{name}]', or "
            f"remove --{name}"
        ) from error


def open_trackers(config: TrainingConfig, folder: RunFolder) -> Iterator[MetricsSink]:
    """Yield the sinks of the chosen trackers, each in a thread, so that none delays training."""
    settings = asdict(config)
    if config.tensorboard:
        yield BackgroundSink("TensorBoard", partial(TensorBoardSink, folder.path))
    if config.wandb:
        make = partial(WandbSink, config.wandb, settings, folder)
        yield BackgroundSink("Weights & Biases", make)
    if config.mlflow:
        yield BackgroundSink("MLflow", partial(MlflowSink, config.mlflow, settings, folder))


class _Tracker(MetricsSink):
    """Logs numbers by name."""

    def on_reading(self, reading: Reading) -> None:
        self._log(reading_values(reading), reading.step, reading.time)

    def on_evaluation(self, evaluated: Figures) -> None:
        values = {f"{name}/validation": value for name, value in evaluated.values.items()}
        self._log(values, evaluated.step, evaluated.time)

    def on_logged(self, logged: Figures) -> None:
        self._log(logged_values(logged.values), logged.step, logged.time)

    def _log(self, values: Mapping[str, float], step: int, at: float) -> None:
        raise NotImplementedError


class TensorBoardSink(_Tracker):
    """Writes scalars, and events as text, with torch's SummaryWriter.

    Each job of a run, and each rank that takes over, adds a file to the folder. If steps are
    repeated, TensorBoard itself drops their values in earlier files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def on_event(self, event: Event) -> None:
        """Write an event as text; at a job's start, TensorBoard drops earlier jobs' later steps."""
        self._open(purge_step=event.step + 1 if event.kind in ("start", "resume") else None)
        self._writer.add_text(f"events/{event.kind}", event.text, event.step, event.time)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, purge_step: int | None = None) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)

    def _log(self, values: Mapping[str, float], step: int, at: float) -> None:
        self._open()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, at)
        self._writer.flush()  # so that a rank that is killed loses nothing


def check_wandb_login() -> None:
    """Check that the user is logged in to Weights & Biases, which would otherwise prompt later.

    Raises:
        UserError: no API key is configured.
    """
    import wandb
    from requests.utils import get_netrc_auth  # a dependency of wandb

    with _hooks_restored():
        settings = wandb.setup().settings
    token = getattr(settings, "identity_token_file", None)
    key = settings.api_key or token or get_netrc_auth(settings.base_url)
    if settings.mode in _ONLINE and not key:
        raise UserError(
            "--wandb: no API key found, which Weights & Biases needs; run 'wandb login', set "
            "WANDB_API_KEY, or set WANDB_MODE=offline to keep the run on disk"
        )


@contextmanager
def _hooks_restored() -> Iterator[None]:
    """Restore the exit and exception hooks, which wandb replaces, so that errors stay one line."""
    exit_hook = sys.exit
    exception_hook = sys.excepthook
    try:
        yield
    finally:
        sys.exit = exit_hook
        sys.excepthook = exception_hook


class WandbSink(_Tracker):
    """Logs to one run of a Weights & Biases project; a resumed run is continued there.

    Repeated steps keep their first values, because Weights & Biases accepts no step before the last
    one.
    """

    def __init__(self, project: str, config: Mapping[str, Any], folder: RunFolder) -> None:
        """Start or continue the run, on disk only if Weights & Biases cannot be reached."""
        import wandb

        previous_run = folder.read(_WANDB_ID)
        run_id = (
            previous_run["id"] if previous_run.get("project") == project else secrets.token_hex(8)
        )
        folder.write(_WANDB_ID, {"id": run_id, "project": project})
        entity, _, name = project.rpartition("/")
        supported = _SETTINGS.keys() & wandb.Settings.model_fields
        init = partial(
            wandb.init,
            entity=entity or None,
            project=name,
            resume="allow",
            dir=str(folder.path),
            name=folder.path.name,
            config=dict(config),
            settings=wandb.Settings(**{key: _SETTINGS[key] for key in supported}),
        )
        with _hooks_restored():
            try:
                self._run = init(id=run_id)
            except wandb.errors.Error as error:
                reason = str(error).partition("\n")[0]
                _log.warning(
                    "Weights & Biases: %s; the run is kept on disk, for 'wandb sync'", reason
                )
                # The first ID stays reserved.
                self._run = init(id=secrets.token_hex(8), mode="offline")
        place = f"run {self._run.id} in {folder.path}/wandb"
        _log.info("Weights & Biases: %s", self._run.url or place)

    def on_event(self, event: Event) -> None:
        """Keep the last event of each kind in the run's summary."""
        self._run.summary[f"event/{event.kind}"] = event.text

    def close(self, finished: bool) -> None:
        """End the run, and wait until it is uploaded or saved."""
        self._run.finish(exit_code=0 if finished else 1)

    def _log(self, values: Mapping[str, float], step: int, at: float) -> None:
        if step >= self._run.step:
            self._run.log(dict(values), step=step)


def prepare_mlflow() -> None:
    """Allow MLflow's file store and turn its telemetry off; called before it is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")


class MlflowSink(_Tracker):
    """Logs to one run of an MLflow experiment; a resumed run is continued there.

    The server is that of MLFLOW_TRACKING_URI; by default, files in the working directory. Repeated
    steps keep their first values, because MLflow would show both.
    """

    def __init__(self, experiment: str, config: Mapping[str, Any], folder: RunFolder) -> None:
        """Start or continue the run."""
        prepare_mlflow()
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        where = {"experiment": experiment, "tracking_uri": _tracking_uri()}
        self._client = MlflowClient(where["tracking_uri"])
        previous_run = folder.read(_MLFLOW_ID)
        self._run_id = str(previous_run.pop("run_id", ""))
        self._last_step = -1
        if previous_run != where or not self._is_continued():
            known_experiment = self._client.get_experiment_by_name(experiment)
            if known_experiment is None:
                experiment_id = self._client.create_experiment(experiment)
            else:
                experiment_id = known_experiment.experiment_id
            created = self._client.create_run(experiment_id, run_name=folder.path.name)
            self._run_id = created.info.run_id
            # A request may have 100 parameters, more than there are settings.
            params = [Param(key, str(value)[:_MAX_PARAM]) for key, value in config.items()]
            self._client.log_batch(self._run_id, params=params)
            folder.write(_MLFLOW_ID, {**where, "run_id": self._run_id})

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "FAILED")

    def _is_continued(self) -> bool:
        """Reopen the run and read its last step; return False if the run does not exist."""
        try:
            self._client.update_run(self._run_id, status="RUNNING")
            history = self._client.get_metric_history(self._run_id, "loss/train")
        except Exception:  # its type depends on the store
            return False
        self._last_step = max((metric.step for metric in history), default=-1)
        return True

    def _log(self, values: Mapping[str, float], step: int, at: float) -> None:
        from mlflow.entities import Metric

        if step <= self._last_step:
            return
        allowed = {re.sub(r"[^\w\-. /]", "_", name): float(v) for name, v in values.items()}
        metrics = [Metric(name, value, int(at * 1000), step) for name, value in allowed.items()]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics[first : first + _MAX_METRICS])


def _tracking_uri() -> str:
    """Return MLflow's configured store; by default files, never a network."""
    import mlflow

    has_database = all(find_spec(name) is not None for name in ("sqlalchemy", "alembic"))
    if os.environ.get("MLFLOW_TRACKING_URI") or has_database:  # mlflow-skinny has neither
        return str(mlflow.get_tracking_uri())
    return (Path.cwd() / "mlruns").as_uri()
