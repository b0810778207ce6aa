"""The cost of a mixture of experts whose experts are on different ranks: its seconds and memory.

An `Experts` module is computed in turns. Each rank computes the layers before it for its own rows;
the tokens go to the ranks that hold their experts, which compute their own first and then those of
the other ranks as these arrive; the results go back. So a rank with few rows can compute experts
while others are still at their rows, but only of the tokens that are known by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.ownership import NO_MIRROR
from kaitian_mpi.balance.pipeline import Hop

_WAYS = 4  # of a token: to its expert and back, in forward and in backward
DEFAULT_CHUNKS = 4


@dataclass(frozen=True)
class Expert:
    """An expert's memory and rows, the same on every rank."""

    mixture: int
    """The number of its `Experts` module, in the order of `model.modules()`."""
    held_bytes: int
    """Bytes of its parameters, their gradients and optimizer state."""
    kept_bytes: float
    """Bytes of a token's activations, kept from forward to backward."""
    row_bytes: float
    """Bytes of a token as it is sent."""
    trained_bytes: int = 0
    """Bytes of its parameters that an optimizer steps."""
    weight_bytes: int = 0
    """Bytes of its parameters and buffers."""

    @property
    def state_bytes(self) -> int:
        """Bytes of its optimizer state."""
        return self.held_bytes - self.weight_bytes - self.trained_bytes


class RankFactors(NamedTuple):
    """How many times as long as measured a rank takes, of what training takes."""

    dense: float = 1.0
    """For its rows, and for the optimizer."""
    experts: float = 1.0
    """For the tokens that it computes, and copies meanwhile."""

    def times(self, other: RankFactors) -> RankFactors:
        """Return the products."""
        return RankFactors(self.dense * other.dense, self.experts * other.experts)


@dataclass(frozen=True)
class ExpertRank:
    """A rank's measured speed and memory."""

    kind: str
    node: int
    """The number of its host. Ranks of one host share its link to others."""
    cost: RankCost
    """Of a step without the experts."""
    fixed_sec: tuple[float, ...]
    """By expert, seconds of forward and backward per call: one for the tokens of each rank."""
    token_sec: tuple[float, ...]
    """By expert, seconds of forward and backward per token."""
    update_sec: tuple[float, ...]
    """By expert, seconds of the optimizer per step."""
    free_bytes: float
    """Memory for experts and activations."""
    sample_bytes: float = 0.0
    """Bytes of a sample's activations, without those of experts."""
    base_bytes: float = 0.0
    """Bytes that it uses besides: of all but the experts, and at startup."""
    mirrored: float = 1.0
    """The fraction of the memory that may be used with mirrors."""
    copying: float = 0.0
    """What the time of messages within its host is multiplied by, in which it cannot compute: its
    own core copies them. 0: it computes meanwhile."""

    def scaled(self, factors: RankFactors) -> ExpertRank:
        """Return the facts of a rank that takes so many times as long."""
        return replace(
            self,
            cost=self.cost.times(factors.dense),
            fixed_sec=tuple(factors.experts * seconds for seconds in self.fixed_sec),
            token_sec=tuple(factors.experts * seconds for seconds in self.token_sec),
            update_sec=tuple(factors.dense * seconds for seconds in self.update_sec),
            copying=factors.experts * self.copying,
        )


