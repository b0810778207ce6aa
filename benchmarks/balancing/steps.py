"""Measures steps of two ranks on one core each, one of them slowed down (emulated).

    export PYTHONPATH=benchmarks
    mpirun -np 2 --map-by core --bind-to core python benchmarks/balancing/steps.py sum

Whatever is compared alternates within one run. World rank 0 prints a line of JSON at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from shared.loops import LoopMaker, timed
from torch.utils.data import Dataset

import kaitian_mpi
from kaitian_mpi.config import TrainConfig
from kaitian_mpi.devices.pace import Pace, Schedule
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import NoFolder
from kaitian_mpi.observe.sink import Sinks
from kaitian_mpi.recipes.data_source import DataSource
from kaitian_mpi.recipes.datasets import load_data
from kaitian_mpi.recipes.image_classification import classify
from kaitian_mpi.recipes.models import build_model
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.train.loop import Loop
from kaitian_mpi.train.measure.plan import Plan, Profile, make_plan
from kaitian_mpi.train.measure.rank_benchmark import benchmark_ranks
from kaitian_mpi.train.rebalancing import Balancing
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, Task

FACTOR = 3.0
WARM_UP = 3
SETTLING = 20  # steps in which the plan may still change


class Repeated(Dataset):
    """A dataset repeated so often that no measurement reaches its end."""

    gives_batches = True

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        length = len(self._data)  # type: ignore[arg-type]
        return self._data[[index % length for index in indices]]


class Run:
    """A loop with the balancing that follows each step."""

    def __init__(self, loop: Loop, balancing: Balancing) -> None:
        self.sampler, self.balancing, self.close = loop.sampler, balancing, loop.close
        self._loop = loop
        loop.observers.append(balancing)

    def steps(self) -> Iterator[None]:
        """Train one step per iteration."""
        while (parts := self._loop.fetch()) is not None:
            self._loop.step_done(self._loop.train(parts))
            yield


class Bench:
    """Creates runs on this rank with the same model and data."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.source = load_data(TrainConfig(dataset="synthetic"))
        self.data = Repeated(self.source.train)

    def config(self, batch: int, balance: str = "static") -> TrainConfig:
        """Return a config without progress output."""
        return TrainConfig(
            model=self.options.model,
            global_batch_size=batch,
            balance=balance,
            epochs=1,
            lr=1e-4,
            log_interval=1e9,
            benchmark_seconds=self.options.benchmark_seconds,
        )

    def model(self) -> torch.nn.Module:
        """Return the model with the same weights each time."""
        torch.manual_seed(0)
        return build_model(self.options.model, self.source.num_classes)

    def task(self, config: TrainConfig) -> Task:
        """Return a new model to train on the repeated data."""
        data = DataSource(self.data, self.source.validation, self.source.num_classes)
        return classify(config, self.model(), data)

    def plan(self, batch: int, schedules: tuple[Schedule, ...]) -> Plan:
        """Return the plan made by the package's own benchmark. Collective."""
        config = self.config(batch)
        world = self.paced(schedules)
        setup = Setup(self.task(config), NoFolder())
        results = benchmark_ranks(config, world, setup)
        profiles = [Profile(each.cost, each.memory_format, each.precision) for each in results]
        return make_plan(config, self.world, profiles)

    def fixed(self, shares: list[int]) -> Plan:
        """Return a plan with these batch sizes."""
        return Plan(shares, [1.0, 1.0], None, None)

    def run(self, plan: Plan, schedules: tuple[Schedule, ...], balance: str = "static") -> Run:
        """Return a run whose ranks follow these slowdown schedules."""
        config = self.config(sum(plan.batch_sizes), balance)
        world, task = self.paced(schedules), self.task(config)
        maker = LoopMaker(config, world, task, memory_format="channels_last")
        loop = maker.make(plan)
        return Run(loop, Balancing(config, loop, maker.setup.folder, Sinks()))

    def paced(self, schedules: tuple[Schedule, ...]) -> World:
        """Return the world with a device of this rank's schedule."""
        emulation = replace(self.world.emulation, schedules=schedules)
        device = emulation.wrap(self.world.device_kind, self.world.rank, "cpu")
        return replace(self.world, emulation=emulation, device_kind=device)

    def computation(self) -> Computation:
        """Return the computation settings shared by all runs."""
        return Computation(self.world.device, "fp32", "channels_last")


