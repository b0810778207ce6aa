"""A sink that logs to MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kaitian_mpi.observe.reading import (
    Evaluated,
    Logged,
    Reading,
    of_evaluation,
    of_logged,
    of_reading,
)
from kaitian_mpi.observe.sink import KeepsJson, MetricsSink

_KEPT = "mlflow.json"
_LOSS = "loss/train"
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # in one request
_MAX_PARAM = 500  # characters


def prepare_environment() -> None:
    """Allow MLflow's file store and turn its telemetry off; called before it is imported."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")


class MlflowSink(MetricsSink):
    """Logs to one run of an experiment; a resumed run is continued there.

    The server is that of MLFLOW_TRACKING_URI, or else files in the working directory. Steps that
    are trained again keep their first values: MLflow would show both.
    """

    def __init__(self, experiment: str, config: Mapping[str, Any], folder: KeepsJson) -> None:
        """Start or continue the run.

        Args:
            experiment: its name; it is created if there is none.
            config: the settings.
            folder: the run folder, where the run's id is kept.
        """
        prepare_environment()
        from mlflow.tracking import MlflowClient

        uri = _tracking_uri()
        self._client = MlflowClient(uri)
        where = {"experiment": experiment, "tracking_uri": uri}
        known = folder.read(_KEPT)
        run_id = known.get("run_id")
        is_known = isinstance(run_id, str) and known == {**where, "run_id": run_id}
        last_step = self._continue(str(run_id)) if is_known else None
        if last_step is None:
            run_id, last_step = self._begin(experiment, config, folder.path.name), -1
            folder.write(_KEPT, {**where, "run_id": run_id})
        self._run_id, self._last_step = str(run_id), last_step

    def on_reading(self, reading: Reading) -> None:
        """Log a reading's numbers."""
        self._log(of_reading(reading), reading.step, reading.time)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Log an evaluation's numbers."""
        self._log(of_evaluation(evaluated), evaluated.step, evaluated.time)

    def on_logged(self, logged: Logged) -> None:
        """Log the user's own figures."""
        self._log(of_logged(logged), logged.step, logged.time)

    def close(self, finished: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "FAILED")

    def _begin(self, experiment: str, config: Mapping[str, Any], name: str) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(experiment)
        number = found.experiment_id if found else self._client.create_experiment(experiment)
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        params = [Param(key, str(value)[:_MAX_PARAM]) for key, value in config.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MAX_PARAMS])
        return run_id

    def _continue(self, run_id: str) -> int | None:
        """Reopen a run; return the last step that it has, or None where it is not there."""
        try:
            self._client.update_run(run_id, status="RUNNING")
            history = self._client.get_metric_history(run_id, _LOSS)
        except Exception:  # which one depends on the kind of store
            return None
        return max((metric.step for metric in history), default=-1)

    def _log(self, values: Mapping[str, float], step: int, time: float) -> None:
        from mlflow.entities import Metric

        if step <= self._last_step:
            return
        metrics = [Metric(_key(n), float(v), int(time * 1000), step) for n, v in values.items()]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics[first : first + _MAX_METRICS])


def _tracking_uri() -> str:
    """Return where MLflow keeps runs: as it is configured, or else files, never a network."""
    import mlflow

    has_database = all(find_spec(name) is not None for name in ("sqlalchemy", "alembic"))
    if os.environ.get("MLFLOW_TRACKING_URI") or has_database:  # mlflow-skinny has none
        return str(mlflow.get_tracking_uri())
    return (Path.cwd() / "mlruns").as_uri()


def _key(name: str) -> str:
    """Return a name with the characters that MLflow does not accept replaced."""
    return re.sub(r"[^\w\-. /]", "_", name)
