"""Checkpoints survive kills, full disks and corrupt files, also in the background writer."""

import contextlib
import errno
import hashlib
import inspect
import io
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy
import pytest
import torch
from choices import by_default
from torch import nn

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.train.checkpoint.files import FORMAT_VERSION, CheckpointFiles, seal
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter
from kaitian_mpi.train.state_transfer import copy_state

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def assert_same(loaded, needed):
    if isinstance(needed, torch.Tensor):
        assert loaded.dtype == needed.dtype
        assert torch.equal(loaded, needed)
        return
    assert type(loaded) is type(needed)
    if isinstance(needed, dict):
        loaded, needed = list(loaded.items()), list(needed.items())
    if isinstance(needed, list | tuple):
        for pair in zip(loaded, needed, strict=True):
            assert_same(*pair)
    else:
        assert loaded == needed


DAMAGED = "checkpoint step-00000120.pt is damaged and ignored: "


@pytest.fixture(autouse=True)
def silence(request, caplog):
    """Fail a test that logs anything, unless it requests caplog."""
    yield
    if not {"caplog", "ignored"} & set(inspect.signature(request.function).parameters):
        assert [record.getMessage() for record in caplog.get_records("call")] == []


def small(value):
    return {"weights": torch.full((1000,), float(value))}


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def two(tmp_path):
    """A folder with checkpoints of steps 100 and 120."""
    files = CheckpointFiles(tmp_path, keep=2)
    for step in (100, 120):
        files.write(small(step), {"step": step, "epoch": 1})
    return files


def test_write_and_load_round_trip(tmp_path):
    files = CheckpointFiles(tmp_path / "new" / "folder", keep=1)
    assert files.newest_good() is None
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "half": torch.full((5,), 1.5, dtype=torch.bfloat16),
        "random": torch.get_rng_state(),
        "nested": [{"lr": 0.1, "name": "warm up", "none": None}, (1, True), torch.tensor(3)],
    }
    saved_description = {"step": 120, "epoch": 3, "score": 0.5, "seen": {"1": [2]}}
    path = files.write(state, saved_description)
    assert path == tmp_path / "new" / "folder" / "step-00000120.pt"
    (path.parent / "notes.txt").write_text("step-00000130.pt")
    checkpoint = files.newest_good()
    assert (checkpoint.path, checkpoint.step) == (path, 120)
    assert files.newest_good(after=119).step == 120
    assert files.newest_good(after=120) is None
    assert_same(checkpoint.state, state)
    assert_same(torch.load(path), state)  # by plain torch, as users do
    assert checkpoint.description == json.loads(path.with_suffix(".json").read_text())
    assert checkpoint.description | {"written_at": 0, "check": 0} == {
        **saved_description,
        **{"format_version": FORMAT_VERSION, "written_at": 0, "check": 0},
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


@pytest.fixture
def ignored(two, caplog):
    """Return a function that loads the newest checkpoint: its step, and log lines about others."""

    def search():
        caplog.clear()
        return two.newest_good().step, caplog.messages

    return search


def flipped(content, place):
    """Return a content with one bit changed."""
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


def test_a_truncated_or_changed_checkpoint_is_skipped(two, ignored):
    path = two.folder / "step-00000120.pt"
    whole = path.read_bytes()
    places = [*range(0, len(whole), 79), len(whole) - 1]
    damaged = [whole[:length] for length in places]
    for content in damaged + [flipped(whole, place) for place in places]:
        path.write_bytes(content)
        assert ignored() == (100, [f"{DAMAGED}it is incomplete or altered: its SHA-256 differs"])
    path.write_bytes(whole)
    assert ignored() == (120, [])


def test_a_flipped_bit_anywhere_in_the_description_is_found_or_harmless(two, caplog):
    path = two.folder / "step-00000120.json"
    whole = path.read_bytes()
    detected = 0
    for place in range(len(whole)):
        path.write_bytes(flipped(whole, place))
        try:
            checkpoint = two.newest_good()
        except UserError as error:
            assert "format version" in str(error)  # noqa: PT017
            continue
        detected += checkpoint.step == 100
        assert checkpoint.step == 100 or checkpoint.description == json.loads(whole)
    assert detected > 0.9 * len(whole)


@pytest.mark.parametrize(
    ("suffix", "content", "reason"),
    [
        *(("json", text, "step-00000120.json ") for text in ("", "{", "[]", "null", "{}")),
        *(("json", text, "step-00000120.json ") for text in ("[" * 100_000, "\x00" * 300)),
        ("json", None, "is missing"),
        ("pt", None, "No such file"),
        ("pt", "folder", "Is a directory"),
    ],
)
def test_a_checkpoint_with_an_invalid_or_unreadable_file_is_skipped(
    two, ignored, suffix, content, reason
):
    path = two.folder / f"step-00000120.{suffix}"
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    step, (line,) = ignored()
    assert step == 100
    assert line.startswith(DAMAGED)
    assert reason in line


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_an_error(two, version):
    path = two.folder / "step-00000120.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": version}))
    reason = rf"has format version {version}; this kaitian-mpi reads version {FORMAT_VERSION}: cont"
    for load in (two.newest_good, lambda: two.load(path.with_suffix(".pt"))):
        with pytest.raises(UserError, match=reason):
            load()
    two.write(small(140), {"step": 140})  # counts it toward `keep`
    assert two.steps() == [120, 140]


