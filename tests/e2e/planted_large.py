"""A task with a large state, and as a script: one rank of which dies after a step."""

import os
import signal
import sys
from functools import partial

import torch
from torch import nn

from kaitian_mpi import Task, Training


class Deep(nn.Module):
    """Has 4 MB of parameters a layer."""

    def __init__(self, width, layers):
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + 0.1 * layer(x).relu()
        return self.last(x)


def build(width: int = 1024, layers: int = 35):
    """Return the task, of 147 MB of parameters by default."""
    torch.manual_seed(1)
    inputs = torch.randn(96, 16)
    return Task(
        model=Deep(width, layers),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        data=list(zip(inputs, torch.arange(96) % 4, strict=True)),
        loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]),
        clip_norm=1.0,
    )


def main():
    """Train; rank 2 dies after the step that is given, the first time."""
    task = partial(build, 32, 3)
    with Training(
        task, layout="shard", run_dir="run", global_batch_size=24, max_steps=10, epochs=9,
        balance="off", checkpoint_every=2, mirrors=False,
    ) as training:  # fmt: skip
        for step in training:
            if training.world.info.world_rank == 2 and step.number == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
