"""A sink that logs to Weights & Biases."""

from __future__ import annotations

import logging
import netrc
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.reading import (
    Evaluated,
    Event,
    Logged,
    Reading,
    of_evaluation,
    of_logged,
    of_reading,
)
from kaitian_mpi.observe.sink import KeepsJson, MetricsSink

_log = logging.getLogger(__name__)

_KEPT = "wandb.json"
_FORMER_HOST = "api.wandb.ai"
_ONLINE = ("online", "run")
_SETTINGS: dict[str, Any] = {
    "console": "off",  # what mpirun's ranks print is not this rank's alone
    "silent": True,
    "finish_timeout": 25.0,  # else a process without a network would not end
    "init_timeout": 20.0,
    "login_timeout": 1,
}


def check_login() -> None:
    """Check that the user is logged in to Weights & Biases, which would ask while training.

    Raises:
        UserError: no API key is configured.
    """
    import wandb

    with _own_hooks():
        settings = wandb.setup().settings
    token = getattr(settings, "identity_token_file", None)
    if settings.mode not in _ONLINE or settings.api_key or token:
        return
    if not _is_in_netrc(urlparse(settings.base_url).hostname or "", _FORMER_HOST):
        raise UserError(
            "--wandb: no API key found, which Weights & Biases needs; run 'wandb login', set "
            "WANDB_API_KEY, or set WANDB_MODE=offline to keep the run on disk"
        )


@contextmanager
def _own_hooks() -> Iterator[None]:
    """Restore the exit and exception hooks, which wandb replaces: our errors stay one line."""
    hooks = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = hooks  # type: ignore[misc]


def _new_id() -> str:
    return secrets.token_hex(8)


def _is_in_netrc(*hosts: str) -> bool:
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        known = netrc.netrc(path).hosts
        return any(host in known for host in hosts)
    except OSError:
        return False
    except netrc.NetrcParseError:  # wandb will say what is wrong with it
        return True


class WandbSink(MetricsSink):
    """Logs to one run of a project; a resumed run is continued there.

    Steps that are trained again keep their first values: Weights & Biases accepts no step before
    the last one.
    """

    def __init__(self, project: str, config: Mapping[str, Any], folder: KeepsJson) -> None:
        """Start or continue the run.

        Args:
            project: its name, as `ENTITY/PROJECT` if the entity is not the user's default.
            config: the settings.
            folder: the run folder, where the run's id is kept.
        """
        known = folder.read(_KEPT)
        run_id = known.get("id") if known.get("project") == project else None
        if not isinstance(run_id, str) or not run_id.isalnum():
            run_id = _new_id()
            folder.write(_KEPT, {"id": run_id, "project": project})
        entity, _, name = project.rpartition("/")
        self._begin(
            folder.path,
            id=run_id,
            entity=entity or None,
            project=name,
            name=folder.path.name,
            resume="allow",
            config=dict(config),
        )

    def on_reading(self, reading: Reading) -> None:
        """Log a reading's numbers."""
        self._log(of_reading(reading), reading.step)

    def on_evaluation(self, evaluated: Evaluated) -> None:
        """Log an evaluation's numbers."""
        self._log(of_evaluation(evaluated), evaluated.step)

    def on_logged(self, logged: Logged) -> None:
        """Log the user's own figures."""
        self._log(of_logged(logged), logged.step)

    def on_event(self, event: Event) -> None:
        """Keep the last event of each kind in the run's summary."""
        self._run.summary[f"event/{event.kind}"] = event.text

    def close(self, finished: bool) -> None:
        """End the run, and wait until it is uploaded or saved."""
        self._run.finish(exit_code=0 if finished else 1)

    def _begin(self, folder: Path, **what: Any) -> None:
        """Start the run; on disk only, if Weights & Biases cannot be reached."""
        import wandb

        what["dir"] = str(folder)
        supported = {key: v for key, v in _SETTINGS.items() if key in wandb.Settings.model_fields}
        with _own_hooks():
            try:
                self._run = wandb.init(**what, settings=wandb.Settings(**supported))
            except wandb.errors.Error as error:
                reason = str(error).partition("\n")[0]
                _log.warning(
                    "Weights & Biases: %s; the run is kept on disk, for 'wandb sync'", reason
                )
                what |= {"id": _new_id(), "mode": "offline"}  # the other id stays reserved
                self._run = wandb.init(**what, settings=wandb.Settings(**supported))
        is_online = self._run.settings.mode in _ONLINE
        kept = f"run {self._run.id} in {folder}/wandb"
        _log.info("Weights & Biases: %s", self._run.url if is_online else kept)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        if step >= self._run.step:
            self._run.log(dict(values), step=step)
