"""Load balancing from the command line: new plans, rank exclusion, forecasts."""

import json
import re

import pytest
from jobs import PYTHON, read_lines, run_alone, run_ranks, summary_of

TRAIN = "kaitian-train --model planted:Paced --benchmark-cache cache --log-interval 1".split()


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    """Two ranks, one of which becomes nine times slower at step 15."""
    folder = tmp_path_factory.mktemp("slowed")
    flags = "--max-steps 50 --run-dir run --emulate-slowdown 1:40@15 --benchmark-seconds 4"
    return folder, run_ranks(2, *TRAIN, *flags.split(), cwd=folder)


def test_plan_follows_a_rank_that_becomes_slow_which_is_named_with_the_reason(slowed):
    folder, ended = slowed
    plans = read_lines(folder / "run" / "plan.jsonl")
    assert plans[0]["reason"] == "the benchmark"
    before = [plan for plan in plans if plan["step"] < 15][-1]["batch_sizes"]
    after = plans[-1]["batch_sizes"]
    assert sum(after) == sum(before) == 256
    assert after[1] < min(before[1], 0.6 * 128)  # a busy machine changes the plan before
    change = max(plans[1:], key=lambda plan: plan["predicted_gain"])
    assert change["step"] >= 15
    named = re.match(r"rank 1 \(\S+, cpu\) takes ([\d.]+)x as long as planned; ", change["reason"])
    assert change["predicted_gain"] >= 0.05
    assert float(named[1]) > 1.5
    assert f"new plan {after}" in ended.out
    summary = summary_of(folder)
    assert (summary["plans"], summary["batch_sizes"]) == (len(plans), after)
    assert summary["emulated"] is True
    found = summary["slow_ranks"]
    slow = [entry for entry in found if entry["rank"] == 1 and entry["kind"] == "compute"]
    # A busy machine makes it slow before, or hides it for some steps.
    assert any(entry["since_step"] <= 25 and (entry["until_step"] or 50) > 20 for entry in slow), (
        found
    )
    assert {"host", "device", "device_kind", "since_step", "amount", "text"} <= set(slow[0])
    assert "rank 1 (" in ended.out
    assert "(compute): it" in ended.out


def test_second_job_uses_the_benchmark_cache(slowed):
    folder, first = slowed
    files = sorted((folder / "cache").iterdir())
    assert len(files) == 2
    # An invalid file is ignored, and then both ranks are timed.
    # Without the slowdown, which begins later, the ranks would share what they have measured.
    again = (*TRAIN, *"--max-steps 2 --emulate-slowdown 1:40@15".split())
    again += tuple("--benchmark-seconds 4 --run-dir".split())
    ended = run_ranks(2, *again, "run2", cwd=folder)
    assert "from --benchmark-cache" in ended.out
    assert "from --benchmark-cache" not in first.out
    kept = json.loads((folder / "run2" / "benchmark.json").read_text())
    timed = json.loads((folder / "run" / "benchmark.json").read_text())
    assert all(rank["from_cache"] for rank in kept["ranks"])
    for one, other in zip(kept["ranks"], timed["ranks"], strict=True):
        assert one["alpha_sec"] == other["alpha_sec"]
        assert one["fit_error"] == other["fit_error"]
    files[0].write_text("{")
    ended = run_ranks(2, *again, "run3", cwd=folder)
    assert "from --benchmark-cache" not in ended.out


@pytest.mark.any_mpi
def test_a_rank_that_is_too_slow_is_excluded_even_rank_0(mpirun, tmp_path):
    # A single sample takes rank 0 four times as long as the others' step, however busy the host.
    flags = "--max-steps 4 --global-batch-size 24 --emulate-slowdown 0:400 --benchmark-seconds 1"
    flags += " --val-split 0.02 --memory-format channels_last"
    command = "kaitian-train --model planted:Steady --run-dir run".split()
    ended = mpirun(3, *command, *flags.split())
    assert "rank 0 (" in ended.out
    assert "is excluded: a single sample takes it" in ended.out
    summary = summary_of(tmp_path)
    assert summary["finished"] is True
    assert (summary["ranks"], summary["groups"]) == ([1, 2], {"cpu": [1, 2]})
    assert [entry["rank"] for entry in summary["excluded"]] == [0]
    assert len(summary["batch_sizes"]) == 2
    assert sum(summary["batch_sizes"]) == 24
    assert (tmp_path / "run" / "checkpoints" / "model.pt").exists()


@pytest.mark.thorough
def test_plan_forecasts_every_subset_of_kinds_and_reads_its_measurements_again(mpirun, tmp_path):
    flags = "--benchmark-seconds 2 --save m.json --emulate-kinds gpu,gpu,mlu --emulate-slowdown 2:3"
    ended = mpirun(3, *f"kaitian-plan --model cnn {flags}".split())
    for line in ("gpu + mlu ", "with gpu ", "with mlu ", "worth it (", "written to m.json"):
        assert line in ended.out
    assert "emulated" in ended.out
    saved = json.loads((tmp_path / "m.json").read_text())
    assert len(saved["allreduces"]) == 3
    assert saved["emulated"] is True

    plan = "-m kaitian_mpi.cli.plan m.json --world 8xgpu,16xmlu".split()
    planned = run_alone(PYTHON, *plan, cwd=tmp_path)
    assert "24 ranks" in planned.out
    assert "samples/s" in planned.out
    assert "emulated" in planned.out


@pytest.mark.thorough
def test_timings_of_equal_ranks_are_repeated_to_forecast_but_not_before_training(mpirun, tmp_path):
    for command, is_repeated in (
        ("kaitian-plan --benchmark-seconds 2", True),
        ("kaitian-train --epochs 0 --max-steps 100 --progress none", False),
    ):
        ended = mpirun(1, *f"{command} --model planted:Paced".split())
        table = ended.out.partition("\nbenchmark")[2]
        assert re.search(r"±\d+%|once", table)[0].startswith("±" if is_repeated else "once")
