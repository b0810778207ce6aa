"""All load-balancing figures, measured on two cores with emulated device kinds and slowdowns.

    python benchmarks/balance.py [--data-dir ~/data/cifar-10-batches-bin] [--plot docs/balance.png]

Runs the scripts in benchmarks/balancing one after another, which takes a quarter of an hour, and
as long again for the accuracy, which needs CIFAR-10. The machine must be otherwise idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from shared.launch import BENCHMARKS, add_to_path

HERE = Path(__file__).parent / "balancing"
STEPS = ["mpirun", "-np", "2", "--map-by", "core", "--bind-to", "core", sys.executable]


def run(*command: object) -> str:
    """Run a command and return what it printed."""
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def found(output: str) -> dict[str, Any]:
    """Return the last line of JSON."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def show(name: str, figure: str, target: str) -> None:
    """Print one figure and its target."""
    print(f"  {name:58} {figure:26} (target: {target})", flush=True)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="", help="CIFAR-10's folder, for the accuracy")
    parser.add_argument("--plot", type=Path, help="file for the plot of slowdown and recovery")
    options = parser.parse_args()
    add_to_path(BENCHMARKS)
    script = HERE / "steps.py"

    part = found(run(*STEPS, script, "sum", "--rounds", 5, "--steps", 3))["sum"]
    show(
        "all ranks together / sum of each rank alone",
        quartiles(part["sum_of_parts"]),
        "0.97 or more",
    )
    show(
        "step with equal batches / with planned batches",
        quartiles(part["against_equal"]),
        "1.9 or more",
    )
    part = found(run(*STEPS, script, "exhaustive", "--rounds", 4))["exhaustive"]
    text = f"{part['planned_over_best']:.3f}, {part['planned']} to {part['best']}"
    show("planned split / best fixed split", text, "1.03 or less")
    part = found(run(*STEPS, script, "steady", "--batch", 64, "--rounds", 6))["steady"]
    show("adaptive / static at constant speed", quartiles(part["adaptive_over_static"]), "1.01")
    output = run(*STEPS, script, "events")
    part = found(output)["events"]
    show(
        "steps until 0.95 of the optimum: slowdown, recovery",
        str(part["first_steps_at_0.95"]),
        "15",
    )
    show("efficiency after step 15", str(part["efficiency_from_step_15_on"]), "0.95 or more")
    show("new plans for both", str(part["plans"]), "4 or fewer")
    if options.plot:
        source = options.plot.with_suffix(".txt")
        source.write_text(output)
        run(sys.executable, HERE / "plot.py", source, options.plot)
        source.unlink()
    part = found(run(sys.executable, HERE / "forecast.py"))
    for kinds, forecast, measured, off in part["forecast"]:
        show(" + ".join(kinds), f"{forecast} / {measured} samples/s, {off:+.1%}", "10%")
    if options.data_dir:
        print(run(sys.executable, HERE / "accuracy.py", "--data-dir", options.data_dir))
    print("device kinds and slowdowns: emulated")


def quartiles(values: list[float]) -> str:
    """Format the median and the quartiles."""
    low, middle, high = values
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
