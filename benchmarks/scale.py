"""Shows what a step costs besides computing as the ranks of a job grow, and forecasts more.

    python benchmarks/scale.py                 # 4 to 48 ranks on this machine
    python benchmarks/scale.py --ranks 4 32    # only these

Each rank trains 64 KB of parameters with `Training` on a device that sleeps for each sample
(emulated), so that many ranks share a few cores: real processes, real MPI, the real backend, and
everything that `Training` does in a step. The overhead is a step's time less the sleep.

On one machine the ranks take turns on the cores, so the overhead grows with the CPU time of all of
them. For comparison, the same ranks train by the shortest loop that does the same: plain torch and
one allreduce of mpi4py's, waited for by sleeping, without balancing, metrics or a watchdog.

On a cluster each rank has cores of its own; there its overhead is its own CPU time, which grows
with the ranks only by what it looks at of each, plus the sum of the gradients, which `--latency-us`
and `--gbit` describe. What is looked at of each rank is measured at the forecast sizes themselves,
in one process: the rebalancer is a pure function of all ranks' times.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

STEP_SEC = 0.1
SAMPLES = 8  # of each rank per step
PARAMETERS = 128  # squared: 64 KB
WARM_UP, STEPS = 10, 40
FORECAST_RANKS = (1_000, 10_000)


def train_here() -> None:
    """Train on this rank; world rank 0 prints a line of JSON. Collective."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import kaitian_mpi
    from kaitian_mpi.mpi.exchange import gather_values

    world = kaitian_mpi.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_SEC / SAMPLES * len(batch))
        return model(batch).square().mean()

    task = kaitian_mpi.Task(
        model=nn.Linear(PARAMETERS, PARAMETERS, bias=False),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        data=torch.randn(100_000, PARAMETERS),
        loss=loss_of,
    )
    seconds, slept, cpu = [], [], []
    batch = SAMPLES * world.size
    with kaitian_mpi.Training(task, global_batch_size=batch, log_interval=1e9) as training:
        steps = iter(training)
        for _ in range(WARM_UP):
            next(steps)
        for _ in range(STEPS):
            began, began_cpu = time.perf_counter(), time.process_time()
            step = next(steps)
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - began_cpu)
            slept.append(STEP_SEC / SAMPLES * max(step.batch_sizes))
        overheads = [took - sleep for took, sleep in zip(seconds, slept, strict=True)]
        own = statistics.median(overheads), statistics.median(cpu)
        by_rank = gather_values(world.comm, own)
    if world.rank == 0:
        low, middle, high = statistics.quantiles(overheads, n=4)
        result = {
            "ranks": world.size,
            "overhead_sec": [low, middle, high],
            "cpu_sec": statistics.mean(cpu_sec for _, cpu_sec in by_rank),
            "batch_sizes": sorted(set(step.batch_sizes)),
        }
        print(json.dumps(result))
    dist.destroy_process_group()


