"""One rank under `data_parallel` against stock DDP and plain training, alternating.

    mpirun -np 1 python benchmarks/on_gpu/alone.py --devices cuda:0

Prints JSON: the medians of the step times, plain, of stock DDP over the vendor's library (gloo on
a CPU) and over kaitian, and of `data_parallel`; `ratio` is `data_parallel` / stock DDP over the
library, the median over neighboring steps, and the quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kaitian_mpi
from kaitian_mpi.recipes.models import build_model


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=256, help="images per step")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of steps")
    options = parser.parse_args()
    world = kaitian_mpi.init(devices=options.devices)
    images = torch.randn(options.batch, 3, 32, 32).to(world.device)
    labels = torch.randint(10, (options.batch,)).to(world.device)
    library = dist.new_group(backend=world.device_kind.vendor_backend or "gloo")
    wrap = {
        "plain": lambda model: model,
        "library": lambda model: DistributedDataParallel(model, process_group=library),
        "kaitian": DistributedDataParallel,
        "data_parallel": kaitian_mpi.data_parallel,
    }
    trained = {n: w(build_model(options.model, 10).to(world.device)) for n, w in wrap.items()}
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=1e-3) for name, m in trained.items()}

    def step(name: str) -> float:
        world.synchronize()
        began = time.perf_counter()
        optimizers[name].zero_grad()
        nn.functional.cross_entropy(trained[name](images), labels).backward()
        optimizers[name].step()
        world.synchronize()
        return time.perf_counter() - began

    seconds: dict[str, list[float]] = {name: [] for name in trained}
    for pair in range(-5, options.pairs):
        for name in list(trained) if pair % 2 else list(reversed(trained)):
            took = step(name)
            if pair >= 0:
                seconds[name].append(took)
    ratios = [k / p for k, p in zip(seconds["data_parallel"], seconds["library"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    found = {f"{name}_sec": statistics.median(times) for name, times in seconds.items()}
    found |= {"ratio": middle, "quartiles": [low, high]}
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
