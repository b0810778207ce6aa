"""What lets another process fork a rank, and where nothing is forked."""

import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from kaitian_mpi.cli.forking_process import become
from kaitian_mpi.devices import drivers
from kaitian_mpi.runtime import FORKS_AT, forked_rank
from kaitian_mpi.runtime.forked_rank import RankRequest, address_of

LONGEST_SEC = 60
# A rank that is not forked ends with code 7.
RANK = """
import sys
from kaitian_mpi.runtime.forked_rank import stand_for_forked_rank
stand_for_forked_rank()
sys.exit(7)
"""


@pytest.fixture
def listener():
    name = f"kaitian-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address_of(name))
        listening.listen(1)
        listening.settimeout(LONGEST_SEC)
        yield name, listening


def start_rank(name, **options):
    env = {**os.environ, FORKS_AT: name}
    return subprocess.Popen([sys.executable, "-c", RANK, "a", "b"], env=env, **options)


def accept_request(listening):
    """Return the connection of a rank's process, its request, and its streams."""
    connection, _ = listening.accept()
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    return connection, RankRequest.decode(text), streams


def test_a_rank_passes_on_what_it_was_started_with_and_ends_as_the_forked_one(listener, tmp_path):
    name, listening = listener
    for ending, code in ((b"3", 3), (b"-9", -signal.SIGKILL), (b"-6", -signal.SIGABRT)):
        with start_rank(name, cwd=tmp_path, stdout=subprocess.PIPE) as rank:
            connection, request, streams = accept_request(listening)
            with connection:
                assert request.arguments == ["-c", "a", "b"]
                assert request.original_arguments == [sys.executable, "-c", RANK, "a", "b"]
                assert request.folder == str(tmp_path)
                assert FORKS_AT not in request.variables
                assert request.launcher == os.getpid()
                os.write(streams[1], b"written for it")
                for stream in streams:
                    os.close(stream)
                connection.send(b"%d" % os.getpid())
                connection.send(ending)
                assert rank.communicate(timeout=LONGEST_SEC)[0] == b"written for it"
            assert rank.returncode == code


def test_a_rank_whose_forking_process_is_gone_is_killed_if_it_was_forked(listener):
    name, listening = listener
    with start_rank(name) as rank:
        connection, _, streams = accept_request(listening)
        for stream in streams:
            os.close(stream)
        connection.send(b"%d" % os.getpid())
        connection.close()
        assert rank.wait(LONGEST_SEC) == -signal.SIGKILL


def test_a_rank_that_nothing_forks_goes_on_itself(listener):
    name, listening = listener
    with start_rank("kaitian-no-such-socket") as rank:
        assert rank.wait(LONGEST_SEC) == 7
    with start_rank(name) as rank:  # the forking process ends, or may not fork it
        connection, _, streams = accept_request(listening)
        for stream in (*streams, connection.detach()):
            os.close(stream)
        assert rank.wait(LONGEST_SEC) == 7


def test_processes_of_other_users_are_not_of_this_one(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        assert forked_rank.is_of_this_user(ours)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not forked_rank.is_of_this_user(ours)


def test_forked_ranks_draw_random_numbers_of_their_own():
    request = RankRequest(
        arguments=["script.py"],
        original_arguments=["python", "script.py"],
        module_path=sys.path,
        folder=os.getcwd(),
        variables=dict(os.environ),
        cores=[],
        ignored=[],
        blocked=[],
        umask=0o22,
        process=os.getpid(),
        launcher=os.getppid(),
    )
    seeds = set()
    for _ in range(2):
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                become(request, "rank")
                os.write(write_end, f"{sys.orig_argv[1]} {torch.initial_seed()}".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        script, seed = os.read(read_end, 64).split()
        assert script == b"script.py"
        seeds.add(seed)
        for descriptor in (read_end, write_end):
            os.close(descriptor)
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("build", "files", "plug_ins", "expected"),
    [
        ("cuda: Optional[str] = None\nhip = None", ["nvidiactl"], ["kaitian"], False),
        ("cuda: Optional[str] = '13.0'\nhip = None", [], ["kaitian"], False),
        ("cuda: Optional[str] = '13.0'\nhip = None", ["nvidiactl"], ["kaitian"], True),
        ("cuda = None\nhip: Optional[str] = '6.4'", ["kfd"], [], True),
        ("cuda = None\nxpu: Optional[str] = '2025'", ["dri/renderD128"], [], True),
        ("cuda = None", [], ["kaitian", "torch_npu"], True),
    ],
)
def test_accelerators_are_expected(monkeypatch, tmp_path, build, files, plug_ins, expected):
    (tmp_path / "version.py").write_text(f"__version__ = '2'\n{build}\n")
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    entries = [SimpleNamespace(name=name) for name in plug_ins]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    for file in files:
        path = tmp_path / "dev" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert drivers.may_have_accelerators(tmp_path / "dev") is expected
