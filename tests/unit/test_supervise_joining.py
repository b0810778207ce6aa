"""Hosts that join and leave a supervised job, with fakes for the clock, the hosts and mpirun."""

import itertools
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from supervised import FakeRunner

from kaitian_mpi.cli import supervise as command
from kaitian_mpi.errors import UserError
from kaitian_mpi.observe.folders import RestartRequest, request_restart, withdraw_request
from kaitian_mpi.runtime.launcher import SUPERVISED
from kaitian_mpi.runtime.polling import wait_until
from kaitian_mpi.supervise.environments import Environment
from kaitian_mpi.supervise.hosts import Host
from kaitian_mpi.supervise.hosts_file import HostChanges, HostsFile, parse_hosts, read_hosts_file
from kaitian_mpi.supervise.mpirun_command import parse_command
from kaitian_mpi.supervise.remote_hosts import HostAnswer, PendingAnswer
from kaitian_mpi.supervise.starts import interpreter_of

TWO = "a slots=2\nb slots=1\n"
THREE = TWO + "c slots=1\n"


class Cluster(FakeRunner):
    """A hosts file, hosts that answer or not, and an mpirun whose jobs train a step a second."""

    def __init__(self, folder):
        super().__init__(folder)
        self.text = TWO
        self.starts, self.asked, self.script, self.words = [], [], [], []
        self.is_requested, self.step = False, 0
        file = HostsFile("hosts", self.reports.append, self.read)
        self.changes = HostChanges(file, self.ask, self.reports.append, 60.0)
        self.job = command.make_job(f"mpirun kaitian-train --run-dir {folder}".split(), file)

    def read(self, path):
        if isinstance(self.text, Exception):
            raise self.text
        return self.text

    def ask(self, host):
        asked_at = self.clock
        self.asked.append((host.name, asked_at))

        def poll():
            if host.name in self.silent:
                return None if self.clock < asked_at + 8 else HostAnswer("", "no answer")
            return HostAnswer("1")

        return SimpleNamespace(poll=poll, cancel=lambda: self.asked.append((host.name, "canceled")))

    def run(self, words, watch=None):
        """Train until the job is asked to end, a planned event ends it, or it has finished."""
        hostfile = words[words.index("--hostfile") + 1]
        self.words.append(words)
        self.starts.append((words[words.index("-np") + 1], Path(hostfile).read_text()))
        begins_at = self.clock + 5
        while True:
            self.clock += 0.5
            for event in [event for event in self.script if event[0] <= self.clock]:
                self.script.remove(event)
                code = event[1](self)
                if code is not None:
                    return code
            if self.clock >= begins_at:
                self.train()
                if self.withdraw_request():
                    return 0
            watch()

    def train(self, finished=False):
        self.step += 1
        self.write_results(self.step, finished)

    def request_restart(self):
        assert self.step > 0, "the job is still starting"
        self.is_requested = True
        return True

    def withdraw_request(self):
        was, self.is_requested = self.is_requested, False
        return was

    def play(self, *script, max_restarts=3):
        """Supervise a job during which things happen, each at a time."""
        self.script = list(script)
        return self.supervise(self.job, max_restarts, self.changes)

    def hosts_of_starts(self):
        return ["".join(line[0] for line in text.splitlines()) for _, text in self.starts]


def write(text):
    return lambda cluster: setattr(cluster, "text", text)


def lose(name, code=0):
    """mpirun ends with code 0 if a host is lost."""

    def event(cluster):
        cluster.silent.add(name)
        return code

    return event


def revive(name):
    return lambda cluster: cluster.silent.discard(name)


def crash(cluster):
    return 1


def finish(cluster):
    cluster.train(finished=True)
    return 0


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path / "run")


def test_a_new_host_joins_and_then_leaves(cluster):
    script = [(20, write(THREE)), (60, write("b slots=1\na slots=2\n")), (90, finish)]
    assert cluster.play(*script) == 0
    assert cluster.starts == [("3", TWO), ("4", THREE), ("3", TWO)]  # never in another order
    assert cluster.reports == [
        "start 1: 3 ranks on a, b", "hosts has changed: a slots=2, b slots=1, c slots=1",
        "host c is ready to join", "asking the job to save and end, to start it again on a, b, c",
        "start 2: 4 ranks on a, b, c", "hosts has changed: a slots=2, b slots=1",
        "asking the job to save and end, to start it again on a, b", "start 3: 3 ranks on a, b",
        "finished after 3 starts",
    ]  # fmt: skip
    assert (cluster.stale, cluster.removed) == ([["c"]], [["c"]])


