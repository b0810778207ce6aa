"""MNIST from tiny files in the official format."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets import mnist

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def images_of(part: str, count: int) -> np.ndarray:
    return np.random.default_rng(len(part)).integers(0, 256, (count, 28, 28), dtype=np.uint8)


def idx(values: np.ndarray) -> bytes:
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write(path: Path, content: bytes, *, compressed: bool = False) -> None:
    if compressed:
        path = path.with_name(path.name + ".gz")
        content = gzip.compress(content)
    path.write_bytes(content)


def write_part(folder: Path, part: str, count: int, *, compressed: bool = False) -> None:
    images, labels = idx(images_of(part, count)), idx(np.arange(count) % 10)
    write(folder / f"{part}-images-idx3-ubyte", images, compressed=compressed)
    write(folder / f"{part}-labels-idx1-ubyte", labels, compressed=compressed)


@pytest.mark.parametrize("compressed", [False, True])
def test_images_are_padded_and_have_three_channels(tmp_path: Path, compressed: bool) -> None:
    write_part(tmp_path, "train", 12, compressed=compressed)
    write_part(tmp_path, "t10k", 5, compressed=compressed)
    train, validation = mnist.load(str(tmp_path), 0.2)
    assert (len(train), len(validation)) == (12, 5)
    assert train.images.shape == (12, 3, 32, 32)
    for channel in range(3):
        inner = train.images[:, channel, 2:30, 2:30]
        assert torch.equal(inner, torch.from_numpy(images_of("train", 12)))
    assert int(train.images.long().sum()) == 3 * int(images_of("train", 12).sum())
    assert train.labels.tolist() == [*range(10), 0, 1]
    inputs, labels = train[[1, 2]]
    assert inputs.is_contiguous()
    assert labels.tolist() == [1, 2]


def test_without_test_set_the_last_samples_validate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_part(tmp_path, "train", 10)
    train, validation = mnist.load(str(tmp_path), 0.2)
    assert train.labels.tolist() == list(range(8))
    assert validation.labels.tolist() == [8, 9]
    assert "the train set has 10 images; the official files have 60000" in caplog.text


def fails(data_dir: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        mnist.load(str(data_dir), 0.2)
    text = str(caught.value)
    assert "\n" not in text
    assert "http://yann.lecun.com/exdb/mnist/" in text
    return text


def test_no_folder_and_missing_files(tmp_path: Path) -> None:
    assert "--dataset mnist needs --data-dir" in fails("")
    assert "--data-dir: no such folder" in fails(tmp_path / "nowhere")
    assert f"{TRAIN_IMAGES}.gz: cannot be read (No such file" in fails(tmp_path)
    write_part(tmp_path, "train", 4)
    (tmp_path / TRAIN_LABELS).unlink()
    assert f"{TRAIN_LABELS}.gz: cannot be read (No such file" in fails(tmp_path)


def test_an_incomplete_test_set(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 4)
    write(tmp_path / "t10k-labels-idx1-ubyte", idx(np.arange(3)))
    assert "t10k-images-idx3-ubyte.gz: cannot be read" in fails(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_IMAGES, b"", ": 0 bytes are too few for an idx file"),
        (TRAIN_LABELS, b"\0\0\x08\x01\0", ": 5 bytes are too few for an idx file"),
        (TRAIN_IMAGES, idx(np.arange(4)) + bytes(16), "its magic number is 2049, not 2051"),
        (TRAIN_LABELS, idx(images_of("x", 4)), "its magic number is 2051, not 2049"),
        (
            TRAIN_IMAGES,
            idx(np.zeros((4, 32, 32))),
            "its images are [32, 32], not [28, 28]",
        ),
        (TRAIN_IMAGES, idx(images_of("x", 4))[:-1], "it has 3,151 bytes; 4 items take 3,152"),
        (TRAIN_IMAGES, idx(images_of("x", 4)) + b"x", "it has 3,153 bytes; 4 items"),
        (TRAIN_IMAGES, idx(images_of("x", 0)), "it has 16 bytes; 0 items"),
        (TRAIN_LABELS, idx(np.arange(5)), "it has 5 labels for 4 images"),
        (TRAIN_LABELS, idx(np.array([1, 2, 3, 11])), "sample 3 has label 11, which"),
    ],
)
def test_files_in_another_format(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_part(tmp_path, "train", 4)
    write(tmp_path / name, content)
    text = fails(tmp_path)
    assert text.startswith(str(tmp_path / name))
    assert message in text


def test_corrupt_archives(tmp_path: Path) -> None:
    write_part(tmp_path, "train", 4, compressed=True)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    whole = path.read_bytes()
    flipped = whole[:40] + bytes([whole[40] ^ 0xFF]) + whole[41:]
    for content in (whole[: len(whole) // 2], whole[:-1], b"not gzip", flipped):
        path.write_bytes(content)
        assert f"{path}: the gzip file is damaged" in fails(tmp_path)
