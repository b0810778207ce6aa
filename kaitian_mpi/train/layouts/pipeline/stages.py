"""The owners of parameters and their optimizer state in layout pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.balance.pipeline import Stage
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.layouts.moving import move
from kaitian_mpi.train.layouts.parameter_owners import ParameterOwners


class Stages(ParameterOwners):
    """The parameters of this rank's layers, and their optimizer state: it has no others.

    A parameter that layers of several stages share is on all of their ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        layers: Sequence[nn.Module],
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.stages: Sequence[Stage] = ()
        super().__init__(model, optimizers, model.parameters(), device)
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        self._of_layer = [{numbers[p] for p in layer.parameters()} for layer in layers]

    def drop(self) -> None:
        super().drop()
        self.stages = ()

    def assign_stages(self, world: World, stages: Sequence[Stage]) -> None:
        """Give each rank its stage's parameters, and free those of others. Collective."""
        self.assign_owners(world, self._owners(stages))
        self.stages = stages
        for stage in stages:
            if world.rank in stage.ranks:
                for layer in self.layers[stage.begin : stage.end]:
                    move(layer, self._device)

    def _owners(self, stages: Sequence[Stage]) -> list[list[int]]:
        owners: list[list[int]] = [[] for _ in self._parameters]
        for stage in stages:
            for number in set().union(*self._of_layer[stage.begin : stage.end]):
                owners[number] += stage.ranks
        return owners

    def _modules_by_source(self) -> Iterable[tuple[Sequence[nn.Module], int]]:
        for stage in self.stages:
            yield self.layers[stage.begin : stage.end], stage.ranks[0]

    def _where(self, name: str) -> str:
        return "in the stage of another rank (layout pipeline)"
