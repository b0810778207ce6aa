"""Compares kaitian-plan's forecast for every subset of device kinds with measured throughput.

    python benchmarks/balancing/forecast.py

The kinds are emulated, with one rank each on its own core. There must not be more kinds than cores:
ranks that share a core are faster alone than together. Each subset is trained by kaitian-train on
the same cores. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from kaitian_mpi.balance.measurements import plan_job, read_measurements

SETTLED = 15  # earlier steps are warm-up, and the plan may still change in them


def launch(cores: list[int], command: list[str], folder: Path) -> None:
    """Run a command with one rank on each of these cores; print its output if it fails."""
    words = ["mpirun", "--map-by", ":oversubscribe", "--bind-to", "none"]
    for core in cores:
        words += ["-np", "1", "taskset", "-c", str(core), *command, ":"]
    environment = {k: v for k, v in os.environ.items() if "rmaps_default_mapping" not in k}
    done = subprocess.run(
        words[:-1], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed\n{done.stdout}\n{done.stderr}")


def slowdown(factors: list[float]) -> list[str]:
    """Return the flags that slow ranks down."""
    pairs = [f"{rank}:{factor}" for rank, factor in enumerate(factors) if factor > 1]
    return ["--emulate-slowdown", ",".join(pairs)] if pairs else []


def measured_rate(folder: Path) -> float:
    """Return the median samples per second of a run after its warm-up."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    readings = [line for line in lines if "validation" not in line]
    return statistics.median(line["samples_per_sec"] for line in readings[SETTLED:])


def main() -> None:
    """Forecast, then train each subset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--kinds", default="gpu,mlu")
    parser.add_argument("--factors", default="1,3")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    factors = dict(zip(kinds, map(float, options.factors.split(",")), strict=True))
    core = {kind: number for number, kind in enumerate(kinds)}
    common = ["--model", options.model, "--dataset", "synthetic"]
    common += ["--global-batch-size", str(options.batch), "--memory-format", "channels_last"]
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        emulated = ["--emulate-kinds", options.kinds, *slowdown(list(factors.values()))]
        command = ["kaitian-plan", *common, *emulated, "--save", "measured.json"]
        launch([core[kind] for kind in kinds], command, folder)
        planned = plan_job(read_measurements(folder / "measured.json"), None)
        settings = ["--keep-all", "--max-steps", str(options.steps), "--log-interval", "0"]
        for number, (taken, cast) in enumerate(planned.subsets.forecasts.items()):
            run = f"run{number}"
            emulated = ["--emulate-kinds", ",".join(taken)]
            emulated += slowdown([factors[kind] for kind in taken])
            command = ["kaitian-train", *common, *settings, *emulated, "--run-dir", run]
            launch([core[kind] for kind in taken], command, folder)
            rate = measured_rate(folder / run)
            off = cast.samples_per_sec / rate - 1
            found.append([taken, round(cast.samples_per_sec, 1), round(rate, 1), round(off, 4)])
            print(f"{' + '.join(taken):20} forecast {found[-1][1]}, measured {found[-1][2]}")
    worst = max(abs(row[3]) for row in found)
    print(f"worst error {worst:.1%} (kinds and their speed emulated)")
    print(json.dumps({"forecast": found, "worst_error": worst}), flush=True)


if __name__ == "__main__":
    main()
