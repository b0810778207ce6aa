"""Takes equal devices of a host for equally fast until repeated measurements separate them. Pure.

Ranks that share cores are timed at different moments: of four equal ones on two cores, some looked
half again as fast as others.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kaitian_mpi.balance.cost_model import MAX_CHANGE, fit
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.train.measure.rank_timer import RankMeasurement

# The rounds that each of two devices needs to be separated. Those of an accelerator hardly differ;
# those on a host's cores depend on what else computes there.
_ROUNDS_ON_HOST, _ROUNDS_ON_ACCELERATOR = 3, 2


def share_measurements(
    infos: Sequence[RankInfo],
    threads: Sequence[int],
    results: Sequence[RankMeasurement],
    samples: int,
) -> list[RankMeasurement]:
    """Return the ranks' measurements; ranks that are not separated have those of all of them.

    They keep their own limits of memory.

    Args:
        infos: of the ranks.
        threads: the number of threads with which each rank computes.
        results: what each rank has measured.
        samples: the batch size at which ranks are compared.
    """
    shared = list(results)
    for ranks in alike_ranks(infos, threads):
        rounds = _ROUNDS_ON_HOST if infos[ranks[0]].is_on_host else _ROUNDS_ON_ACCELERATOR
        for equal in _not_separated(ranks, results, rounds, samples):
            for rank, pooled in zip(equal, _pool([results[rank] for rank in equal]), strict=True):
                shared[rank] = pooled
    return shared


def are_equal_cpus(infos: Sequence[RankInfo], threads: Sequence[int]) -> bool:
    """Return whether all ranks compute on the CPU of one host, and may be equally fast."""
    return all(info.is_on_host for info in infos) and len(alike_ranks(infos, threads)) == 1


def alike_ranks(infos: Sequence[RankInfo], threads: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host with equal devices."""
    by_device: dict[tuple[object, ...], list[int]] = {}
    for rank, info in enumerate(infos):
        device = info.node, info.host, info.slowdown, threads[rank], info.rounding
        by_device.setdefault(device, []).append(rank)
    return list(by_device.values())


def _not_separated(
    ranks: Sequence[int], results: Sequence[RankMeasurement], rounds: int, samples: int
) -> list[list[int]]:
    """Divide equal devices into those that no repeated measurement separates, fastest first."""
    seconds = {rank: _by_round(results[rank], samples) for rank in ranks}

    def is_slower(rank: int, other: int) -> bool:
        both = seconds[other], seconds[rank]
        repeated = min(map(len, both)) >= rounds
        return repeated and max(both[0]) * (1 + MAX_CHANGE) < min(both[1])

    parts: list[list[int]] = []
    for rank in sorted(ranks, key=lambda rank: statistics.median(seconds[rank])):
        if parts and not all(is_slower(rank, other) for other in parts[-1]):
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return parts


def _by_round(result: RankMeasurement, samples: int) -> list[float]:
    """Return the seconds that a step takes by each round of the smallest and the largest batch."""
    ends = [0, -1] if len(result.batches) > 1 else [0]
    batches = [result.batches[end] for end in ends]
    rounds = zip(*(result.rounds[end] for end in ends), strict=False)
    return [fit(batches, seconds).seconds(samples) for seconds in rounds]


def _pool(results: Sequence[RankMeasurement]) -> list[RankMeasurement]:
    """Return the measurements of all of these ranks for each, in the settings that most chose."""
    settings = [(result.memory_format, result.precision) for result in results]
    (chosen, _), *_ = Counter(settings).most_common(1)
    rounds: dict[int, list[float]] = {}
    for result, result_settings in zip(results, settings, strict=True):
        for batch, seconds in zip(result.batches, result.rounds, strict=True):
            if result_settings == chosen:
                rounds.setdefault(batch, []).extend(seconds)
    batches = sorted(rounds)
    memory_format, precision = chosen
    return [
        replace(
            result,
            batches=batches,
            seconds=[statistics.median(rounds[batch]) for batch in batches],
            rounds=[rounds[batch] for batch in batches],
            memory_format=memory_format,
            precision=precision,
        )
        for result in results
    ]
