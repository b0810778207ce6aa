"""Measures what `--timeline` costs: steps that are recorded and steps that are not, alternating.

    mpirun -np 2 python benchmarks/timeline.py

Prints the ratio of their times, recorded / not recorded: the median over pairs of neighboring
steps, and the quartiles. By default a tenth of the steps is recorded, so a run pays a tenth of
that. Also prints what a hook costs without a timeline, what recording an event costs, and how long
it takes to gather the ranks' events, which happens every ten seconds or less often.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import timeit
from pathlib import Path

import torch
from shared.comparison import quartiles, ratios
from torch import nn

import kaitian_mpi
from kaitian_mpi.observe.timeline import recorder
from kaitian_mpi.observe.timeline.recorder import (
    Recorder,
    start_recording,
    stop_recording,
)
from kaitian_mpi.recipes.models import build_model
from kaitian_mpi.runtime.watchdog import enter_phase

CALLS = 100_000
WARM_UP = 6


def make_task(model: str) -> kaitian_mpi.Task:
    """Return the training of a model on random images of 32x32."""
    torch.manual_seed(0)
    images, labels = torch.randn(512, 3, 32, 32), torch.randint(10, (512,))
    data = torch.utils.data.TensorDataset(images, labels)
    network = build_model(model, 10)
    network(images[:2])  # its lazy layers, if any, learn the number of channels

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    return kaitian_mpi.Task(model=network, data=data, loss=loss, optimizer=optimizer)


def time_steps(model: str, batch: int, pairs: int, folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of the steps that are recorded, and of those that are not. Collective."""
    settings = {"balance": "off", "run_dir": str(folder), "log_interval": 1e9, "check_every": 0}
    steps = WARM_UP + 2 * pairs
    seconds: tuple[list[float], list[float]] = ([], [])
    with kaitian_mpi.Training(
        make_task(model),
        **settings,
        global_batch_size=batch * kaitian_mpi.init().size,
        epochs=steps,
        max_steps=steps,
        timeline=True,
        timeline_every=1,
    ) as training:
        since = time.perf_counter()
        for step in training:
            now = time.perf_counter()
            if step.number == 1:
                recording = recorder.current
                assert recording is not None
            if step.number > WARM_UP:
                seconds[recorder.current is None].append(now - since)
            # Which of the two comes first changes from pair to pair.
            if step.number % 4 in (0, 1):
                stop_recording()
            else:
                start_recording(recording)
            since = time.perf_counter()
        start_recording(recording)
    return seconds


def microseconds(statement: str) -> float:
    """Return how long a statement takes."""
    names = {"recorder": recorder, "enter_phase": enter_phase}
    return min(timeit.repeat(statement, globals=names, number=CALLS, repeat=5)) / CALLS * 1e6


def print_costs_of_events() -> None:
    """Print what a hook costs while it is off, and while it is on."""
    empty = microseconds("pass")
    check = microseconds("if recorder.current is not None: pass") - empty
    phase_off = microseconds("enter_phase('forward', step=1)")
    made = Recorder(2, capacity=1 << 30)
    start_recording(made)
    unsampled = microseconds("enter_phase('forward', step=1)")
    sampled = microseconds("enter_phase('forward', step=2)")
    made.take()
    stop_recording()
    print(
        f"off: {check:.3f} us a check. A phase: {phase_off:.2f} us off, {unsampled:.2f} us in a "
        f"step that is not sampled, {sampled:.2f} us in one that is"
    )


def print_file(path: Path, steps: int, size: int) -> None:
    """Print how many events a step has, and how long gathering them took."""
    trace = json.loads(path.read_text())
    spans = [event for event in trace if event["ph"] == "X"]
    sharing = [span["dur"] / 1e3 for span in spans if span["name"] == "sharing the timeline"]
    print(
        f"{len(spans) / steps / size:.0f} events and {path.stat().st_size / steps / size:,.0f} "
        f"bytes a recorded step and rank; sharing {statistics.median(sharing):.1f} ms"
    )


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilenetv2", help="a built-in model")
    parser.add_argument("--batch", type=int, default=8, help="images per rank")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of steps")
    options = parser.parse_args()
    world = kaitian_mpi.init()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        on, off = time_steps(options.model, options.batch, options.pairs, folder)
        if world.rank:
            return
        more = statistics.median(1e6 * (a - b) for a, b in zip(on, off, strict=True))
        print(
            f"{options.model}, {world.size} ranks, step {1e3 * statistics.median(off):.2f} ms, "
            f"{len(on)} pairs: recorded / not recorded {quartiles(ratios(on, off), '.4f')}, "
            f"difference {more:+.0f} us"
        )
        print_file(folder / "timeline.json", len(on), world.size)
    print_costs_of_events()


if __name__ == "__main__":
    main()
