"""Counts the lines that turn a plain PyTorch script into one of this package.

    python benchmarks/conversions.py

The scripts are those of examples/conversions: three well-known shapes of a training loop, each
before and after. Prints the rows of the table in docs/your-own-training.md.
"""

import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples/conversions"
SHAPES = {
    "mnist": "a train and a test loop on one device, as in the usual MNIST script",
    "gpt": "iterations over random windows, with DDP and accumulation, as in nanoGPT",
    "imagenet": "DDP, meters, validation and checkpoints, as in the usual ImageNet script",
}


def count(name: str) -> tuple[int, int]:
    """Return the lines that git counts as added and as removed."""
    files = [str(FOLDER / f"{name}{end}.py") for end in ("_before", "")]
    command = ["git", "diff", "--no-index", "--numstat", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    added, removed, *_ = done.stdout.split()
    return int(added), int(removed)


def rows() -> list[str]:
    """Return the rows of the table."""
    found = []
    for name, shape in SHAPES.items():
        added, removed = count(name)
        before, after = (
            f"[{label}](../examples/conversions/{name}{end}.py)"
            for label, end in (("before", "_before"), ("after", ""))
        )
        found.append(f"| {shape} | {before}, {after} | +{added} -{removed} |")
    return found


if __name__ == "__main__":
    print("\n".join(rows()))