def test_a_host_that_does_not_answer_does_not_join_until_it_does(cluster):
    cluster.silent.add("c")
    # A file that is gone for a moment, or half written, is not reported.
    gone = UserError("--hosts-file hosts: No such file or directory")
    script = [(10, write(gone)), (11, write(TWO)), (15, write("a slots=2\n")), (16, write(TWO))]
    script += [(20, write(THREE)), (300, revive("c")), (400, finish)]
    assert (cluster.play(*script), cluster.hosts_of_starts()) == (0, ["ab", "abc"])
    assert cluster.reports[1].startswith("hosts has changed: a slots=2, b slots=1, c slots=1")
    told = [line for line in cluster.reports if "no answer" in line]
    assert told == ["no answer; until then, the job runs without c"]  # once
    times = [at for name, at in cluster.asked]
    assert all(60 <= later - at <= 70 for at, later in itertools.pairwise(times))


def test_a_lost_host_comes_back_after_a_back_off_that_doubles(cluster):
    script = [(20, lose("b")), (21, revive("b")), (120, lose("b")), (121, revive("b"))]
    assert cluster.play(*script, (400, finish)) == 0
    assert cluster.hosts_of_starts() == ["ab", "a", "ab", "a", "ab"]
    assert [line for line in cluster.reports if "earliest" in line] == [
        f"host b does not answer; it can rejoin in {sec} s at the earliest" for sec in (60, 120)
    ]
    (_, first), (_, second), *_ = cluster.asked
    assert 80 <= first <= 85
    assert 240 <= second <= 245
    assert cluster.stale == [["b"], ["b"]]


def test_a_host_with_which_the_job_does_not_start_is_held_back(cluster):
    script = [(20, write(THREE)), (27, crash), (120, finish)]
    assert cluster.play(*script, max_restarts=0) == 0
    assert cluster.hosts_of_starts() == ["ab", "abc", "ab", "abc"]
    assert (
        "host c joined, and the job ended with code 1 before its next step; it can rejoin in "
        "60 s at the earliest" in cluster.reports
    )


