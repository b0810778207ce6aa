"""Compares held-out accuracy where gradients cross in fewer bits (--wire) with exact ones.

    python benchmarks/wire_accuracy.py --data-dir ~/data/cifar-10-batches-bin

Two emulated hosts with a rank each, of which the second is three times slower (emulated), so that
it gets a quarter of each global batch. For each seed there is a job for each format. Needs root:
each host is a network namespace with an sshd. Other flags are passed on to kaitian-train.
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

from shared.emulated_hosts import EmulatedHosts, why_not
from shared.launch import AS_ROOT


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options and the arguments for kaitian-train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--data-dir", required=True, help="folder with the official files")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--wires", default="fp32,int8,int4")
    return parser.parse_known_args()


def train(hosts: EmulatedHosts, arguments: list[str]) -> float:
    """Train on the hosts; return the held-out accuracy in percent."""
    launch = ["mpirun", "--timeout", "600", "--hostfile", str(hosts.hostfile), "--bind-to", "none"]
    launch += [word for name in AS_ROOT for word in ("-x", f"{name}=1")]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("kaitian-train")), *arguments]
        done = subprocess.run(
            hosts.on_first(*launch, *command, f"--run-dir={folder}/run"),
            env={**os.environ, **dict.fromkeys(AS_ROOT, "1")},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}exit code {done.returncode}")
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return 100 * float(summary["val_accuracy"])


def main() -> None:
    """Run the comparison."""
    options, handed_on = parse_arguments()
    if reason := why_not():
        sys.exit(f"wire_accuracy.py: {reason}")
    names = ("model", "dataset", "epochs", "global_batch_size", "lr")
    alike = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    alike += [f"--data-dir={Path(options.data_dir).absolute()}", "--emulate-slowdown=1:3"]
    alike += ["--log-interval=60", *handed_on]
    wires = options.wires.split(",")
    found: dict[str, list[float]] = {wire: [] for wire in wires}
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as folder,
        EmulatedHosts(Path(folder), [1, 1]) as hosts,
    ):
        for seed in options.seeds.split(","):
            for wire in wires:
                accuracy = train(hosts, [*alike, f"--seed={seed}", f"--wire={wire}"])
                found[wire].append(accuracy)
                print(f"seed {seed}, {wire}: {accuracy:.2f}%", flush=True)
    for wire, values in found.items():
        spread = f"({min(values):.2f} to {max(values):.2f})"
        print(f"{wire}: mean {statistics.mean(values):.2f}% {spread}")


if __name__ == "__main__":
    main()
