"""The run folder: all files of a run, written by one rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.files import (
    append,
    describe_failure,
    finite,
    json_bytes,
    read_json,
    replacing,
)
from kaitian_mpi.observe.folder_lock import Claim, check_unclaimed
from kaitian_mpi.observe.folders import make_new_folder
from kaitian_mpi.observe.reading import Event, Figures, Reading
from kaitian_mpi.observe.sink import MetricsSink
from kaitian_mpi.observe.tensor_files import write_tensors

_log = logging.getLogger(__name__)

_NOT_KEPT = ("epochs", "epoch_fraction", "steps", "seconds_left")  # shown while training
_HISTORY = "events.jsonl"  # keeps its lines when steps are repeated
MODEL_FILE = "checkpoints/model.pt"
"""The path of the model's weights in a run folder."""


class RunFolder:
    """The interface of a run folder; this one writes nothing, because another rank does."""

    path = Path()

    def begin(self, config: TrainingConfig, job: str) -> None:
        """Claim the folder for a job's ID; write config.json unless the folder has a run."""

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file atomically."""

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Append a line to a JSON lines file."""

    def save_model(self, state: dict[str, torch.Tensor]) -> None:
        """Save the model's weights as `checkpoints/model.pt`, atomically."""

    def log_unsaved_model(self, fault: OSError) -> None:
        """Log why the model's weights cannot be saved; `require` then raises that."""

    def has(self, name: str) -> bool:
        """Return whether the last content written to a file is on disk."""
        return True

    def require(self, name: str) -> None:
        """Raise `StorageError` if the last content written to a file is not on disk."""

    def cut_after(self, step: int) -> None:
        """Remove lines of later steps, which will be repeated, except from events.jsonl."""

    def read(self, name: str) -> dict[str, Any]:
        """Return a JSON file's content; empty if it is missing or invalid."""
        return {}

    def confirm(self, name: str) -> None:
        """Update a file's modification time: its content is valid for this job as well."""

    def close(self) -> None:
        """Let other jobs train in the folder; does nothing after the first call."""


class NoFolder(RunFolder):
    """The run folder of the ranks that do not write."""


class DiskFolder(RunFolder):
    """A folder on disk, in which one job at a time trains.

    If a file cannot be written, that is logged and training continues; `require` raises at the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._claim: Claim | None = None
        self._faults: dict[Path, str] = {}
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _unwritable(path, error) from error

    def begin(self, config: TrainingConfig, job: str) -> None:
        claim = self.claim(job)
        config_file = self.path / "config.json"
        try:
            config_file.touch(exist_ok=bool(config.resume) or claim.is_renewed)
        except FileExistsError as error:
            raise _used(self.path) from error
        except OSError as error:
            raise StorageError(f"--run-dir {self.path}: {error.strerror}") from error
        # The config of a resumed run is written once this job is known to resume it.
        if not config.resume or not config_file.stat().st_size:
            self.write("config.json", dataclasses.asdict(config))
            self.require("config.json")  # with a full disk, the whole training would be lost

    def claim(self, job: str) -> Claim:
        """Keep other jobs from training in the folder, until `close`."""
        self._claim = claim = Claim(self.path, job)
        for path in self.path.glob("*.jsonl"):
            with path.open("rb+") as file:  # a rank may have died in the middle of a line
                file.truncate(file.read().rfind(b"\n") + 1)
        return claim

    def close(self) -> None:
        if self._claim is not None:
            self._claim.close()

    def write(self, name: str, content: Any) -> None:
        self._replace(self.path / name, json_bytes(finite(content)))

    def append(self, name: str, line: dict[str, Any]) -> None:
        target = self.path / name
        with _warned(target):
            append(target, (json.dumps(finite(line)) + "\n").encode())

    def cut_after(self, step: int) -> None:
        for path in self.path.glob("*.jsonl"):
            lines = path.read_bytes().splitlines(keepends=True)
            remaining = [line for line in lines if _step_of(line) <= step]
            if len(remaining) < len(lines) and path.name != _HISTORY:
                self._replace(path, b"".join(remaining))

    def read(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)

    def confirm(self, name: str) -> None:
        with _warned(self.path / name):
            os.utime(self.path / name)

    def save_model(self, state: dict[str, torch.Tensor]) -> None:
        needed = sum({value.data_ptr(): value.nbytes for value in state.values()}.values())
        self._fill(self.path / MODEL_FILE, needed, lambda file: write_tensors(file, state))

    def log_unsaved_model(self, fault: OSError) -> None:
        target = self.path / MODEL_FILE
        self._faults[target] = fault.strerror or str(fault)
        _warn(target, fault)

    def has(self, name: str) -> bool:
        return self._faults.get(self.path / name) == ""

    def require(self, name: str) -> None:
        path = self.path / name
        reason = self._faults.get(path, "")
        if not reason:
            try:
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # some file systems report a full disk only now
            except OSError as error:
                reason = error.strerror or str(error)
        if reason:
            raise StorageError(f"{path} could not be written: {reason}")

    def _replace(self, target: Path, content: bytes) -> None:
        self._fill(target, len(content), lambda file: file.write(content))

    def _fill(self, target: Path, needed: int, fill: Callable[[IO[bytes]], object]) -> None:
        """Write a file of about `needed` bytes atomically; an OSError is logged and noted."""
        with _warned(target):
            try:
                with replacing(target) as file:
                    fill(file)
            except OSError as error:
                self._faults[target] = describe_failure(error, target.parent, needed)
                raise
            self._faults[target] = ""


def _step_of(line: bytes) -> float:
    """Return a line's step; below any step if it has none."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -math.inf


