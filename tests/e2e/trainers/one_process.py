"""Repeats a job's training in one process, from the rows that its ranks have recorded."""

import copy
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROWS, FEATURES, CLASSES = 203, 8, 4
Recorded = list[tuple[int, list[int], bool]]
"""Of each micro-batch: its epoch, its rows, and whether the optimizer has stepped after it."""


class RecordInFile:
    """Keeps the rows of each micro-batch for a job that is started again: the last training counts.

    Rank 1 kills itself before a micro-batch, once.
    """

    def __init__(self, rank: int, killed_at: int) -> None:
        self.path, self.killed_at = Path(f"rows-{rank}.jsonl"), killed_at if rank == 1 else -1

    def note(self, index: int, epoch: int, rows: list[int], steps: bool) -> None:
        if index == self.killed_at and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with self.path.open("a") as file:
            file.write(json.dumps([index, [epoch, rows, steps]]) + "\n")

    def read(self) -> Recorded:
        lines = dict(json.loads(line) for line in self.path.read_text().splitlines())
        return [tuple(lines[index]) for index in sorted(lines)]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (ROWS,), generator=generator)


def classifier(norm: type[nn.Module] = nn.Identity) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 32), norm(32), nn.Tanh(), nn.Linear(32, CLASSES)
    return nn.Sequential(*layers).double()


def report(
    recorded: Recorded,
    trained: nn.Module,
    start: nn.Module,
    backward: Callable[[nn.Module, Sequence[Sequence[int]]], float],
    **found: Any,
) -> None:
    """Print, on rank 0, how the job compares with one process that trains on all ranks' rows.

    `backward(model, micro_batches)` computes the gradients of a step, and returns its loss.
    """
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, recorded)
    if dist.get_rank():
        return
    model = copy.deepcopy(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, waiting = [], []
    for index, (_, _, steps) in enumerate(recorded):
        waiting.append([row for rank in ranks for row in rank[index][1]])
        if steps:
            optimizer.zero_grad()
            losses.append(backward(model, waiting))
            optimizer.step()
            waiting = []
    pairs = zip(model.parameters(), trained.parameters(), strict=True)
    epochs = sorted({epoch for epoch, _, _ in recorded})
    rows = [
        [row for rank in ranks for e, part, _ in rank if e == epoch for row in part]
        for epoch in epochs
    ]
    found |= {
        "difference": max(float((a - b).abs().max()) for a, b in pairs),
        "splits": len({tuple(len(rank[i][1]) for rank in ranks) for i in range(len(recorded))}),
        "rows": [len(epoch_rows) for epoch_rows in rows],
        "distinct_rows": [len(set(epoch_rows)) for epoch_rows in rows],
        "steps": len(losses),
        "mean_loss": sum(losses) / len(losses),
    }
    print(f"\n{json.dumps(found)}", flush=True)
