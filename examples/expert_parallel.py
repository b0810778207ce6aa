"""A mixture of experts with experts on different ranks; tokens are sent to their experts' ranks.

    mpirun -np 2 python examples/expert_parallel.py
    KAITIAN_EMULATE_SLOWDOWN=1:3 mpirun -np 2 python examples/expert_parallel.py

Which rank holds which experts follows from the ranks' speed and memory. The losses are those of
one rank with all experts: compare with `mpirun -np 1`.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import kaitian_mpi

WIDTH, EXPERTS = 16, 4


class MixtureBlock(nn.Module):
    """Adds to each token what the expert that the gate chooses for it computes."""

    def __init__(self) -> None:
        super().__init__()
        experts = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        ]
        self.mixture = kaitian_mpi.Experts(experts, gate=nn.Linear(WIDTH, EXPERTS), top_k=1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the block's output, shaped as its input: (tokens, width)."""
        return tokens + self.mixture(tokens)


def main() -> None:
    """Learn a function that differs between regions of its inputs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=6, help="of 16 steps")
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    regions = torch.randn(4, WIDTH, WIDTH)  # a linear function each
    x = torch.randn(8192, WIDTH)
    y = torch.einsum("tw,twv->tv", x, regions[x[:, :4].argmax(1)]) / WIDTH**0.5
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MixtureBlock(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        error = (model(batch[0]) - batch[1]).square().mean()
        return error + 0.05 * model[1].mixture.balance_loss  # else few experts get all tokens

    task = kaitian_mpi.Task(model=model, optimizer=optimizer, data=TensorDataset(x, y), loss=loss)
    settings = {"global_batch_size": 512, "epochs": epochs}
    with kaitian_mpi.Training(task, layout="experts", **settings) as training:
        for step in training:
            if training.world.rank == 0 and step.number % 20 == 1:
                print(f"step {step.number} loss {step.loss:.4f}", flush=True)
        if training.world.rank == 0:
            print("tokens by expert:", *model[1].mixture.tokens_by_expert)


if __name__ == "__main__":
    main()