def test_loading_a_checkpoint_by_its_path(two, tmp_path):
    path = tmp_path / "mine.pt"
    for suffix in (".pt", ".json"):
        shutil.copy(two.folder / f"step-00000120{suffix}", path.with_suffix(suffix))
    mine = CheckpointFiles.load(path)
    assert_same(mine.state, small(120))
    assert two.is_newest(mine)
    assert not two.is_newest(CheckpointFiles.load(two.folder / "step-00000100.pt"))
    path.write_bytes(path.read_bytes()[:-1])
    for name, reason in (("mine", "is incomplete or altered"), ("none", "cannot be read: No such")):
        with pytest.raises(UserError, match=f"{name}.pt cannot be used: it {reason}"):
            CheckpointFiles.load(tmp_path / f"{name}.pt")


class Evil:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder / "executed"),)


def evil_content(folder):
    torch.save({"weights": Evil(folder)}, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("content", [evil_content, b"", b"not of torch", b"PK\x03\x04" + bytes(9)])
def test_a_file_that_torch_must_or_can_not_load_is_skipped_whatever_its_checksum(
    two, ignored, content
):
    path, is_evil = two.folder / "step-00000120.pt", callable(content)
    path.write_bytes(content(two.folder) if is_evil else content)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    description = seal({"step": 120, "format_version": FORMAT_VERSION, "sha256": sha256})
    path.with_suffix(".json").write_text(json.dumps(description))
    step, (line,) = ignored()
    assert (step, "\n" in line) == (100, False)
    assert line.startswith(DAMAGED)
    if is_evil:
        assert line == f"{DAMAGED}it holds more than tensors and plain values"
        assert "executed" not in names(two.folder)
        torch.load(path, weights_only=False)
        assert "executed" in names(two.folder), "the file was no danger"


def test_newest_and_best_checkpoints_are_kept(tmp_path):
    for number, (keep, scores, kept) in enumerate((
        *((1, [None], [1]), (1, [None] * 3, [3]), (2, [None] * 3, [2, 3])),
        *((9, [None] * 3, [1, 2, 3]), (1, [0.9, 0.1, 0.2], [1, 3])),
        (2, [0.9, 0.1, 0.2, 0.3], [1, 3, 4]),
        (1, [0.9, 0.9, 0.2, 0.3], [2, 4]),  # the newest of equals
        (1, [0.1, 0.2, 0.3], [3]),
        (1, [-1.0, float("nan"), None, -2, float("inf"), None], [1, 6]),
    )):  # fmt: skip
        files = CheckpointFiles(tmp_path / str(number), keep)
        for step, score in enumerate(scores, 1):
            files.write({}, {"step": step, "score": score})
        assert (files.steps(), len(names(files.folder))) == (kept, 2 * len(kept))


def test_writing_a_step_again_replaces_it_and_what_killed_writers_left_is_removed(two, ignored):
    for name in ("step-00000140.pt.partial", "step-00000140.json.partial", "notes.partial"):
        (two.folder / name).write_bytes(b"half")
    assert ignored() == (120, [])
    again = two.write(small(7), {"step": 120, "score": 1.0})
    assert (again.name, two.newest_good().path) == ("step-00000120-1.pt", again)
    assert_same(two.newest_good().state, small(7))
    third = two.write(small(8), {"step": 120})
    assert names(two.folder) == [
        "notes.partial",  # the user's
        *(f"{stem}.{kind}" for stem in ("step-00000100", third.stem) for kind in ("json", "pt")),
    ]
    assert_same(two.newest_good().state, small(8))


def test_skipped_later_checkpoints_do_not_count_toward_keep(two, ignored):
    (two.folder / "step-00000120.pt").write_bytes(b"damaged")
    (two.folder / "step-00000130.pt").write_bytes(b"without its .json")
    for step in (105, 110, 115):
        two.write(small(step), {"step": step})
    assert (two.steps(), ignored()[0]) == ([110, 115, 120], 115)
    two.write(small(120), {"step": 120}).unlink()
    assert two.steps() == [115, 120]
    two.write(small(130), {"step": 130})
    assert two.steps() == [115, 130], "one without its .pt does not count either"
    assert names(two.folder)[2:] == ["step-00000130.json", "step-00000130.pt"]


def fill_disk_after(monkeypatch, size):
    """Let os.write accept only so many bytes in total."""
    real, left = os.write, [size]

    def write(descriptor, data):
        taken = min(left[0], len(data))
        if taken == 0:
            raise FULL
        left[0] -= taken
        return real(descriptor, data[:taken])

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("numbers", [1000, 1_000_000])  # torch buffers less, or more
def test_a_full_disk_leaves_earlier_checkpoints_intact(two, monkeypatch, numbers):
    before, state = names(two.folder), {"weights": torch.ones(numbers)}
    torch.save(state, buffer := io.BytesIO())
    tensors = buffer.tell()
    for size in (0, 1, tensors // 2, tensors - 1, tensors, tensors + 100):
        with monkeypatch.context() as context:
            fill_disk_after(context, size)
            with pytest.raises(OSError, match="No space left") as caught:  # not torch's own error
                two.write(state, {"step": 140})
        assert (caught.value.errno, names(two.folder)) == (errno.ENOSPC, before)
        assert two.newest_good().step == 120
    two.write(state, {"step": 140})
    assert two.newest_good().step == 140


def test_files_are_synced_before_rename_and_before_old_ones_are_removed(two, monkeypatch):
    calls = []

    def fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        calls.append("sync folder" if is_folder else "sync file")

    def call(name, real, path, *more):
        calls.append(f"{name} {Path(path).name}")
        return real(path, *more)

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, partial(call, name, getattr(os, name)))
    two.write(small(140), {"step": 140})
    assert calls == [
        *("sync file", "replace step-00000140.pt.partial", "sync folder"),
        *("sync file", "replace step-00000140.json.partial", "sync folder"),
        *("unlink step-00000100.json", "unlink step-00000100.pt"),
    ]


def die_at(monkeypatch, number):
    """Make this disk-modifying call and all later ones raise without effect."""
    count = [0]

    def call(real, *arguments):
        count[0] += 1
        if count[0] >= number:
            raise OSError(errno.EIO, "dead")
        return real(*arguments)

    for name in ("write", "fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, partial(call, getattr(os, name)))
    return count


@pytest.mark.parametrize(
    ("keep", "step"),
    by_default(itertools.product([1, 2], [120, 140]), [(1, 120), (2, 140)]),
)
def test_dying_at_any_system_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path, monkeypatch, keep, step, caplog
):
    number = calls = 1
    while calls >= number:
        files = CheckpointFiles(tmp_path / str(number), keep)
        for done in (100, 120):
            files.write(small(done), {"step": done, "value": done})
        with monkeypatch.context() as context:
            count = die_at(context, number)
            with contextlib.suppress(OSError):
                files.write(small(7), {"step": step, "value": 7})
            calls = count[0]
        checkpoint = files.newest_good()
        assert checkpoint.description["value"] in (120, 7)
        assert_same(checkpoint.state, small(checkpoint.description["value"]))
        files.write(small(9), {"step": 160})
        assert (len(files.steps()), len(names(files.folder))) == (keep, 2 * keep)
        number += 1
    assert number > 10
    assert checkpoint.description["value"] == 7  # the last attempt survived


EXITS = """
import sys
from pathlib import Path
import torch
from kaitian_mpi.train.checkpoint.files import CheckpointFiles
from kaitian_mpi.train.checkpoint.writer import BackgroundWriter
writer = BackgroundWriter(CheckpointFiles(Path(sys.argv[1]), keep=1))
writer.submit({"a": torch.ones(1_000_000)}, {"step": 1000})
raise SystemExit(3)
"""


def test_a_process_that_ends_completes_its_last_checkpoint(tmp_path):
    command = [sys.executable, "-c", EXITS, str(tmp_path)]
    assert subprocess.run(command, timeout=300).returncode == 3
    assert CheckpointFiles(tmp_path, keep=1).newest_good().step == 1000


class GatedFiles(CheckpointFiles):
    """Writes only while the gate is open."""

    def __init__(self, folder, keep):
        super().__init__(folder, keep)
        self.gate, self.begun = threading.Event(), threading.Event()

    def write(self, state, description):
        self.begun.set()
        assert self.gate.wait(20)
        return super().write(state, description)


@pytest.fixture
def writer(tmp_path):
    return BackgroundWriter(CheckpointFiles(tmp_path, keep=2))


def test_the_background_writer_writes_each_submission(writer):
    assert writer.last_written is None
    writer.wait()
    for step in (1, 2):
        writer.submit(small(step), {"step": step})
        writer.wait()
        assert (writer.last_written, writer.newly_written()) == (step, step)
        assert writer.newly_written() is None
    for _ in range(2):
        writer.close()
    assert (writer.files.steps(), writer.is_writing) == ([1, 2], False)


def test_only_the_newest_submission_waits_for_the_writer(tmp_path, caplog):
    files = GatedFiles(tmp_path, keep=5)
    writer = BackgroundWriter(files)
    states = [small(step) for step in range(4)]
    writer.submit(states[0], {"step": 10})
    assert files.begun.wait(20)
    assert writer.take_spare() is None
    for step in (1, 2):
        writer.submit(states[step], {"step": 10 + step})
    assert writer.take_spare() is states[1]
    writer.submit(states[3], {"step": 13})
    assert caplog.messages == [
        f"skipping the checkpoint of step {step}: an earlier one is still being written; the next "
        f"is of step {step + 1}"
        for step in (11, 12)
    ]
    assert (writer.is_writing, writer.last_written) == (True, None)
    files.gate.set()
    writer.wait()
    assert (files.steps(), writer.last_written) == ([10, 13], 13)
    assert writer.take_spare() is states[3]
    assert_same(files.newest_good().state, small(3))


def test_what_cannot_be_written_is_logged_each_time_and_training_continues(
    writer, monkeypatch, caplog
):
    full, key = "No space left on device", "a key of state['extra'] is a numpy.int64"
    for step, size, value, line, kept in (
        (80, 0, 1, full, "there is no checkpoint yet"),
        (100, None, 1, "", ""),
        (120, 1000, 1, full, "the checkpoint of step 100 is kept"),
        (140, 1000, 1, full, "the checkpoint of step 100 is kept"),
        (160, None, {3}, "state['extra'] is a set", "the checkpoint of step 100 is kept"),
        (180, None, 1, "", ""),
        (200, None, {numpy.int64(3): 1}, key, "the checkpoint of step 180 is kept"),
        (220, None, {"a": [object()]}, "state['extra']['a'][0] is a object", "the checkpoint of"),
    ):
        caplog.clear()
        with monkeypatch.context() as context:
            if size is not None:
                fill_disk_after(context, size)
            writer.submit({"extra": value, **small(1)}, {"step": step})
            writer.wait()
        assert bool(writer.fault) == bool(line) == len(caplog.messages)
        for message in caplog.messages:
            assert message.startswith(f"checkpoint of step {step} could not be written: {line}")
            assert f"training continues; {kept}" in message
    assert writer.last_written == 180


def test_an_unexpected_error_is_raised_once(writer, monkeypatch):
    for call in (writer.wait, writer.close, lambda: writer.submit(small(2), {"step": 2})):
        with monkeypatch.context() as context:
            context.setattr(writer.files, "write", None)
            writer.submit(small(1), {"step": 1})
            assert wait_until(lambda: not writer.is_writing, 60)
        with pytest.raises(TypeError, match="not callable"):
            call()
    writer.submit(small(3), {"step": 3})
    writer.close()
    assert writer.last_written == 3


def test_a_copy_keeps_the_layout_but_not_the_whole_storage():
    image = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    part = nn.Parameter(torch.rand(1000)[10:20])
    expanded = torch.ones(1).expand(5)
    copy = copy_state({"image": image, "part": part, "expanded": expanded})
    assert_same(copy, {"image": image, "part": part.detach(), "expanded": expanded})
    assert copy["image"].is_contiguous(memory_format=torch.channels_last)
    assert copy["part"].untyped_storage().nbytes() == 40
    assert type(copy["part"]) is torch.Tensor
    assert not copy["part"].requires_grad
