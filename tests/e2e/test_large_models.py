"""Layout shard trains what fits no rank, continues on other ranks, and after a loss."""

import json
import re

import pytest
import torch
from jobs import PLANTED, PYTHON, SURVIVING, run_alone

KINDS = ("--emulate-kinds", "gpu,mlu,mlu")
MEMORY = ("--emulate-memory", "0:150MB,1:75MB,2:75MB", *KINDS)
TRAIN = (
    "kaitian-train --task planted_large:build --global-batch-size 24 --epochs 9 --run-dir run "
    "--benchmark-seconds 0.2"
).split()
RESUMED = ("--resume", "auto", "--balance", "off")


def train(tmp_path, ranks, *flags, code=0):
    command = ("mpirun", "-np", str(ranks), *TRAIN, *flags)
    return run_alone(*command, cwd=tmp_path, code=code, PYTHONPATH=str(PLANTED))


def test_what_fits_no_rank_trains_in_shards_and_continues_on_others(tmp_path):
    memory = ("--emulate-memory", "0:150MB,1:85MB,2:85MB", *KINDS, "--set", "width=420")
    ended = train(tmp_path, 3, *memory, "--max-steps", "2", "--run-dir", "other", code=None)
    assert ended.code != 0
    assert "out of memory" in ended.text
    ended = train(tmp_path, 3, *memory, "--max-steps", "2", "--layout", "shard")
    assert "layout shard: gradients and optimizer state by rank" in ended.out
    assert "MiB (emulated)" in ended.out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["emulated"] is True
    (file,) = (tmp_path / "run/checkpoints").glob("step-*2.pt")
    before = file.read_bytes()
    saved = torch.load(file)["optimizers"][0]["state"]
    assert len(saved) == 2 * 37
    assert all(state["step"] == 2 for state in saved.values())
    ended = train(tmp_path, 2, "--set", "width=420", "--max-steps", "3", *RESUMED)
    assert "resuming from step 2" in ended.out
    assert file.read_bytes() == before


@pytest.mark.thorough
def test_parameters_are_in_parts_if_they_fit_no_rank_whole(tmp_path):
    """The state is 380 MB: 1.6 times the largest device's memory, and 0.8 of the sum."""
    # What no plan can know to the byte, some MB, would be more than the tenth of a smaller plan.
    memory = ("--emulate-memory", "0:240MB,1:120MB,2:120MB", *KINDS)
    deep = ("--task", "planted_large:build_deep", "--layout", "shard")
    few = ("--max-steps", "2", "--global-batch-size", "12")  # of two micro-batches a rank
    ended = train(tmp_path, 3, *memory, *deep, *few)
    assert "layout shard: parameters, gradients and optimizer state by rank" in ended.out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    planned, peaks = (
        [m[f"{name}_bytes"] for m in summary["memory"]] for name in ("planned", "peak")
    )
    assert peaks == pytest.approx(planned, rel=0.1)
    assert sum(peaks) > 380e6
    assert min(summary["compute_time_sec"]) > 0  # without the waits, also after backward
    weights = torch.load(tmp_path / "run/checkpoints/model.pt", mmap=True)
    assert sum(weight.numel() for weight in weights.values()) == summary["parameters"]
    assert all(weight.isfinite().all() for weight in weights.values())


def test_without_mirrors_a_lost_ranks_part_comes_from_the_checkpoint(tmp_path):
    script = str(PLANTED / "planted_large.py")
    command = ("mpirun", "-np", "3", *SURVIVING, PYTHON, script)
    ended = run_alone(*command, "5", cwd=tmp_path)
    assert "no mirrors, because of --no-mirrors" in ended.out
    assert "continuing from step 4" in ended.out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["finished"]
    assert summary["steps"] == 10


@pytest.mark.parametrize("dies_after", [pytest.param(5, marks=pytest.mark.thorough), 0])
def test_parameters_in_parts_come_from_the_checkpoint_if_there_is_one(tmp_path, dies_after):
    script = str(PLANTED / "planted_large.py")
    command = ("mpirun", "-np", "3", *SURVIVING, PYTHON, script, str(dies_after))
    memory = "0:75MB,1:75MB,2:75MB"  # two ranks have hardly more than the state
    ended = run_alone(*command, memory, "parts", "2", "7", cwd=tmp_path, code=None)
    if not dies_after:
        assert ended.code != 0
        # Its run folder is empty: the first checkpoint is written once training begins.
        text = (
            "part of the state is lost, and there is no checkpoint to continue from; start the job"
        )
        # On a busy machine mpirun may have dropped the very last line; the file has it.
        events = (tmp_path / "run/events.jsonl").read_text()
        assert f'{text} again"' in events, ended.text
        return
    assert ended.code == 0, ended.text
    assert "parameters, gradients and optimizer state by rank" in ended.out
    assert "continuing from step 4" in ended.text
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["finished"]
    assert summary["steps"] == 7
    saved = torch.load(tmp_path / "run/checkpoints/model.pt", mmap=True)
    assert all(weight.isfinite().all() for weight in saved.values())


