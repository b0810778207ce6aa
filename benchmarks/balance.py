"""All figures of load balancing: on two cores, with emulated kinds and slowness.

    python benchmarks/balance.py [--data-dir ~/data/cifar-10-batches-bin] [--plot docs/balance.png]

Runs the scripts in benchmarks/balancing one after the other, a quarter of an hour in all, and as
long again for the accuracy, which needs CIFAR-10. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def show(name: str, figure: str, asked: str) -> None:
    """Print one figure and what was asked for."""
    print(f"  {name:58} {figure:26} (asked: {asked})", flush=True)


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", default="", help="CIFAR-10's files, for the accuracy")
    parser.add_argument("--plot", type=Path, help="where to draw the events")
    options = parser.parse_args()
    script = HERE / "steps.py"

    part = found(run(*STEPS, script, "sum", "--rounds", 5, "--steps", 3))["sum"]
    show("together / sum of the parts", quartiles(part["sum_of_parts"]), "0.97 or more")
    show("equal shares' step / ours", quartiles(part["against_equal"]), "1.9 or more")
    part = found(run(*STEPS, script, "exhaustive", "--rounds", 4))["exhaustive"]
    text = f"{part['planned_over_best']:.3f}, {part['planned']} to {part['best']}"
    show("planned / best of all fixed splits", text, "1.03 or less")
    part = found(run(*STEPS, script, "steady", "--batch", 64, "--rounds", 6))["steady"]
    show("adaptive / static, nothing changes", quartiles(part["adaptive_over_static"]), "1.01")
    output = run(*STEPS, script, "events")
    part = found(output)["events"]
    show("steps until 0.95 of the optimum: slow, well", str(part["first_steps_at_0.95"]), "15")
    show("efficiency from then on", str(part["efficiency_from_step_15_on"]), "0.95 or more")
    show("plans for both", str(part["plans"]), "4 or fewer")
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
    print("device kinds and slowness: emulated")


def quartiles(values: list[float]) -> str:
    """Return the median, and the quartiles."""
    low, middle, high = values
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
