"""A script of a user's, which is to survive the kill of any rank at any moment.

    mpirun --with-ft ulfm -np 4 python benchmarks/recovering/own_training.py closed --run-dir FOLDER

It computes in float64, so that its weights depend on neither the ranks nor a loss. A surviving rank
whose loop has not seen every step once ends the job with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
from torch import nn
from torch.nn import functional

import kaitian_mpi

_SAMPLES, _FEATURES = 2048, 256


class Gated(nn.Module):
    """A block in which every weight matters for every sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the gated values to x."""
        return x + torch.sigmoid(self.gate(x)) * self.value(x).tanh()


def compute_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean over the batch."""
    return functional.mse_loss(model(batch[0]), batch[1])


def make_task(form: str, width: int, has_experts: bool) -> kaitian_mpi.Task:
    """Return a regression, with a loss in the closed form, and perhaps a mixture of experts."""
    torch.manual_seed(0)
    inputs = torch.randn(_SAMPLES, _FEATURES, dtype=torch.float64)
    data = list(zip(inputs, inputs.sin().sum(1, keepdim=True), strict=True))
    blocks: list[nn.Module] = [Gated(width) for _ in range(2)]
    if has_experts:
        blocks.append(kaitian_mpi.Experts([Gated(width) for _ in range(4)], nn.Linear(width, 4)))
    model = nn.Sequential(nn.Linear(_FEATURES, width), *blocks, nn.Linear(width, 1)).double()
    return kaitian_mpi.Task(
        model=model,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        data=data[:-64],
        validation=data[-64:],
        loss=compute_loss if form == "closed" else None,
        metrics=lambda model, batch: {"loss": compute_loss(model, batch) * len(batch[0])},
        clip_norm=1.0,
    )


def train(training: kaitian_mpi.Training, form: str) -> list[int]:
    """Train in one of the forms; return the steps that the loop has seen."""
    if form == "closed":
        return [step.number for step in training]
    seen = []
    for batch in training.batches():
        training.backward(compute_loss(training.model, batch))
        if training.step():
            assert training.last_step is not None
            seen.append(training.last_step.number)
    return seen


def main() -> None:
    """Train, and evaluate at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("form", choices=("closed", "open"))
    parser.add_argument("--run-dir")
    parser.add_argument("--log-interval", type=float)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--global-batch-size", type=int)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--allreduce", default="auto")
    parser.add_argument("--layout", default="replicate")
    parser.add_argument("--mirrors", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--step-timeout", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--emulate-memory", default="")
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--balance", default="off")
    parser.add_argument("--benchmark-seconds", type=float, default=3.0)
    parser.add_argument("--emulate-slowdown", default="")
    parser.add_argument("--resume", default="")
    options = vars(parser.parse_args())
    form = options.pop("form")
    kaitian_mpi.init(devices=options.pop("devices"))
    task = partial(make_task, form, options.pop("width"), options["layout"] == "experts")
    with kaitian_mpi.Training(task, epochs=1000, **options) as training:
        seen = train(training, form)
        training.evaluate()
    if options["checkpoint_every"]:  # from which steps may be repeated
        seen = sorted({*seen})
    steps = list(range(1, options["max_steps"] + 1))
    if options["resume"]:
        steps = steps[len(steps) - len(seen) :]
    if seen != steps:
        sys.exit(f"this rank's loop saw the steps {seen}")


if __name__ == "__main__":
    main()
