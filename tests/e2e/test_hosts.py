"""Hosts, links and early ranks that are lost: hosts are network namespaces, joined by real ssh."""

import re
import time
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from jobs import EVEN, PYTHON, SCRIPTS, SOON_SEC, HostsJob, steps_shown, summary_of
from shared.emulated_hosts import EmulatedHosts, reason_to_skip

pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())

MOST_STEPS_REPEATED = 10

TRAIN = f"{SCRIPTS}/kaitian-train --model planted:Slow --global-batch-size 24".split()
WIDE = f"{SCRIPTS}/kaitian-train --model planted:SlowAndWide --global-batch-size 24".split()
TRAIN += EVEN
ON_OTHERS = ("--map-by", "slot:NOLOCAL")
EARLY = """
import os, sys
if os.environ["OMPI_COMM_WORLD_RANK"] in sys.argv[2:]:
    sys.exit(int(sys.argv[1]))
import kaitian_mpi
kaitian_mpi.init()
"""


@pytest.fixture
def slots():
    """How many ranks each host gets."""
    return [2, 1, 1]


@pytest.fixture
def hosts(tmp_path, slots):
    settings = tmp_path / "hosts"
    settings.mkdir()
    with EmulatedHosts(settings, slots) as hosts:
        yield hosts


@pytest.mark.parametrize("wire", ["fp32", pytest.param("int8", marks=pytest.mark.thorough)])
def test_loss_of_a_hosts_only_rank(hosts, tmp_path, wire):
    network = "--network-interface eth0 --network-allreduce pairwise".split()
    network += "--max-steps 8 --val-split 0.02".split()
    ranks = [*WIDE, *EVEN, *network, "--wire", wire]
    if wire == "fp32":
        ranks += "--emulate-kinds a,a,b,a --group-by kind-and-host --allreduce leader".split()
    with HostsJob(hosts, *"mpirun -np 4".split(), *ranks, cwd=tmp_path, fresh=False) as job:
        if wire == "fp32":
            job.wait_for(r"4 ranks, 3 groups by kind and host")
        job.wait_for(r"allreduce among 4 ranks on 3 hosts: pairwise")
        job.wait_for(r"step 3/")
        job.kill(3)
        killed_at = time.time()
        job.wait_for(r"allreduce among 3 ranks on 2 hosts: pairwise")
        job.wait_for(r"rank 3 .* lost")
        job.wait_for(r"step \d+/")
        recovery_sec = time.time() - killed_at
        ended = job.finish()
    assert recovery_sec < SOON_SEC
    shown = steps_shown(ended)
    assert shown == list(range(1, shown[-1] + 1))
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [0, 1, 2]
    assert summary["wire"] == wire
    assert summary["allreduce"] == ("leader" if wire == "fp32" else "direct")
    if wire == "fp32":
        assert summary["groups"] == {"a": [0, 1], "b": [2]}
        assert summary["relay"]["group_by"] == "kind-and-host"
    newest = max((tmp_path / "run/checkpoints").glob("step-*.pt"))
    saved = torch.load(newest, weights_only=True)
    rounds_off = [bool(state["residuals"]) for state in saved["rank_states"]]
    assert rounds_off == [wire == "int8", False, wire == "int8"]  # a rank of each host


@pytest.mark.thorough
def test_loss_of_a_host_and_then_of_the_link_to_another(hosts, tmp_path):
    supervised = "-m kaitian_mpi.cli.supervise mpirun -np 4".split()
    ranks = [*TRAIN, *"--snapshot-every 5 --max-steps 40".split()]
    lost = []
    with HostsJob(hosts, PYTHON, *supervised, *ranks, cwd=tmp_path, fresh=False) as job:
        for number, lose in ((3, hosts.kill), (2, hosts.unplug)):
            before = max(int(job.wait_for(r"\| step (\d+)/")[1]) for _ in range(7))
            lose(number)
            lost_at = time.time()
            job.wait_for(r"resuming from step")
            first = int(job.wait_for(r"\| step (\d+)/")[1])
            lost.append((before - first + 1, time.time() - lost_at))
        (tmp_path / "hurry").touch()
        ended = job.finish()
    for repeated, seconds in lost:
        assert repeated <= MOST_STEPS_REPEATED, ended.text
        assert seconds < SOON_SEC, ended.text
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [0, 1]