@contextlib.contextmanager
def _warned(path: Path) -> Iterator[None]:
    """Log an OSError as a warning: training continues, and space may be freed before its end."""
    try:
        yield
    except OSError as error:
        _warn(path, error)


def _warn(path: Path, error: OSError) -> None:
    reason = error.strerror or error
    _log.warning("%s could not be written: %s; training continues", path, reason)


def check_run_folder(config: TrainingConfig, world: World) -> None:
    """Check the folder given by `--run-dir`, without creating anything. Collective."""
    if not config.run_dir:
        return
    with agree_on_errors(world.comm):
        if world.rank == 0:
            path = Path(config.run_dir)
            try:
                (path / "config.json").lstat()
            except FileNotFoundError:
                pass
            except OSError as error:
                raise _unwritable(path, error) from error
            else:
                if not config.resume:
                    raise _used(path)
            check_unclaimed(path)


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"--run-dir {path}: {error.strerror}; choose a writable folder")


def _used(path: Path) -> UserError:
    return UserError(
        f"--run-dir {path}: the folder has the results of another run; choose a new folder, or add "
        "--resume auto to continue that run"
    )


def open_run_folder(config: TrainingConfig, rank: int) -> RunFolder:
    """Return the run folder on rank 0, and a stand-in that writes nothing on other ranks."""
    path = config.choose_folder()
    if rank != 0 or path is None:
        return NoFolder()
    return DiskFolder(path if config.run_dir else make_new_folder(path))


class RunFolderSink(MetricsSink):
    """Appends a line to a file for everything it receives; with a full disk, lines are lost."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def on_reading(self, reading: Reading) -> None:
        values = {
            name: value
            for name, value in dataclasses.asdict(reading).items()
            if name not in _NOT_KEPT and value is not None and (value or name != "logged")
        }
        self._folder.append("metrics.jsonl", values)

    def on_evaluation(self, evaluated: Figures) -> None:
        self._append_values(evaluated, "validation")

    def on_logged(self, logged: Figures) -> None:
        self._append_values(logged, "logged")

    def on_event(self, event: Event) -> None:
        self._folder.append(_HISTORY, dataclasses.asdict(event))

    def _append_values(self, content: Figures, name: str) -> None:
        line = dataclasses.asdict(content)
        line[name] = line.pop("values")
        self._folder.append("metrics.jsonl", line)