@pytest.mark.thorough
def test_what_fits_no_rank_trains_in_a_pipeline(tmp_path):
    chain = ("--task", "planted_large:chain", "--set", "width=724")
    # Of a smaller plan, what it cannot know would come close to a tenth.
    memory = ("--emulate-memory", "0:300MB,1:150MB,2:150MB", *KINDS)
    ended = train(tmp_path, 3, *memory, *chain, "--max-steps", "2", "--layout", "pipeline")
    assert "layout pipeline: micro-batches of at most" in ended.out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    pipeline = summary["pipeline"]
    assert len(pipeline["stages"]) == 3
    for memory in summary["memory"]:
        assert memory["peak_bytes"] < 1.1 * memory["planned_bytes"]
    (file,) = (tmp_path / "run/checkpoints").glob("step-*2.pt")
    saved = torch.load(file, mmap=True)
    assert len(saved["optimizers"][0]["state"]) == 2 * 59
    assert all(saved["model"][name].any() for name in ("0.weight", "30.layer.weight", "58.weight"))


@pytest.mark.thorough
def test_experts_continue_on_other_numbers_of_ranks_and_as_a_plain_module(tmp_path):
    mixture = ("--task", "planted_large:exact_mixture", "--epochs", "2")
    train(tmp_path, 1, *mixture, "--run-dir", "whole", "--balance", "off")
    train(tmp_path, 3, *mixture, "--layout", "experts", "--max-steps", "3")
    ended = train(tmp_path, 1, *mixture, *RESUMED, "--max-steps", "5")
    assert "resuming from step 3" in ended.out
    ended = train(tmp_path, 2, *mixture, *RESUMED, "--layout", "experts")
    assert "resuming from step 5" in ended.out
    found, expected = (
        torch.load(tmp_path / name / "checkpoints/model.pt") for name in ("run", "whole")
    )
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dies", "after", "last_saved"),
    [("0", 5, 4), ("-1", 1, 0)],
)
def test_a_lost_stage_comes_from_the_checkpoint(tmp_path, dies, after, last_saved):
    script = str(PLANTED / "planted_large.py")
    command = ("mpirun", "-np", "3", *SURVIVING, PYTHON, script)
    ended = run_alone(*command, str(after), "", "pipeline", dies, "10", cwd=tmp_path)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert f"continuing from step {last_saved}" in ended.text
    assert summary["finished"]
    assert summary["steps"] == 10


AUTO = (
    "--layout auto --max-steps 2 --task planted_large:chain --set width=724 --set layers=28".split()
)


@pytest.mark.thorough
def test_the_fastest_layout_that_fits_is_chosen(tmp_path):
    ended = train(tmp_path, 3, *MEMORY, *AUTO)
    table = " ".join(ended.out.replace("|", " ").split())
    assert re.search(r"replicate - \S+ .*needs [\d,]+ MB on rank \d, which has \d+ MB", table)
    found = json.loads((tmp_path / "run/layouts.json").read_text())
    predicted = {each["layout"]: each["step_sec"] for each in found["layouts"]}
    assert predicted.pop("replicate") is None
    # Of two that are within 3% it takes the simpler one.
    assert predicted[found["chosen"]] <= 1.03 * min(filter(None, predicted.values()))
    assert f"layout {found['chosen']}: the fastest that fits" in ended.out
    assert json.loads((tmp_path / "run/summary.json").read_text())["finished"]


@pytest.mark.thorough
def test_a_model_that_fits_in_no_layout_is_refused(tmp_path):
    small = "0:72MB,1:72MB,2:72MB"
    ended = train(tmp_path, 3, *AUTO, "--emulate-memory", small, "--run-dir", "none", code=2)
    assert "fits the ranks' memory in no layout (replicate: needs" in ended.err
    assert "Traceback" not in ended.text


def test_a_plan_compares_the_layouts(tmp_path):
    plan = ("kaitian-plan", "--task", "planted_large:build", "--set", "width=64", "--save", "file")
    run_alone("mpirun", "-np", "2", *plan, cwd=tmp_path, PYTHONPATH=str(PLANTED))
    ended = run_alone("kaitian-plan", "file", "--world", "5000xcpu", cwd=tmp_path)
    rows = ended.out.partition("layouts (--layout) of the whole world")[2].splitlines()[2:5]
    assert [row.split()[0] for row in rows] == ["replicate", "shard", "pipeline"]
    assert "Task(layers=[...])" in rows[2]


def test_the_example_has_no_memory_to_draw_of_replicas(tmp_path, monkeypatch, capsys):
    """As `--layout auto` may choose them."""
    monkeypatch.syspath_prepend(PLANTED.parents[1] / "examples")
    from large_gpt import draw

    (tmp_path / "summary.json").write_text('{"emulated": false}')
    draw(tmp_path)
    assert "not drawn" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("flags", ["--layout shard", "--layout pipeline --lora"])
def test_the_example_trains_and_draws_the_memory(tmp_path, flags):
    example = str(PLANTED.parents[1] / "examples/large_gpt.py")
    small = "--width 64 --blocks 2 --steps 3 --run-dir run".split()
    run_alone("mpirun", "-np", "2", PYTHON, example, *small, *flags.split(), cwd=tmp_path)
    assert (tmp_path / "run/memory.png").stat().st_size > 1000
