"""What a run leaves behind: one folder, written by world rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.files import json_bytes, read_json, replacing
from kaitian_mpi.output.folders import make_new_folder

_log = logging.getLogger(__name__)

_claimed: set[Path] = set()
"""Folders that this process has begun to write."""


class RunFolder(Protocol):
    """Where results go. `NoFolder` is the one of the ranks that do not write."""

    path: Path

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        ...

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Add a line to a JSON lines file."""
        ...

    def save_model(self, state: dict[str, torch.Tensor]) -> None:
        """Save the model's weights as `checkpoints/model.pt`, whole or not at all."""
        ...

    def has(self, name: str) -> bool:
        """Return whether the last content that this object was given for a file is written."""
        ...

    def require(self, name: str) -> None:
        """Raise `StorageError` if a file's last content is not on disk."""
        ...

    def cut_after(self, step: int) -> None:
        """Drop the lines about later steps from the JSON lines files: they are trained again."""
        ...

    def read(self, name: str) -> dict[str, Any]:
        """Return what a JSON file holds; nothing where there is none that can be read."""
        ...

    def confirm(self, name: str) -> None:
        """Give a file the present time: what it says holds for this job, too."""
        ...


class NoFolder:
    """Writes nothing: only one rank owns the files."""

    path = Path()

    def write(self, name: str, content: Any) -> None:
        """Do nothing."""

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Do nothing."""

    def save_model(self, state: dict[str, torch.Tensor]) -> None:
        """Do nothing."""

    def has(self, name: str) -> bool:
        """Return that nothing is missing."""
        return True

    def require(self, name: str) -> None:
        """Do nothing."""

    def cut_after(self, step: int) -> None:
        """Do nothing."""

    def read(self, name: str) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def confirm(self, name: str) -> None:
        """Do nothing."""


class DiskFolder:
    """A folder on disk."""

    def __init__(self, path: Path) -> None:
        """Make the folder where it is not there.

        Raises:
            UserError: it cannot be made or written.
        """
        self.path = path
        self._faults: dict[Path, str] = {}
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise UserError(
                f"--run-dir {path}: {error.strerror}; name a folder that can be written"
            ) from error

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        self._replace(self.path / name, json_bytes(content))

    def append(self, name: str, line: dict[str, Any]) -> None:
        """Add a line to a JSON lines file."""
        target = self.path / name
        with _warned(target):
            before = target.stat().st_size if target.exists() else 0
            try:
                with target.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError:
                _cut(target, before)  # half a line would spoil the next one, too
                raise

    def claim(self) -> bool:
        """Take the folder for this job; return whether it is new, not claimed by it before.

        Raises:
            UserError: another job has been quicker.
        """
        if self.path in _claimed:  # before a rank was lost
            return False
        try:
            (self.path / "config.json").touch(exist_ok=False)
        except FileExistsError as error:
            raise _used(self.path) from error
        except OSError as error:
            raise StorageError(f"--run-dir {self.path}: {error.strerror}") from error
        _claimed.add(self.path)
        return True

    def mend(self) -> None:
        """Cut off the line that a rank was writing when it died."""
        for path in self.path.glob("*.jsonl"):
            with path.open("rb+") as file:
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)

    def cut_after(self, step: int) -> None:
        """Drop the lines about later steps from the JSON lines files: they are trained again."""
        for path in self.path.glob("*.jsonl"):
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) <= step]
            if len(kept) < len(lines):
                self._replace(path, b"".join(kept))

    def read(self, name: str) -> dict[str, Any]:
        """Return what a JSON file holds; nothing where there is none that can be read."""
        return read_json(self.path / name)

    def confirm(self, name: str) -> None:
        """Give a file the present time: what it says holds for this job, too."""
        with _warned(self.path / name):
            os.utime(self.path / name)

    def save_model(self, state: dict[str, torch.Tensor]) -> None:
        """Save the model's weights as `checkpoints/model.pt`, whole or not at all."""
        buffer = io.BytesIO()  # torch.save turns a full disk into an error of another kind
        torch.save(state, buffer)
        # Released even when an error keeps this frame: Python 3.12.1 crashes in the collection of a
        # cycle with a buffer that is still exported.
        with buffer.getbuffer() as content:
            self._replace(self.path / "checkpoints" / "model.pt", content)

    def has(self, name: str) -> bool:
        """Return whether the last content that this object was given for a file is written."""
        return self._faults.get(self.path / name) == ""

    def require(self, name: str) -> None:
        """Raise `StorageError` if a file's last content is not on disk."""
        path = self.path / name
        reason = self._faults.get(path, "")
        if not reason:
            try:
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # some file systems find out only now
            except OSError as error:
                reason = error.strerror or str(error)
        if reason:
            raise StorageError(f"{path} could not be written: {reason}")

    def _replace(self, target: Path, content: bytes | memoryview) -> None:
        with _warned(target):
            try:
                with replacing(target) as file:
                    file.write(content)
            except OSError as error:
                self._faults[target] = _describe(error, target.parent, len(content))
                raise
            self._faults[target] = ""


def _step_of(line: bytes) -> float:
    """Return the step that a line is about; below any step where it names none."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -math.inf


@contextlib.contextmanager
def _warned(path: Path) -> Iterator[None]:
    """Let training go on where a file cannot be written: a full disk may be made room on."""
    try:
        yield
    except OSError as error:
        _log.warning(
            "%s could not be written: %s; training continues", path, error.strerror or error
        )


def _cut(path: Path, size: int) -> None:
    with contextlib.suppress(OSError):
        os.truncate(path, size)


def _describe(error: OSError, folder: Path, needed: int) -> str:
    """Return why so many bytes could not be written to a folder."""
    reason = error.strerror or str(error)
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return reason
    return f"{reason} ({_size(needed)} needed, {_size(free)} free)"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"


def check_run_folder(config: TrainingConfig, world: World) -> None:
    """Check the folder that `--run-dir` names; nothing is made yet. Collective.

    Raises:
        AgreedError: it holds another run, which nobody asked to go on with, or cannot be one.
    """
    if not config.run_dir:
        return
    with agree_on_errors(world.comm):
        if world.rank == 0:
            _check(Path(config.run_dir), config.resume)


def _check(path: Path, resume: str) -> None:
    try:
        holds_run = (path / "config.json").lstat() is not None
    except FileNotFoundError:
        holds_run = False
    except OSError as error:
        raise UserError(
            f"--run-dir {path}: {error.strerror}; name a folder that can be written"
        ) from error
    if holds_run and not resume:
        raise _used(path)


def _used(path: Path) -> UserError:
    return UserError(
        f"--run-dir {path}: found the results of another run, needed a new or empty folder; name "
        "another, or give --resume auto to go on with that run"
    )


def open_run_folder(config: TrainingConfig, rank: int) -> RunFolder:
    """Return the run's folder on rank 0, a stand-in that writes nothing elsewhere.

    Args:
        config: names the folder, and is written into it. Without a name, a new folder that no
            other job has; a stand-in where nothing is to be written.
        rank: of this process.

    Raises:
        UserError: the folder cannot be made or written, or another job has begun to use it.
    """
    path = config.choose_folder()
    if rank != 0 or path is None:
        return NoFolder()
    folder = DiskFolder(path if config.run_dir else make_new_folder(path))
    folder.mend()
    is_new = folder.claim() if not config.resume else not (folder.path / "config.json").exists()
    if is_new or not config.resume:  # or else once it is clear that this job may resume the run
        folder.write("config.json", dataclasses.asdict(config))
    if is_new:
        folder.require("config.json")  # a disk that is full now would lose the whole training
    return folder
