"""Which snapshots of a job are removed from its hosts' memory: commands run in a local shell."""

import socket

import pytest

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.observe import folders
from kaitian_mpi.supervise.hosts import parse_host_list
from kaitian_mpi.supervise.job_snapshots import JobSnapshots
from kaitian_mpi.supervise.mpirun_command import parse_command
from kaitian_mpi.supervise.remote_shell import RemoteShell
from kaitian_mpi.supervise.starts import JobCommand


@pytest.fixture
def shell(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    return RemoteShell([str(agent)], 20.0)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """What stands for the hosts' /dev/shm, which is one for all."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(folders, "SHM", folder)
    return folder


def make_job(folder):
    return JobCommand(
        command=parse_command("mpirun --host a,b,c -np 3 kaitian-train".split()),
        hosts=parse_host_list("a,b,c"),
        local=frozenset("a"),
        hostfiles={},
        config=TrainConfig(run_dir=str(folder), snapshots="beef"),
        folder=folder,
    )


@pytest.mark.parametrize("name", ["node-1.cluster", "node_1"])
def test_a_host_that_joins_again_loses_its_own_snapshot_only(
    tmp_path, shell, memory, monkeypatch, name
):
    (tmp_path / "hostname").write_text(f"#!/bin/sh\necho {name}\n")
    (tmp_path / "hostname").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    stale, other = folders.snapshot_folder("beef"), memory / "kaitian-beef-node-2"
    stale.mkdir()
    other.mkdir()
    job = make_job(tmp_path / "run")
    JobSnapshots(job, shell, print).remove_stale(job.remote[:1])
    assert [*memory.iterdir()] == [other]


@pytest.mark.parametrize(
    ("code", "removed"), [(0, ["c"]), (1, ["b", "c"])], ids=["finished", "failed"]
)
def test_a_finished_run_leaves_only_the_hosts_that_were_left_out(tmp_path, memory, code, removed):
    job, commands = make_job(tmp_path / "run"), []

    class Shell:
        def run(self, hosts, words):
            commands.append(([host.name for host in hosts], words))
            return {}

    snapshots = JobSnapshots(job, Shell(), print)
    snapshots.follow_hosts(job.remote, frozenset("c"))
    snapshots.follow_hosts(job.remote, frozenset())
    snapshots.end(code)
    assert commands == [(removed, ["rm", "-rf", f"{memory}/kaitian-beef-*"])]
