"""Snapshots in /dev/shm are private: files that another user may have put there are not read."""

import os
import stat
from functools import partial

import pytest
import torch

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe import folders
from kaitian_mpi.observe.folders import (
    SNAPSHOTS_VARIABLE,
    make_private,
    remove_private,
    snapshots_name,
)
from kaitian_mpi.train.checkpoint.files import CheckpointFiles, snapshot_files

STATE = {"weight": torch.full((2,), 666.0)}


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A place that is shared with other users, like /dev/shm."""
    monkeypatch.setattr(folders, "SHM", tmp_path)
    monkeypatch.delenv(SNAPSHOTS_VARIABLE, raising=False)
    return tmp_path


def files_of(name="job"):
    name = snapshots_name(TrainConfig(snapshots=name).snapshots, os.environ)
    return snapshot_files(name) if name else None


def test_snapshots_go_to_a_folder_only_this_user_can_access(memory):
    before = os.umask(0)
    try:
        files_of().write(STATE, {"step": 1})
    finally:
        os.umask(before)
    found = files_of().folder.lstat()
    assert stat.S_IMODE(found.st_mode) == 0o700
    assert found.st_uid == os.geteuid()
    files_of().write(STATE, {"step": 2})
    assert files_of().newest_good().step == 2
    remove_private(files_of().folder)
    assert list(memory.iterdir()) == []


REJECTED = "it is not a folder of mode 700 that belongs to you, so it is not used"


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


def test_the_name_can_be_set_by_the_environment(memory, monkeypatch):
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, "secret")
    assert "kaitian-secret-" in str(files_of("").folder)
    assert "kaitian-given-" in str(files_of("given").folder)
    monkeypatch.setenv(SNAPSHOTS_VARIABLE, "../../etc")
    with pytest.raises(UserError, match="use letters and digits only"):
        files_of("")
    monkeypatch.delenv(SNAPSHOTS_VARIABLE)
    assert files_of("") is None
