"""Plots the batch sizes and step times of `steps.py events`.

    python benchmarks/balancing/plot.py events.txt docs/balance.png

The first file is that command's output. Needs matplotlib: pip install ".[report]".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

FAST, SLOW, STEP = "#1f5fa8", "#d1701e", "#444444"


def main() -> None:
    """Draw two panels over the steps: batch sizes and seconds."""
    source, target = map(Path, sys.argv[1:3])
    last = [line for line in source.read_text().splitlines() if line.startswith("{")][-1]
    found = json.loads(last)["events"]
    slow_at, well_at, count = found["steps"]
    steps = range(1, count + 1)
    figure, (shares, seconds) = plt.subplots(
        2, 1, figsize=(8, 5), sharex=True, layout="constrained"
    )
    for rank, (color, name) in enumerate(((FAST, "rank 0"), (SLOW, "rank 1"))):
        sizes = [share[rank] for share in found["shares"]]
        shares.step(steps, sizes, where="mid", color=color, label=name, linewidth=2)
    shares.set_ylabel("samples per step")
    shares.set_ylim(bottom=0)
    shares.set_title(
        "Batch sizes follow a rank that becomes three times slower (emulated)", loc="left"
    )
    seconds.plot(steps, found["seconds"], color=STEP, marker=".", linewidth=1, label="step")
    seconds.set_ylabel("seconds per step")
    warm = found["seconds"][2:]
    seconds.set_ylim(0, 1.1 * max(warm))
    seconds.set_xlabel("step (the first ones warm up)")
    for panel in (shares, seconds):
        panel.axvspan(slow_at, well_at, color=SLOW, alpha=0.12, label="rank 1 is slowed 3x")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    shares.legend(loc="lower right", ncols=3, frameon=False)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
