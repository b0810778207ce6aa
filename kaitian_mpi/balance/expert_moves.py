"""The time and memory of placements of experts, and of those that are one change away."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kaitian_mpi.balance.experts import (
    ExpertPlacement,
    ExpertsJob,
    ExpertTimes,
    Loads,
    activation_bytes,
    limit_rows,
    sample_bytes,
)
from kaitian_mpi.balance.ownership import NO_MIRROR

_MANY_PAIRS = 4096


class Placements:
    """The placements of a job with one number of micro-batches.

    One is given by `owners`, the rank of each expert, and `rows`, the samples of each rank.
    """

    def __init__(self, job: ExpertsJob, rounds: int) -> None:
        self._job = job
        self._rounds = rounds
        self.times = ExpertTimes(job, rounds)
        self.sizes = activation_bytes(job, rounds)
        """By expert, the bytes on its rank, with its tokens' activations."""
        self.free = job.free_bytes
        """By rank, the memory for experts and activations."""
        self.limits = limit_rows(job, rounds)
        """By rank, the most samples."""
        self._ranks = np.arange(len(job.ranks))

    def describe(
        self, owners: np.ndarray, rows: np.ndarray, mirrors: Sequence[int]
    ) -> ExpertPlacement:
        """Return a placement with its times and memory."""
        step, rank_sec = self.times.exact_step(self.loads(owners, rows))
        held = self.used(owners, rows)
        for number, mirror in enumerate(mirrors):
            if mirror != NO_MIRROR:
                held[mirror] += self._job.experts[number].held_bytes
        return ExpertPlacement(
            owners=tuple(owners.tolist()),
            mirrors=tuple(mirrors),
            batch_sizes=tuple(rows.tolist()),
            rounds=self._rounds,
            rank_sec=tuple(rank_sec.tolist()),
            step_sec=step,
            bytes_by_rank=tuple(map(math.ceil, held.tolist())),
        )

    def step(self, owners: np.ndarray, rows: np.ndarray) -> float:
        """Return the seconds of a step, as `ExpertTimes.step` has them."""
        return float(self.times.step(self.loads(owners, rows))[0])

    def loads(self, owners: np.ndarray, rows: np.ndarray) -> Loads:
        """Return the work of the ranks."""
        job = self._job
        shape = (job.mixture_count, len(job.ranks))
        work, tokens, update = np.zeros(shape), np.zeros(shape), np.zeros(len(job.ranks))
        at = job.mixtures, owners
        numbers = np.arange(len(owners))
        np.add.at(work, at, self.times.work_sec[owners, numbers])
        np.add.at(tokens, at, job.counts)
        np.add.at(update, owners, self.times.update_sec[owners, numbers])
        return Loads(work[None], tokens[None], update[None], rows[None, :])

    def held(self, owners: np.ndarray) -> np.ndarray:
        """Return the bytes that each rank uses for experts."""
        held = np.zeros(len(self._ranks))
        np.add.at(held, owners, self.sizes)
        return held

    def used(self, owners: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the bytes that each rank uses for experts and activations."""
        used: np.ndarray = self.held(owners) + sample_bytes(self._job, rows, self._rounds)
        return used

    def single_moves(
        self, members: np.ndarray, owners: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return experts and ranks to which they may move, with the seconds; infinite: no room."""
        numbers = np.repeat(members, len(self._ranks))
        ranks = np.tile(self._ranks, len(members))
        is_move = owners[numbers] != ranks
        numbers, ranks = numbers[is_move], ranks[is_move]
        mixture = int(self._job.mixtures[members[0]])
        moves = [(numbers, owners[numbers], ranks)]
        seconds = self._seconds_after(moves, owners, rows, mixture)
        used = self.used(owners, rows)
        has_room = used[ranks] + self.sizes[numbers] <= self.free[ranks]
        return numbers, ranks, np.where(has_room, seconds, np.inf)

    def swaps(
        self, pairs: np.ndarray, owners: np.ndarray, rows: np.ndarray, mixture: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return those pairs of experts that may change places, with the seconds.

        Infinite ones if there is no room.
        """
        pairs = pairs.reshape(-1, 2)
        pairs = pairs[owners[pairs[:, 0]] != owners[pairs[:, 1]]]
        if len(pairs) > _MANY_PAIRS:  # only those that change the latest rank
            _, seconds = self.times.exact_step(self.loads(owners, rows))
            pairs = pairs[(owners[pairs] == int(seconds.argmax())).any(axis=1)][:_MANY_PAIRS]
        ones, others = pairs[:, 0], pairs[:, 1]
        a, b = owners[ones], owners[others]
        moves = [(ones, a, b), (others, b, a)]
        seconds = self._seconds_after(moves, owners, rows, mixture)
        used = self.used(owners, rows)
        more = self.sizes[others] - self.sizes[ones]
        has_room = (used[a] + more <= self.free[a]) & (used[b] - more <= self.free[b])
        return pairs, np.where(has_room, seconds, np.inf)

    def _seconds_after(
        self,
        moves: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
        owners: np.ndarray,
        rows: np.ndarray,
        mixture: int | None,
    ) -> np.ndarray:
        """Return the seconds of candidates, each of which moves experts from ranks to ranks.

        Those of one mixture, in which all of them are, or of the whole step.
        """
        base = self.loads(owners, rows)
        if mixture is not None:
            base = base.only(mixture)
        count = len(moves[0][0])
        if not count:
            return np.zeros(0)
        work, tokens, update = (np.repeat(load, count, axis=0) for load in base[:3])
        at = np.arange(count)
        for numbers, sources, targets in moves:
            where = self._job.mixtures[numbers] if mixture is None else 0
            work[at, where, sources] -= self.times.work_sec[sources, numbers]
            work[at, where, targets] += self.times.work_sec[targets, numbers]
            tokens[at, where, sources] -= self._job.counts[numbers]
            tokens[at, where, targets] += self._job.counts[numbers]
            update[at, sources] -= self.times.update_sec[sources, numbers]
            update[at, targets] += self.times.update_sec[targets, numbers]
        loads = Loads(work, tokens, update, base.rows)
        return self.times.step(loads, None if mixture is None else [mixture])

    def mirrors(
        self, owners: np.ndarray, rows: np.ndarray, now: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return another rank for each expert, on another host if possible, by free memory.

        If it fits, the rank that mirrors it `now`.
        """
        job = self._job
        mirrors = [NO_MIRROR] * len(owners)
        if not job.has_mirrors:
            return tuple(mirrors)
        fractions = np.array([rank.mirrored for rank in job.ranks])
        left = fractions * self.free - self.used(owners, rows)
        held = job.held_bytes
        nodes = [rank.node for rank in job.ranks]
        for number in sorted(range(len(owners)), key=lambda n: (-held[n], n)):
            owner = int(owners[number])
            before = now[number] if now else NO_MIRROR
            choices = [
                (nodes[rank] != nodes[owner], rank == before, left[rank], -rank)
                for rank in range(len(nodes))
                if rank != owner and left[rank] >= held[number]
            ]
            if choices:
                mirror = -max(choices)[-1]
                mirrors[number] = mirror
                left[mirror] -= held[number]
        return tuple(mirrors)
