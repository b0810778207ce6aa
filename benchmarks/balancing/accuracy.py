"""Compares held-out accuracy of uneven batches with one process at the same global batch.

    python benchmarks/balancing/accuracy.py --data-dir ~/data/cifar-10-batches-bin

For each seed it runs kaitian-train three times with the same seed, epochs, learning rate and global
batch: on several ranks of emulated kinds, some of them slowed down, with the batch sizes that
balancing gives them; in a single process; and in a single process with another memory format. The
last one does the same computation with different rounding, so the accuracy it gains or loses is
chance. Prints the accuracies, and whether the difference of the means is less than the spread of
the single process over the seeds. Other flags, such as --augment none, are passed on to
kaitian-train in all runs. KAITIAN (arXiv 2505.10183) lost 1.9 to 2.1 points.

A run on an otherwise idle machine with 2 cores takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAPER_LOST_POINTS = (1.9, 2.1)


@dataclass(frozen=True)
class Runs:
    """The `summary.json` of the runs of one seed."""

    seed: int
    uneven: dict[str, Any]
    single: dict[str, Any]
    rounded: dict[str, Any]
    """A single process with different rounding."""

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Held-out accuracy of the three runs, in percent."""
        runs = (self.uneven, self.single, self.rounded)
        return tuple(round(100 * run["val_accuracy"], 4) for run in runs)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options and the arguments for kaitian-train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data-dir", required=True, help="folder with the official files")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seeds", default="0,1,2", help="two or more, such as 0,1,2")
    parser.add_argument("--emulate-kinds", default="gpu,gpu,mlu,mlu", help="one per rank")
    parser.add_argument("--emulate-slowdown", default="2:3.0,3:3.0")
    options, handed_on = parser.parse_known_args()
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    if len(options.seeds) < 2:
        parser.error("--seeds: give two or more, for a spread")
    return options, handed_on


def train(ranks: int, arguments: list[str]) -> dict[str, Any]:
    """Run kaitian-train and return its summary; end this program if it does not finish."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mpirun", "-np", str(ranks), "kaitian-train", *arguments, "--run-dir", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        path = Path(folder) / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {}
    if done.returncode or not summary.get("finished"):
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}")
    return summary


def train_all(seed: int, options: argparse.Namespace, handed_on: list[str]) -> Runs:
    """Train the three runs of a seed, one after another."""
    names = ("model", "dataset", "data_dir", "epochs", "global_batch_size", "lr")
    alike = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    alike += [f"--seed={seed}", "--log-interval=60", *handed_on]
    uneven = [
        f"--emulate-kinds={options.emulate_kinds}",
        f"--emulate-slowdown={options.emulate_slowdown}",
    ]
    ranks = len(options.emulate_kinds.split(","))
    usual, other = "--memory-format=channels_last", "--memory-format=contiguous"
    start = time.perf_counter()
    several = train(ranks, [*alike, usual, *uneven])
    single = train(1, [*alike, usual])
    rounded = train(1, [*alike, other])
    print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    return Runs(seed, several, single, rounded)


def compare(pairs: list[Runs]) -> dict[str, Any]:
    """Return the means, the spread and the paired differences, in percent and points."""
    uneven, single, rounded = zip(*(pair.accuracies for pair in pairs), strict=True)
    differences = [one - other for one, other in zip(uneven, single, strict=True)]
    difference = statistics.mean(uneven) - statistics.mean(single)
    spread = max(single) - min(single)
    return {
        "uneven_mean": round(statistics.mean(uneven), 3),
        "single_mean": round(statistics.mean(single), 3),
        "rounded_mean": round(statistics.mean(rounded), 3),
        "difference": round(difference, 3),
        "difference_by_rounding": round(statistics.mean(rounded) - statistics.mean(single), 3),
        "single_spread": round(spread, 3),
        "single_std": round(statistics.stdev(single), 3),
        "within_spread": abs(difference) < spread,
        "paired_stderr": round(statistics.stdev(differences) / len(pairs) ** 0.5, 3),
        "seeds_lower": sum(one < 0 for one in differences),
    }


def show(pairs: list[Runs], result: dict[str, Any]) -> None:
    """Print the table and the verdict."""
    print("seed  uneven %  one process %  other rounding %  difference  final batch sizes")
    for pair in pairs:
        uneven, single, rounded = pair.accuracies
        shares = pair.uneven["batch_sizes"]
        columns = f"{uneven:8.2f}  {single:13.2f}  {rounded:16.2f}  {uneven - single:+10.2f}"
        print(f"{pair.seed:4}  {columns}  {shares}")
    means = f"{result['uneven_mean']:8.2f}  {result['single_mean']:13.2f}"
    print(f"mean  {means}  {result['rounded_mean']:16.2f}  {result['difference']:+10.2f}")
    print(f"rounding alone: {result['difference_by_rounding']:+.2f} points")
    print(
        f"one process over {len(pairs)} seeds: max - min {result['single_spread']:.2f} points, "
        f"standard deviation {result['single_std']:.2f}"
    )
    print(
        f"|difference of the means| {abs(result['difference']):.2f} points, "
        f"{'less' if result['within_spread'] else 'NOT less'} than max - min"
    )
    print(
        f"seed by seed: {result['difference']:+.2f} points, standard error "
        f"{result['paired_stderr']:.2f}; lower in {result['seeds_lower']} of {len(pairs)} seeds"
    )
    low, high = PAPER_LOST_POINTS
    print(f"(KAITIAN, arXiv 2505.10183, lost {low} to {high} points)")


def main() -> None:
    """Run the comparison."""
    options, handed_on = parse_arguments()
    print(
        f"{options.model} on {options.dataset}, {options.epochs} epochs, global batch "
        f"{options.global_batch_size}, lr {options.lr} {' '.join(handed_on)}\n"
        f"uneven (emulated): kinds {options.emulate_kinds}, slowed {options.emulate_slowdown}",
        flush=True,
    )
    pairs = [train_all(seed, options, handed_on) for seed in options.seeds]
    result = compare(pairs)
    show(pairs, result)
    runs = [
        {"seed": p.seed, "accuracies": p.accuracies, "batch_sizes": p.uneven["batch_sizes"]}
        for p in pairs
    ]
    emulated = any(pair.uneven["emulated"] for pair in pairs)
    given = {**vars(options), "handed_on": handed_on}
    given.pop("data_dir")
    torch_version = pairs[0].uneven["torch_version"]
    print(
        json.dumps({"emulated": emulated, **given, "torch": torch_version, **result, "runs": runs})
    )


if __name__ == "__main__":
    main()
