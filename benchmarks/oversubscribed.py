"""Compares training with more ranks than cores to training with as many, at one global batch.

    python benchmarks/oversubscribed.py

Whole jobs of `kaitian-train` in turn, with 2 ranks and with 4 on the same cores: MobileNetV2 on
synthetic images, equal batches. A job's rate is its global batch over the median step, from
metrics.jsonl, without the first steps. The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

WARM_UP = 5


def samples_per_sec(ranks: int, options: argparse.Namespace) -> float:
    """Train with some ranks; return the samples per second."""
    with tempfile.TemporaryDirectory(prefix="kaitian-oversubscribed-") as folder:
        words = ["mpirun", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-np", str(ranks)]
        words += f"kaitian-train --model {options.model} --dataset synthetic --balance off".split()
        words += ["--global-batch-size", str(options.batch), "--max-steps", str(options.steps)]
        words += ["--run-dir", folder, "--log-interval", "0"]
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    readings = [line for line in map(json.loads, lines) if "validation" not in line]
    seconds = [line["step_time_sec"] for line in readings[WARM_UP:]]
    return options.batch / statistics.median(seconds)


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=256, help="samples per step over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    ratios = []
    for pair in range(options.pairs):
        order = (cores, 2 * cores) if pair % 2 else (2 * cores, cores)
        rates = {ranks: samples_per_sec(ranks, options) for ranks in order}
        ratios.append(rates[2 * cores] / rates[cores])
        print(
            f"{cores} ranks {rates[cores]:.1f} samples/s, {2 * cores} ranks "
            f"{rates[2 * cores]:.1f}: {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"twice as many ranks as cores / as many: {statistics.median(ratios):.3f} (median)")


if __name__ == "__main__":
    main()
