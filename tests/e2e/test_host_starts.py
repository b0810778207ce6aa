"""Jobs on several hosts start, whatever each has installed; or one line says why they cannot."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from jobs import (
    EVEN,
    PLANTED,
    PYTHON,
    SCRIPTS,
    SOON_SEC,
    HostsJob,
    run_alone,
    summary_of,
    write_forking_python,
)
from shared.emulated_hosts import reason_to_skip

pytestmark = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())

ENV = (PYTHON, "-m", "kaitian_mpi.cli.env")
PAGE = (Path(__file__).parents[2] / "docs/torchrun.md").read_text()
OF_TORCHRUN = """
import os, sys
import torch
import torch.distributed as dist

names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE".split()
shown = [os.environ[name] for name in names]
if torch.accelerator.is_available():
    kind = torch.accelerator.current_accelerator().type
    shown.append(str(torch.empty(1, device=f"{kind}:{os.environ['LOCAL_RANK']}").device))
else:
    shown.append("cpu")
if "--where" in sys.argv:
    shown.append(os.path.basename(sys.prefix))
if "--lr" in sys.argv:
    dist.init_process_group("nccl" if torch.accelerator.is_available() else "gloo")
    ranks = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(ranks)
    shown += [str(int(ranks)), *sys.argv[1:]]
print("shown", *shown, flush=True)
"""


@pytest.fixture(scope="module")
def other_environment(tmp_path_factory):
    """The interpreter of an environment of its own, with the same packages."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return folder / "bin" / "python"


def write_environments(path, **pythons):
    tables = [f'["{host}"]\npython = "{python}"\n' for host, python in pythons.items()]
    path.write_text("".join(tables))


@pytest.mark.thorough
def test_two_environments_train_one_model(hosts, other_environment, tmp_path):
    ours = write_forking_python(tmp_path / "python") if hosts.have_group else PYTHON
    pythons = {hosts.address(1): ours, hosts.address(2): other_environment}
    write_environments(tmp_path / "env.toml", **pythons)
    train = "--model planted:where --global-batch-size 24 --max-steps 4 --check-every 1".split()
    train += ["--devices", "cpu", *EVEN]
    command = (*ENV, "env.toml", "mpirun", "-np", "3", f"{SCRIPTS}/kaitian-train")
    with HostsJob(hosts, *command, *train, cwd=tmp_path) as job:
        ended = job.finish()
    assert "differ" not in ended.text  # the weights, compared after each step
    assert f"rank 0 in {os.path.dirname(os.path.dirname(PYTHON))}" in ended.text
    assert f"rank 2 in {other_environment.parent.parent}" in ended.text
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["steps"] == 4
    topology = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert [rank["host"] for rank in topology["ranks"]] == ["host1", "host1", "host2"]


def test_every_host_that_cannot_take_part_is_named_in_time(hosts, tmp_path):
    gone = hosts.address(9)
    (tmp_path / "hosts.txt").write_text(hosts.hostfile.read_text() + f"{gone} slots=1\n")
    write_environments(tmp_path / "env.toml", **{hosts.address(2): "/nowhere/bin/python"})
    command = (*ENV, "env.toml", "mpirun", "--hostfile", "hosts.txt", "kaitian-train")
    ended = run_alone(*hosts.on_first(*command), cwd=tmp_path, fresh=True, code=2)
    assert ended.seconds < SOON_SEC
    assert ended.err.count("\n") == 1
    assert f"{hosts.address(2)} has no /nowhere/bin/python; install" in ended.err
    assert f"{gone} " in ended.err


def test_the_doctor_asks_the_hosts_before_mpirun(hosts, tmp_path):
    write_environments(tmp_path / "env.toml", **{hosts.address(2): "/usr/bin/env"})
    doctor = (PYTHON, "-m", "kaitian_mpi.cli.doctor", "--hostfile", str(hosts.hostfile))
    with hosts.preferred():
        well = run_alone(*hosts.on_first(*doctor), cwd=tmp_path, fresh=True)
    assert well.out.count("kaitian-mpi 0.") == 2
    assert "all is well: training can start" in well.out
    command = hosts.on_first(*doctor, "--env", "env.toml")
    ill = run_alone(*command, cwd=tmp_path, fresh=True, code=1)
    assert hosts.address(2) in ill.out


