"""What the readers of downloaded data sets have in common."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kaitian_mpi.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """A data set that its users download."""

    name: str
    """As `--dataset` has it."""
    url: str
    """Where its official files are."""
    num_classes: int

    def folder(self, data_dir: str) -> Path:
        """Return the folder that `--data-dir` names.

        Raises:
            UserError: there is none.
        """
        if not data_dir:
            raise UserError(
                f"--data-dir: found none, needed the folder of the official files for --dataset "
                f"{self.name}; get them from {self.url}"
            )
        folder = Path(data_dir).expanduser()
        if not os.path.isdir(folder):  # which never raises, as Path.is_dir does
            raise UserError(
                f"--data-dir: found no folder {folder}, needed the one of the official files for "
                f"--dataset {self.name}; get them from {self.url}"
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
                f"{path}: cannot be read ({error.strerror}); {self.name} needs it: get it from "
                f"{self.url}"
            ) from error

    def bad_file(self, path: Path, found: str, needed: str) -> UserError:
        """Return the error to raise about a file that is not what it should be."""
        return UserError(f"{path}: found {found}, needed {needed}; get it from {self.url}")

    def check_labels(self, path: Path, labels: torch.Tensor) -> None:
        """Check int64 [n] class labels.

        Raises:
            UserError: one of them is no class of the data set.
        """
        wrong = ((labels < 0) | (labels >= self.num_classes)).nonzero()
        if len(wrong):
            sample = int(wrong[0])
            raise self.bad_file(
                path,
                f"label {int(labels[sample])} at sample {sample}",
                f"labels from 0 to {self.num_classes - 1}",
            )

    def report_count(self, part: str, found: int, official: int) -> None:
        """Warn when a part of the data set is smaller or larger than the official one."""
        if found != official:
            _log.warning(
                "%s: found %d %s images, the official files have %d",
                self.name,
                found,
                part,
                official,
            )
