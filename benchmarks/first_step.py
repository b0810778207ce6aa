"""Times a training's start: until the table of its ranks, and until its first step has ended.

    python benchmarks/first_step.py [--ranks 4] [--pairs 5] [--model mobilenetv2]

Starts `kaitian-train -n` in turns with ranks that are forked from a process with torch loaded, and
with ranks that load it themselves (KAITIAN_FORK_RANKS=0). Prints of each the seconds since the
command was started, and of processors until its end: the median, and the quartiles.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass

from shared.comparison import quartiles, ratios

KINDS = {"forked": "1", "not forked": "0"}


@dataclass(frozen=True)
class Start:
    """The seconds of one start."""

    table: float
    """Until the table of ranks."""
    step: float
    """Until the end of the first step."""
    processors: float
    """Of all its processes, until the end of the job."""


def measure(options: argparse.Namespace, forks: str) -> Start:
    """Start a job of one step."""
    command = ["kaitian-train", "-n", str(options.ranks), "--devices", "cpu", "--max-steps", "1"]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    table = step = 0.0
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [*command, "--model", options.model, "--run-dir", f"{folder}/run"],
            env={**os.environ, "KAITIAN_FORK_RANKS": forks},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as job,
    ):
        for line in job.stdout or ():
            since = time.perf_counter() - began
            if line.startswith("| rank") and not table:
                table = since
            if "| step 1" in line:
                step = since
    if job.returncode or not step:
        raise SystemExit(f"the job ended with code {job.returncode}")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    processors = ended.ru_utime + ended.ru_stime - used.ru_utime - used.ru_stime
    return Start(table, step, processors)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="mobilenetv2")
    options = parser.parse_args()
    starts: dict[str, list[Start]] = {kind: [] for kind in KINDS}
    for turn in range(-1, options.pairs):  # the first pair fills the system's cache of files
        for kind in list(KINDS) if turn % 2 else reversed(KINDS):
            start = measure(options, KINDS[kind])
            if turn >= 0:
                starts[kind].append(start)
    for name in ("table", "step", "processors"):
        by_kind = {kind: [getattr(start, name) for start in starts[kind]] for kind in KINDS}
        texts = [f"{kind} {quartiles(values, '.1f')} s" for kind, values in by_kind.items()]
        ratio = quartiles(ratios(*by_kind.values()), ".2f")
        print(f"{name}: {', '.join(texts)}, ratio {ratio}", flush=True)


if __name__ == "__main__":
    main()
