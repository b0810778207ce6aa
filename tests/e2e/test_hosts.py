"""Loss of hosts and links: hosts are emulated by network namespaces, with real ssh.

The ranks are fresh processes: forked ones sometimes wait for ever in `MPI_Init` on several hosts.
"""

import time

import pytest
import torch
from emulated_hosts import EmulatedHosts, reason_to_skip
from jobs import EVEN, PYTHON, SCRIPTS, HostsJob, steps_shown, summary_of

pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())

RECOVERY_LIMIT_SEC = 20
RESTART_LIMIT_SEC = 60  # 20 s on a machine that has nothing else to do
MOST_STEPS_REPEATED = 10

TRAIN = f"{SCRIPTS}/kaitian-train --model planted:slow --global-batch-size 24".split()
WIDE = f"{SCRIPTS}/kaitian-train --model planted:slow_and_wide --global-batch-size 24".split()
TRAIN += EVEN


@pytest.fixture
def hosts(tmp_path):
    settings = tmp_path / "hosts"
    settings.mkdir()
    with EmulatedHosts(settings, [2, 1, 1]) as hosts:
        yield hosts


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_loss_of_a_hosts_only_rank(hosts, tmp_path, wire):
    network = "--network-interface eth0 --network-allreduce pairwise --max-steps 8".split()
    ranks = [*WIDE, *EVEN, *network, "--wire", wire]
    with HostsJob(hosts, *"mpirun -np 4".split(), *ranks, cwd=tmp_path) as job:
        job.wait_for(r"allreduce among 4 ranks on 3 hosts: pairwise")
        job.wait_for(r"step 3/")
        job.kill(3)
        killed_at = time.time()
        job.wait_for(r"allreduce among 3 ranks on 2 hosts: pairwise")
        job.wait_for(r"rank 3 .* lost")
        job.wait_for(r"step \d+/")
        recovery_sec = time.time() - killed_at
        ended = job.finish()
    assert ended.code == 0, ended.text
    assert recovery_sec < RECOVERY_LIMIT_SEC
    shown = steps_shown(ended)
    assert shown == list(range(1, shown[-1] + 1))
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [0, 1, 2]
    assert summary["wire"] == wire
    newest = max((tmp_path / "run/checkpoints").glob("step-*.pt"))
    saved = torch.load(newest, weights_only=True)
    rounds_off = [bool(state["residuals"]) for state in saved["rank_states"]]
    assert rounds_off == [wire == "int8", False, wire == "int8"]  # a rank of each host


def test_loss_of_a_host_and_then_of_the_link_to_another(hosts, tmp_path):
    supervised = "-m kaitian_mpi.cli.supervise mpirun -np 4".split()
    ranks = [*TRAIN, *"--snapshot-every 5 --max-steps 40".split()]
    lost = []
    with HostsJob(hosts, PYTHON, *supervised, *ranks, cwd=tmp_path) as job:
        for number, lose in ((3, hosts.kill), (2, hosts.unplug)):
            before = max(int(job.wait_for(r"\| step (\d+)/")[1]) for _ in range(7))
            lose(number)
            lost_at = time.time()
            job.wait_for(r"resuming from step")
            first = int(job.wait_for(r"\| step (\d+)/")[1])
            lost.append((before - first + 1, time.time() - lost_at))
        ended = job.finish()
    assert ended.code == 0, ended.text
    for repeated, seconds in lost:
        assert repeated <= MOST_STEPS_REPEATED, ended.text
        assert seconds < RESTART_LIMIT_SEC, ended.text
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [0, 1]