class Alone:
    """Trains this rank's share without communication."""

    def __init__(self, bench: Bench, share: int, schedule: Schedule) -> None:
        self._computation = bench.computation()
        self._task = bench.task(bench.config(share))
        self._model = self._task.model.to(bench.world.device).train()
        (self._optimizer,) = self._task.make_optimizers(self._model)
        self._slowdown = Pace(schedule)
        self._data, self._share, self._next = bench.data, share, 0

    def samples_per_sec(self, world: World, seconds: float) -> float:
        """Train for about `seconds`, at the same time as the other rank. Collective."""
        sleeping_barrier(world.comm)
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            self._step()
            done += self._share
        return done / (time.perf_counter() - start)

    def _step(self) -> None:
        indices = list(range(self._next, self._next + self._share))
        self._next += self._share
        batch = self._computation.place(self._data[indices])
        self._slowdown.start()
        self._computation.loss(self._task, self._model, batch).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._slowdown.catch_up()


SLOW: tuple[Schedule, ...] = ((), ((0, FACTOR),))


def sum_of_parts(bench: Bench, plan: Plan, rounds: int, steps: int) -> dict[str, object]:
    """Compare both ranks together with each rank alone, and with equal shares."""
    world, batch = bench.world, sum(plan.batch_sizes)
    together = bench.run(plan, SLOW, "adaptive")
    planned_steps = together.steps()
    timed(world, planned_steps, SETTLING)
    shares = together.sampler.batch_sizes
    equal = bench.run(bench.fixed([batch // 2, batch - batch // 2]), SLOW)
    alone = Alone(bench, shares[world.rank], SLOW[world.rank])
    equal_steps = equal.steps()
    timed(world, equal_steps, 1)
    alone.samples_per_sec(world, 0.1)
    parts, gains, rates = [], [], []
    for _ in range(rounds):
        before = timed(world, planned_steps, steps)
        own = alone.samples_per_sec(world, steps * before)
        sum_alone = sum(gather_values(world.comm, own))
        after = timed(world, planned_steps, steps)
        step = (before + after) / 2
        equal_step = timed(world, equal_steps, max(1, steps // 2))
        parts.append(batch / step / sum_alone)
        gains.append(equal_step / after)
        rates.append(batch / step)
    together.close()
    equal.close()
    return {
        "planned_by_benchmark": plan.batch_sizes,
        "shares": shares,
        "samples_per_sec": statistics.median(rates),
        "sum_of_parts": quartiles(parts),
        "against_equal": quartiles(gains),
    }


def exhaustive(bench: Bench, batch: int, rounds: int) -> dict[str, object]:
    """Compare the plan's step with the best of all fixed splits of a small global batch."""
    world = bench.world
    plan = bench.plan(batch, SLOW)
    splits = [[share, batch - share] for share in range(1, batch)]
    run = bench.run(bench.fixed(splits[0]), SLOW)
    steps = run.steps()
    timed(world, steps, WARM_UP)
    seconds: dict[int, list[float]] = {share: [] for share, _ in splits}
    for _ in range(rounds):
        for split in splits:
            run.sampler.set_plan(split)
            next(steps)  # the loader has already fetched this step's samples
            seconds[split[0]].append(timed(world, steps, 1))
    medians = {share: statistics.median(times) for share, times in seconds.items()}
    # Measure the best four again, alternating with the plan, so that the best is not just lucky.
    finalists = sorted(medians, key=lambda share: medians[share])[:4]
    again: dict[int, list[float]] = {share: [] for share in {*finalists, plan.batch_sizes[0]}}
    for _ in range(3 * rounds):
        for share, times in again.items():
            run.sampler.set_plan([share, batch - share])
            next(steps)
            times.append(timed(world, steps, 1))
    run.close()
    finals = {share: statistics.median(times) for share, times in again.items()}
    best = min(finals, key=lambda share: finals[share])
    return {
        "batch": batch,
        "planned": plan.batch_sizes,
        "best": [best, batch - best],
        "planned_over_best": finals[plan.batch_sizes[0]] / finals[best],
        "finals": {str(share): round(seconds, 4) for share, seconds in sorted(finals.items())},
    }


def steady(bench: Bench, plan: Plan, rounds: int, steps: int) -> dict[str, object]:
    """Compare adaptive with static balancing at constant speed."""
    world = bench.world
    runs = [bench.run(plan, SLOW, balance) for balance in ("static", "adaptive")]
    steps_of = [run.steps() for run in runs]
    for run_steps in steps_of:
        timed(world, run_steps, WARM_UP)
    ratios = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = [0.0, 0.0]
        for index in order:
            seconds[index] = timed(world, steps_of[index], steps)
        ratios.append(seconds[1] / seconds[0])
    plans = runs[1].balancing.plans
    for run in runs:
        run.close()
    return {"adaptive_over_static": quartiles(ratios), "plans": plans}


def events(
    bench: Bench, batch: int, slow_at: int, recovers_at: int, steps: int
) -> dict[str, object]:
    """Slow rank 1 down three times, then let it recover."""
    world = bench.world
    plan = bench.plan(batch, ((), ()))
    schedules: tuple[Schedule, ...] = ((), ((slow_at, FACTOR), (recovers_at, 1.0)))
    run = bench.run(plan, schedules, "adaptive")
    run_steps = run.steps()
    seconds, shares = [], []
    for _ in range(steps):
        shares.append(run.sampler.batch_sizes)
        seconds.append(timed(world, run_steps, 1))
    plans = run.balancing.plans - 1
    slow = run.balancing.slow_ranks()
    run.close()
    optimum = best_fixed(bench, batch, SLOW)
    equal_speeds = best_fixed(bench, batch, ((), ()))

    def efficiency(best: float, first: int, last: int) -> list[float]:
        return [round(best / s, 4) for s in seconds[first - 1 : last]]

    during, after = (
        efficiency(optimum, slow_at, recovers_at - 1),
        efficiency(equal_speeds, recovers_at, steps),
    )
    return {
        "steps": [slow_at, recovers_at, steps],
        "plans": plans,
        "efficiency_from_step_15_on": [
            statistics.median(during[15:]),
            statistics.median(after[15:]),
        ],
        "first_steps_at_0.95": [reached(during), reached(after)],
        "seconds": seconds,
        "shares": shares,
        "slow_ranks": slow,
    }


def best_fixed(bench: Bench, batch: int, schedules: tuple[Schedule, ...]) -> float:
    """Return the smallest median step time of the fixed splits near the ideal one."""
    world = bench.world
    ratio = 1 / FACTOR if schedules[1] else 1.0
    ideal = round(batch / (1 + ratio))
    reach = max(1, batch // 32)
    run = bench.run(bench.fixed([ideal, batch - ideal]), schedules)
    run_steps = run.steps()
    timed(world, run_steps, WARM_UP)
    seconds: dict[int, list[float]] = {}
    for _ in range(3):
        for share in (ideal - reach, ideal, ideal + reach):
            run.sampler.set_plan([share, batch - share])
            next(run_steps)
            seconds.setdefault(share, []).extend(timed(world, run_steps, 1) for _ in range(2))
    run.close()
    return min(statistics.median(times) for times in seconds.values())


def reached(efficiencies: list[float]) -> int:
    """Return the number of steps until the median of five first reaches 0.95; -1 if never."""
    for step in range(2, len(efficiencies) - 2):
        if statistics.median(efficiencies[step - 2 : step + 3]) >= 0.95:
            return step - 2
    return -1


def quartiles(values: list[float]) -> list[float]:
    """Return the quartiles, the median in the middle."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(value, 4) for value in (low, middle, high)]


def main() -> None:
    """Run the chosen parts; world rank 0 prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=["sum", "exhaustive", "steady", "events"])
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--batch", type=int, default=128, help="global batch")
    parser.add_argument("--small-batch", type=int, default=32, help="for the exhaustive search")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--benchmark-seconds", type=float, default=10.0)
    options = parser.parse_args()
    bench = Bench(kaitian_mpi.init(), options)
    found: dict[str, object] = {}
    plan = None
    if {"sum", "steady"} & set(options.parts):
        plan = bench.plan(options.batch, SLOW)
    for part in options.parts:
        if part == "sum":
            found[part] = sum_of_parts(bench, plan, options.rounds, options.steps)
        elif part == "exhaustive":
            found[part] = exhaustive(bench, options.small_batch, math.ceil(options.rounds / 2))
        elif part == "steady":
            found[part] = steady(bench, plan, 2 * options.rounds, options.steps)
        else:
            found[part] = events(bench, options.batch // 2, 25, 65, 105)
    if bench.world.rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