@pytest.mark.any_mpi
def test_a_job_that_has_lost_a_rank_is_started_again(hosts, tmp_path):
    supervised = "-m kaitian_mpi.cli.supervise mpirun -np 3".split()
    train = f"{SCRIPTS}/kaitian-train --model planted:Slow --global-batch-size 24".split()
    train += [*EVEN, *"--snapshot-every 5 --max-steps 16 --check-every 1 --val-split 0.02".split()]
    options = {"cwd": tmp_path, "survives": False, "fresh": False}
    with HostsJob(hosts, PYTHON, *supervised, *train, **options) as job:
        job.wait_for("start 1 of")
        job.wait_for("allreduce among 3 ranks on 2 hosts")
        job.wait_for(r"\| step 7/")
        job.kill(2)
        job.wait_for("start 2 of .*: 3 ranks")
        resumed = int(job.wait_for(r"resuming from step (\d+)")[1])
        job.finish()
    assert resumed >= 5
    summary = summary_of(tmp_path)
    assert (summary["finished"], summary["steps"], summary["ranks"]) == (True, 16, [0, 1, 2])
    topology = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert [rank["host"] for rank in topology["ranks"]] == ["host1", "host1", "host2"]


def run_the_pages_command(hosts, folder, begin, *before):
    """Run a command for several hosts of docs/torchrun.md; return what each rank shows."""
    blocks = PAGE.split("```")
    (listed,) = (block for block in blocks if block.startswith("\nnode-a slots="))
    (tables,) = (block for block in blocks if block.startswith("toml\n[node-a]"))
    python = write_forking_python(folder / "python") if hosts.have_group else PYTHON
    texts = {"hosts.txt": listed.strip(), "environments.toml": tables.removeprefix("toml\n")}
    for name, text in texts.items():
        for host, node in enumerate(("node-a", "node-b"), 1):
            address = hosts.address(host)
            text = text.replace(node, f'"{address}"' if name.endswith("toml") else address)
        text = text.replace("/opt/torch/bin/python", str(python)).replace("cuda", "mlu")
        (folder / name).write_text(text + "\n")
    (folder / "train.py").write_text(OF_TORCHRUN)
    (line,) = (line for line in PAGE.splitlines() if line.startswith(begin))
    words = shlex.split(line.replace("$(which kaitian-run)", f"{SCRIPTS}/kaitian-run"))
    words = [*ENV, *words[1:]] if words[0] == "kaitian-env" else words
    options = {"cwd": folder, "on_all": False, "survives": False, "fresh": bool(before)}
    with HostsJob(hosts, *before, *words, **options) as job:
        ended = job.finish()
    return sorted(re.findall("shown .*", ended.text))


def test_a_script_of_torchrun_runs_on_unequal_hosts(hosts, tmp_path):
    assert run_the_pages_command(hosts, tmp_path, "mpirun --hostfile") == [
        "shown 0 3 0 2 0 2 cpu 6 --lr 0.1",
        "shown 1 3 1 2 0 2 cpu 6 --lr 0.1",
        "shown 2 3 0 1 1 2 cpu 6 --lr 0.1",
    ]


@pytest.mark.thorough
@pytest.mark.device_in_python
def test_a_script_of_torchrun_has_the_devices_of_each_host(hosts, tmp_path):
    """With an emulated plug-in, of which each host has devices 0 to 7."""
    with_mlu = ("env", f"PYTHONPATH={PLANTED / 'emulated_mlu'}:{PLANTED.parents[1]}")
    assert run_the_pages_command(hosts, tmp_path, "kaitian-env", *with_mlu) == [
        "shown 0 3 2 2 0 2 mlu:2",
        "shown 1 3 3 2 0 2 mlu:3",
        "shown 2 3 0 1 1 2 cpu",
    ]


@pytest.mark.thorough
@pytest.mark.device_in_python
def test_two_environments_on_one_host_have_devices_of_their_own(other_environment, tmp_path):
    """The other one has an emulated plug-in, which ours does not have."""
    (packages,) = other_environment.parent.parent.glob("lib/python*/site-packages")
    shutil.copy(PLANTED / "emulated_mlu" / "torch_mlu.py", packages)
    ours = write_forking_python(tmp_path / "python")
    tables = [(ours, '"cpu", "cpu"'), (other_environment, '"mlu:3"')]
    (tmp_path / "env.toml").write_text(
        "".join(f'[[localhost]]\npython = "{path}"\ndevices = [{each}]\n' for path, each in tables)
    )
    (tmp_path / "script.py").write_text(OF_TORCHRUN)
    command = (*ENV, "env.toml", "mpirun", "kaitian-run", "script.py", "--where")
    ended = run_alone(*command, cwd=tmp_path, fresh=True)
    ours, other = (os.path.basename(path) for path in (sys.prefix, other_environment.parents[1]))
    found = [line.split() for line in sorted(re.findall("shown .*", ended.out))]
    assert [[rank, size, *rest] for _, rank, _, _, size, _, _, *rest in found] == [
        ["0", "3", "cpu", ours],
        ["1", "3", "cpu", ours],
        ["2", "3", "mlu:3", other],
    ]
