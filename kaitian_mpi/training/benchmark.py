"""Timing the user's own model on every rank."""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

from kaitian_mpi.balance.cost_model import CostModel, fit, scores
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.emulation import Slowdown
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.runtime import Arrival, wait_quietly
from kaitian_mpi.mpi.world import World
from kaitian_mpi.training.computation import MEMORY_FORMATS, Computation, make_optimizer

_PROBE_BATCH = 8
_LONGEST_STEP_SEC = 2.0
_ROUND_SEC = 0.25
_FORMAT_ROUNDS = 4


@dataclass(frozen=True)
class RankBenchmark:
    """What the benchmark found out about one rank."""

    cost: CostModel
    memory_format: str
    seconds: float
    """Seconds for an equal share of the global batch, by the cost model."""


def benchmark_ranks(
    config: TrainConfig,
    world: World,
    model: nn.Module,
    data: Dataset,
    share: int,
    slowdown: Slowdown,
) -> list[RankBenchmark]:
    """Time forward, backward and optimizer on every rank at once, as in training. Collective.

    The model itself is left as it was.

    Args:
        config: precision, optimizer, memory format and number of timed steps.
        world: the ranks.
        model: the user's model, anywhere.
        data: the training data; real samples are timed.
        share: samples of an equal share, to which the ranks are compared.
        slowdown: this rank's emulated slowdown.

    Returns:
        Every rank's result, by rank.
    """
    with torch.random.fork_rng(devices=[]):
        own = _RankTimer(config, world, model, data, slowdown).measure(share)
    results = gather_values(world.comm, asdict(own))
    return [RankBenchmark(**{**r, "cost": CostModel(**r["cost"])}) for r in results]


def scores_of(results: list[RankBenchmark]) -> list[float]:
    """Return the ranks' scores, time_min / time_i."""
    return scores([result.seconds for result in results])


class _RankTimer:
    """Times steps of one rank."""

    def __init__(
        self, config: TrainConfig, world: World, model: nn.Module, data: Dataset, slowdown: Slowdown
    ) -> None:
        self._config, self._world, self._data, self._slowdown = config, world, data, slowdown
        self._model = model

    def measure(self, share: int) -> RankBenchmark:
        probe = min(share, _PROBE_BATCH)
        computation, step_sec = self._fastest_format(probe)
        # The equal share itself where that is affordable, so that nothing is extrapolated.
        large = share
        while large > probe and large * step_sec / probe > _LONGEST_STEP_SEC:
            large = -(-large // 2)
        batches = [max(1, large // 2), large]
        model, optimizer = self._prepare(computation)
        rounds: list[list[float]] = [[], []]
        # Ranks may share cores, so each is timed while all the others are busy too, as in training:
        # the first to be done goes on until the last is.
        wait_quietly(self._world.comm)
        for round_number in range(self._config.benchmark_steps + 1):
            for batch, seconds in zip(batches, rounds, strict=True):
                elapsed = self._mean_step(computation, model, optimizer, batch)
                if round_number > 0:  # the first warms up
                    seconds.append(elapsed)
        finished = Arrival(self._world.comm)
        while not finished.complete():
            self._time_step(computation, model, optimizer, probe)
        cost = fit(batches, [statistics.median(seconds) for seconds in rounds])
        return RankBenchmark(cost, computation.memory_format, cost.seconds(share))

    def _mean_step(
        self, computation: Computation, model: nn.Module, optimizer: torch.optim.SGD, batch: int
    ) -> float:
        """Return the mean seconds of as many steps as fill a while, at least one.

        A short step says little on a shared core: the operating system's turns are as long.
        """
        steps, total = 0, 0.0
        while steps == 0 or total < _ROUND_SEC:
            total += self._time_step(computation, model, optimizer, batch)
            steps += 1
        return total / steps

    def _fastest_format(self, batch: int) -> tuple[Computation, float]:
        """Return how to compute, and the seconds of a step of this many samples."""
        named = self._config.memory_format
        names = list(MEMORY_FORMATS) if named == "auto" else [named]
        contestants = [self._compute_in(name) for name in names]
        prepared = [self._prepare(computation) for computation in contestants]
        # On a core shared with other ranks the layouts differ by less than the wait for the core,
        # which the thread's own CPU time leaves out. The first step, which warms up, is no minimum.
        clock = time.thread_time if self._world.device.type == "cpu" else time.perf_counter
        costs: list[list[float]] = [[] for _ in names]
        seconds: list[list[float]] = [[] for _ in names]
        for _ in range(_FORMAT_ROUNDS):
            for index, (computation, made) in enumerate(zip(contestants, prepared, strict=True)):
                before = clock()
                seconds[index].append(self._time_step(computation, *made, batch))
                costs[index].append(clock() - before)
        cheapest = [min(values) for values in costs]
        best = cheapest.index(min(cheapest))
        return contestants[best], min(seconds[best])

    def _compute_in(self, memory_format: str) -> Computation:
        return Computation(
            self._world.device,
            self._config.precision,
            memory_format,
            self._config.label_smoothing,
        )

    def _prepare(self, computation: Computation) -> tuple[nn.Module, torch.optim.SGD]:
        model = computation.place_model(copy.deepcopy(self._model)).train()
        return model, make_optimizer(self._config, model)

    def _time_step(
        self,
        computation: Computation,
        model: nn.Module,
        optimizer: torch.optim.SGD,
        batch: int,
    ) -> float:
        indices = [index % len(self._data) for index in range(batch)]  # type: ignore[arg-type]
        inputs, labels = computation.place(*self._data[indices])
        self._world.synchronize()
        start = time.perf_counter()
        self._slowdown.start()
        loss = computation.loss(model, inputs, labels)
        computation.scaler.scale(loss).backward()
        computation.update(optimizer)
        optimizer.zero_grad()
        self._world.synchronize()
        self._slowdown.catch_up()
        return time.perf_counter() - start
