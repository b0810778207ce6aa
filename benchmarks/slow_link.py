"""Training over a slow link in each of the formats of --wire, against a link that is not slowed.

    python benchmarks/slow_link.py --link-mbit 100

Two emulated hosts with a core each train MobileNetV2 for 32x32 images on random samples. Needs
root: each host is a network namespace with an sshd, and the kernel's token bucket filter gives its
link a speed, in each direction. In one job, a few steps in fp32 over links that are not slowed
alternate with a few over slowed ones, in each of the formats: a core's speed may change by a third
within a minute. A ratio is of two such neighbors; times are medians of steps.
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
from typing import NamedTuple

from shaped_hosts import ShapedHosts, why_not_shaped

_TIMEOUT_SEC = 500
_WARM_UP_STEPS = 3
_STEPS_AT_ONCE = 4


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link-mbit", type=float, default=100.0, help="of each link, each way")
    parser.add_argument("--batch", type=int, default=16, help="samples of each rank and step")
    parser.add_argument("--rounds", type=int, default=6, help="of all formats")
    parser.add_argument("--formats", default="fp32,bf16,int8,int4", help="of --wire, with commas")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser


class Pair(NamedTuple):
    """The seconds of a step in fp32 over free links, and of one in a format over slow ones."""

    wire: str
    free: float
    slow: float


def train(links: Links, options: argparse.Namespace) -> list[Pair]:
    """Train on this rank; return all pairs, round by round."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    import kaitian_mpi
    from kaitian_mpi.distributed.reducer import GradientReducer
    from kaitian_mpi.distributed.residual import Residuals
    from kaitian_mpi.recipes.models import build_model

    world = kaitian_mpi.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build_model("mobilenetv2", 10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, y = torch.randn(options.batch, 3, 32, 32), torch.randint(10, (options.batch,))

    def slow_down(is_slow: bool) -> None:
        if world.rank == 0:
            links.ask(is_slow)
        dist.barrier()

    slow_down(True)
    dist.all_reduce(torch.zeros(1 << 20))  # for which the fastest way is chosen, on these links

    def step_sec(wire: str, is_slow: bool) -> float:
        """Return the median step."""
        slow_down(is_slow)
        residuals, seconds = Residuals(wire), []
        reducer = GradientReducer(model, residuals=residuals)
        for _ in range(_WARM_UP_STEPS + _STEPS_AT_ONCE):
            began = time.perf_counter()
            optimizer.zero_grad()
            reducer.arm(0.5)
            functional.cross_entropy(model(x), y).backward()
            reducer.finish()
            residuals.keep()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        reducer.close()
        return statistics.median(seconds[_WARM_UP_STEPS:])

    return [
        Pair(wire, step_sec("fp32", False), step_sec(wire, True))
        for _ in range(options.rounds)
        for wire in options.formats.split(",")
    ]


class Links:
    """How a rank has the links slowed down, by files that it shares with the benchmark."""

    def __init__(self, folder: Path) -> None:
        """Use two files of a folder that all hosts can read."""
        self._wanted, self._is = folder / "wanted", folder / "is"

    def ask(self, is_slow: bool) -> None:
        """Have the links slowed down, or not, and wait until they are. On one rank."""
        _write(self._wanted, str(is_slow))
        while _read(self._is) != str(is_slow):
            time.sleep(0.01)

    def obey(self, hosts: ShapedHosts, mbit_per_sec: float) -> None:
        """Do what the rank has asked for, if anything is to be done."""
        wanted = _read(self._wanted)
        if wanted and wanted != _read(self._is):
            if wanted == str(True):
                hosts.set_link_speed(mbit_per_sec)
            elif _read(self._is):
                hosts.lift_link_speed()
            _write(self._is, wanted)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _write(path: Path, text: str) -> None:
    whole = path.with_suffix(".new")
    whole.write_text(text)
    whole.replace(path)


def run_job(hosts: ShapedHosts, folder: Path, options: argparse.Namespace) -> list[Pair]:
    """Run the job on the hosts; return what its rank 0 has measured."""
    command = [sys.executable, os.path.abspath(__file__), "--worker", str(folder)]
    command += [f"--batch={options.batch}", f"--rounds={options.rounds}"]
    command += [f"--formats={options.formats}"]
    links = Links(folder)
    with hosts.start_ranks(command, _TIMEOUT_SEC, stdout=subprocess.PIPE) as job:
        while job.poll() is None:
            links.obey(hosts, options.link_mbit)
            time.sleep(0.02)
        assert job.stdout is not None
        lines = [line for line in job.stdout if line.startswith("[")]
    if job.returncode:
        sys.exit(f"slow_link.py: the job ended with code {job.returncode}")
    return [Pair(*each) for each in json.loads(lines[-1])]


def compare(options: argparse.Namespace) -> None:
    """Run the job, and print what each format reaches."""
    with (
        tempfile.TemporaryDirectory(prefix="kaitian-hosts-") as name,
        ShapedHosts(Path(name), [1, 1]) as hosts,
    ):
        pairs = run_job(hosts, Path(name), options)
    print(
        f"| gradients cross as | ms a step at {options.link_mbit:g} Mbit/s | samples/s over fp32 "
        "on links that are not slowed |\n|---|---|---|"
    )
    for wire in dict.fromkeys(pair.wire for pair in pairs):
        of_wire = [pair for pair in pairs if pair.wire == wire]
        slow = [1e3 * pair.slow for pair in of_wire]
        ratios = [pair.free / pair.slow for pair in of_wire]
        print(f"| {wire} | {_spread(slow, '.0f')} | {_spread(ratios, '.2f')} |")
    free = [1e3 * pair.free for pair in pairs]
    print(f"fp32 over links that are not slowed: {_spread(free, '.0f')} ms a step")


def _spread(values: list[float], how: str) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{how}} ({low:{how}} to {high:{how}})"


def main() -> None:
    """Compare, or be one of the ranks."""
    options = make_parser().parse_args()
    if options.worker:
        result = train(Links(Path(options.worker)), options)
        if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
            print(json.dumps(result), flush=True)
        return
    if reason := why_not_shaped():
        sys.exit(f"slow_link.py: {reason}")
    compare(options)


if __name__ == "__main__":
    main()
