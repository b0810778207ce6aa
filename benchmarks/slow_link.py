"""Training over a slow link in each of the formats of --wire, against a link that is not slowed.

    python benchmarks/slow_link.py --link-mbit 100

Two emulated hosts with a core each train MobileNetV2 for 32x32 images on random samples. Needs
root: each host is a network namespace with an sshd, and the kernel's token bucket filter gives its
link a speed, in each direction. Jobs with and without it alternate; in one job, the formats do.
Times are medians of steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from emulated_hosts import EmulatedHosts, why_not_shaped

_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_WARM_UP_STEPS = 3
_STEPS_AT_ONCE = 4


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link-mbit", type=float, default=100.0, help="of each link, each way")
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank and step")
    parser.add_argument("--rounds", type=int, default=4, help="of all formats, in each job")
    parser.add_argument("--pairs", type=int, default=2, help="of jobs")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser


def train(wires: list[str], batch: int, rounds: int) -> dict[str, float]:
    """Return the median step of each format, in seconds, on this rank."""
    import torch
    from torch.nn import functional

    import kaitian_mpi
    from kaitian_mpi.backend.reducer import GradientReducer
    from kaitian_mpi.models import build_model
    from kaitian_mpi.wire.residual import Residuals

    kaitian_mpi.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model("mobilenetv2", 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    seconds: dict[str, list[float]] = {wire: [] for wire in wires}
    for _ in range(rounds):
        for wire in wires:
            residuals = Residuals(wire)
            reducer = GradientReducer(model, residuals=residuals)
            for step in range(_WARM_UP_STEPS + _STEPS_AT_ONCE):
                began = time.perf_counter()
                optimizer.zero_grad()
                reducer.arm(0.5)
                functional.cross_entropy(model(x), y).backward()
                reducer.finish()
                residuals.keep()
                optimizer.step()
                if step >= _WARM_UP_STEPS:
                    seconds[wire].append(time.perf_counter() - began)
            reducer.close()
    return {wire: statistics.median(each) for wire, each in seconds.items()}


def run_job(
    hosts: EmulatedHosts, wires: list[str], options: argparse.Namespace
) -> dict[str, float]:
    """Run one job on the hosts; return what its rank 0 has measured."""
    launch = ["mpirun", "--timeout", "200", "-np", "2", "--hostfile", str(hosts.hostfile)]
    launch += ["--bind-to", "none", *[word for name in _AS_ROOT for word in ("-x", f"{name}=1")]]
    command = [sys.executable, os.path.abspath(__file__), "--worker", ",".join(wires)]
    command += [f"--batch={options.batch}", f"--rounds={options.rounds}"]
    ended = subprocess.run(
        hosts.on_first(*launch, *command),
        env={**os.environ, **dict.fromkeys(_AS_ROOT, "1")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    result: dict[str, float] = json.loads(lines[-1])
    return result


def compare(options: argparse.Namespace) -> None:
    """Run the pairs of jobs, and print what each format reaches."""
    from kaitian_mpi.wire.formats import FORMATS

    wires = ["fp32", *FORMATS]
    ratios: dict[str, list[float]] = {wire: [] for wire in wires}
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as folder,
        EmulatedHosts(Path(folder), [1, 1]) as hosts,
    ):
        for _ in range(options.pairs):
            hosts.set_link_speed(options.link_mbit)
            slowed = run_job(hosts, wires, options)
            hosts.lift_link_speed()
            free = run_job(hosts, ["fp32"], options)["fp32"]
            print(f"link not slowed, fp32: {1e3 * free:.0f} ms a step", flush=True)
            for wire, seconds in slowed.items():
                ratios[wire].append(free / seconds)
                print(f"{options.link_mbit:g} Mbit/s, {wire}: {1e3 * seconds:.0f} ms a step")
    print("samples/s over those of fp32 on the link that is not slowed:")
    for wire, values in ratios.items():
        print(f"{wire}: {', '.join(f'{value:.2f}' for value in values)}")


def main() -> None:
    """Compare, or be one of the ranks."""
    options = make_parser().parse_args()
    if options.worker:
        result = train(options.worker.split(","), options.batch, options.rounds)
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
            print(json.dumps(result), flush=True)
        return
    if reason := why_not_shaped():
        sys.exit(f"slow_link.py: {reason}")
    compare(options)


if __name__ == "__main__":
    main()
