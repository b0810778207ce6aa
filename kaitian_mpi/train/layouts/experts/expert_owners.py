"""The owners of parameters and their optimizer state in layout experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.balance.ownership import NO_MIRROR
from kaitian_mpi.distributed.experts import Experts
from kaitian_mpi.distributed.sync_batch_norm import SyncBatchNorm
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.moving import move
from kaitian_mpi.train.layouts.parameter_owners import ParameterOwners


def find_mixtures(model: nn.Module) -> dict[str, Experts]:
    """Return the mixtures of experts in a model by name, in the order of `modules()`."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Experts)}


def experts_of(mixtures: Mapping[str, Experts]) -> list[nn.Module]:
    """Return the experts of all mixtures, in the order in which they are numbered."""
    return [expert for mixture in mixtures.values() for expert in mixture.experts]


def check_experts(model: nn.Module, mixtures: Mapping[str, Experts]) -> None:
    """Check that each expert can be on one rank. Not collective.

    Raises:
        UserError: the model has no experts, or they share something.
    """
    if not mixtures:
        raise UserError(
            "--layout experts: the model has no kaitian_mpi.Experts; build it with some, or use "
            "kaitian_mpi.convert_experts(model)"
        )
    inside: dict[nn.Parameter, str] = {}
    for name, mixture in mixtures.items():
        for number, expert in enumerate(mixture.experts):
            text = f"expert {number} of {name or 'the model'}"
            for module in expert.modules():
                if isinstance(module, Experts):
                    raise UserError(f"--layout experts: {text} has Experts inside; leave them out")
                if getattr(module, "track_running_stats", False):
                    raise UserError(
                        f"--layout experts: {text} has a {type(module).__name__}, which normalizes "
                        "by whatever tokens are computed together; use LayerNorm or RMSNorm"
                    )
            for parameter in expert.parameters():
                other = inside.setdefault(parameter, text)
                if other != text:
                    raise UserError(
                        f"--layout experts: {text} and {other} share a parameter; give each its own"
                    )
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        raise UserError(
            "--layout experts: the model has a SyncBatchNorm, whose gradients would be weighted "
            "twice; use LayerNorm, or a BatchNorm, whose statistics are pooled"
        )
    experts = set(experts_of(mixtures))
    within = {module for expert in experts for module in expert.modules()}
    for name, module in model.named_modules():
        if module not in within:
            for parameter in module.parameters(recurse=False):
                if parameter in inside:
                    raise UserError(
                        f"--layout experts: {inside[parameter]} shares a parameter with "
                        f"{name or 'the model'}, which every rank needs; give each its own"
                    )


class ExpertOwners(ParameterOwners):
    """The parameters of the experts that this rank holds or mirrors, and all that are not in one.

    A mirror steps its expert as the owner does, and does not compute it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        mixtures: Mapping[str, Experts],
        device: torch.device,
    ) -> None:
        self.mixtures = mixtures
        self._experts = experts_of(mixtures)
        self.ranks: list[list[int]] = []
        """The owner of each expert, and its mirror if it has one; empty before they are given."""
        owned = [parameter for expert in self._experts for parameter in expert.parameters()]
        super().__init__(model, optimizers, owned, device)
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._of_expert = [[numbers[p] for p in expert.parameters()] for expert in self._experts]

    def drop(self) -> None:
        super().drop()
        self.ranks = []

    def assign_experts(self, world: World, owners: Sequence[int], mirrors: Sequence[int]) -> None:
        """Give each expert to its owner, and to its mirror; free it elsewhere. Collective.

        `mirrors` has `NO_MIRROR` for experts without one.
        """
        everyone = list(range(world.size))
        by_parameter = [everyone for _ in self._parameters]
        ranks = [
            [owner] if mirror == NO_MIRROR else [owner, mirror]
            for owner, mirror in zip(owners, mirrors, strict=True)
        ]
        for numbers, of_expert in zip(self._of_expert, ranks, strict=True):
            for number in numbers:
                by_parameter[number] = of_expert
        self.assign_owners(world, by_parameter)
        self.ranks = ranks
        for expert, of_expert in zip(self._experts, ranks, strict=True):
            if world.rank in of_expert:
                move(expert, self._device)

    def owners_by_mixture(self) -> list[list[int]]:
        """Return the rank that computes each expert, by mixture."""
        owners = iter(ranks[0] for ranks in self.ranks)
        return [[next(owners) for _ in mixture.experts] for mixture in self.mixtures.values()]

    def numbers_by_mixture(self) -> list[list[int]]:
        """Return the numbers of the parameters of all experts, by mixture."""
        numbers = iter(self._of_expert)
        return [
            [number for _ in mixture.experts for number in next(numbers)]
            for mixture in self.mixtures.values()
        ]

    def _modules_by_source(self) -> Iterable[tuple[Sequence[nn.Module], int]]:
        for expert, ranks in zip(self._experts, self.ranks, strict=True):
            yield [expert], ranks[0]

    def _where(self, name: str) -> str:
        return "of an expert on another rank (layout experts)"
