"""A mixture of experts with experts on different ranks; tokens are sent to their experts' ranks.

    mpirun -np 2 python examples/expert_parallel.py
    mpirun -np 2 python examples/expert_parallel.py --experts 3,1 --emulate-kinds gpu,mlu

The number of tokens sent differs for every pair of ranks and every step. The losses equal those of
one rank with all experts: compare `--experts 3,1` on two ranks with `--experts 4` on one.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn

import kaitian_mpi

WIDTH = 16


class MixtureOfExperts(nn.Module):
    """Adds each expert's output to its tokens, weighted by the gate's probability.

    Args:
        experts: how many experts each rank holds.
        rank: the rank of this process.
    """

    def __init__(self, experts: list[int], rank: int) -> None:
        super().__init__()
        self.held = experts
        self.rank = rank
        self.gate = nn.Linear(WIDTH, sum(experts))
        all_experts = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(sum(experts))
        ]  # built on every rank, so that the weights do not depend on the number of ranks
        first = sum(experts[:rank])
        self.experts = nn.ModuleList(all_experts[first : first + experts[rank]])
        self.tokens_per_expert = torch.zeros(sum(experts))  # of all ranks, in the last forward
        self.imbalance = torch.zeros(())  # this rank's part of a loss that is 1 at equal load

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the layer's output for this rank's tokens, shaped (tokens, width). Collective."""
        probabilities = self.gate(tokens).softmax(-1)
        weight, chosen = probabilities.max(-1)
        order = chosen.argsort()  # groups the tokens by expert, and so by rank
        counts = chosen.bincount(minlength=sum(self.held))
        self.tokens_per_expert = counts.clone()
        dist.all_reduce(self.tokens_per_expert)
        part_of = self.tokens_per_expert / self.tokens_per_expert.sum()
        # The Switch Transformer's balancing loss, without which few experts get all tokens.
        mean = probabilities.sum(0) / self.tokens_per_expert.sum()
        self.imbalance = sum(self.held) * (part_of * mean).sum()

        # How many tokens come from each rank for each of this rank's experts.
        held_here = self.held[self.rank]
        incoming = torch.empty(len(self.held), held_here, dtype=counts.dtype, device=counts.device)
        dist.all_to_all_single(incoming.view(-1), counts, [held_here] * len(self.held), self.held)
        sent = [int(part.sum()) for part in counts.split(self.held)]
        received = incoming.sum(1).tolist()

        arrived = exchange(tokens[order], received, sent)
        expert_of = torch.arange(held_here, device=counts.device).repeat(len(self.held))
        expert_of = expert_of.repeat_interleave(incoming.view(-1))
        answers = torch.empty_like(arrived)
        for index, expert in enumerate(self.experts):
            answers[expert_of == index] = expert(arrived[expert_of == index])
        back = exchange(answers, sent, received)
        return tokens + weight[:, None] * back[order.argsort()]


def exchange(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    """Send rows to every rank and return those received, by rank; differentiable."""
    return collectives.all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)


def main() -> None:
    """Learn a function that differs between regions of its inputs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--experts", default="", help="experts per rank, such as 3,1; default 2 each"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per step over all ranks")
    parser.add_argument("--emulate-kinds", default="", help="such as gpu,gpu,mlu")
    options = parser.parse_args()

    world = kaitian_mpi.init(emulate_kinds=options.emulate_kinds)
    experts = [int(count) for count in options.experts.split(",") if count] or [2] * world.size
    if len(experts) != world.size or min(experts) < 1:
        parser.error(f"--experts {experts}: give 1 or more for each of the {world.size} ranks")

    torch.manual_seed(0)
    regions = torch.randn(4, WIDTH, WIDTH)  # a linear function each
    shared_in, shared_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    mixture = MixtureOfExperts(experts, world.rank)
    model = nn.Sequential(shared_in, mixture, shared_out).to(world.device)
    on_all_ranks = [*shared_in.parameters(), *mixture.gate.parameters(), *shared_out.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for step in range(1, options.steps + 1):
        x = torch.randn(options.tokens, WIDTH)  # the same on every rank, which takes its part
        y = torch.einsum("tw,twv->tv", x, regions[x[:, :4].argmax(1)]) / WIDTH**0.5
        x, y = (whole.tensor_split(world.size)[world.rank].to(world.device) for whole in (x, y))
        # Divided by the tokens of all ranks, as an expert sums the gradients from all ranks.
        loss = (model(x) - y).square().sum() / (options.tokens * WIDTH)
        optimizer.zero_grad()
        (loss + 0.05 * mixture.imbalance).backward()
        for parameter in on_all_ranks:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step == 1 or step % 20 == 0:
            loss = loss.detach()
            dist.all_reduce(loss)
            if world.rank == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)

    if world.rank == 0:
        print("tokens per expert:", *mixture.tokens_per_expert.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
