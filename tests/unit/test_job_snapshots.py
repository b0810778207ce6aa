"""Which snapshots of a job are removed from its hosts' memory: commands run in a local shell."""

import socket
import subprocess

import pytest

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.observe import folders
from kaitian_mpi.supervise.hosts import parse_host_list
from kaitian_mpi.supervise.job_snapshots import JobSnapshots
from kaitian_mpi.supervise.mpirun_command import parse_command
from kaitian_mpi.supervise.remote_hosts import NO_ANSWER
from kaitian_mpi.supervise.remote_shell import RemoteShell
from kaitian_mpi.supervise.starts import JobCommand
from kaitian_mpi.train.checkpoint import files


@pytest.fixture
def shell(tmp_path):
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    agent.chmod(0o755)
    return RemoteShell([str(agent)], 20.0)


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """What stands for this machine's /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(folders, "SHM", folder)
    monkeypatch.setattr(files, "SHM", folder)
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


class Hosts:
    """Hosts whose commands a local shell runs, each with a memory of its own."""

    def __init__(self, place, silent=""):
        self.place, self.silent = place, silent
        self.commands = []

    def add(self, host, *names):
        """Give a host a folder with the job's snapshots."""
        folder = self.place / host / "kaitian-beef-its-name"
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()

    def with_snapshots(self):
        return "".join(sorted(folder.parent.name for folder in self.place.glob("?/kaitian-*")))

    def run(self, hosts, words):
        self.commands.append(("".join(host.name for host in hosts), words[0]))
        codes = dict.fromkeys((host.name for host in hosts), NO_ANSWER)
        for name in codes.keys() - {*self.silent}:
            line = " ".join(words).replace(str(folders.SHM), str(self.place / name))
            codes[name] = subprocess.call(line, shell=True)
        return codes


@pytest.mark.parametrize(
    ("finished", "removed"), [(True, "c"), (False, "bc")], ids=["finished", "failed"]
)
def test_a_finished_run_leaves_only_the_hosts_that_were_left_out(
    tmp_path, memory, finished, removed
):
    job, hosts = make_job(tmp_path / "run"), Hosts(tmp_path)
    snapshots = JobSnapshots(job, hosts, print)
    snapshots.follow_hosts(job.remote, frozenset("c"))
    snapshots.follow_hosts(job.remote, frozenset())
    for name in removed:
        hosts.add(name)
    snapshots.end(finished)
    assert [words for words in hosts.commands if words[1] == "rm"] == [(removed, "rm")]
    assert hosts.with_snapshots() == ""


# The disk has step 90; a file without its .json is not a snapshot yet.
OLDER = "step-00000089.json", "step-00000090-1.json", "step-00000100.pt"


@pytest.mark.parametrize(
    ("on_c", "kept"),
    [(OLDER, ""), ((*OLDER, "step-00000100-2.json"), "bc"), (("step-123456789.json",), "bc")],
    ids=["older", "newer", "much newer"],
)
def test_a_failed_run_keeps_all_if_another_hosts_state_is_newer(tmp_path, memory, on_c, kept):
    job, reports, hosts = make_job(tmp_path / "run"), [], Hosts(tmp_path)
    (job.folder / "checkpoints").mkdir(parents=True)
    (job.folder / "checkpoints/step-00000090.json").touch()
    hosts.add("b", *OLDER)
    hosts.add("c", *on_c)
    JobSnapshots(job, hosts, reports.append).end(finished=False)
    assert hosts.with_snapshots() == kept
    expected = (
        f"the newest state is still in the memory of c ({memory}): run the same command with "
        f"--run-dir {job.folder} --resume auto --snapshots beef"
    )
    assert reports == ([expected] if kept else [])


def test_a_failed_run_keeps_the_state_of_a_host_that_cannot_be_asked(tmp_path, memory):
    job, reports, hosts = make_job(tmp_path / "run"), [], Hosts(tmp_path, silent="b")
    hosts.add("b", "step-00000100.json")
    JobSnapshots(job, hosts, reports.append).end(finished=False)
    assert hosts.commands == [("bc", "sh"), ("c", "rm")]  # b may answer again meanwhile
    assert reports == [f"{memory}/kaitian-beef-* may be left on b"]


def test_a_snapshot_that_cannot_be_written_to_disk_is_kept_and_its_fault_named(tmp_path, memory):
    job, reports = make_job(tmp_path / "run"), []
    folder = memory / "kaitian-beef-here"
    folder.mkdir(mode=0o755)
    JobSnapshots(job, Hosts(tmp_path), reports.append).end(finished=False)
    assert folder.exists()
    (report,) = reports
    said = f"still in memory ({memory}), as it could not be written to disk: {folder} is not used: "
    assert said in report
    assert "; correct that, and run the same command with --run-dir" in report
