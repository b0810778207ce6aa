"""CIFAR-10 from tiny files in the official formats."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.recipes.datasets import cifar10

Batch = tuple[np.ndarray, list[int]]


def make_batch(number: int, count: int = 4) -> Batch:
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, draw.integers(0, 10, count).tolist()


def write_binary(path: Path, batch: Batch) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels, labels = batch
    path.write_bytes(np.column_stack([np.array(labels, np.uint8), pixels]).tobytes())


def as_dict(batch: Batch) -> dict[bytes, Any]:
    pixels, labels = batch
    names = [b"frog_%d.png" % label for label in labels]
    return {b"batch_label": b"batch", b"labels": labels, b"data": pixels, b"filenames": names}


def python_2_pickle(batch: Batch) -> bytes:
    """Write the opcodes of the official files, which Python 2 wrote with protocol 2."""
    pixels, labels = batch

    def short_string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little", signed=True)

    raw = pixels.tobytes()
    shape = number(len(pixels)) + number(3072) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + short_string(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + short_string(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    data = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short_string(b"b")
    data += b"\x87R(K\x01" + shape + dtype + b"\x89T" + len(raw).to_bytes(4, "little") + raw + b"tb"
    return (
        b"\x80\x02}("
        + (short_string(b"batch_label") + short_string(b"training batch 1 of 5"))
        + (short_string(b"labels") + b"](" + b"".join(map(number, labels)) + b"e")
        + (short_string(b"data") + data)
        + b"u."
    )


def write_pickle(path: Path, content: Any, protocol: int = 4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol))


def check(loaded: Any, batches: list[Batch]) -> None:
    pixels = np.concatenate([batch[0] for batch in batches]).reshape(-1, 3, 32, 32)
    assert torch.equal(loaded.images, torch.from_numpy(pixels))
    assert loaded.labels.tolist() == [label for batch in batches for label in batch[1]]
    assert loaded.labels.dtype == torch.int64


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_binary_version(tmp_path: Path, place: str) -> None:
    batches = [make_batch(number, 3 + number) for number in range(6)]
    for number, batch in enumerate(batches):
        name = f"data_batch_{number}.bin" if number else "test_batch.bin"
        write_binary(tmp_path / place / name, batch)
    train, validation = cifar10.load(str(tmp_path), 0.2)
    check(train, batches[1:])
    check(validation, batches[:1])
    inputs, _ = train[[0, 1]]
    assert inputs.shape == (2, 3, 32, 32)


@pytest.mark.parametrize("place", ["", "cifar-10-batches-py"])
@pytest.mark.parametrize("protocol", [1, 2, 3, 4])
def test_python_version(tmp_path: Path, place: str, protocol: int) -> None:
    batches = [make_batch(number) for number in range(6)]
    # numpy arrays of another memory order are read too.
    batches[2] = (np.asfortranarray(batches[2][0]), batches[2][1])
    for number, batch in enumerate(batches):
        name = f"data_batch_{number}" if number else "test_batch"
        write_pickle(tmp_path / place / name, as_dict(batch), protocol)
    train, validation = cifar10.load(str(tmp_path), 0.2)
    check(train, batches[1:])
    check(validation, batches[:1])


def test_python_version_as_python_2_wrote_it(tmp_path: Path) -> None:
    batches = [make_batch(number) for number in range(1, 6)]
    for number, batch in enumerate(batches, 1):
        (tmp_path / f"data_batch_{number}").write_bytes(python_2_pickle(batch))
    assert pickle.loads(python_2_pickle(batches[0]), encoding="bytes")[b"data"].shape == (4, 3072)
    train, validation = cifar10.load(str(tmp_path), 0.2)
    check(train, batches[:4])
    check(validation, batches[4:])


def test_without_test_set_the_last_samples_validate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = [make_batch(number) for number in range(1, 6)]
    for number, batch in enumerate(batches, 1):
        write_binary(tmp_path / f"data_batch_{number}.bin", batch)
    train, validation = cifar10.load(str(tmp_path), 0.2)
    check(train, batches[:4])
    check(validation, batches[4:])
    assert "the training set has 20 images; the official files have 50000" in caplog.text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(1, 6):
        write_binary(tmp_path / f"data_batch_{number}.bin", make_batch(number))
    return tmp_path


def fails(data_dir: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        cifar10.load(str(data_dir), 0.2)
    text = str(caught.value)
    assert "\n" not in text
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in text
    return text


def test_no_folder(tmp_path: Path) -> None:
    assert "--dataset cifar10 needs --data-dir" in fails("")
    assert f"--data-dir: no such folder: {tmp_path / 'nowhere'}" in fails(tmp_path / "nowhere")
    assert "neither data_batch_1.bin nor data_batch_1 is there" in fails(tmp_path)


@pytest.mark.parametrize("number", [1, 3])
def test_missing_training_file(folder: Path, number: int) -> None:
    path = folder / f"data_batch_{number}.bin"
    path.unlink()
    assert f"{path}: cannot be read (No such file or directory)" in fails(folder)


@pytest.mark.parametrize("name", ["data_batch_2.bin", "test_batch.bin"])
@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_a_file_of_the_wrong_size(folder: Path, name: str, size: int) -> None:
    (folder / name).write_bytes(bytes(size))
    text = fails(folder)
    assert f"{folder / name}: {size:,} bytes are no whole number of records of 3,073 bytes" in text
    assert "the official file has 30,730,000" in text


def test_a_label_out_of_range(folder: Path) -> None:
    pixels, _ = make_batch(4)
    write_binary(folder / "data_batch_4.bin", (pixels, [1, 2, 10, 3]))
    assert "data_batch_4.bin: sample 2 has label 10, which is not between 0 and 9" in fails(folder)


@pytest.fixture
def pickles(tmp_path: Path) -> Path:
    for number in range(1, 6):
        write_pickle(tmp_path / f"data_batch_{number}", as_dict(make_batch(number)))
    return tmp_path


class Call:
    """Pickles as a call of an arbitrary function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_not_executed(pickles: Path, protocol: int) -> None:
    mark = pickles / "it-ran"
    content = {**as_dict(make_batch(2)), b"extra": Call(os.system, f"touch {mark}")}
    write_pickle(pickles / "data_batch_2", content, protocol)
    text = fails(pickles)
    assert f"{pickles / 'data_batch_2'}: it is no valid pickle (it imports 'posix.system'" in text
    assert not mark.exists()


