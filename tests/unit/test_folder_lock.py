"""One job at a time trains in a run folder, and one process at a time saves in it."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from mistakes import one_line_error

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.folder_lock import (
    Claim,
    check_unclaimed,
    collecting_in,
    collection_progress,
    saving_in,
    wait_for_save,
)
from kaitian_mpi.observe.run_folder import open_run_folder
from kaitian_mpi.runtime.polling import wait_until

LONGEST_SEC = 120
# Trains or saves in the folder until it is told to end; writes `done` just before.
HOLDER = """
import sys
from pathlib import Path
from kaitian_mpi.observe.folder_lock import Claim, collecting_in, saving_in
folder = Path(sys.argv[1])
folder.mkdir(exist_ok=True)
if sys.argv[2] == "trains":
    claim = Claim(folder, "job")
    (folder / "config.json").touch()
else:
    saving = saving_in(folder) if sys.argv[2] == "saves" else collecting_in(folder)
    on_piece = saving.__enter__()
print("holds", flush=True)
while sys.stdin.readline().strip() == "piece":
    on_piece()
(folder / "done").touch()
claim.close() if sys.argv[2] == "trains" else saving.__exit__(None, None, None)
"""


@contextmanager
def other_process(folder, does):
    command = [sys.executable, "-c", HOLDER, str(folder), does]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


@pytest.fixture
def training(tmp_path):
    """Yield a process that trains in the folder, for the job `job`."""
    with other_process(tmp_path, "trains") as process:
        yield process


@pytest.fixture
def writer(tmp_path):
    """Yield a process that saves in the folder."""
    with other_process(tmp_path, "saves") as process:
        yield process


def begin_run(folder, job, **settings):
    config = TrainConfig(run_dir=str(folder), **settings)
    found = open_run_folder(config, 0)
    found.begin(config, job)
    return found


def test_two_jobs_do_not_train_in_one_folder(tmp_path, training):
    message = (
        rf"another job is training in it \(process {training.pid} on .*remove {tmp_path}/.job$"
    )
    for begin in (
        lambda: check_unclaimed(tmp_path),
        lambda: begin_run(tmp_path, "another", resume="auto"),
        lambda: Claim(tmp_path, "another"),
    ):
        with one_line_error(message):
            begin()
    training.communicate("end\n")
    assert not (tmp_path / ".job").exists()
    check_unclaimed(tmp_path)
    begin_run(tmp_path, "another", resume="auto").close()


def test_the_claim_of_a_job_that_was_killed_is_none(tmp_path, training):
    training.kill()
    training.wait()
    assert (tmp_path / ".job").exists()
    check_unclaimed(tmp_path)
    with pytest.raises(UserError, match="the folder has the results of another run; choose a new"):
        begin_run(tmp_path, "another")
    begin_run(tmp_path, "another", resume="auto").close()
    assert not (tmp_path / ".job").exists()


def test_a_job_takes_over_from_its_own_rank_that_is_lost_or_does_not_end(tmp_path, training):
    """It is on standby, or on a host that is not reached; also for a job that replaces it."""
    taken = Claim(tmp_path, "job")
    training.communicate("end\n")
    assert (tmp_path / ".job").exists(), "the claim is another one's now"
    taken.close()
    assert not (tmp_path / ".job").exists()
    with other_process(tmp_path / "new", "trains") as lost:
        lost.kill()
        lost.wait()
    assert begin_run(tmp_path / "new", "job", lr=0.3).read("config.json")["lr"] == 0.3
    begin_run(tmp_path / "new", "job")  # the same process again, after a loss


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_files_cannot_be_locked_or_written_nothing_is_claimed(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as context:
        context.setattr(fcntl, "lockf", refuse)
        check_unclaimed(tmp_path)
        begin_run(tmp_path, "job").close()
    assert (tmp_path / "config.json").is_file()
    (tmp_path / "other/.job").mkdir(parents=True)
    begin_run(tmp_path / "other", "job").close()


def test_another_users_claim_holds_while_its_job_trains(tmp_path, training, monkeypatch, caplog):
    real_open = os.open

    def refuse(path, flags, *mode, **others):
        """Let nobody write to claims that exist."""
        if flags & os.O_RDWR and os.path.basename(path) == ".job" and os.path.exists(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real_open(path, flags, *mode, **others)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match="another job is training in it"):
        Claim(tmp_path, "another")
    training.kill()
    training.wait()
    with monkeypatch.context() as context:
        context.setattr(os, "remove", lambda path: os.open(path, os.O_RDWR))
        Claim(tmp_path, "another")
        assert f"{tmp_path}/.job cannot be locked against other jobs: " in caplog.text
    claim = Claim(tmp_path, "another")
    assert '"another"' in (tmp_path / ".job").read_text()
    claim.close()


def test_an_active_writer_is_logged_and_waited_for(tmp_path, writer, caplog):
    caplog.set_level("INFO")
    threading.Timer(0.3, writer.stdin.close).start()
    wait_for_save(tmp_path)
    assert (tmp_path / "done").exists()
    assert writer.wait(LONGEST_SEC) == 0
    wait_for_save(tmp_path)
    (line,) = caplog.messages  # of the first
    assert f"process {writer.pid} on " in line
    assert os.listdir(tmp_path) == ["done"]
    with other_process(tmp_path, "saves") as another:
        (tmp_path / "done").unlink()
        threading.Timer(0.3, another.stdin.close).start()
        with saving_in(tmp_path):  # one at a time
            assert (tmp_path / "done").exists()
            assert another.wait(LONGEST_SEC) == 0


def test_a_writer_that_was_killed_is_not_waited_for(tmp_path, writer, caplog):
    caplog.set_level("INFO")
    writer.kill()
    writer.wait()
    for folder in (tmp_path, tmp_path / "none"):
        wait_for_save(folder)
    assert caplog.messages == []
    with saving_in(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_collection_is_seen_while_its_process_lives_and_so_is_its_progress(tmp_path):
    assert collection_progress(tmp_path / "none") is None
    with other_process(tmp_path, "collects") as collector:
        begun = collection_progress(tmp_path)
        assert begun is not None
        assert collection_progress(tmp_path) == begun
        collector.stdin.write("piece\n")
        collector.stdin.flush()
        assert wait_until(lambda: collection_progress(tmp_path) > begun, LONGEST_SEC)
        with collecting_in(tmp_path) as on_piece:  # by another rank after a loss: it does not wait
            on_piece()
        assert collection_progress(tmp_path) is not None
        collector.kill()
        collector.wait()
        assert collection_progress(tmp_path) is None
    with other_process(tmp_path, "collects") as collector:  # though the killed one left its file
        assert collection_progress(tmp_path) is not None
        collector.communicate("end\n")
    assert collection_progress(tmp_path) is None
    assert os.listdir(tmp_path) == ["done"]
    with collecting_in(None) as on_piece:
        on_piece()
