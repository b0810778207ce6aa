"""A GPT that fits no rank, on an accelerator whose memory is capped, and a CPU with as much.

    PYTHONPATH=benchmarks mpirun -np 2 python tests/gpu/capped.py --layout shard \
        --precision bf16 --devices cuda:0,cpu

The accelerator may allocate `--limit` GB, and so may the CPU rank; the training's parameters,
gradients and optimizer state are `--state` GB. Prints `capped_LAYOUT_PRECISION: ok`, or FAIL, with
each rank's peak, plan and limit: no rank may run out of memory, nor take more than was planned.
`--whole` hides the model's layers, so that no pipeline can divide it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shared import stand_in
from torch import nn
from torch.utils.data import TensorDataset
from verdicts import LONGEST_SEC, FailedError, check_plain, expect, run_checks

import kaitian_mpi
from kaitian_mpi.devices.accelerator import Accelerator
from kaitian_mpi.mpi.exchange import gather_values

sys.path.append(str(Path(__file__).parents[2] / "examples"))

CONTEXT, VOCABULARY, STATE_BYTES = 32, 128, 16  # a parameter's, with AdamW
STEPS = 2 if stand_in.KIND == stand_in.STAND_IN else 6
CONTEXT_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="shard", choices=("shard", "pipeline", "auto"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--devices", required=True)
    parser.add_argument("--whole", action="store_true", help="hide the model's layers")
    parser.add_argument("--limit", type=float, default=1.5, help="GB of each rank")
    parser.add_argument("--state", type=float, default=1.8, help="GB of all ranks together")
    parser.add_argument("--width", type=int, default=1536)
    options = parser.parse_args()
    limit = int(options.limit * 1e9)
    of_limit = {"memory_bytes": mock.DEFAULT, "memory_limit_bytes": mock.DEFAULT}
    with mock.patch.multiple(Accelerator, **of_limit) as patched:
        for method in patched.values():
            method.return_value = limit
        world = kaitian_mpi.init(devices=options.devices)
        if not world.device_kind.is_host:
            cap(world, limit)

        def trains_within_the_limit(world: Any) -> str:
            return train(world, options)

        name = "_".join(["capped", options.layout, options.precision, *["whole"] * options.whole])
        trains_within_the_limit.__name__ = name
        is_good = run_checks(world, [trains_within_the_limit], 2 * LONGEST_SEC)
    dist.destroy_process_group()
    sys.exit(not is_good)


def cap(world: Any, limit: int) -> None:
    """Let torch's allocator have no more than the limit."""
    module = torch.get_device_module(world.device.type)
    if hasattr(module, "set_per_process_memory_fraction"):
        total = module.get_device_properties(world.device.index).total_memory
        if stand_in.KIND == stand_in.STAND_IN:  # which counts its context, unlike torch
            limit += CONTEXT_BYTES
        module.set_per_process_memory_fraction(min(1.0, limit / total), world.device.index)


class Whole(nn.Module):
    """A model whose layers are not to be seen."""

    def __init__(self, chain: nn.Module) -> None:
        super().__init__()
        self.inner = chain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def build(width: int, parameters: float, is_whole: bool) -> kaitian_mpi.Task:
    """Return the training of a GPT of about so many parameters."""
    from large_gpt import loss_of, make_model

    torch.manual_seed(0)
    blocks = max(2, round(parameters / (12 * width**2)))
    model = make_model(width, blocks, VOCABULARY, CONTEXT, False)
    return kaitian_mpi.Task(
        model=Whole(model) if is_whole else model,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4),
        clip_norm=1.0,
        data=TensorDataset(torch.randint(VOCABULARY, (4096, CONTEXT + 1))),
        loss=loss_of,
    )


def train(world: Any, options: argparse.Namespace) -> str:
    """Train some steps, and compare what the ranks have used with what was planned."""
    check_plain(world)
    of_host = [rank for rank, kind in enumerate(world.kinds) if kind == "cpu"]
    limits = ",".join(f"{rank}:{options.limit:g}GB" for rank in of_host)
    with tempfile.TemporaryDirectory(prefix="kaitian-gpu-") as folder:
        shared = Path(gather_values(world.comm, folder)[0])
        with kaitian_mpi.Training(
            lambda: build(options.width, options.state * 1e9 / STATE_BYTES, options.whole),
            layout=options.layout, precision=options.precision, emulate_memory=limits,
            global_batch_size=8, max_steps=STEPS, epochs=1000,
            benchmark_seconds=stand_in.BENCHMARK_SEC,
            progress="none", log_interval=1e9, parity=False, run_dir=str(shared / "run"),
            checkpoint_minutes=1e6,
        ) as training:  # fmt: skip
            losses = [step.loss for step in training]
        summary = json.loads((shared / "run/summary.json").read_text())
        gather_values(world.comm, None)
    if not torch.tensor(losses).isfinite().all():
        raise FailedError(f"losses {losses}")
    rows, are_right = [], []
    for info, memory in zip(world.infos, summary["memory"] or [], strict=False):
        sizes = [memory[f"{name}_bytes"] or 0 for name in ("peak", "planned", "limit")]
        are_right.append(sizes == sorted(sizes))
        peak, planned, limit = (f"{size / 1e9:.2f}" for size in sizes)
        rows.append(f"{info.kind} peak {peak}, planned {planned}, limit {limit} GB")
    seconds = f"{1e3 * summary['step_time_sec']:.0f} ms a step"
    chosen = f"{training._session.prepared.config.layout} chosen; " * (options.layout == "auto")
    text = f"{chosen}{'; '.join(rows) or 'nothing planned'}; {seconds}"
    if stand_in.KIND == stand_in.STAND_IN:
        return text
    if world.infos[0].kind == "cuda":
        found = gather_values(world.comm, has_growing_segments(world))
        text += f"; segments grow: {found[0]}"
    return expect(bool(rows) and all(are_right), text)


def has_growing_segments(world: Any) -> bool:
    """Return whether torch's allocator has segments that grow."""
    if world.device_kind.is_host:
        return False
    return any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())


if __name__ == "__main__":
    main()