@pytest.mark.parametrize(
    "function",
    [eval, exec, getattr, open, __import__, np.load, np.save, np.fromfile, np.array, np.frombuffer],
)
def test_no_other_global_is_allowed(pickles: Path, function: Any) -> None:
    write_pickle(pickles / "data_batch_2", Call(function, "x"))
    assert "which no CIFAR-10 file needs" in fails(pickles)


def test_allowed_globals_are_not_called_either(pickles: Path) -> None:
    # numpy itself would allocate a petabyte, and take a forged type's bytes for pointers.
    dtype = Call(np.dtype, "O")
    for content in (Call(np.ndarray, (2**50,)), {b"data": Call(np.ndarray, (1,), dtype)}):
        write_pickle(pickles / "data_batch_2", content)
        assert "data_batch_2: it" in fails(pickles)


def test_a_pickle_cannot_modify_the_allowed_globals(pickles: Path) -> None:
    # BUILD, on the admitted name itself, with attributes to set.
    for name in (b"cnumpy\nndarray\n", b"c_codecs\nencode\n"):
        (pickles / "data_batch_2").write_bytes(b"\x80\x02" + name + b"N}X\x01\0\0\0aK\x01s\x86b.")
        assert "data_batch_2: it" in fails(pickles)
    write_pickle(pickles / "data_batch_2", as_dict(make_batch(2)), protocol=2)
    cifar10.load(str(pickles), 0.2)


def test_an_error_with_a_long_name_is_one_short_line(pickles: Path) -> None:
    name = b"\x8c\xf0" + b"x\ny" * 80 + b"\x8c\x01f\x93."
    (pickles / "data_batch_1").write_bytes(b"\x80\x04" + name)
    assert len(fails(pickles)) < 600


GOOD = as_dict(make_batch(1))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([1, 2], "it holds a list"),
        ({}, "'data' is no numpy array"),
        ({**GOOD, b"data": b"bytes"}, "'data' is no numpy array"),
        ({**GOOD, b"data": np.zeros(3072, np.uint8)}, "'data' is no numpy array"),
        ({**GOOD, b"data": np.zeros((4, 3072), np.int8)}, "'data' is no uint8 array"),
        ({**GOOD, b"data": np.zeros((4, 3072), object)}, "'data' is no uint8 array"),
        ({**GOOD, b"data": np.zeros((4, 3071), np.uint8)}, "12284 bytes for an array of 4 x 3071"),
        ({**GOOD, b"data": np.zeros((0, 3072), np.uint8)}, "0 bytes for an array of 0 x 3072"),
        ({**GOOD, b"labels": [1, 2, 3]}, "3 labels for 4 images"),
        ({**GOOD, b"labels": [1, 2, 3, 4.5]}, "its 'labels' are no list of class numbers"),
        ({**GOOD, b"labels": [1, 2, 3, 2**80]}, "its 'labels' are no list of class numbers"),
        ({**GOOD, b"labels": b"1234"}, "its 'labels' are no list of class numbers"),
        ({**GOOD, b"labels": [1, 2, -3, 4]}, "sample 2 has label -3"),
    ],
)
def test_pickles_with_other_content_are_rejected(pickles: Path, content: Any, problem: str) -> None:
    path = pickles / "data_batch_1"
    write_pickle(path, content)
    text = fails(pickles)
    assert text.startswith(f"{path}: ")
    assert problem in text


def test_a_truncated_pickle(pickles: Path) -> None:
    path = pickles / "data_batch_5"
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert f"{path}: it is no valid pickle" in fails(pickles)
