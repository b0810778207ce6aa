"""CIFAR-10 and MNIST, from tiny files in the official formats."""

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.cifar_mnist import load_cifar10, load_mnist

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def fails(load, data_dir):
    with pytest.raises(UserError) as caught:
        load(str(data_dir))
    text = str(caught.value)
    assert "\n" not in text
    assert "cs.toronto.edu" in text or "yann.lecun.com" in text
    return text


def make_batch(number, count=4):
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, draw.integers(0, 10, count).tolist()


def binary(batch):
    pixels, labels = batch
    return np.column_stack([np.array(labels, np.uint8), pixels]).tobytes()


def as_dict(batch):
    pixels, labels = batch
    names = [b"frog_%d.png" % label for label in labels]
    return {b"batch_label": b"batch", b"labels": labels, b"data": pixels, b"filenames": names}


def python_2_pickle(batch):
    """Write the opcodes of the official files, which Python 2 wrote with protocol 2."""
    pixels, labels = batch

    def text(short):
        return b"U" + bytes([len(short)]) + short

    def number(value):
        return b"J" + value.to_bytes(4, "little", signed=True)

    raw = pixels.tobytes()
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    data = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b")
    data += b"\x87R(K\x01" + number(len(pixels)) + number(3072) + b"\x86" + dtype + b"\x89T"
    data += len(raw).to_bytes(4, "little") + raw + b"tb"
    content = text(b"batch_label") + text(b"training batch 1 of 5") + text(b"labels") + b"]("
    content += b"".join(map(number, labels)) + b"e" + text(b"data") + data
    return b"\x80\x02}(" + content + b"u."


def pickled(batch):
    return pickle.dumps(as_dict(batch), 4)


def by_columns(batch):
    return pickle.dumps(as_dict((np.asfortranarray(batch[0]), batch[1])), 2)


def write_batches(folder, write):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(6):
        name = f"data_batch_{number}" if number else "test_batch"
        suffix = ".bin" if write is binary else ""
        (folder / f"{name}{suffix}").write_bytes(write(make_batch(number)))


@pytest.mark.parametrize("write", [binary, pickled, by_columns, python_2_pickle])
@pytest.mark.parametrize("place", ["", "cifar-10-batches"])
def test_cifar10(tmp_path, place, write):
    suffix = "bin" if write is binary else "py"
    write_batches(tmp_path / f"{place}-{suffix}" if place else tmp_path, write)
    for loaded, numbers in zip(load_cifar10(str(tmp_path)), ([1, 2, 3, 4, 5], [0]), strict=True):
        batches = [make_batch(number) for number in numbers]
        pixels = np.concatenate([batch[0] for batch in batches]).reshape(-1, 3, 32, 32)
        assert torch.equal(loaded.images, torch.from_numpy(pixels))
        assert loaded.labels.tolist() == [label for batch in batches for label in batch[1]]
        assert loaded.labels.dtype == torch.int64
        assert loaded[[0, 1]][0].shape == (2, 3, 32, 32)


def test_missing_files(tmp_path):
    assert "--dataset cifar10 requires --data-dir" in fails(load_cifar10, "")
    assert "--dataset mnist requires --data-dir" in fails(load_mnist, "")
    assert "neither data_batch_1.bin nor data_batch_1 is there" in fails(load_cifar10, tmp_path)
    assert f"{TRAIN_IMAGES}.gz: cannot be read (No such file" in fails(load_mnist, tmp_path)
    write_batches(tmp_path, binary)
    for name in ("test_batch.bin", "data_batch_3.bin"):
        (tmp_path / name).unlink()
        text = fails(load_cifar10, tmp_path)
        assert f"{tmp_path / name}: cannot be read (No such file or directory)" in text


