"""What watching a run costs its steps: each case is switched on and off in turn inside one run.

    mpirun -np 2 python benchmarks/observing.py
    mpirun -np 2 python benchmarks/observing.py --case dashboard --pairs 20 --seconds 5

Each block of steps is compared with its neighbors, so that a host that becomes slower or faster
matters little. Each rank keeps one core busy: with as many ranks as cores, no core is idle.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import kaitian_mpi

SETTLE_SEC = 1.0
"""After a switch; these steps do not count."""
MAX_STEPS = 10**6
WATCH = """
import re, sys, time, urllib.request
address, shown = sys.argv[1], None
def load(name):
    with urllib.request.urlopen(address + name) as answer:
        return answer.read().decode()
while True:
    state = load("state.json")
    if state != shown:
        for figure in re.findall(r'img src="([^"]+)"', load("update.html")):
            load(figure)
        shown = state
    time.sleep(2)
"""


class Dashboard:
    """A browser that watches the page, against a page that nobody watches.

    The watcher asks for what the page's own script asks for, and for all figures at each change.
    """

    settings: dict[str, Any] = {"dashboard": 0}  # noqa: RUF012

    def __init__(self, printed: str, folder: Path) -> None:
        address = re.search(r"dashboard: (http://\S+) ", printed)
        assert address is not None, printed
        (self._server,) = (
            child
            for child in psutil.Process().children()
            if "kaitian_mpi.observe.dashboard" in child.cmdline()
        )
        self._watcher = psutil.Popen([sys.executable, "-c", WATCH, address[1]])
        self._watcher.nice(19)  # stands for one on another computer
        self._watcher.suspend()
        self._used = self._cpu_sec()
        self.cpu_sec = 0.0

    def on(self) -> None:
        """Begin to watch."""
        self._used = self._cpu_sec()
        self._watcher.resume()

    def off(self) -> None:
        """Stop watching."""
        self._watcher.suspend()
        self.cpu_sec += self._cpu_sec() - self._used

    def close(self) -> None:
        """End the watcher."""
        self._watcher.kill()
        self._watcher.wait()

    def _cpu_sec(self) -> float:
        times = self._server.cpu_times()
        return times.user + times.system


CASES = {"dashboard": Dashboard}


def make_task(width: int) -> kaitian_mpi.Task:
    """Return a task that computes for some ten milliseconds a step."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) if i % 2 == 0 else nn.ReLU() for i in range(8)]
    inputs = torch.randn(4096, width)
    data = torch.utils.data.TensorDataset(inputs, inputs.sign())

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    return kaitian_mpi.Task(model=nn.Sequential(*layers), data=data, optimizer=optimizer, loss=loss)


class Blocks:
    """Switches a case in turn, and collects the steps' times of each block; on rank 0."""

    def __init__(self, case: Any, pairs: int, seconds: float) -> None:
        self._case, self._left, self._seconds = case, 2 * pairs, seconds
        self.blocks: list[tuple[bool, list[float]]] = [(False, [])]
        self._since = self._last = time.perf_counter()

    def step_done(self) -> bool:
        """Note a step; return whether all blocks are done."""
        now = time.perf_counter()
        if now - self._since > SETTLE_SEC:
            self.blocks[-1][1].append(now - self._last)
        self._last = now
        if now - self._since > SETTLE_SEC + self._seconds and self.blocks[-1][1]:
            is_on = not self.blocks[-1][0]
            (self._case.on if is_on else self._case.off)()
            self.blocks.append((is_on, []))
            self._since = self._last = time.perf_counter()
        return len(self.blocks) > self._left + 1

    def ratios(self) -> list[float]:
        """Return the mean step with the case on over that of the blocks before and after."""
        means = [statistics.fmean(steps) for _, steps in self.blocks[: self._left + 1]]
        return [
            means[i] / statistics.fmean((means[i - 1], means[i + 1]))
            for i in range(1, len(means) - 1, 2)
        ]


def interval(values: list[float]) -> tuple[float, float]:
    """Return a 95% interval of the median, by resampling."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(2000)
    )
    return medians[50], medians[1949]


def measure(name: str, pairs: int, seconds: float, width: int) -> dict[str, Any] | None:
    """Run one case; return what it costs, on rank 0."""
    world = kaitian_mpi.init()
    # Only rank 0 writes.
    folder = Path(tempfile.mkdtemp(prefix="kaitian-observing-")) if world.rank == 0 else Path("-")
    seen = io.StringIO()
    case_type = CASES[name]
    settings = {"run_dir": str(folder / "run"), "balance": "off", "log_interval": 1.0}
    settings |= {"max_steps": MAX_STEPS, "epochs": MAX_STEPS, **case_type.settings}
    done = torch.zeros(1)
    with contextlib.redirect_stdout(seen):
        training = kaitian_mpi.Training(lambda: make_task(width), **settings)
        case = case_type(seen.getvalue(), folder) if world.rank == 0 else None
        blocks = Blocks(case, pairs, seconds) if case else None
        try:
            with training:
                for step in training:
                    if blocks is not None:
                        done[0] = blocks.step_done()
                    if step.number % 20 == 0:
                        torch.distributed.all_reduce(done)
                        if done[0]:
                            break
        finally:
            if case is not None:
                case.close()
                shutil.rmtree(folder, ignore_errors=True)
    if blocks is None:
        return None
    ratios = blocks.ratios()
    low, high = interval(ratios)
    steps = [sec for is_on, block in blocks.blocks for sec in block if not is_on]
    watched = sum(sum(block) for is_on, block in blocks.blocks if is_on)
    return {
        "case": name,
        "ranks": world.size,
        "cores": psutil.cpu_count(),
        "pairs": len(ratios),
        "step_ms": round(1000 * statistics.fmean(steps), 2),
        "cost_percent": round(100 * (statistics.median(ratios) - 1), 2),
        "cost_percent_95": [round(100 * (bound - 1), 2) for bound in (low, high)],
        "core_percent_used": round(100 * case.cpu_sec / watched, 1) if watched else None,
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--case", choices=CASES, default="dashboard")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each block")
    parser.add_argument("--width", type=int, default=1024, help="of the layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.case, options.pairs, options.seconds, options.width)
    if found is not None:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
