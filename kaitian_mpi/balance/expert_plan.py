"""Plans which rank holds which expert and computes how many rows, so that a step is short.

Rows and experts are moved in turns, from several divisions of the rows, as long as the predicted
step gets shorter: single experts, pairs of them, rows, and an expert with the rows that then fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kaitian_mpi.balance.expert_moves import Placements
from kaitian_mpi.balance.expert_prediction import predict
from kaitian_mpi.balance.experts import (
    ExpertPlacement,
    ExpertsJob,
    Loads,
    moved_bytes,
    sample_bytes,
    too_large,
)
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.errors import UserError

_ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_TURNS = 8
_JOINT = 6  # moves of an expert after which the rows are divided again
_MANY_RANKS = 16  # above this, only late ranks give rows away, to early ones
_LATE, _EARLY = 2, 4
_TOO_MANY_RANKS = 64  # above this, experts are placed once, on ranks that are early
_MUCH_WORK = 2048  # ranks times experts; above this, fewer plans are compared
_STARTS_OF_MANY = 2
_BETTER = 1 - 1e-9
_WORTH_A_CHANGE = 0.98  # of the step with owners as they are, or nearly so
# Experts move if the step gets faster by this factor, and the steps left save more than a move
# takes: these seconds, and sending the experts.
_MIN_GAIN = 1.05
_MOVING_SEC = 1.0


def place_experts(
    job: ExpertsJob, owners: Sequence[int] = (), mirrors: Sequence[int] = ()
) -> ExpertPlacement:
    """Return the placement with the shortest step of those that fit the ranks' memory.

    Args:
        job: the experts, ranks and links.
        owners: the ranks that hold the experts now, which do not move for a small gain; -1: no rank
            does. Empty: none does.
        mirrors: those that keep them, too; -1: no rank does.

    Raises:
        UserError: the experts do not fit.
    """
    best: ExpertPlacement | None = None
    for rounds in _ROUNDS:
        if rounds > 1 and (job.is_whole or rounds * job.min_batch > job.global_batch):
            break
        placement = _Search(job, rounds, owners, mirrors).run()
        if placement is None:
            continue
        is_second = best is not None
        if best is None or placement.step_sec < best.step_sec:
            best = placement
        # With less memory for activations at once, experts may be elsewhere.
        if is_second or has_spare(job, placement):
            break
    if best is None:
        raise UserError(too_large(job))
    return best


def has_spare(job: ExpertsJob, placement: ExpertPlacement) -> bool:
    """Return whether each rank has the memory for another expert."""
    largest = float(job.held_bytes.max(initial=0.0))
    used = np.array(placement.bytes_by_rank)
    return bool((used + 2 * largest <= job.free_bytes).all())


class Replacement(NamedTuple):
    """Another placement that is worth its move."""

    placement: ExpertPlacement
    text: str


def replace_experts(job: ExpertsJob, placement: ExpertPlacement, steps: int) -> Replacement | None:
    """Return another placement if it is worth its move; None if not.

    Args:
        job: as steps have shown it, see `Calibration`.
        placement: of the experts now.
        steps: the steps left.
    """
    before = predict(job, placement).step_sec
    try:
        after = place_experts(job, placement.owners, placement.mirrors)
    except UserError:  # the tokens of one expert may be too many for any rank's memory
        return None
    if before < _MIN_GAIN * after.step_sec:
        return None
    busy_sec = max((hop.busy_sec for hop in job.links.values()), default=0.0)
    moving_sec = _MOVING_SEC + moved_bytes(job, placement, after) * busy_sec
    if (before - after.step_sec) * steps <= moving_sec:
        return None
    moved = sum(a != b for a, b in zip(placement.owners, after.owners, strict=True))
    what = {0: "other batch sizes", 1: "1 expert moves"}.get(moved, f"{moved} experts move")
    times = f"{1e3 * after.step_sec:.0f} ms in place of {1e3 * before:.0f} ms"
    return Replacement(after, f"{what}; predicted step {times}")


class _Search:
    """Searches placements for one number of micro-batches."""

    def __init__(
        self, job: ExpertsJob, rounds: int, owners: Sequence[int], mirrors: Sequence[int]
    ) -> None:
        """Search for one number of micro-batches; experts have owners and mirrors, or none."""
        self._job = job
        self._rounds = rounds
        self._now = np.array(owners, dtype=int)
        self._mirrors_now = mirrors
        self._placements = Placements(job, rounds)
        self._times = self._placements.times
        self._sizes = self._placements.sizes
        self._free = self._placements.free
        self._mixtures = [
            np.flatnonzero(job.mixtures == number) for number in range(job.mixture_count)
        ]
        self._ranks = np.arange(len(job.ranks))
        self._is_large = len(job.ranks) * len(job.experts) > _MUCH_WORK
        self._is_huge = len(job.ranks) > _TOO_MANY_RANKS

    def run(self) -> ExpertPlacement | None:
        """Return the best placement found; None if none fits."""
        best: tuple[float, np.ndarray, np.ndarray] | None = None
        limit = np.inf
        for is_now in (True, False) if len(self._now) else (False,):
            for rows in self._starts():
                owners = self._complete(rows) if is_now else self._place(rows)
                if owners is None:
                    continue
                step, owners, rows = self._improve(owners, rows)
                if step < limit:
                    best = step, owners, rows
                    limit = _BETTER * step
            limit = min(limit, _WORTH_A_CHANGE * limit / _BETTER)
        if best is None:
            return None
        _, owners, rows = best
        mirrors = self._placements.mirrors(owners, rows, self._mirrors_now)
        return self._placements.describe(owners, rows, mirrors)

    def _starts(self) -> Iterator[np.ndarray]:
        """Yield divisions of the rows to begin with."""
        job = self._job
        count, total = len(job.ranks), job.global_batch
        if job.batch_sizes:
            planned_rows = np.array(job.batch_sizes, dtype=int)
            if (sample_bytes(job, planned_rows, self._rounds) <= self._free).all():
                yield planned_rows
            return
        speeds = [1 / rank.cost.seconds(max(1, total // count)) for rank in job.ranks]
        busiest = [
            max(1e-12, *map(sum, zip(rank.token_sec, rank.update_sec, strict=True)))
            for rank in job.ranks
        ]
        free = np.maximum(self._free, 1.0).tolist()
        weights = [
            speeds,
            [1.0] * count,
            [1 / seconds for seconds in busiest],
            [speed / memory for speed, memory in zip(speeds, free, strict=True)],
            [speed * memory for speed, memory in zip(speeds, free, strict=True)],
        ]
        seen = set()
        starts = 1 if self._is_huge else _STARTS_OF_MANY if self._is_large else None
        for start in weights[:starts]:
            rows = self._fitting_rows(apportion(total, start))
            if rows is not None and tuple(rows) not in seen:
                seen.add(tuple(rows))
                yield np.array(rows, dtype=int)

    def _fitting_rows(self, rows: list[int]) -> list[int] | None:
        """Return rows that every rank can compute, as near to these as is simple."""
        job, least = self._job, self._job.min_batch
        if least * len(rows) > job.global_batch:
            least = 0
        limits = self._placements.limits.copy()
        for rank, facts in enumerate(job.ranks):
            if facts.sample_bytes:
                most = math.floor(max(0.0, facts.free_bytes) / facts.sample_bytes)
                limits[rank] = min(limits[rank], most * self._rounds)
        if (limits < least).any() or limits.sum() < job.global_batch:
            return None
        fitted = [min(max(row, least), int(most)) for row, most in zip(rows, limits, strict=True)]
        while missing := job.global_batch - sum(fitted):
            # One after the other, so that equal ranks stay equal within one sample.
            step = max(1, abs(missing) // len(fitted))
            if missing > 0:
                spare = [int(most) - row for row, most in zip(fitted, limits, strict=True)]
                rank = spare.index(max(spare))
                fitted[rank] += min(step, spare[rank])
            else:
                over = [row - least for row in fitted]
                rank = over.index(max(over))
                fitted[rank] -= min(step, over[rank])
        return fitted

    def _place(self, rows: np.ndarray) -> np.ndarray | None:
        """Return owners for given rows, the largest expert first; None if they do not fit."""
        fastest = self._times.work_sec.min(axis=0) + self._times.update_sec.min(axis=0)
        by_time = sorted(range(len(self._sizes)), key=lambda n: (-fastest[n], n))
        owners = self._place_in_order(by_time, rows, by_memory=False)
        if owners is None:
            by_size = sorted(range(len(self._sizes)), key=lambda n: (-self._sizes[n], n))
            owners = self._place_in_order(by_size, rows, by_memory=True)
        return owners

    def _complete(self, rows: np.ndarray) -> np.ndarray | None:
        """Return owners of which those that there are now stay; None if they do not fit."""
        missing = np.flatnonzero(self._now < 0).tolist()
        by_size = sorted(missing, key=lambda n: (-self._sizes[n], n))
        return self._place_in_order(by_size, rows, False, self._now)

    def _place_in_order(
        self,
        order: Sequence[int],
        rows: np.ndarray,
        by_memory: bool,
        now: np.ndarray | None = None,
    ) -> np.ndarray | None:
        job, times = self._job, self._times
        used = sample_bytes(job, rows, self._rounds)
        shape = (job.mixture_count, len(job.ranks))
        work, tokens = np.zeros(shape), np.zeros(shape)
        update = np.zeros(len(job.ranks))
        owners = np.full(len(job.experts), -1) if now is None else now.copy()
        placed = np.flatnonzero(owners >= 0)
        if len(placed):
            ranks = owners[placed]
            np.add.at(used, ranks, self._sizes[placed])
            np.add.at(work, (job.mixtures[placed], ranks), times.work_sec[ranks, placed])
            np.add.at(tokens, (job.mixtures[placed], ranks), job.counts[placed])
            np.add.at(update, ranks, times.update_sec[ranks, placed])
            if (used > self._free).any():
                return None
        for number in order:
            mixture = int(job.mixtures[number])
            has_room = used + self._sizes[number] <= self._free
            if not has_room.any():
                return None
            if by_memory:
                rank = int(np.where(has_room, self._free - used, -np.inf).argmax())
            else:
                ranks = np.flatnonzero(has_room)
                if self._is_huge:
                    ends = work[mixture] + times.work_sec[:, number] + times.dense(rows)
                    ranks = ranks[np.argsort(ends[ranks], kind="stable")[:_EARLY]]
                here = np.zeros((len(ranks), len(has_room)))
                here[np.arange(len(ranks)), ranks] = 1.0
                loads = Loads(
                    (work[mixture] + here * times.work_sec[:, number])[:, None, :],
                    (tokens[mixture] + here * job.counts[number])[:, None, :],
                    update + here * times.update_sec[:, number],
                    rows[None, :],
                )
                rank = int(ranks[times.step(loads, [mixture]).argmin()])
            owners[number] = rank
            used[rank] += self._sizes[number]
            work[mixture, rank] += times.work_sec[rank, number]
            tokens[mixture, rank] += job.counts[number]
            update[rank] += times.update_sec[rank, number]
        return owners

    def _improve(
        self, owners: np.ndarray, rows: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        if self._is_huge:
            return self._placements.step(owners, rows), owners, rows
        step, owners, rows = self._take_turns(owners, rows)
        for _ in range(_TURNS):
            improved = self._joint(owners, rows, step)
            if improved is None:
                break
            step, owners, rows = improved
        return step, owners, rows

    def _take_turns(
        self, owners: np.ndarray, rows: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Move experts, then rows, as long as the step gets shorter."""
        step = self._placements.step(owners, rows)
        for _ in range(_TURNS):
            owners = self._move_experts(owners, rows)
            rows = self._move_rows(owners, rows)
            shorter = self._placements.step(owners, rows)
            if shorter >= _BETTER * step:
                break
            step = shorter
        return min(step, shorter), owners, rows

    def _joint(
        self, owners: np.ndarray, rows: np.ndarray, step: float
    ) -> tuple[float, np.ndarray, np.ndarray] | None:
        """Return a shorter step by a move that only pays with other rows; None if there is none."""
        if self._job.batch_sizes or len(self._ranks) == 1 or self._is_large:
            return None
        candidates: list[tuple[float, int, int]] = []
        for members in self._mixtures:
            numbers, ranks, seconds = self._placements.single_moves(members, owners, rows)
            order = np.argsort(seconds, kind="stable")[:_JOINT]
            candidates += [
                (float(seconds[place]), int(numbers[place]), int(ranks[place]))
                for place in order
                if np.isfinite(seconds[place])
            ]
        for _, number, rank in sorted(candidates)[:_JOINT]:
            changed = owners.copy()
            changed[number] = rank
            new_rows = self._move_rows(changed, rows)
            shorter = self._placements.step(changed, new_rows)
            if shorter < _BETTER * step:
                return self._take_turns(changed, new_rows)
        return None

    def _move_experts(self, owners: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Move and swap experts as long as a mixture's time gets shorter."""
        owners = owners.copy()
        is_changed = True
        while is_changed:
            is_changed = False
            for members in self._mixtures:
                while self._improve_mixture(members, owners, rows):
                    is_changed = True
            is_changed |= self._swap_across(owners, rows)
        return owners

    def _improve_mixture(self, members: np.ndarray, owners: np.ndarray, rows: np.ndarray) -> bool:
        """Make the best move or swap within a mixture; return False if none helps."""
        mixture = int(self._job.mixtures[members[0]])
        now = float(
            self._times.step(self._placements.loads(owners, rows).only(mixture), [mixture])[0]
        )
        numbers, ranks, moved = self._placements.single_moves(members, owners, rows)
        best_move = float(moved.min(initial=np.inf))
        pairs = np.array(list(itertools.combinations(members.tolist(), 2)), dtype=int)
        pairs, swapped = self._placements.swaps(pairs, owners, rows, mixture)
        best_swap = float(swapped.min(initial=np.inf))
        if min(best_move, best_swap) >= _BETTER * now:
            return False
        if best_move <= best_swap:
            place = int(moved.argmin())
            owners[numbers[place]] = ranks[place]
        else:
            _swap(owners, pairs[int(swapped.argmin())])
        return True

    def _swap_across(self, owners: np.ndarray, rows: np.ndarray) -> bool:
        """Swap two experts of different mixtures, which share memory and the optimizer's time."""
        mixtures = self._job.mixtures
        is_tight = (
            self._placements.used(owners, rows) + self._sizes.max(initial=0.0) > self._free
        ).any()
        is_shared = bool(is_tight) or bool(self._times.update_sec.any())
        if self._is_large or len(self._mixtures) == 1 or not is_shared:
            return False
        pairs = np.array(list(itertools.combinations(range(len(owners)), 2)), dtype=int)
        pairs = pairs[mixtures[pairs[:, 0]] != mixtures[pairs[:, 1]]]
        pairs, seconds = self._placements.swaps(pairs, owners, rows)
        if float(seconds.min(initial=np.inf)) >= _BETTER * self._placements.step(owners, rows):
            return False
        _swap(owners, pairs[int(seconds.argmin())])
        return True

    def _move_rows(self, owners: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Move rows between ranks as long as the step gets shorter."""
        if self._job.batch_sizes or len(self._ranks) == 1:
            return rows
        amount = max(1, 2 ** int(math.log2(max(1, int(rows.max()) // 2))))
        step = self._placements.step(owners, rows)
        while amount:
            moved = self._best_transfer(owners, rows, amount)
            if moved is not None and moved[0] < _BETTER * step:
                step, rows = moved
            else:
                amount //= 2
        return rows

    def _best_transfer(
        self, owners: np.ndarray, rows: np.ndarray, amount: int
    ) -> tuple[float, np.ndarray] | None:
        """Return the best of the divisions in which one rank gives so many rows to another."""
        loads = self._placements.loads(owners, rows)
        donors = takers = self._ranks
        if len(self._ranks) > _MANY_RANKS:
            _, seconds = self._times.exact_step(loads)
            order = np.argsort(-seconds, kind="stable")
            donors, takers = order[:_LATE], order[-_EARLY:]
        pairs = [(a, b) for a in donors.tolist() for b in takers.tolist() if a != b]
        sources, targets = (np.array(column) for column in zip(*pairs, strict=True))
        candidates = np.repeat(rows[None, :], len(pairs), axis=0)
        at = np.arange(len(pairs))
        candidates[at, sources] -= amount
        candidates[at, targets] += amount
        held = self._placements.held(owners)
        used = held + sample_bytes(self._job, candidates, self._rounds)
        fits = (candidates[at, sources] >= min(self._job.min_batch, int(rows.min()))) & (
            candidates[at, targets] <= self._placements.limits[targets]
        )
        fits &= (used <= np.maximum(self._free, held)).all(axis=1)
        if not fits.any():
            return None
        candidates = candidates[fits]
        seconds = self._times.step(loads._replace(rows=candidates))
        place = int(seconds.argmin())
        return float(seconds[place]), candidates[place]


def _swap(owners: np.ndarray, pair: np.ndarray) -> None:
    owners[pair] = owners[pair[::-1]]
