"""The file in which `kaitian-bench` keeps what ranks and links cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaitian_mpi.balance.communication import AllreduceCost, MeasuredAllreduce
from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.forecast import Cohort
from kaitian_mpi.balance.optimum import RankCost
from kaitian_mpi.errors import UserError

VERSION = 1
MOST_SAMPLES = 10**9  # of a global batch
_MOST_BYTES = 2**42  # a million million float32 parameters
_MOST_SEC = 1e9  # so that no sum of them overflows
_LEAST_SEC = 1e-12  # per sample, so that no rate does
_ADVICE = "save it again by kaitian-bench --json"


@dataclass(frozen=True)
class BenchRank:
    """What one rank was and cost."""

    rank: int
    host: str
    kind: str
    device: str
    cost: RankCost
    fit_error: float
    """How far measured seconds lie from the cost model, root mean square: 0.02 for 2%."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What a benchmark found."""

    model: str
    emulated: bool
    """Whether any kind or slowdown was emulated."""
    gradient_bytes: int
    """Of the whole model, as they are reduced."""
    global_batch_size: int
    """Samples per step the benchmark was asked about."""
    ranks: tuple[BenchRank, ...]
    measured: tuple[MeasuredAllreduce, ...]

    def cohorts(self) -> list[Cohort]:
        """Return the measured ranks, one cohort each."""
        return [Cohort(rank.kind, rank.cost) for rank in self.ranks]


def bench_to_json(bench: Bench, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a benchmark as the content of the file that `read_bench` reads.

    Args:
        bench: what was measured.
        extra: more keys for other readers; `read_bench` ignores them.
    """
    return dict(extra or {}) | {
        "version": VERSION,
        "model": bench.model,
        "emulated": bench.emulated,
        "gradient_bytes": bench.gradient_bytes,
        "global_batch_size": bench.global_batch_size,
        "ranks": [_rank_to_json(rank) for rank in bench.ranks],
        "allreduce": [_allreduce_to_json(entry) for entry in bench.measured],
    }


def read_bench(path: Path) -> Bench:
    """Read a benchmark.

    Raises:
        UserError: the file is missing, is none of `kaitian-bench`, or holds impossible numbers.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: found no file to read ({error.strerror}), needed one saved by "
            "kaitian-bench --json; check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: found no whole JSON ({error}), needed a file saved by kaitian-bench; "
            f"{_ADVICE}"
        ) from error
    return _bench_from_json(_Node(content, str(path)))


def _rank_to_json(rank: BenchRank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "kind": rank.kind,
        "device": rank.device,
        "alpha_sec": rank.cost.model.alpha_sec,
        "beta_sec_per_sample": rank.cost.model.beta_sec,
        "fit_error": rank.fit_error,
        "largest_micro_batch": rank.cost.largest_micro_batch,
    }


def _allreduce_to_json(entry: MeasuredAllreduce) -> dict[str, Any]:
    return {
        "ranks_per_kind": dict(entry.ranks_per_kind),
        "latency_sec": entry.cost.latency_sec,
        "sec_per_byte": entry.cost.sec_per_byte,
    }


@dataclass(frozen=True)
class _Node:
    """A value in the file and where it is, for what an error says."""

    value: Any
    place: str

    def __getitem__(self, key: str) -> _Node:
        if not isinstance(self.value, dict):
            raise self.wrong("an object in braces")
        if key not in self.value:
            raise UserError(f"{self.place}: found no key {key!r}, needed one; {_ADVICE}")
        return _Node(self.value[key], f"{self.place}: {key}")

    def items(self) -> list[_Node]:
        """Return what is in a list, which is not empty."""
        if not isinstance(self.value, list) or not self.value:
            raise self.wrong("a list with at least one entry")
        return [_Node(value, f"{self.place}[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        """Return printable text."""
        if not isinstance(self.value, str) or not self.value or not self.value.isprintable():
            raise self.wrong("printable text")
        return self.value

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def whole(self, least: int, most: int) -> int:
        """Return a whole number from `least` to `most`."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a whole number from {least} to {most}")
        return self.value

    def number(self) -> float:
        """Return a finite number of at least 0."""
        # A bool is an int to Python; a comparison with NaN is false.
        if type(self.value) not in (int, float) or not 0 <= self.value <= _MOST_SEC:
            raise self.wrong(f"a number from 0 to {_MOST_SEC:g}")
        return float(self.value)

    def wrong(self, needed: str) -> UserError:
        """Return the error that says what was needed here."""
        shown = ascii(self.value)
        found = shown if len(shown) <= 40 else shown[:40] + "…"
        return UserError(f"{self.place}: found {found}, needed {needed}; {_ADVICE}")


def _bench_from_json(root: _Node) -> Bench:
    if root["version"].value != VERSION or type(root["version"].value) is not int:
        raise root["version"].wrong(f"{VERSION}, the one this version of kaitian-mpi reads")
    ranks = tuple(_rank_from_json(node) for node in root["ranks"].items())
    if len({rank.rank for rank in ranks}) < len(ranks):
        raise UserError(f"{root.place}: ranks: found a rank twice, needed each once; {_ADVICE}")
    there = Counter(rank.kind for rank in ranks)
    return Bench(
        model=root["model"].text(),
        emulated=root["emulated"].flag(),
        gradient_bytes=root["gradient_bytes"].whole(0, _MOST_BYTES),
        global_batch_size=root["global_batch_size"].whole(1, MOST_SAMPLES),
        ranks=ranks,
        measured=tuple(_allreduce_from_json(node, there) for node in root["allreduce"].items()),
    )


def _rank_from_json(node: _Node) -> BenchRank:
    limit = node["largest_micro_batch"]
    return BenchRank(
        rank=node["rank"].whole(0, MOST_SAMPLES),
        host=node["host"].text(),
        kind=node["kind"].text(),
        device=node["device"].text(),
        cost=RankCost(
            _model_from_json(node),
            None if limit.value is None else limit.whole(1, MOST_SAMPLES),
        ),
        fit_error=node["fit_error"].number(),
    )


def _model_from_json(node: _Node) -> CostModel:
    alpha, beta = node["alpha_sec"], node["beta_sec_per_sample"]
    if 0 < beta.number() < _LEAST_SEC:
        raise beta.wrong(f"0, or {_LEAST_SEC:g} or more")
    if alpha.number() == beta.number() == 0:
        raise beta.wrong("more than 0 where alpha_sec is 0, as a sample takes some time")
    return CostModel(alpha.number(), beta.number())


def _allreduce_from_json(node: _Node, there: Mapping[str, int]) -> MeasuredAllreduce:
    counts = node["ranks_per_kind"]
    if not isinstance(counts.value, dict) or not counts.value or counts.value.keys() - there.keys():
        raise counts.wrong(f"how many ranks of each kind, of {', '.join(there)}")
    return MeasuredAllreduce(
        {kind: counts[kind].whole(1, there[kind]) for kind in counts.value},
        AllreduceCost(node["latency_sec"].number(), node["sec_per_byte"].number()),
    )
