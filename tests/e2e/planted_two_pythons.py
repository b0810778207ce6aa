"""A script on the backend: DDP, objects that torch pickles, a distributed checkpoint.

    python planted_two_pythons.py FOLDER

Each rank prints a line with what must be the same on all of them.
"""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Settings:
    """An object of the script's own."""

    path: Path
    kinds: frozenset[str]


def train(rank):
    torch.manual_seed(rank)  # other weights, which DDP replaces by rank 0's, and other samples
    layers = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Linear(48, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        x = torch.randn(16, 24)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return dict(layers.named_parameters())


def digest_of(weights):
    content = b"".join(weight.detach().numpy().tobytes() for weight in weights.values())
    return hashlib.sha256(content).hexdigest()[:16]


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("kaitian", init_method="mpi://")
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = train(rank)

    for root in range(size):
        received = [Settings(folder, frozenset({"gpu", "cpu"})) if rank == root else None]
        dist.broadcast_object_list(received, src=root)
        assert received == [Settings(folder, frozenset({"gpu", "cpu"}))]
    gathered = [None] * size
    dist.all_gather_object(gathered, (rank, folder / str(rank), weights["0.bias"].dtype))
    assert gathered == [(each, folder / str(each), torch.float32) for each in range(size)]

    dcp.save({"weights": weights}, checkpoint_id=folder / "checkpoint")
    loaded = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    dcp.load({"weights": loaded}, checkpoint_id=folder / "checkpoint")
    assert digest_of(loaded) == digest_of(weights)
    print("weights", digest_of(weights), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
