"""`kaitian-train` on an accelerator and the CPU; `bin/test` runs it on a stand-in as well."""

import time

import pytest
from jobs import SOON_SEC, Job, run_ranks, summary_of
from shared import stand_in

TRAIN = "kaitian-train --model cnn --keep-all --run-dir run --global-batch-size 96".split()
TRAIN += ["--val-split", "0.05", "--benchmark-seconds", str(stand_in.BENCHMARK_SEC)]
pytestmark = stand_in.needs_accelerator
WORLDS = [(2, 1), (1, 2), (1, 0), (2, 2), (3, 2)]
STEPS = 60  # so many that the last is not done before the kill
if stand_in.KIND == stand_in.STAND_IN:  # on which tests/e2e/test_vendor.py kills ranks as well
    STEPS = 10
    WORLDS = [pytest.param(*each, marks=pytest.mark.thorough) for each in WORLDS]


def run(ranks, *command, **options):
    return run_ranks(ranks, *command, fresh=stand_in.IS_FRESH, **options, **stand_in.environment())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_in_both_kinds(tmp_path, precision):
    if stand_in.KIND == stand_in.STAND_IN and precision != "fp32":
        pytest.skip("torch has no autocast for the fake accelerator")
    command = [*TRAIN, *stand_in.devices(1, 1), "--max-steps", "5", "--precision", precision]
    run(2, *command, cwd=tmp_path)
    summary = summary_of(tmp_path)
    assert summary["device_kinds"] == [stand_in.KIND, "cpu"]
    assert summary["emulated"] is False


@pytest.mark.parametrize(("accelerators", "lost"), WORLDS)
def test_a_killed_rank_is_survived(tmp_path, accelerators, lost):
    """A CPU rank dies, the only accelerator, or one that others wait for in their library."""
    words = [*TRAIN, *stand_in.devices(accelerators, 3 - accelerators)]
    words += f"--max-steps {STEPS} --log-interval 0 --no-parity".split()
    command = stand_in.command(accelerators, *words)
    options = {"cwd": tmp_path, "fresh": stand_in.IS_FRESH, **stand_in.environment()}
    with Job(3, *command, **options) as job:
        job.wait_for(r"step 3/")
        job.kill(lost)
        killed_at = time.time()
        job.wait_for(rf"rank {lost} .* lost")
        job.wait_for(r"step \d+/")
        assert time.time() - killed_at < SOON_SEC
        job.finish()
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert summary["ranks"] == [rank for rank in range(3) if rank != lost]


@pytest.mark.thorough
def test_resuming_on_other_devices(tmp_path):
    """A checkpoint of both kinds goes on on the CPU alone, and from there on both again."""
    for accelerators, steps in ((1, 2), (0, 4), (1, 6)):
        devices = stand_in.devices(accelerators, 2 - accelerators)
        resumed = ("--max-steps", str(steps), "--no-parity", "--resume", "auto")
        run(2, *TRAIN, *devices, *resumed, cwd=tmp_path)
        assert summary_of(tmp_path)["steps"] == steps
