"""A task with a large state, and as a script: one rank of which dies after a step."""

import os
import signal
import sys
import time
from functools import partial

import torch
from torch import nn

import kaitian_mpi
from kaitian_mpi import Task, Training
from kaitian_mpi.train.layouts.shard import row_states


class Deep(nn.Module):
    """Has parameters of width**2 numbers, and a bias, a layer."""

    def __init__(self, width, layers):
        super().__init__()
        self.first, self.last = nn.Linear(16, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + 0.1 * layer(x).relu()
        return self.last(x)


def build(width: int = 724, layers: int = 35):
    """Return the task, of 74 MB of parameters by default."""
    torch.manual_seed(1)
    inputs = torch.randn(96, 16)
    return Task(
        model=Deep(width, layers),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        data=list(zip(inputs, torch.arange(96) % 4, strict=True)),
        loss=lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]),
        clip_norm=1.0,
    )


class Residual(nn.Module):
    """Adds a linear layer of its input to it."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x + 0.1 * self.layer(x).relu()


def chain(width: int = 512, layers: int = 57):
    """Return the task of a chain of layers, of 60 MB of parameters by default."""
    torch.manual_seed(1)
    blocks = [Residual(width) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 4))
    return Task(**{**vars(build(4, 1)), "model": model, "name": ""})


def slow_to_collect(hangs: bool = False):
    """Return a task in shards, each of which arrives a second late at rank 0.

    If it `hangs`, no other arrives after the third.
    """
    real_send = row_states.send_state
    sent = []

    def send_late(comm, state, source, *others):
        if comm.rank == source:
            sent.append(source)
            time.sleep(900 if hangs and len(sent) > 3 else 1)
        return real_send(comm, state, source, *others)

    row_states.send_state = send_late
    return build(32, 3)


def exact_chain(width: int = 256, layers: int = 8, device_mb: float = 0):
    """Return the task of a chain in float64, of 4 MB of parameters by default.

    On fake accelerators with memory for so many MB of tensors (0: more than enough).
    """
    task = chain(width, layers)
    data = [(inputs.double(), label) for inputs, label in task.data]
    if device_mb:
        import fake_device  # on the path of those who have one

        fake_device.set_limit(fake_device.memory.CONTEXT_BYTES + int(device_mb * 1e6))
    return Task(**{**vars(task), "model": task.model.double(), "data": data, "name": ""})


def exact_mixture():
    """Return the task of two mixtures of experts in float64."""
    torch.manual_seed(1)
    mixtures = [
        kaitian_mpi.Experts([Residual(16) for _ in range(experts)], nn.Linear(16, experts))
        for experts in (5, 3)
    ]
    model = nn.Sequential(*mixtures, nn.Linear(16, 4)).double()
    data = [(inputs.double(), label) for inputs, label in build(4, 1).data]
    return Task(**{**vars(build(4, 1)), "model": model, "data": data, "name": ""})


def build_deep():
    """Return the task with 95 MB of parameters."""
    return build(647, 57)


def mortal_at_start(make, dies):
    """Return a task, of which a rank dies when it makes its state."""
    task, made = make(), []

    def optimizer(model):
        made.append(model)
        if len(made) == 3 and int(os.environ["OMPI_COMM_WORLD_RANK"]) == dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.optim.AdamW(model.parameters())

    return Task(**{**vars(task), "optimizer": optimizer, "name": ""})


def main():
    """Train; a rank dies after the step that is given, the first time; before the first, if 0."""
    layout, dies, last = sys.argv[3:] if len(sys.argv) > 3 else ("shard", "2", "10")
    if layout == "pipeline":  # of three stages
        kaitian_mpi.init(emulate_kinds="gpu,mlu,npu")
    task = {
        "shard": partial(build, 32, 3),
        "parts": partial(build, 512, 24),
        "pipeline": partial(chain, 32, 6),
    }[layout]
    with Training(
        partial(mortal_at_start, task, int(dies)) if sys.argv[1] == "0" else task,
        layout="pipeline" if layout == "pipeline" else "shard", run_dir="run",
        global_batch_size=24, max_steps=int(last), epochs=9,
        balance="off", checkpoint_every=2, mirrors=False,
        emulate_memory=sys.argv[2] if len(sys.argv) > 2 else "",
    ) as training:  # fmt: skip
        for step in training:
            mortal = int(dies)
            if layout == "pipeline":  # the first rank of the first stage, or of the last
                mortal = training.summary.pipeline["stages"][mortal]["ranks"][0]
            is_mortal = training.world.size == 3 and training.world.info.world_rank == mortal
            if is_mortal and step.number == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
