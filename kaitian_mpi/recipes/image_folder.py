"""Pictures in folders, one for each class, as `--dataset imagefolder` reads them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from kaitian_mpi.config.factory import one_line
from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.images import ImageArrays, shuffled_split

_FORMATS = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"))
_HELD_OUT = ("val", "valid", "validation", "test")
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, per channel


class PictureFiles:
    """Picture files, each read when it is asked for: its middle square, in one size and RGB."""

    def __init__(self, paths: Sequence[str], size: int) -> None:
        self._paths = paths
        self._size = size

    def __getitem__(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the pictures of these n indices: uint8 [n, 3, size, size].

        Raises:
            UserError: a file cannot be read, or is no picture.
        """
        pictures = [self._read(self._paths[index]) for index in indices.tolist()]
        empty = np.empty((0, self._size, self._size, 3), np.uint8)
        stacked = np.stack(pictures) if pictures else empty
        return torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()

    def _read(self, path: str) -> np.ndarray:
        from PIL import Image, ImageOps

        square = self._size, self._size
        try:
            with Image.open(path) as picture:
                picture.draft("RGB", square)  # a JPEG is read in a fraction of its size, if larger
                upright = ImageOps.exif_transpose(picture).convert("RGB")
                fitted = ImageOps.fit(upright, square, Image.Resampling.BILINEAR)
                return np.asarray(fitted)
        except Exception as error:  # a decoder may raise anything
            reason = error.strerror if isinstance(error, OSError) and error.strerror else ""
            raise UserError(
                f"--dataset imagefolder: {path} cannot be read as a picture "
                f"({reason or one_line(error)}); replace or remove it on every host"
            ) from error


def load_image_folder(
    data_dir: str, size: int, val_split: float
) -> tuple[ImageArrays, ImageArrays, int]:
    """Return training and validation pictures, and the number of classes.

    `data_dir` has a folder for each class, whose pictures may be in further folders. Or it has such
    folders in `train`, and held-out ones in `val`, `valid`, `validation` or `test`. The classes are
    the folders' names in alphabetical order. Without held-out pictures, `val_split` of all are.
    """
    if importlib.util.find_spec("PIL") is None:
        raise UserError('--dataset imagefolder needs Pillow: pip install "kaitian-mpi[images]"')
    if not data_dir:
        raise UserError(
            "--dataset imagefolder requires --data-dir, with a folder of pictures for each class"
        )
    root = Path(data_dir)
    has_train = (root / "train").is_dir()
    train = root / "train" if has_train else root
    classes = _folders(train)
    files = _files(train, classes)
    held_out = [root / name for name in _HELD_OUT if has_train and (root / name).is_dir()]
    if held_out:
        if unknown := set(_folders(held_out[0])) - set(classes):
            raise UserError(
                f"--data-dir {data_dir}: {held_out[0].name} has the class {min(unknown)!r}, which "
                "train does not have; give both the same folders"
            )
        parts = files, _files(held_out[0], classes)
    else:
        first, second = shuffled_split(len(files), val_split)
        parts = [files[index] for index in first], [files[index] for index in second]
    arrays = [
        ImageArrays(
            PictureFiles([path for path, _ in part], size),
            torch.tensor([label for _, label in part]),
            _MEAN,
            _STD,
        )
        for part in parts
    ]
    return arrays[0], arrays[1], len(classes)


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")


def _files(folder: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Return the pictures below the classes' folders, and their classes, in order."""
    samples = []
    for label, name in enumerate(classes):
        for parent, below, files in os.walk(folder / name, followlinks=True):
            below.sort()
            paths = (os.path.join(parent, file) for file in sorted(files) if file[0] != ".")
            samples += [(path, label) for path in paths if Path(path).suffix.lower() in _FORMATS]
    if not samples:
        raise UserError(
            f"--dataset imagefolder: no picture in a folder of {folder}; put those of each class "
            f"into one, as {folder}/cat/1.jpg ({', '.join(sorted(_FORMATS))})"
        )
    return samples
