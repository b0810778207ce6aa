"""`kaitian-train` on fake accelerators of another package, beside the CPU."""

import json
from pathlib import Path

import pytest
from jobs import (
    PLANTED,
    Job,
    largest_difference,
    run_alone,
    summary_of,
    weights_in,
)

OTHER_PACKAGE = Path(__file__).parents[1] / "vendor"


pytestmark = pytest.mark.emulated_device


@pytest.mark.thorough
def test_train_with_kinds_and_a_vendor_library_of_another_package(mpirun, tmp_path):
    broken = tmp_path / "packages" / "broken-1.0.dist-info"  # never requested here
    broken.mkdir(parents=True)
    (broken / "entry_points.txt").write_text("[kaitian_mpi.devices]\nbroken = no_module:Device\n")
    ended = mpirun(
        3,
        *"kaitian-train --devices vendor:0,cpu,vendor:1 --model cnn --allreduce leader".split(),
        *"--epochs 1 --global-batch-size 96 --check-every 2 --keep-all --run-dir run".split(),
        *"--relay-dtype bf16 --sync-bn --benchmark-seconds 0.2".split(),
        PYTHONPATH=f"{OTHER_PACKAGE}:{broken.parent}",
        KAITIAN_FAKE_DEVICE="rounding",
    )
    assert "broken" not in ended.text
    assert "differ from the others'" not in ended.text  # though these devices round unlike the CPU
    summary = summary_of(tmp_path)
    assert summary["finished"]
    assert summary["device_kinds"] == ["vendor", "cpu"]
    assert not summary["emulated"]
    assert (summary["relay"]["memory_mb"], summary["relay"]["dtype"]) == (32, "bf16")
    assert summary["val_accuracy"] > 0.2  # chance gives 0.1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["sync_bn"]


def test_a_device_without_running_statistics_is_named_before_it_trains(mpirun):
    ended = mpirun(
        2,
        *"kaitian-train --devices vendor:0,cpu --model cnn --balance off --max-steps 2".split(),
        PYTHONPATH=str(OTHER_PACKAGE),
        KAITIAN_FAKE_DEVICE="frozen-statistics",
        code=2,
    )
    assert "by more than rounding on vendor (rank 0" in ended.err
    assert "the buffers 1.0e+00" in ended.err, ended.err
    assert "Traceback" not in ended.text


SCRIPT = """
import os
import kaitian_mpi
import torch.distributed as dist
import fake_library
world = kaitian_mpi.init()
tensor = fake_library.torch.ones(5, device=world.device)
dist.all_reduce(tensor)
values = tensor.cpu().tolist(), fake_library.calls, os.environ["KAITIAN_VENDOR_LIBRARY"]
print("shown", *values, flush=True)
"""


@pytest.mark.thorough
def test_commands_without_the_vendors_library(mpirun, tmp_path):
    line = "fakeccl is not used, by --no-vendor-library or KAITIAN_VENDOR_LIBRARY=0 on rank"
    path = {"PYTHONPATH": f"{OTHER_PACKAGE}"}
    devices = "--devices vendor:0,vendor:1".split()
    scripts = ("kaitian-run", *devices, "--no-vendor-library", "script.py")
    ended = mpirun(2, *scripts, script=SCRIPT, **path)
    assert ended.out.count("shown [2.0, 2.0, 2.0, 2.0, 2.0] [] 0\n") == 2
    assert ended.text.count(line) == 1
    train = "kaitian-train --model cnn --balance off --max-steps 2 --run-dir run".split()
    ended = mpirun(2, *train, *devices, **path, KAITIAN_VENDOR_LIBRARY="0")
    assert ended.text.count(f"{line}s 0, 1: groups communicate through host memory") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["vendor_library"] is False
    doctor = "kaitian-doctor", *devices
    ended = run_alone(*doctor, "--no-vendor-library", "--json", cwd=tmp_path, **path)
    (found,) = [each for each in json.loads(ended.out)["checks"] if line in each["found"]]
    assert found["level"] == "warning"
    wrong = run_alone(*doctor, cwd=tmp_path, code=2, KAITIAN_VENDOR_LIBRARY="off")
    assert "KAITIAN_VENDOR_LIBRARY is 'off'; set it to 0, so that" in wrong.err


@pytest.mark.parametrize(
    ("devices", "lost"),
    [
        ("vendor:0,vendor:1,cpu", "cpu"),  # the others are of one kind from then on
        # The library's kernels wait for the lost rank forever, and the others for their devices, as
        # in the test of layout shard below.
        pytest.param("vendor:0,vendor:1,vendor:2", "", marks=pytest.mark.thorough),
        pytest.param("vendor:0,vendor:1,vendor2:0", "", marks=pytest.mark.thorough),
    ],
)
def test_accelerators_survive_the_only_cpu_rank_and_one_of_their_own(tmp_path, devices, lost):
    command = f"kaitian-train --devices {devices} --model cnn --balance off --no-parity"
    command += " --max-steps 8 --log-interval 0 --run-dir run"
    with Job(3, *command.split(), cwd=tmp_path, fresh=False, PYTHONPATH=str(OTHER_PACKAGE)) as job:
        # Devices are given by local rank.
        rank = int(job.wait_for(r"\|\s+(\d) \|.*\| cpu ")[1]) if lost == "cpu" else 1
        job.wait_for("step 3/")
        job.kill(rank)
        ended = job.finish()
    summary = summary_of(tmp_path)
    assert summary["finished"]
    assert summary["ranks"] == sorted({0, 1, 2} - {rank})
    assert [[lost["rank"] for lost in loss["ranks"]] for loss in summary["failures"]] == [[rank]]
    assert lost or "differ" not in ended.text  # the weights, which are compared after a loss
    if lost == "cpu":
        assert summary["device_kinds"] == ["vendor"]
        assert summary["allreduce"] in ("flat", "leader", "striped")  # what both kinds used
        assert "allreduce: direct, as the ranks here are of one kind" in ended.text


EXACT = (
    "kaitian-train --task planted_large:exact_chain --global-batch-size 24 --epochs 9 "
    "--max-steps 16 --balance off --log-interval 0 --run-dir run"
).split()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the weights of a run on CPUs, in which no rank is lost."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_alone("mpirun", "-np", "3", *EXACT, cwd=folder, PYTHONPATH=str(PLANTED))
    return weights_in(folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--layout shard", "; mirrors 33.3%, 33.3%, 33.3%"),
        ("--layout pipeline --set device_mb=15", "|     3 | "),
    ],
)
def test_a_kill_among_accelerators_leaves_the_weights_of_an_undisturbed_run(
    tmp_path, undisturbed, flags, text
):
    """In layouts whose state is in parts, one of which the killed rank had."""
    devices = "--devices vendor:0,vendor:1,vendor:2 --checkpoint-every 4".split()
    command = (*EXACT, *devices, *flags.split())
    path = f"{OTHER_PACKAGE}:{PLANTED}"
    with Job(3, *command, cwd=tmp_path, fresh=False, PYTHONPATH=path) as job:
        job.wait_for("step 6/")
        job.kill(1)
        ended = job.finish()
    assert text in ended.text
    summary = summary_of(tmp_path)
    assert summary["finished"]
    assert summary["steps"] == 16
    assert [[lost["rank"] for lost in loss["ranks"]] for loss in summary["failures"]] == [[1]]
    assert largest_difference(weights_in(tmp_path), undisturbed) < 1e-9