@dataclass(frozen=True)
class ExpertsJob:
    """The experts, ranks and links that rows and experts are planned for."""

    experts: tuple[Expert, ...]
    """In the order of their mixtures, then of their numbers there."""
    ranks: tuple[ExpertRank, ...]
    tokens: tuple[float, ...]
    """By expert, the tokens that it gets for a sample of the global batch."""
    global_batch: int
    min_batch: int = 1
    """The fewest samples of a rank."""
    micro_batch: int = 0
    """The most samples that a rank computes at once; 0: as many as fit its memory."""
    batch_sizes: tuple[int, ...] = ()
    """The ranks' samples; empty: they are planned."""
    is_whole: bool = False
    """Whether a rank has to compute its samples at once."""
    links: Mapping[str, Hop] = field(default_factory=dict)
    """By two kinds in alphabetical order: a message's latency, and its busy seconds per byte."""
    chunks: int = DEFAULT_CHUNKS
    """In how many parts a rank's tokens are sent."""
    has_mirrors: bool = False
    """Whether another rank is to keep each expert, too, as far as there is memory."""
    residual_sec: float = 0.0
    """The seconds by which a step is longer than its parts explain, as by what is not hidden of the
    sum of gradients; negative if it is shorter."""

    def in_world(self, world: Mapping[str, int], global_batch: int) -> ExpertsJob:
        """Return the job for other numbers of ranks by kind, repeating the measured ones."""
        by_kind: dict[str, list[ExpertRank]] = {}
        for rank in self.ranks:
            by_kind.setdefault(rank.kind, []).append(rank)
        ranks = tuple(
            rank
            for kind, count in world.items()
            for rank in itertools.islice(itertools.cycle(by_kind[kind]), count)
        )
        return replace(self, ranks=ranks, global_batch=global_batch, batch_sizes=())

    @cached_property
    def counts(self) -> np.ndarray:
        """By expert, the tokens of a step."""
        return np.array(self.tokens, dtype=float) * self.global_batch

    @cached_property
    def kept_counts(self) -> np.ndarray:
        """By expert, the tokens of a step that there is to be memory for.

        At least those of an equal share: a gate may choose others later.
        """
        mixtures = self.mixtures
        sums = np.zeros(self.mixture_count)
        numbers = np.zeros(self.mixture_count)
        np.add.at(sums, mixtures, self.counts)
        np.add.at(numbers, mixtures, 1.0)
        equal: np.ndarray = np.maximum(self.counts, (sums / np.maximum(numbers, 1))[mixtures])
        return equal

    @cached_property
    def mixtures(self) -> np.ndarray:
        """By expert, the number of its mixture."""
        return np.array([expert.mixture for expert in self.experts], dtype=int)

    @property
    def mixture_count(self) -> int:
        """The number of mixtures."""
        return max((expert.mixture for expert in self.experts), default=-1) + 1

    @property
    def held_bytes(self) -> np.ndarray:
        """By expert, the bytes of its parameters, gradients and optimizer state."""
        return np.array([expert.held_bytes for expert in self.experts], dtype=float)

    @property
    def free_bytes(self) -> np.ndarray:
        """By rank, the memory for experts and activations."""
        return np.array([rank.free_bytes for rank in self.ranks], dtype=float)

    def hop(self, one: int, other: int) -> Hop:
        """Return a message's latency and its busy seconds per byte, between two ranks."""
        kinds = sorted((self.ranks[one].kind, self.ranks[other].kind))
        return self.links.get(" ".join(kinds), Hop(0.0, 0.0))


@dataclass(frozen=True)
class ExpertPlacement:
    """The rank of each expert and the rows of each rank, with their predicted time and memory."""

    owners: tuple[int, ...]
    """By expert, the rank that holds it."""
    mirrors: tuple[int, ...]
    """By expert, another rank that keeps it, too; `NO_MIRROR` if none has the memory."""
    batch_sizes: tuple[int, ...]
    """By rank, the samples of a step."""
    rounds: int = 1
    """The micro-batches of a step, of which all ranks compute one at a time."""
    rank_sec: tuple[float, ...] = ()
    """By rank, the predicted seconds of a step without waiting for slower ranks: of its rows, of
    its experts, and of what it sends and receives that is not hidden behind these."""
    step_sec: float = 0.0
    """The predicted seconds of a step."""
    bytes_by_rank: tuple[int, ...] = ()
    """By rank, the predicted peak of the memory for experts and activations."""

    def experts_of(self, rank: int) -> list[int]:
        """Return the numbers of the experts that a rank holds."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    @property
    def mirrored(self) -> int:
        """How many experts have a mirror."""
        return sum(mirror != NO_MIRROR for mirror in self.mirrors)


class Loads(NamedTuple):
    """Work of the ranks, for several candidates at once.

    Arrays are shaped (candidates, mixtures, ranks), those of rows and updates (candidates, ranks).
    """

    work_sec: np.ndarray
    """Seconds of the experts."""
    tokens: np.ndarray
    """Tokens of the experts."""
    update_sec: np.ndarray
    """Seconds of the experts' optimizer."""
    rows: np.ndarray
    """Samples."""

    def only(self, mixture: int) -> Loads:
        """Return the work of one mixture."""
        at = slice(mixture, mixture + 1)
        return self._replace(work_sec=self.work_sec[:, at], tokens=self.tokens[:, at])


