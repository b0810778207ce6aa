"""`kaitian-train` on an accelerator and the CPU. Run by `bin/test` wherever there is one."""

import time

import pytest
from jobs import SOON_SEC, Job, run_ranks, summary_of
from shared import stand_in

TRAIN = "kaitian-train --model cnn --keep-all --benchmark-seconds 2 --run-dir run".split()
pytestmark = stand_in.needs_accelerator


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_training_in_both_kinds(tmp_path, precision):
    if stand_in.KIND == stand_in.STAND_IN and precision != "fp32":
        pytest.skip("torch has no autocast for the fake accelerator")
    command = [*TRAIN, *stand_in.devices(1, 1), "--max-steps", "5", "--precision", precision]
    run_ranks(2, *command, cwd=tmp_path, fresh=True, **stand_in.environment())
    summary = summary_of(tmp_path)
    assert summary["device_kinds"] == [stand_in.KIND, "cpu"]
    assert summary["emulated"] is False


@pytest.mark.parametrize(("accelerators", "lost"), [(1, 2), (1, 0), (2, 2), (2, 1), (3, 2)])
def test_a_killed_rank_is_survived(tmp_path, accelerators, lost):
    """A CPU rank dies, the only accelerator, or one that others wait for in their library."""
    words = [*TRAIN, *stand_in.devices(accelerators, 3 - accelerators)]
    words += "--global-batch-size 96 --max-steps 60 --log-interval 0".split()
    command = stand_in.command(accelerators, *words)
    with Job(3, *command, cwd=tmp_path, **stand_in.environment()) as job:
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


def test_resuming_on_other_devices(tmp_path):
    """A checkpoint of both kinds goes on on the CPU alone, and from there on both again."""
    for accelerators, steps in ((1, 4), (0, 8), (1, 12)):
        run_ranks(
            2, *TRAIN, *stand_in.devices(accelerators, 2 - accelerators),
            *("--max-steps", str(steps), "--checkpoint-every", "3", "--resume", "auto"),
            cwd=tmp_path, fresh=True, **stand_in.environment(),
        )  # fmt: skip
        assert summary_of(tmp_path)["steps"] == steps