@pytest.mark.parametrize("slots", [[1, 1, 1]], ids=[""])  # few, as each start of a rank takes long
def test_a_host_joins_is_lost_and_comes_back(hosts, tmp_path):
    lines = hosts.hostfile.read_text().splitlines(keepends=True)
    file = tmp_path / "hosts.txt"
    file.write_text("".join(lines[:2]))
    supervised = f"-m kaitian_mpi.cli.supervise --hosts-file {file} --host-backoff 1".split()
    ranks = [*TRAIN, *"--snapshot-every 5 --max-steps 100".split()]
    changes = {}
    command = (PYTHON, *supervised, "mpirun", *ranks)
    with HostsJob(hosts, *command, cwd=tmp_path, on_all=False, fresh=False) as job:

        def see_change(name, since):
            first = int(job.wait_for(r"\| step (\d+)/")[1])
            changes[name] = round(time.time() - since, 1)
            return first

        job.wait_for(r"\| step 2/")
        file.write_text("".join(lines))
        saved = int(job.wait_for(r"step (\d+) is saved, and the job ends")[1])
        joined = see_change("joined", time.time())
        job.wait_for(rf"\| step {joined + 2}/")
        hosts.kill(3)
        killed_at = time.time()
        job.wait_for(r"does not answer; it can rejoin in 1 s")
        hosts.revive(3)
        see_change("lost", killed_at)
        saved_again = int(job.wait_for(r"step (\d+) is saved, and the job ends")[1])
        came_back = see_change("came back", time.time())
        (tmp_path / "hurry").touch()
        ended = job.finish()
    print("seconds without a step, by change:", changes)
    assert (joined, came_back) == (saved + 1, saved_again + 1), ended.text
    shown = steps_shown(ended)
    jumps = [(last, first) for last, first in pairwise(shown) if first != last + 1]
    assert len(jumps) <= 1, ended.text  # where the host was lost
    assert all(0 < last - first + 1 <= MOST_STEPS_REPEATED for last, first in jumps), ended.text
    assert (shown[0], shown[-1]) == (1, 100)
    assert max(changes.values()) < SOON_SEC, ended.text
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [0, 1, 2]
    starts = [line for line in ended.text.splitlines() if "kaitian-supervise: start" in line]
    sizes = ["2 ranks", "3 ranks", "2 ranks", "3 ranks"]
    assert [size in line for size, line in zip(sizes, starts, strict=True)] == [True] * 4


# Which ranks end, with which code, and the line on it: one of mpirun's own host, or of the other.
ENDED_EARLY = [
    ("12", 0, "ranks 1-2 on host2 ended before MPI started; see what was printed there, and"),
    ("2", 1, "rank [12] (on host2|of this host) ended before MPI started; see what"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("slots", [[1, 2]], ids=[""])
def test_ranks_of_another_host_that_end_before_mpi_end_the_job(hosts, tmp_path):
    """Where no rank is left on a host, no code of this package may have run there."""
    (tmp_path / "early.py").write_text(EARLY)
    with ExitStack() as jobs:
        started = []
        for ended, code, _ in ENDED_EARLY:  # at once, as they mostly wait
            command = "mpirun", PYTHON, "early.py", str(code), *ended
            started.append(jobs.enter_context(HostsJob(hosts, *command, cwd=tmp_path)))
        for job, (*_, line) in zip(started, ENDED_EARLY, strict=True):
            found = job.finish(code=None)
            assert found.code != 0
            assert re.search(line, found.text)
            assert found.seconds < SOON_SEC
        started[0].wait_until(lambda: not hosts.rank_pids(), "a rank was left")


@pytest.mark.thorough
@pytest.mark.parametrize("slots", [[1, 2]], ids=[""])
def test_where_mpirun_has_no_rank_beside_it_the_host_of_the_ended_one_ends_the_job(hosts, tmp_path):
    (tmp_path / "early.py").write_text(EARLY)
    (tmp_path / "hosts.txt").write_text(f"{hosts.address(2)} slots=2\n")
    command = "mpirun", "--hostfile", "hosts.txt", *ON_OTHERS, PYTHON, "early.py", "0", "1"
    with HostsJob(hosts, *command, cwd=tmp_path, on_all=False, survives=False) as job:
        found = job.finish(code=None)
        job.wait_until(lambda: not hosts.rank_pids(), "a rank was left")
    assert found.code != 0
    assert "rank 1 of this host ended before MPI started; see what it printed" in found.text
