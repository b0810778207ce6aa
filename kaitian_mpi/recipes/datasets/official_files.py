"""Reads and checks the official files of a downloaded dataset."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kaitian_mpi.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OfficialFiles:
    """A dataset that users download, and the errors about its files."""

    name: str
    """The value of `--dataset`."""
    url: str
    """Where to download the official files."""
    num_classes: int

    def folder(self, data_dir: str) -> Path:
        """Return the folder given by `--data-dir`.

        Raises:
            UserError: it is not given or does not exist.
        """
        if not data_dir:
            raise UserError(
                f"--dataset {self.name} needs --data-dir, the folder with its official files; "
                f"get them from {self.url}"
            )
        folder = Path(data_dir).expanduser()
        if not os.path.isdir(folder):  # unlike Path.is_dir, never raises
            raise UserError(
                f"--data-dir: no such folder: {folder}; give the folder with the official files "
                f"for --dataset {self.name}, or get them from {self.url}"
            )
        return folder

    def read(self, path: Path) -> bytes:
        """Return a file's contents.

        Raises:
            UserError: it cannot be read.
        """
        try:
            return path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}), and {self.name} needs it; get it from "
                f"{self.url}"
            ) from error

    def file_error(self, path: Path, problem: str) -> UserError:
        """Return the error to raise for a file with the wrong contents."""
        return UserError(f"{path}: {problem}; get it from {self.url}")

    def check_labels(self, path: Path, labels: torch.Tensor) -> None:
        """Check int64 [n] class labels.

        Raises:
            UserError: one of them is not a class of the dataset.
        """
        wrong = ((labels < 0) | (labels >= self.num_classes)).nonzero()
        if len(wrong):
            sample = int(wrong[0])
            label, last = int(labels[sample]), self.num_classes - 1
            raise self.file_error(
                path, f"sample {sample} has label {label}, which is not between 0 and {last}"
            )

    def warn_if_incomplete(self, part: str, images: int, official: int) -> None:
        """Warn if a part of the dataset is smaller or larger than the official one."""
        if images != official:
            _log.warning(
                "%s: the %s set has %d images; the official files have %d",
                *(self.name, part, images, official),
            )
