"""A folder of checkpoints: a kill or power loss at any moment leaves an intact one."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.files import replacing, sync_folder
from kaitian_mpi.observe.tensor_files import UnusableError
from kaitian_mpi.train.checkpoint.folder_lock import writing_in
from kaitian_mpi.train.checkpoint.format import (
    Checkpoint,
    HashingWriter,
    describe,
    read,
    read_description,
)
from kaitian_mpi.train.state_transfer import check_loadable

_log = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?\.(pt|json)(\.partial)?")


@dataclass(frozen=True, order=True)
class _Name:
    """The name of a checkpoint's files; names sort by age.

    A step that is written again gets the next number and so a new name: a pair of files is never
    overwritten, so it cannot be half old and half new.
    """

    step: int
    number: int = 0

    def __str__(self) -> str:
        return f"step-{self.step:08d}" + (f"-{self.number}" if self.number else "")


class CheckpointFiles:
    """The checkpoints of one run, in a folder to which one process writes at a time.

    A checkpoint is `step-00000120.pt`, which plain `torch.load` reads, and `step-00000120.json`,
    which describes it and is written last. If step 120 is written again, the files are named
    `step-00000120-1`.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        """Create the object only; nothing on disk changes.

        Args:
            folder: the checkpoints' folder; created by the first write.
            keep: how many of the newest to keep, at least 1, besides the one with the best score.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.folder, self.keep = folder, keep

    def write(
        self, state: dict[str, Any], description: dict[str, Any], only_new: bool = False
    ) -> Path:
        """Write a checkpoint, then remove old ones that are not to be kept.

        Waits while another process is writing in the folder. Checkpoints of later steps are neither
        removed nor counted: the run may have ignored them because of a transient fault.

        Args:
            state: tensors, numbers, strings, lists, tuples and dicts, nested.
            description: JSON values, including "step" and optionally "score": a float, higher is
                better, or None.
            only_new: whether to keep a checkpoint of this step that exists by then.

        Returns:
            The .pt file.

        Raises:
            OSError: the disk is full or faulty; existing checkpoints are kept.
            UserError: the state holds something that could not be loaded.
        """
        check_loadable(state, "state")
        self.folder.mkdir(parents=True, exist_ok=True)
        with writing_in(self.folder):
            step = description["step"]
            if only_new and step in self.steps():
                return self.newest_of(step)
            return self._write(state, description)

    def _write(self, state: dict[str, Any], description: dict[str, Any]) -> Path:
        self._remove_partial_files()
        step = description["step"]
        numbers = [name.number for name in self._names("json") if name.step == step]
        name = _Name(step, max(numbers, default=-1) + 1)
        try:
            size, sha256 = self._put(f"{name}.pt", lambda file: torch.save(state, file))
            text = describe(description, size, sha256)
            self._put(f"{name}.json", lambda file: file.write(text))
        except BaseException:
            self._remove(name)
            raise
        self._remove_superseded(name)
        return self.folder / f"{name}.pt"

    def newest_good(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, and log each damaged one; None if there is none.

        Raises:
            UserError: it has another format.
            OSError: the folder cannot be read.
        """
        for name in reversed(self._names("pt", "json")):
            try:
                return read(self.folder / f"{name}.pt")
            except UnusableError as error:
                _log.warning("checkpoint %s.pt is damaged and ignored: %s", name, error)
        return None

    @staticmethod
    def load(path: Path) -> Checkpoint:
        """Return the checkpoint of this .pt file, which may have any name and be in any folder.

        Raises:
            UserError: it is damaged, or has another format.
        """
        try:
            return read(path)
        except UnusableError as error:
            raise UserError(
                f"checkpoint {path} cannot be used: {error}; name another one"
            ) from error

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, intact or not, oldest first."""
        return sorted({name.step for name in self._names("json")})

    def newest_of(self, step: int) -> Path:
        """Return the newest .pt file of a step, which must exist."""
        name = max(name for name in self._names("json") if name.step == step)
        return self.folder / f"{name}.pt"

    def holds(self, path: Path) -> bool:
        """Return whether a .pt file is one of these checkpoints."""
        match = _FILE_NAME.fullmatch(path.name)
        return match is not None and path.resolve().parent == self.folder.resolve()

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: the user resumes from an earlier one."""
        for name in self._names("pt", "json"):
            if name.step > step:
                self._remove(name)

    def set_aside(self, path: Path, earlier: bool = False) -> Path | None:
        """Move the checkpoints that are later than this one to a folder beside them.

        From then on `newest_good` returns this one, until a later one is written.

        Args:
            path: a .pt file in this folder.
            earlier: whether to move the earlier ones as well, because they are of another run.

        Returns:
            The folder they were moved to; None if there were none.

        Raises:
            OSError: they cannot be moved.
        """
        match = _FILE_NAME.fullmatch(path.name)
        assert match is not None
        last = _Name(int(match[1]), int(match[2] or 0))
        names = self._names("pt", "json")
        aside = [name for name in names if name > last or (earlier and name < last)]
        if not aside:
            return None
        numbers = itertools.count(1)
        folder = next(f for n in numbers if not (f := self.folder / f"abandoned-{n}").exists())
        folder.mkdir()
        for name in aside:
            for suffix in ("json", "pt"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self.folder / f"{name}.{suffix}", folder / f"{name}.{suffix}")
        sync_folder(self.folder)
        return folder

    def _put(self, file_name: str, fill: Callable[[IO[bytes]], object]) -> tuple[int, str]:
        """Write a file atomically; return its size in bytes and its SHA-256 in hex."""
        with replacing(self.folder / file_name, sync=True) as file:
            writer = HashingWriter(file)
            writer.fill(fill)
        return writer.size, writer.sha256.hexdigest()

    def _files(self) -> list[re.Match[str]]:
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [match for match in map(_FILE_NAME.fullmatch, entries) if match]

    def _names(self, *suffixes: str) -> list[_Name]:
        """Return the names of files with one of these suffixes, oldest first."""
        complete = [m for m in self._files() if m[3] in suffixes and not m[4]]
        return sorted({_Name(int(m[1]), int(m[2] or 0)) for m in complete})

    def _remove_superseded(self, written: _Name) -> None:
        with contextlib.suppress(OSError):  # the new one is intact; the next write tries again
            complete = set(self._names("json")) & set(self._names("pt"))
            past = [name for name in self._names("pt", "json") if name <= written]
            newest_by_step = {name.step: name for name in past if name in complete}
            newest = list(newest_by_step.values())
            kept = {*newest[-self.keep :], *self._best(newest)}
            for name in past:
                if name not in kept:
                    self._remove(name)

    def _best(self, names: list[_Name]) -> list[_Name]:
        """Return the name with the best score, the newest of equals; none if there is no score."""
        scores = {}
        for name in names:
            with contextlib.suppress(UnusableError, UserError):
                score = read_description(self.folder / f"{name}.json").get("score")
                if isinstance(score, (int, float)) and math.isfinite(score):
                    scores[name] = score
        return [max(scores, key=lambda name: (scores[name], name))] if scores else []

    def _remove(self, name: _Name) -> None:
        """Remove a checkpoint; files that cannot be removed stay."""
        for suffix in ("json", "pt"):  # in this order: a .json alone would look damaged
            with contextlib.suppress(OSError):
                (self.folder / f"{name}.{suffix}").unlink(missing_ok=True)

    def _remove_partial_files(self) -> None:
        with contextlib.suppress(OSError):
            for match in self._files():
                if match[4]:
                    (self.folder / match[0]).unlink(missing_ok=True)
