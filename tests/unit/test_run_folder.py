"""Run folders on full disks, folders that cannot be created, and snapshots that stay private."""

import errno
import json
import multiprocessing
import os
import resource
import stat
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.observe import folders
from kaitian_mpi.observe.folders import (
    make_new_folder,
    make_private,
    remove_private,
    snapshots_name,
)
from kaitian_mpi.observe.run_folder import DiskFolder, open_run_folder
from kaitian_mpi.train.checkpoint.files import CheckpointFiles, snapshot_files
from kaitian_mpi.train.checkpoint.writer import Checkpoints


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The host's memory, which has room."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(folders, "SHM", folder)
    monkeypatch.delenv(folders.SNAPSHOTS_VARIABLE, raising=False)
    return folder


def full(monkeypatch, name):
    """Make the disk full for files of a name."""
    real_open = Path.open

    def refuse(path, mode="r", *args, **kwargs):
        if "w" in mode and path.name.removesuffix(".partial") == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)


def run_in(folder, **flags):
    config = TrainConfig(run_dir=str(folder), **flags)
    run_folder = open_run_folder(config, 0)
    run_folder.begin(config, "job")
    return run_folder, Checkpoints(config, folder)


def test_a_partial_line_is_no_error(tmp_path, caplog):
    folder, file = DiskFolder(tmp_path), tmp_path / "metrics.jsonl"
    folder.append(file.name, {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, limits[1]))
    try:
        folder.append(file.name, {"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "metrics.jsonl could not be written: File too large; training" in caplog.text
    folder.append(file.name, {"step": 3})
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 3]


def test_a_disk_full_at_the_start_is_an_error(tmp_path, monkeypatch):
    full(monkeypatch, "config.json")
    with pytest.raises(StorageError, match=r"config.json could not be written: No space left on"):
        run_in(tmp_path / "run")


def test_jobs_started_simultaneously_get_different_folders(tmp_path):
    """Processes that create a folder of the same name at the same moment."""

    def make(at, names):
        time.sleep(max(0, at - time.time()))
        names.put([make_new_folder(tmp_path / "runs" / "cnn").name for _ in range(50)])

    context = multiprocessing.get_context("fork")
    queue, at = context.SimpleQueue(), time.time() + 0.2
    jobs = [context.Process(target=make, args=(at, queue)) for _ in range(4)]
    for job in jobs:
        job.start()
    made = [name for _ in jobs for name in queue.get()]
    assert len(made) == 200
    assert {*made} == {"cnn"} | {f"cnn-{number}" for number in range(2, 201)}
    for job in jobs:
        job.join()


STATE = {"weight": torch.full((2,), 666.0)}


def files_of(name="job"):
    name = snapshots_name(TrainConfig(snapshots=name).snapshots, os.environ)
    return snapshot_files(name) if name else None


def test_snapshots_go_to_a_folder_only_this_user_can_access_by_its_name(memory, monkeypatch):
    before = os.umask(0)
    try:
        files_of().write(STATE, {"step": 1})
    finally:
        os.umask(before)
    found = files_of().folder.lstat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o700, os.geteuid())
    files_of().write(STATE, {"step": 2})
    assert files_of().newest_good().step == 2
    remove_private(files_of().folder)
    assert list(memory.iterdir()) == []
    monkeypatch.setenv(folders.SNAPSHOTS_VARIABLE, "secret")
    for given, name in (("", "secret"), ("given", "given")):
        assert f"kaitian-{name}-" in str(files_of(given).folder)
    monkeypatch.setenv(folders.SNAPSHOTS_VARIABLE, "../../etc")
    with pytest.raises(UserError, match="use letters and digits only"):
        files_of("")
    monkeypatch.delenv(folders.SNAPSHOTS_VARIABLE)
    assert files_of("") is None


REJECTED = "is not used: it is not a folder of mode 700 that belongs to you"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o755, "given away", "a link"])
def test_a_folder_that_others_own_or_can_access_is_rejected(memory, mode):
    files = files_of()
    folder = memory / "elsewhere" if mode == "a link" else files.folder
    folder.mkdir()
    CheckpointFiles(folder, keep=1).write(STATE, {"step": 60})  # as any user could
    folder.chmod(mode if isinstance(mode, int) else 0o700)
    if mode == "a link":
        files.folder.symlink_to(folder)
    elif mode == "given away":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 65534, 65534)
    write = partial(files.write, STATE, {"step": 61})
    for access in (files.newest_good, write, partial(make_private, files.folder)):
        with pytest.raises(UserError, match=REJECTED):
            access()
    remove_private(files.folder)
    assert len(list(folder.iterdir())) == 2  # it is not ours to remove