def train_plainly_here() -> None:
    """Train on this rank by the shortest loop; world rank 0 prints a line of JSON. Collective."""
    import torch
    from mpi4py import MPI
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(PARAMETERS, PARAMETERS, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(SAMPLES, PARAMETERS)
    overheads, cpu = [], []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        time.sleep(STEP_SEC)
        began_cpu = time.process_time()
        model(data).square().mean().backward()
        gradient = model.weight.grad
        assert gradient is not None
        backward_cpu = time.process_time()
        request = MPI.COMM_WORLD.Iallreduce(MPI.IN_PLACE, gradient.numpy())
        nap_sec = 20e-6
        while not request.Test():
            time.sleep(nap_sec)
            nap_sec = min(1.2 * nap_sec, 1e-3)
        summed_cpu = time.process_time()
        optimizer.step()
        optimizer.zero_grad()
        overheads.append(time.perf_counter() - began - STEP_SEC)
        cpu.append((backward_cpu - began_cpu, summed_cpu - backward_cpu))
    own = [statistics.mean(part) for part in zip(*cpu[WARM_UP:], strict=True)]
    by_rank = MPI.COMM_WORLD.gather(own)
    if by_rank is not None:
        computing, summing = (statistics.mean(part) for part in zip(*by_rank, strict=True))
        result = {
            "overhead_sec": statistics.median(overheads[WARM_UP:]),
            "computing_sec": computing,
            "summing_sec": summing,
        }
        print(json.dumps(result))


def run(ranks: int, how: str) -> dict[str, Any]:
    """Train on some ranks; return what world rank 0 has printed."""
    words = ["mpirun", "--map-by", ":OVERSUBSCRIBE", "-np", str(ranks), "--timeout", "580"]
    words += [sys.executable, __file__, "--rank", how]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def rebalancing_sec(ranks: int) -> float:
    """Return the seconds a rank takes in each step to look at the times of all ranks."""
    from kaitian_mpi.balance.cost_model import RankCost
    from kaitian_mpi.balance.rebalancer import RankSteps, Rebalancer
    from kaitian_mpi.balance.stragglers import StragglerDetector

    chance = np.random.default_rng(0)
    cost = RankCost(0.01, STEP_SEC / SAMPLES)
    rebalancer = Rebalancer([cost] * ranks, [SAMPLES] * ranks)
    stragglers = StragglerDetector(ranks, [cost] * ranks)
    once, samples = np.ones(ranks, int), np.full(ranks, SAMPLES)
    seconds = []
    for step in range(1, 61):
        work = cost.seconds(SAMPLES) * chance.normal(1, 0.02, ranks)
        steps = RankSteps(once, samples, work, work.max() - work)
        began = time.perf_counter()
        stragglers.observe(step, steps, np.zeros(ranks))
        rebalancer.observe(steps)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def forecast(ranks: int, base_sec: float, options: argparse.Namespace) -> None:
    """Print the forecast overhead of a step on ranks with cores of their own."""
    looked_at = rebalancing_sec(ranks)
    rounds = 2 * math.ceil(math.log2(ranks))
    report_sec = 48 * ranks * 8 / (options.gbit * 1e9)
    gradients_sec = 2 * options.mb * 1e6 * 8 / (options.gbit * 1e9)
    latency_sec = 2 * rounds * options.latency_us * 1e-6  # of the gradients and of the reports
    total = base_sec + looked_at + latency_sec + report_sec + gradients_sec
    print(
        f"| {ranks:,} | {1e3 * base_sec:.1f} | {1e3 * looked_at:.1f} | {1e3 * latency_sec:.1f} | "
        f"{1e3 * report_sec:.2f} | {1e3 * gradients_sec:.1f} | {1e3 * total:.1f} |"
    )


def main() -> None:
    """Run the benchmark, or with --rank one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 48])
    parser.add_argument("--latency-us", type=float, default=20.0, help="of a message")
    parser.add_argument("--gbit", type=float, default=25.0, help="of a rank's network, per second")
    parser.add_argument("--mb", type=float, default=100.0, help="of gradients in the forecast")
    parser.add_argument("--rank", choices=["training", "plain"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        (train_here if options.rank == "training" else train_plainly_here)()
        return
    print(
        "| ranks | overhead of a step, ms | quartiles | CPU time of a rank, ms | samples | "
        "plain loop, ms | its CPU time: forward and backward, sum; ms |"
    )
    print("|---|---|---|---|---|---|---|")
    sizes, cpu = [], []
    for ranks in options.ranks:
        result, plain = run(ranks, "training"), run(ranks, "plain")
        low, middle, high = (1e3 * value for value in result["overhead_sec"])
        plain_ms = {name: 1e3 * value for name, value in plain.items()}
        sizes.append(ranks)
        cpu.append(result["cpu_sec"])
        print(
            f"| {ranks} | {middle:.1f} | {low:.1f} to {high:.1f} | {1e3 * cpu[-1]:.2f} | "
            f"{result['batch_sizes']} | {plain_ms['overhead_sec']:.1f} | "
            f"{plain_ms['computing_sec']:.2f}, {plain_ms['summing_sec']:.2f} |",
            flush=True,
        )
    if len(sizes) < 2:
        return
    slope, base = np.polyfit(sizes, cpu, 1)
    print(f"CPU time of a rank per step: {1e3 * base:.2f} ms + {1e6 * slope:.1f} us x ranks")
    print(
        f"\nforecast, each rank on cores of its own, {options.mb:g} MB of gradients, "
        f"{options.gbit:g} Gbit/s, {options.latency_us:g} us a message; ms of a step, nothing "
        "hidden behind computing"
    )
    print("| ranks | own work | all ranks' times | latency | reports | gradients | sum |")
    print("|---|---|---|---|---|---|---|")
    for ranks in FORECAST_RANKS:
        forecast(ranks, base, options)


if __name__ == "__main__":
    main()
