"""A robot arm's policy, cloned from an expert: a camera's picture and joint angles to velocities.

    kaitian-train -n 2 --task examples.behavior_cloning:build --epochs 8 \
        --global-batch-size 128 --run-dir runs/policy
    python examples/behavior_cloning.py runs/policy/checkpoints/model.pt

An arm of two joints reaches for a spot that only the picture shows. The first command trains on
demonstrations of an expert, who knows where the spot is; the second lets the policy move the arm.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import kaitian_mpi

PIXELS = 32
REACH = 2.0  # both links are of length 1
NEAR = 0.15  # from the spot, the arm has reached it
STEPS, SEC_PER_STEP = 60, 0.1
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def positions(joints: torch.Tensor) -> torch.Tensor:
    """Return where the arm's hand is, (n, 2), by its joints' angles, (n, 2) in radians."""
    upper, lower = joints[:, 0], joints.sum(1)
    return torch.stack([upper.cos() + lower.cos(), upper.sin() + lower.sin()], 1)


def pictures(spots: torch.Tensor) -> torch.Tensor:
    """Return what the camera sees of the spots, (n, 2): (n, 1, PIXELS, PIXELS)."""
    axis = torch.linspace(-REACH, REACH, PIXELS)
    x, y = (spots[:, index, None] - axis for index in (0, 1))
    near_x, near_y = ((-8 * distance.square()).exp() for distance in (x, y))
    return (near_y[:, :, None] * near_x[:, None, :])[:, None]


def expert(spots: torch.Tensor, joints: torch.Tensor) -> torch.Tensor:
    """Return the joints' velocities, (n, 2), that bring the hand to the spots."""
    way = spots - positions(joints)
    hand, elbow = positions(joints), torch.stack([joints[:, 0].cos(), joints[:, 0].sin()], 1)
    turned = torch.stack([hand, hand - elbow], 2).flip(1) * torch.tensor([[-1.0], [1.0]])
    # Damped least squares: near a stretched arm, no velocity brings the hand outward.
    square = turned.transpose(1, 2) @ turned + 0.1 * torch.eye(2)
    return torch.linalg.solve(square, (turned.transpose(1, 2) @ way[..., None])[..., 0]).tanh()


def draw_scenes(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return spots that the arm can reach, and the joints' angles at the start, (count, 2) each."""
    draws = torch.Generator().manual_seed(seed)
    reached, joints = (math.pi * (2 * torch.rand(count, 2, generator=draws) - 1) for _ in "ab")
    return positions(reached), joints


def demonstrate(count: int, seed: int) -> TensorDataset:
    """Return (picture, joints, velocities) of the expert."""
    spots, joints = draw_scenes(count, seed)
    return TensorDataset(pictures(spots), joints, expert(spots, joints))


class Policy(nn.Module):
    """Chooses the joints' velocities by a picture and the joints' angles."""

    def __init__(self) -> None:
        super().__init__()
        self.sees = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * (PIXELS // 4) ** 2, 64), nn.ReLU()),
        )
        self.moves = nn.Sequential(
            *(nn.Linear(64 + 4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()),
            *(nn.Linear(128, 2), nn.Tanh()),
        )

    def forward(self, seen: torch.Tensor, joints: torch.Tensor) -> torch.Tensor:
        """Return velocities, (n, 2)."""
        angles = torch.cat([joints.cos(), joints.sin()], 1)
        return self.moves(torch.cat([self.sees(seen), angles], 1))


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean squared error of the velocities."""
    seen, joints, velocities = batch
    return functional.mse_loss(model(seen, joints), velocities)


def measure(model: nn.Module, batch: Batch) -> dict[str, tuple]:
    """Return the sum of the squared errors, and how many numbers they are of."""
    error = loss_of(model, batch)
    return {"error": (error * batch[-1].numel(), batch[-1].numel())}


def build(demonstrations: int = 16384, lr: float = 3e-3) -> kaitian_mpi.Task:
    """Return the task for `kaitian-train --task`; `--set demonstrations=N` changes its size."""
    return kaitian_mpi.Task(
        model=Policy(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=lr),
        data=demonstrate(demonstrations, seed=1),
        validation=demonstrate(1024, seed=2),
        loss=loss_of,
        metrics=measure,
    )


@torch.no_grad()
def reach(policy: nn.Module, scenes: int = 200) -> float:
    """Let a policy move the arm; return the fraction of spots that it reaches."""
    spots, joints = draw_scenes(scenes, seed=3)
    seen = pictures(spots)
    for _ in range(STEPS):
        joints = joints + SEC_PER_STEP * policy(seen, joints)
    return (positions(joints) - spots).norm(dim=1).lt(NEAR).float().mean().item()


def main() -> None:
    """Try the policy whose weights the file has."""
    policy = Policy()
    policy.load_state_dict(torch.load(sys.argv[1], weights_only=True))
    spots, joints = draw_scenes(200, seed=3)
    for _ in range(STEPS):
        joints = joints + SEC_PER_STEP * expert(spots, joints)
    known = (positions(joints) - spots).norm(dim=1).lt(NEAR).float().mean().item()
    print(f"the policy reaches {reach(policy):.0%} of 200 spots, the expert {known:.0%}")


if __name__ == "__main__":
    main()
