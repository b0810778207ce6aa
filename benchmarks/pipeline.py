"""Measures layout pipeline on a GPT.

    mpirun -np 2 python benchmarks/pipeline.py        (against its bound)
    python benchmarks/pipeline.py --link-mbit 100     (against replicate over a slow link; as root)

The bound: two emulated kinds with a core each, one of them three times slower, and 16 micro-batches
take at least sum(f + b) + 15 max(f + b) over the stages, and the slowest optimizer's step. The
parts are timed in the same steps, without what a rank waits.

Over a slow link: two emulated hosts with a rank each, of two emulated kinds, train in fp32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

VOCABULARY, LENGTH = 256, 64
_TIMEOUT_SEC = 900


def make_task(width: int, layers: int, batch: int) -> Any:
    """Return the training of a GPT, a chain of layers, to predict random tokens."""
    import torch
    from shared.gpt import Embeddings, loss_of, make_optimizer
    from torch import nn

    import kaitian_mpi

    class Block(nn.TransformerEncoderLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
            return super().forward(x, src_mask=mask, is_causal=True)

    torch.manual_seed(0)
    first = Embeddings(VOCABULARY, LENGTH, width)
    blocks = [Block(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)]
    return kaitian_mpi.Task(
        model=nn.Sequential(first, *blocks, nn.Linear(width, VOCABULARY)),
        optimizer=make_optimizer,
        data=torch.randint(VOCABULARY, (400 * batch, LENGTH + 1)),
        loss=loss_of,
        clip_norm=1.0,
    )


def train(options: argparse.Namespace, steps: int, **settings: Any) -> tuple[float, list[Any], Any]:
    """Return the median seconds of a step, every rank's times in it, and the plan. Collective."""
    import kaitian_mpi
    from kaitian_mpi.mpi.exchange import gather_values

    task = partial(make_task, options.width, options.layers, options.batch)
    common = {"parity": False, "check_every": 0, "log_interval": 1e9, "progress": "none"}
    with kaitian_mpi.Training(task, global_batch_size=options.batch, **common, **settings) as run:
        steps_of, seconds, times = iter(run), [], []
        for number in range(steps + options.settle):
            began = time.perf_counter()
            step = next(steps_of)
            if number >= options.settle:
                seconds.append(time.perf_counter() - began)
                times.append((step.times.forward + step.times.backward, step.times.optimizer))
        steps_of.close()
        own = [statistics.median(seconds) for seconds in zip(*times, strict=True)]
        own.append(statistics.median(seconds))
        gathered = gather_values(run.world.comm, own)
        return max(by_rank[2] for by_rank in gathered), gathered, run.summary.pipeline


def compare_with_bound(options: argparse.Namespace) -> None:
    """Print how near steps come to the bound. Collective."""
    import kaitian_mpi

    world = kaitian_mpi.init(
        devices="cpu", emulate_kinds="gpu,mlu", emulate_slowdown=f"1:{options.slowdown}"
    )
    count = 16
    settings = {"layout": "pipeline", "micro_batch_size": options.batch // count}
    for _ in range(options.rounds):
        step, ranks, plan = train(options, options.steps, **settings)
        parts = [seconds[0] / count for seconds in ranks]
        bound = sum(parts) + (count - 1) * max(parts) + max(seconds[1] for seconds in ranks)
        if world.rank == 0:
            shown = ", ".join(f"{1e3 * seconds:.1f}" for seconds in parts)
            layers = [stage["layers"] for stage in plan["stages"]]
            print(
                f"step {1e3 * step:.0f} ms, bound {1e3 * bound:.0f} ms: {bound / step:.3f} of it; "
                f"predicted {1e3 * plan['predicted_step_sec']:.0f} ms; layers {layers}, ms a "
                f"micro-batch {shown}",
                flush=True,
            )


def compare_layouts(options: argparse.Namespace) -> None:
    """Print the steps of replicate and pipeline, in turn. Collective."""
    import kaitian_mpi

    world = kaitian_mpi.init(devices="cpu", emulate_kinds="gpu,mlu")
    for _ in range(options.rounds):
        fast, _, plan = train(options, options.steps, layout="pipeline")
        # Ranks that are alike; and measuring how to reduce takes minutes here.
        named = {"balance": "off", "allreduce": "flat"}
        slow, _, _ = train(options, max(2, options.steps // 3), layout="replicate", **named)
        if world.rank == 0:
            print(
                f"replicate {1e3 * slow:.0f} ms, pipeline {1e3 * fast:.0f} ms a step: "
                f"{slow / fast:.2f} times; predicted {1e3 * plan['predicted_step_sec']:.0f} ms",
                flush=True,
            )


def compare_over_link(options: argparse.Namespace) -> None:
    """Run the comparison on two hosts of this machine's own making."""
    from shaped_hosts import print_over_link

    command = [os.path.abspath(__file__), "--worker"]
    for name in ("width", "layers", "batch", "rounds", "steps", "settle"):
        command += [f"--{name}", str(getattr(options, name))]
    print_over_link(command, options.link_mbit, "replicate", _TIMEOUT_SEC)


def main() -> None:
    """Run the comparison that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link-mbit", type=float, default=0.0, help="of each link, each way")
    parser.add_argument("--slowdown", type=float, default=3.0, help="of the second rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9, help="per round")
    parser.add_argument("--settle", type=int, default=2, help="steps before those")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        compare_layouts(options)
    elif options.link_mbit:
        compare_over_link(options)
    else:
        compare_with_bound(options)


if __name__ == "__main__":
    main()
