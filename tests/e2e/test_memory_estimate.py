"""`kaitian-plan --memory`: what it prints, and how near it is to the peaks of real jobs."""

import re

import pytest
from jobs import PYTHON, run_alone, summary_of

# A wide chain of layers, so that parameters, state and activations all count, in megabytes; a wider
# one of fewer layers has as many, and takes longer.
TASK = """
import torch
from torch import nn
from kaitian_mpi import Task

def build(width: int = 768, blocks: int = 12) -> Task:
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks)]
    return Task(
        model=nn.Sequential(*layers),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 1e-4, foreach=False),
        data=list(torch.randn(64, 128, width)),
        loss=lambda model, batch: (model(batch) - batch).square().mean(),
    )
"""
STATE = 4 * 12 * (768 * 768 + 768)  # bytes of the parameters
TRAINING = "--task planted_memory:build --global-batch-size 16"
PEAK = """
import resource, sys
from kaitian_mpi.cli.train import main

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main()
print("peak MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "planted_memory.py").write_text(TASK)
    return tmp_path


def tables(out):
    """Return the rows of each layout's table, as numbers by column."""
    found = {}
    for layout, text in re.findall(r"^layout (\w+): (.*?)(?=^layout|\Z)", out, re.M | re.S):
        heads, *rows = [line.split() for line in text.splitlines() if line.startswith("  ")] or [[]]
        numbers = [[cell.replace(",", "") for cell in row] for row in rows]
        found[layout] = [dict(zip(heads, row, strict=True)) for row in numbers]
    return found


def estimate(folder, memory):
    ended = run_alone("kaitian-plan", "--memory", memory, *TRAINING.split(), cwd=folder)
    assert ended.err == ""
    return ended.out


@pytest.mark.thorough
def test_a_replica_takes_what_was_estimated(folder):
    """As its process's memory counts, within 15%: malloc and the operators' own buffers."""
    out = estimate(folder, "cpu")
    (row,) = tables(out)["replicate"]
    assert [int(row[name]) for name in ("gradients", "optimizer")] == pytest.approx(
        [STATE / 1e6, 2 * STATE / 1e6], abs=1
    )
    limits = "--max-steps 2 --epochs 9 --precision fp32 --balance off"
    ended = run_alone(PYTHON, "-c", PEAK, *TRAINING.split(), *limits.split(), cwd=folder)
    peak = float(ended.out.rpartition("peak MB ")[2])
    assert float(row["total"]) == pytest.approx(peak, rel=0.15), (row, peak)


@pytest.mark.parametrize("layout", ["shard", pytest.param("pipeline", marks=pytest.mark.thorough)])
def test_the_ranks_of_a_divided_model_take_what_was_estimated(mpirun, folder, layout):
    """Beyond their memory at startup, as the memory of an accelerator counts; within 25%."""
    out = estimate(folder, "2xgpu:2GB")
    rows = tables(out)[layout]
    rows = rows * (2 // len(rows))
    options = f"--layout {layout} --emulate-memory 0:2GB,1:2GB --max-steps 2 --epochs 9"
    # Without measured times, stages have equally many layers, whatever these take.
    options += " --balance off" if layout == "shard" else " --benchmark-seconds 0.5"
    mpirun(2, "kaitian-train", *TRAINING.split(), *options.split(), "--run-dir", "run")
    memory = summary_of(folder)["memory"]
    for row, measured in zip(rows, memory, strict=True):
        assert measured["peak_bytes"] / 1e6 == pytest.approx(float(row["total"]), rel=0.25)


@pytest.mark.thorough
def test_a_model_larger_than_the_machine_is_estimated(folder):
    """Of 107 GB, in parameters of 1 GB each."""
    settings = "--set width=16384 --set blocks=100"
    words = f"--memory 8xcuda:80GB --task planted_memory:build {settings}".split()
    out = run_alone("kaitian-plan", *words, cwd=folder).out
    assert "26,845,184,000 parameters, 107,381 MB" in out
    assert "layout replicate: does not fit: 431,2" in out
    assert "layout shard: fits (parameters sharded, too)" in out
    assert "layout pipeline: fits (8 stages)" in out


def test_a_loss_that_needs_values_leaves_the_activations_out(folder):
    (folder / "planted_memory.py").write_text(
        TASK.replace("mean(),", "mean() * float((batch.sum() + 1).item() > 0),").replace(
            "AdamW", "Adagrad"
        )
    )
    out = estimate(folder, "2xcpu:2GB")
    assert "note: the state of Adagrad is counted as Adam's" in out
    assert "note: activations are not in the figures, as the loss needs values" in out
    assert "layout replicate: may fit" in out