def test_a_stop_during_a_change(cluster):
    def stop_once_asked(cluster):
        cluster.stopped = signal.SIGTERM if cluster.is_requested else 0
        return 143 if cluster.is_requested else None

    script = [(20, write(THREE)), *[(20 + n / 2, stop_once_asked) for n in range(40)]]
    assert (cluster.play(*script), cluster.hosts_of_starts()) == (128 + signal.SIGTERM, ["ab"])
    assert not cluster.is_requested


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has no host with slots"),
        ("# only a comment\n", "has no host with slots"),
        ("a slots=0\n", "has no host with slots"),
        ("a slots=2\nb\n", "b has no slots"),
        ("a slots=2\n-oProxyCommand=x slots=1\n", "line 2: '-oProxyCommand=x' is not"),
        ("a slots=2\n\x00\x01\n", "is not a host name"),
        ("c slots=4\n", "none of the job's current hosts"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(cluster, text, fault):
    if "none" not in fault:
        with pytest.raises(UserError, match=fault):
            parse_hosts(text, "hosts")
    assert cluster.play((20, write(text)), (60, write(TWO)), (90, finish)) == 0
    assert cluster.hosts_of_starts() == ["ab"]
    (told,) = (line for line in cluster.reports if fault in line)
    assert "none" in fault or told.endswith("; until then, the previous hosts are kept")


def test_a_hosts_file_must_be_the_users_own_and_is_in_place_of_mpiruns_options(tmp_path):
    names = ("own", "others", "groups", "fifo", "binary")
    own, others, groups, fifo, binary = (tmp_path / name for name in names)
    own.write_text(TWO)
    assert read_hosts_file(str(own)) == TWO
    others.touch(0o666)
    others.chmod(0o606)
    groups.touch()
    groups.chmod(0o660)
    os.mkfifo(fifo)
    binary.write_bytes(b"\xff\xfe")
    for file, fault in (
        (tmp_path / "none", "No such file"), (others, "another user can write"),
        (groups, "another user can write .* chmod go-w"),
        (fifo, "not a regular file"), (binary, "not UTF-8 text"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=fault):
            read_hosts_file(str(file))
    (tmp_path / "hosts").write_text(TWO)
    file = HostsFile(str(tmp_path / "hosts"), print)
    for words in (
        *("mpirun --hostfile hf kaitian-train", "mpirun --host a,b kaitian-train"),
        *("mpirun -np 4 kaitian-train", "kaitian-train", "mpirun kaitian-run train.py"),
        "mpirun kaitian-train --emulate-slowdown 0:2",
        "mpirun -x KAITIAN_EMULATE_KINDS=a,b kaitian-train",
    ):
        with pytest.raises(UserError, match="--hosts-file"):
            command.make_job([*words.split(), "--run-dir", str(tmp_path / "run")], file)


def test_asking_a_host_waits_for_nothing(tmp_path):
    (tmp_path / "python").touch()
    for words, python in (
        ([*"mpirun --bind-to none".split(), f"{tmp_path}/kaitian-train"], f"{tmp_path}/python"),
        ("mpirun -x A /opt/python -m kaitian_mpi.cli.train --seed 1".split(), "/opt/python"),
    ):
        assert interpreter_of(parse_command(words)) == python
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = slow ] && sleep 60\necho Welcome; echo 1.2\n')
    agent.chmod(0o755)

    def ask(name, limit_sec, python="python", agent=agent):
        return PendingAnswer([str(agent)], Host(name=name), [python], limit_sec)

    quick, slow, canceled = ask("quick", 20), ask("slow", 0.5), ask("slow", 20)
    assert slow.poll() is None
    assert wait_until(lambda: quick.poll() is not None, 20)
    assert quick.poll().version == "1.2"
    assert wait_until(lambda: slow.poll() is not None, 20)
    assert "slow does not answer within 0.5 s" in slow.poll().fault
    canceled.cancel()
    assert "a has no /p" in ask("a", 20, "/p", tmp_path / "none").poll().fault
    here = PendingAnswer([], Host(name="a"), [sys.executable, "/no/python"], 20, host_is_local=True)
    assert wait_until(lambda: here.poll() is not None, 20)
    assert "a has no /no/python" in here.poll().fault


def test_each_host_has_an_interpreter_of_its_own_in_every_start(cluster):
    environments = {host: [Environment(f"/{host}/python")] for host in "cz"}
    cluster.job = replace(cluster.job, environments=environments)
    assert cluster.play((20, write(THREE)), (60, finish)) == 0
    train = ["-np", "3", "kaitian-train", "--run-dir", str(cluster.folder)]
    first, second = cluster.words
    assert first[:3] == ["mpirun", "--hostfile", f"{cluster.folder}/hostfile-start-1"]
    assert first[3:10] == ["--host", "a:2,b:1", *train]
    at = second.index(":")
    assert second[3:10] == first[3:10]
    flags = ["--run-dir", str(cluster.folder), f"--run-dir={cluster.folder}", "--resume=auto"]
    module = ["/c/python", "-m", "kaitian_mpi.cli.train"]
    assert second[at:] == [":", "--host", "c:1", "-np", "1", *module, *flags]


def test_only_the_jobs_own_supervisor_can_ask_it_to_end(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.delenv(SUPERVISED, raising=False)
    unsupervised = RestartRequest(tmp_path, lambda: 9.0)
    monkeypatch.setenv(SUPERVISED, "other")
    other = RestartRequest(tmp_path, lambda: 9.0)
    monkeypatch.setenv(SUPERVISED, "id")
    asked = RestartRequest(tmp_path, lambda: clock[0])
    elsewhere = RestartRequest(None, lambda: 9.0)
    assert not asked.is_made()
    request_restart(tmp_path, "id")
    assert not asked.is_made()  # it looks every half second
    clock[0] = 1.0
    assert asked.is_made()
    assert not any(each.is_made() for each in (other, unsupervised, elsewhere))
    other.fulfill()
    assert withdraw_request(tmp_path)
    assert asked.is_made()
    request_restart(tmp_path, "id")
    asked.fulfill()
    assert not withdraw_request(tmp_path)
    asked.refuse()
    assert not asked.is_made()
    for number, make in enumerate((os.mkfifo, os.mkdir)):  # nothing is waited for there
        (tmp_path / str(number)).mkdir()
        make(tmp_path / str(number) / "restart-request")
        assert not RestartRequest(tmp_path / str(number)).is_made()