class Call:
    """Pickles as a call of an arbitrary function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_nothing_in_a_pickle_is_executed(tmp_path):
    write_batches(tmp_path, pickled)
    mark = tmp_path / "it-ran"
    for protocol in (0, 2, 4):
        content = pickle.dumps(Call(os.system, f"touch {mark}"), protocol)
        (tmp_path / "data_batch_2").write_bytes(content)
        assert "it is not a CIFAR-10 batch" in fails(load_cifar10, tmp_path)
        assert not mark.exists()


def images_of(part, count):
    return np.random.default_rng(len(part)).integers(0, 256, (count, 28, 28), dtype=np.uint8)


def idx(values):
    header = struct.pack(f">{1 + values.ndim}I", 0x0800 + values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def write_mnist(folder, *, compressed=False):
    for part, count in (("train", 12), ("t10k", 5)):
        images, labels = idx(images_of(part, count)), idx(np.arange(count) % 10)
        for name, content in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{part}-{name}-ubyte{'.gz' if compressed else ''}"
            path.write_bytes(gzip.compress(content) if compressed else content)


@pytest.mark.parametrize("compressed", [False, True])
def test_mnist_is_padded_and_has_three_channels(tmp_path, compressed):
    write_mnist(tmp_path, compressed=compressed)
    train, validation = load_mnist(str(tmp_path))
    assert (len(train), len(validation)) == (12, 5)
    assert train.images.shape == (12, 1, 32, 32)
    inner = train.images[:, 0, 2:30, 2:30]
    assert torch.equal(inner, torch.from_numpy(images_of("train", 12)))
    assert int(train.images.long().sum()) == int(images_of("train", 12).sum())
    assert train.labels.tolist() == [*range(10), 0, 1]
    inputs, labels = train[[1, 2]]
    assert inputs.shape == (2, 3, 32, 32)
    assert torch.equal(inputs[:, 0], inputs[:, 2])
    assert labels.tolist() == [1, 2]


GOOD = as_dict(make_batch(1))
WHOLE = pickled(make_batch(1))
BINARY_FILE = "data_batch_2.bin"
WRONG_LABEL = binary((make_batch(4)[0], [1, 2, 10, 3]))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (BINARY_FILE, b"", "0 bytes are not one or more records of 3,073 bytes"),
        (BINARY_FILE, bytes(3074), "3,074 bytes are not one or more records of 3,073 bytes"),
        (BINARY_FILE, WRONG_LABEL, "sample 2 has label 10, which is not between"),
        ("data_batch_1", [1, 2], "it is not a CIFAR-10 batch"),
        ("data_batch_1", {}, "it is not a CIFAR-10 batch"),
        ("data_batch_1", {**GOOD, b"data": b"bytes"}, "it is not a CIFAR-10 batch"),
        ("data_batch_1", {**GOOD, b"data": np.zeros((4, 3071), np.uint8)}, "it is not a CIFAR-10"),
        ("data_batch_1", {**GOOD, b"labels": [1, 2, 3]}, "3 labels for 4 images"),
        ("data_batch_1", {**GOOD, b"labels": [1, 2, 3, 4.5]}, "3 labels for 4 images"),
        ("data_batch_1", {**GOOD, b"labels": b"1234"}, "it is not a CIFAR-10 batch"),
        ("data_batch_1", {**GOOD, b"labels": [1, 2, -3, 4]}, "sample 2 has label -3"),
        *(("data_batch_1", WHOLE[:n], "not a valid pickle") for n in (0, 1, 100, len(WHOLE) - 1)),
        (TRAIN_IMAGES, b"", ": it is not an idx file of such data"),
        (TRAIN_LABELS, b"\0\0\x08\x01\0", "it has 5 bytes"),
        (TRAIN_IMAGES, idx(np.arange(4)) + bytes(16), "it is not an idx file of such data"),
        (TRAIN_LABELS, idx(images_of("x", 4)), "it is not an idx file of such data"),
        (TRAIN_IMAGES, idx(np.zeros((4, 32, 32))), "it is not an idx file of such data"),
        (TRAIN_IMAGES, idx(images_of("x", 4))[:-1], "it has 3,151 bytes; 4 items take 3,152"),
        (TRAIN_IMAGES, idx(images_of("x", 0)), "it has 16 bytes; 0 items"),
        (TRAIN_LABELS, idx(np.arange(5)), "it has 5 labels for 12 images"),
        (TRAIN_LABELS, idx(np.array([1, 2, 3, 11] * 3)), "sample 3 has label 11, which"),
    ],
)
def test_files_with_other_content(tmp_path, name, content, problem):
    load = load_cifar10 if name.startswith("data") else load_mnist
    if load is load_mnist:
        write_mnist(tmp_path)
    else:
        write_batches(tmp_path, binary if name == BINARY_FILE else pickled)
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, 4))
    text = fails(load, tmp_path)
    assert text.startswith(f"{path}: ")
    assert problem in text


def test_corrupt_archives(tmp_path):
    write_mnist(tmp_path, compressed=True)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    whole = path.read_bytes()
    flipped = whole[:40] + bytes([whole[40] ^ 0xFF]) + whole[41:]
    for content in (whole[: len(whole) // 2], whole[:-1], b"not gzip", flipped):
        path.write_bytes(content)
        assert f"{path}: the gzip file is damaged" in fails(load_mnist, tmp_path)