class ExpertTimes:
    """The time of a step in so many micro-batches, for many placements at once."""

    def __init__(self, job: ExpertsJob, rounds: int) -> None:
        self._job = job
        self._rounds = rounds
        ranks = range(len(job.ranks))
        fixed = np.array([rank.fixed_sec for rank in job.ranks], dtype=float)
        per_token = np.array([rank.token_sec for rank in job.ranks], dtype=float)
        calls = rounds * len(job.ranks)
        self.work_sec = calls * fixed * (job.counts > 0) + per_token * job.counts
        """By rank and expert, seconds of forward and backward."""
        self.update_sec = np.array([rank.update_sec for rank in job.ranks], dtype=float)
        """By rank and expert, seconds of the optimizer."""
        self._copying = np.array([rank.copying for rank in job.ranks])
        self._alpha = np.array([rank.cost.alpha_sec for rank in job.ranks]) * rounds
        self._beta = np.array([rank.cost.beta_sec for rank in job.ranks])
        nodes = np.array([rank.node for rank in job.ranks])
        is_same_node = nodes[:, None] == nodes[None, :]
        busy = np.array([[job.hop(a, b).busy_sec * (a != b) for b in ranks] for a in ranks])
        rows = [expert.row_bytes for expert in job.experts]
        self._row_bytes = np.zeros(job.mixture_count)
        self._row_bytes[job.mixtures] = rows  # those of a mixture are alike
        self._inside = busy * is_same_node
        self._across = busy * ~is_same_node
        self._node_of = is_same_node.astype(float)
        latency = [
            max((job.hop(a, b).latency_sec for b in ranks if b != a), default=0.0) for a in ranks
        ]
        self._latency = np.array(latency) * (_WAYS * rounds * job.chunks)

    def dense(self, rows: np.ndarray) -> np.ndarray:
        """Return each rank's seconds for its rows, without experts."""
        return self._alpha + self._beta * rows

    def step(self, loads: Loads, mixtures: Sequence[int] | None = None) -> np.ndarray:
        """Return each candidate's seconds: of these mixtures, or of all with the optimizer.

        A little more if several ranks are late, so that a search goes on where one alone does not
        change the time.
        """
        finish, _ = self._finish(loads, mixtures)
        seconds: np.ndarray = finish.max(-1).sum(-1) + loads.update_sec.max(-1)
        mean = finish.sum(-1).sum(-1) + loads.update_sec.sum(-1)
        return seconds + 1e-4 * mean / finish.shape[-1]

    def exact_step(self, loads: Loads) -> tuple[float, np.ndarray]:
        """Return the seconds of a single candidate's step, and those of each rank's own work."""
        finish, work_sec = self._finish(loads, None)
        step = float(finish.max(-1).sum(-1)[0] + loads.update_sec.max(-1)[0])
        rank_sec = work_sec.sum(1)[0] + loads.update_sec[0]
        return max(0.0, step + self._job.residual_sec), rank_sec

    def computing(self, loads: Loads) -> tuple[np.ndarray, np.ndarray]:
        """Return each rank's seconds of all but experts, and of experts, for one candidate."""
        dense = self.dense(loads.rows)[0] + loads.update_sec[0]
        fraction = loads.rows / self._job.global_batch
        copies, _ = self._exchange(loads.tokens * self._row_bytes[:, None], fraction)
        experts: np.ndarray = (loads.work_sec + copies).sum(1)[0]
        return dense, experts

    def _finish(
        self, loads: Loads, mixtures: Sequence[int] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return when each rank has the results of each mixture, from the end of the one before.

        And each rank's own time, without waiting for tokens. Both are shaped as `loads.work_sec`.
        """
        work, tokens, _, rows = loads
        sizes = self._row_bytes if mixtures is None else self._row_bytes[list(mixtures)]
        dense = (self.dense(rows) / max(1, self._job.mixture_count))[:, None, :]
        fraction = rows / self._job.global_batch
        copies, exchange = self._exchange(tokens * sizes[:, None], fraction)
        work = work + copies
        last = exchange / self._job.chunks  # nothing is left to compute while it travels
        alone = dense + np.maximum(work, exchange - last) + last
        # A rank computes a token no sooner than its own rank has finished the rows before it: of
        # each rank, all tokens that are not known before its own.
        later = (dense[:, 0, None, :] >= dense[:, 0, :, None]) * fraction[:, None, :]
        waiting = dense[:, :, None, :] + work[..., None] * later.sum(-1)[:, None, None, :]
        return np.maximum(alone, waiting.max(-1) + last), alone

    def _exchange(
        self, received: np.ndarray, fraction: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each rank's seconds of sending and receiving, for the bytes that each gets.

        As those in which it cannot compute, and the others.
        """
        if received.shape[-1] == 1:
            return np.zeros_like(received), np.zeros_like(received)
        seconds = []
        for busy in (self._inside, self._across):
            if not busy.any():
                seconds.append((np.zeros_like(received),) * 2)
                continue
            send = fraction[:, None, :] * (received[:, :, None, :] * busy).sum(-1)
            receive = received * (fraction[:, None, :] * busy.T).sum(-1)[:, None, :]
            seconds.append((send, receive))
        (send, receive), across = seconds
        node_send, node_receive = (
            (rank_sec[:, :, None, :] * self._node_of).sum(-1) for rank_sec in across
        )
        copies = _WAYS * (send + receive) * self._copying
        inside = np.where(self._copying > 0, 0.0, np.maximum(send, receive))
        busiest = inside + np.maximum(node_send, node_receive)
        return copies, _WAYS * busiest + self._latency


def limit_rows(job: ExpertsJob, rounds: int) -> np.ndarray:
    """Return the most rows of each rank that it may compute in so many micro-batches."""
    limits = []
    for rank in job.ranks:
        at_once = [limit for limit in (job.micro_batch, rank.cost.largest_micro_batch) if limit]
        limits.append(min([job.global_batch, *(rounds * limit for limit in at_once)]))
    return np.array(limits, dtype=int)


def activation_bytes(job: ExpertsJob, rounds: int) -> np.ndarray:
    """Return the bytes of each expert on its rank: also of its tokens' activations."""
    token_bytes = np.array([expert.kept_bytes for expert in job.experts], dtype=float)
    return job.held_bytes + token_bytes * np.ceil(job.kept_counts / rounds)


def sample_bytes(job: ExpertsJob, rows: np.ndarray, rounds: int) -> np.ndarray:
    """Return the bytes of each rank's own activations, for its rows."""
    size = np.array([rank.sample_bytes for rank in job.ranks], dtype=float)
    result: np.ndarray = size * np.ceil(rows / rounds)
    return result


def too_large(job: ExpertsJob) -> str:
    """Return the line for experts, or samples, that the ranks have no memory for."""
    for rank, facts in enumerate(job.ranks):
        least = job.min_batch * facts.sample_bytes
        if facts.free_bytes < least:
            return (
                f"--layout experts: rank {rank} has {_megabytes(facts.free_bytes)} MB of free "
                f"memory next to all but the experts, and its smallest share takes "
                f"{_megabytes(least)} MB; leave it out, or use a smaller model or an optimizer "
                "with less state"
            )
    held = job.held_bytes
    available = ", ".join(map(_megabytes, job.free_bytes.tolist()))
    return (
        f"--layout experts: {len(job.experts)} experts, their gradients and optimizer state take "
        f"{_megabytes(held.sum())} MB without activations, the largest "
        f"{_megabytes(held.max())} MB, and the ranks have {available} MB of free memory; start "
        "more ranks, or use smaller experts or an optimizer with less state"
    )


def _megabytes(size: float) -> str:
    megabytes = max(0.0, size) / 1e6
    return f"{megabytes:.0f}" if megabytes >= 10 else f"{megabytes:.2g}"


def moved_bytes(job: ExpertsJob, before: ExpertPlacement, after: ExpertPlacement) -> float:
    """Return the bytes that ranks receive so that one placement becomes another."""
    size = 0.0
    for number, expert in enumerate(job.experts):
        had = {before.owners[number], before.mirrors[number]}
        needed = {after.owners[number], after.mirrors[number]} - {NO_MIRROR}
        size += len(needed - had) * expert.held_bytes
    return size
