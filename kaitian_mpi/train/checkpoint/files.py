"""A folder of checkpoints: a kill or power loss at any moment leaves an intact one.

A checkpoint is `step-00000120.pt`, which holds only tensors and plain values, for plain
`torch.load`, and `step-00000120.json`, which describes it and is written last: with the size and
SHA-256 of the other, and a checksum of its own content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import finite, json_bytes, replacing
from kaitian_mpi.observe.folder_lock import saving_in
from kaitian_mpi.observe.folders import SHM, is_private, make_private, snapshot_folder
from kaitian_mpi.observe.tensor_files import (
    TensorFile,
    UnusableError,
    map_tensors,
    write_hashed,
    write_tensors,
)
from kaitian_mpi.train.state_transfer import check_loadable

_log = logging.getLogger(__name__)

FORMAT_VERSION = 4
_FILE_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?\.(pt|json)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    """The .pt file."""
    description: dict[str, Any]
    """The content of its .json file: the values given to `write`, and those that it added."""
    file: TensorFile

    @property
    def state(self) -> dict[str, Any]:
        """The state, with tensors in host memory or in the file; not to be changed."""
        return self.file.content

    @property
    def step(self) -> int:
        """The number of steps done when it was written."""
        return self.description["step"]


class _Name(NamedTuple):
    """The name of a checkpoint's files; names sort by age.

    A step that is written again gets the next number and so a new name: a pair of files is never
    overwritten, so it cannot be half old and half new.
    """

    step: int
    number: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f"-{self.number}" if self.number else "")


class CheckpointFiles:
    """The checkpoints of one run, in a folder to which one process writes at a time."""

    def __init__(self, folder: Path, keep: int, private: bool = False) -> None:
        self.folder = folder
        self.keep = keep
        self._private = private

    def write(
        self, state: dict[str, Any], description: dict[str, Any], only_new: bool = False
    ) -> Path:
        """Write a checkpoint, then remove old ones that are not to be kept; return the .pt file.

        Waits while another process is writing in the folder. Checkpoints of later steps are neither
        removed nor counted: the run may have ignored them because of a transient fault.

        Args:
            state: tensors, numbers, strings, lists, tuples and dicts, nested.
            description: JSON values, including "step" and optionally "score": a float, higher is
                better, or None.
            only_new: whether to keep a checkpoint of this step that exists by then.

        Raises:
            OSError: the disk is full or faulty; existing checkpoints are kept.
            UserError: the state holds something that could not be loaded.
        """
        check_loadable(state, "state")
        if self._private:
            make_private(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        with saving_in(self.folder):
            step = description["step"]
            names = [name for name in self._names("json") if name.step == step]
            if only_new and names:
                return self._path(names[-1])
            name = _Name(step, names[-1].number + 1) if names else _Name(step)
            return self._write(name, state, description)

    def _write(self, name: _Name, state: dict[str, Any], description: dict[str, Any]) -> Path:
        with contextlib.suppress(OSError):
            for partial in self.folder.glob("step-*.partial"):
                partial.unlink(missing_ok=True)
        try:
            with replacing(self._path(name), sync=True) as file:
                size, sha256 = write_tensors(file, state)
            content = {
                **description,
                "format_version": FORMAT_VERSION,
                "bytes": size,
                "sha256": sha256,
                "written_at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            text = json_bytes(seal(json.loads(json.dumps(finite(content)))))  # keys become strings
            with replacing(self._path(name, "json"), sync=True) as file:
                write_hashed(file, lambda buffered: buffered.write(text))
        except BaseException:
            self._remove(name)
            raise
        self._remove_superseded(name)
        return self._path(name)

    def newest_good(self, after: int = -1) -> Checkpoint | None:
        """Return the newest intact checkpoint of a step after `after`, and log damaged ones."""
        if self._private and not is_private(self.folder):
            return None
        for name in reversed(self._names("pt", "json")):
            if name.step <= after:
                break
            try:
                return _read(self._path(name))
            except UnusableError as error:
                _log.warning("checkpoint %s.pt is damaged and ignored: %s", name, error)
        return None

    @staticmethod
    def load(path: Path) -> Checkpoint:
        """Return the checkpoint of this .pt file, which may have any name and be in any folder."""
        try:
            return _read(path)
        except UnusableError as error:
            raise UserError(f"checkpoint {path} cannot be used: {error}; name another") from error

    def adopt(self, path: Path, step: int) -> None:
        """Copy the checkpoint of a .pt file, of this step, into this folder, which has none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with saving_in(self.folder):
            for suffix in ("pt", "json"):
                with (
                    path.with_suffix(f".{suffix}").open("rb") as file,
                    replacing(self._path(_Name(step), suffix), sync=True) as copy,
                ):
                    shutil.copyfileobj(file, copy)

    def is_newest(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint, of any folder, has the content of the newest one here."""
        with contextlib.suppress(UnusableError, UserError, IndexError):
            newest = _read_description(self._path(self._names("json")[-1], "json"))
            return newest["sha256"] == checkpoint.description["sha256"]
        return False

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, intact or not, oldest first."""
        return sorted({name.step for name in self._names("json")})

    def newest_step(self) -> int | None:
        """Return the last of `steps`; None if there is none, or on a faulty disk."""
        with contextlib.suppress(OSError):
            return max(self.steps(), default=None)
        return None

    def _path(self, name: _Name, suffix: str = "pt") -> Path:
        return self.folder / f"{name}.{suffix}"

    def _names(self, *suffixes: str) -> list[_Name]:
        """Return the names of files with one of these suffixes, oldest first."""
        try:
            matches = filter(None, map(_FILE_NAME.fullmatch, os.listdir(self.folder)))
        except FileNotFoundError:
            return []
        return sorted({_Name(int(m[1]), int(m[2] or 0)) for m in matches if m[3] in suffixes})

    def _remove_superseded(self, written: _Name) -> None:
        """Keep the newest up to this one, and the best; of equally good ones, the newest."""
        with contextlib.suppress(OSError):  # the new one is intact; the next write tries again
            complete = set(self._names("json")) & set(self._names("pt"))
            past = [name for name in self._names("pt", "json") if name <= written]
            newest = list({name.step: name for name in past if name in complete}.values())
            best = max(newest, key=lambda name: (self._score(name), name))
            for name in past:
                if name not in (best, *newest[-self.keep :]):
                    self._remove(name)

    def _score(self, name: _Name) -> float:
        with contextlib.suppress(UnusableError, UserError):
            score = _read_description(self._path(name, "json")).get("score")
            if isinstance(score, (int, float)) and math.isfinite(score):
                return score
        return -math.inf

    def _remove(self, name: _Name) -> None:
        """Remove a checkpoint; files that cannot be removed stay."""
        for suffix in ("json", "pt"):  # in this order: a .json alone would look damaged
            with contextlib.suppress(OSError):
                self._path(name, suffix).unlink(missing_ok=True)


def run_files(run_folder: Path, keep: int) -> CheckpointFiles:
    """Return the checkpoints in a run folder."""
    return CheckpointFiles(run_folder / "checkpoints", keep)


def snapshot_files(name: str) -> CheckpointFiles:
    """Return this host's snapshots of this name: a job's checkpoints in the host's memory."""
    return CheckpointFiles(snapshot_folder(name), keep=1, private=True)


def save_snapshot(name: str, run_folder: Path, keep_checkpoints: int) -> None:
    """Write this host's snapshot of this name to the run's checkpoints, if it is the newest."""
    files = run_files(run_folder, keep_checkpoints)
    for folder in SHM.glob(f"kaitian-{name}-*"):
        snapshots = CheckpointFiles(folder, keep=1, private=True)
        if (snapshot := snapshots.newest_good(max(files.steps(), default=-1))) is not None:
            files.write(snapshot.state, snapshot.description)
            _log.info("step %d saved from memory; --resume auto continues from it", snapshot.step)


def seal(description: dict[str, Any]) -> dict[str, Any]:
    """Return a description with a checksum of its own content."""
    content = {key: value for key, value in description.items() if key != "check"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "check": hashlib.sha256(text.encode()).hexdigest()}


def _read_description(path: Path) -> dict[str, Any]:
    """Read and verify a .json file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UnusableError(f"{path.name}, which is written last, is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UnusableError(f"{path.name} cannot be read: {type(error).__name__}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version != FORMAT_VERSION:
        raise UserError(
            f"checkpoint {path.with_suffix('.pt')} has format version {version}; this kaitian-mpi "
            f"reads version {FORMAT_VERSION}: continue the run with the release that started it"
        )
    if not isinstance(content, dict) or content != seal(content):
        raise UnusableError(f"{path.name} was altered after it was written")
    return content


def _read(path: Path) -> Checkpoint:
    """Read and verify the checkpoint of a .pt file."""
    try:
        with path.open("rb") as file:
            description = _read_description(path.with_suffix(".json"))
            if hashlib.file_digest(file, "sha256").hexdigest() != description["sha256"]:
                raise UnusableError("it is incomplete or altered: its SHA-256 differs")
        return Checkpoint(path, description, map_tensors(path))
    except OSError as error:
        raise UnusableError(f"it cannot be read: {error.strerror}") from error
