"""Measures how much of the possible gain from following the ranks' speeds the rebalancer reaches.

    mpirun -np 2 --map-by core --bind-to core python benchmarks/replay.py

Records how long each rank takes for the same samples, step after step: the small GPT of
benchmarks/training.py, the last rank three times slower (emulated). Then replays these speeds, by
calculation only: with equal shares; with the best shares for the median speeds; with the
rebalancer; with shares by the median of the last steps, over the number of steps that would have
been best; and with shares by the speeds of the step itself, which nobody can know in advance. This
separates what the rebalancer could still gain from noise of the machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from shared.gpt import loss_of, make_optimizer
from training import LENGTH, VOCABULARY, make_model

import kaitian_mpi
from kaitian_mpi.balance.cost_model import CostTable, RankCost, fit
from kaitian_mpi.balance.fastest_split import plan_fastest
from kaitian_mpi.balance.rebalancer import RankSteps, Rebalancer
from kaitian_mpi.devices.pace import Pace
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.polling import sleeping_barrier

BATCH = 32
LAGS = (1, 2, 3, 5, 10, 20, 40)
EXPOSED_SEC = 0.004  # communication, in every step
Shares = Callable[[int], np.ndarray]


def record(world: World, slowdown: float, seconds: float) -> tuple[list[RankCost], np.ndarray]:
    """Return each rank's cost, and how much slower than that it was in each step. Collective.

    The latter is [steps, ranks].
    """
    torch.manual_seed(0)
    model = make_model()
    optimizer, data = make_optimizer(model), torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    is_slow = world.rank == world.size - 1
    emulated = Pace(((0, slowdown),) if is_slow else ())

    def step(samples: int) -> list[float]:
        sleeping_barrier(world.comm)
        emulated.start()
        began = time.perf_counter()
        loss_of(model, data[:samples]).backward()
        optimizer.step()
        optimizer.zero_grad()
        emulated.catch_up()
        return gather_values(world.comm, time.perf_counter() - began)

    sizes = (BATCH // 4, BATCH // 2)
    for size in sizes:
        step(size)
    samples = BATCH // 4 if is_slow else BATCH - BATCH // 4
    times = {size: [step(size) for _ in range(15)] for size in sizes}
    rows, until = [], time.perf_counter() + seconds
    while gather_values(world.comm, float(time.perf_counter() < until))[0]:
        rows.append(step(samples))
    shares = [int(share) for share in gather_values(world.comm, float(samples))]
    seconds_of = np.array(rows)
    medians = {size: np.median(times[size], axis=0) for size in sizes}
    costs = [
        RankCost(fit([*sizes, share], [*(float(medians[s][rank]) for s in sizes), float(middle)]))
        for rank, (share, middle) in enumerate(
            zip(shares, np.median(seconds_of, axis=0), strict=True)
        )
    ]
    return costs, seconds_of / CostTable.from_costs(costs).seconds(np.array(shares))


def total(costs: CostTable, factors: np.ndarray, shares_of: Shares) -> float:
    """Return the seconds of all steps, each as long as its slowest rank.

    Args:
        costs: the ranks' costs.
        factors: how much longer than its cost each rank took, as [steps, ranks].
        shares_of: returns the ranks' samples in a step.
    """
    return sum(
        float((costs.seconds(shares_of(step)) * factor).max()) + EXPOSED_SEC
        for step, factor in enumerate(factors)
    )


def rebalanced(costs: list[RankCost], factors: np.ndarray) -> tuple[float, int]:
    """Return the seconds of all steps with the rebalancer, and how many plans it made."""
    table, plans, reported, seconds = CostTable.from_costs(costs), 0, None, 0.0
    rebalancer = Rebalancer(costs, plan_fastest(costs, BATCH))
    for factor in factors:
        shares = np.array(rebalancer.batch_sizes)
        work = table.seconds(shares) * factor
        seconds += float(work.max()) + EXPOSED_SEC
        if reported is not None:  # a step's report arrives a step later
            plans += rebalancer.observe(reported) is not None
        reported = RankSteps(np.ones_like(shares), shares, work, work.max() - work + EXPOSED_SEC)
    return seconds, plans


def show(costs: list[RankCost], factors: np.ndarray) -> None:
    """Print what each way of dividing the batch gains over equal shares."""
    table = CostTable.from_costs(costs)

    def best(factor: np.ndarray) -> np.ndarray:
        return np.array(plan_fastest(table.times(factor).costs(), BATCH))

    def lagging(lag: int) -> Shares:
        return lambda step: best(np.median(factors[max(0, step - 1 - lag) : max(1, step - 1)], 0))

    equal = np.full(len(costs), BATCH // len(costs))
    equal_sec = total(table, factors, lambda step: equal)
    fixed = best(np.median(factors, axis=0))
    lags = {lag: equal_sec / total(table, factors, lagging(lag)) for lag in LAGS}
    lag = max(lags, key=lambda each: lags[each])
    seconds, plans = rebalanced(costs, factors)
    low, high = np.quantile(factors, (0.1, 0.9), axis=0)
    spread = ", ".join(f"{a:.2f} to {b:.2f}" for a, b in zip(low, high, strict=True))
    print(f"{len(factors)} steps, one rank slowed (emulated)")
    print(f"a step's time, relative to the median, of each rank (8 of 10 steps): {spread}")
    gains = {
        f"shares that stay, {fixed.tolist()}": equal_sec
        / total(table, factors, lambda step: fixed),
        f"the rebalancer, {plans} new plans": equal_sec / seconds,
        f"by the last {lag} steps, the best number": lags[lag],
        "by each step's own speeds": equal_sec / total(table, factors, lambda k: best(factors[k])),
    }
    print("samples/s relative to equal shares:")
    for name, gain in gains.items():
        print(f"  {name:40} {gain:.3f}")


def main() -> None:
    """Record and replay. Collective."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slowdown", type=float, default=3.0, help="of the last rank (emulated)")
    parser.add_argument("--seconds", type=float, default=90.0, help="to record")
    options = parser.parse_args()
    world = kaitian_mpi.init()
    costs, factors = record(world, options.slowdown, options.seconds)
    if world.rank == 0:
        show(costs, factors)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
