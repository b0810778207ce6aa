"""What `kaitian-plan` has measured, and the file of its `--save`: costs of ranks and allreduces."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaitian_mpi.balance.communication import AllreduceCost, MeasuredAllreduce
from kaitian_mpi.balance.cost_model import CostModel
from kaitian_mpi.balance.fastest_split import RankCost
from kaitian_mpi.balance.forecast import Cohort
from kaitian_mpi.errors import UserError

VERSION = 1
MAX_SAMPLES = 10**9  # in a global batch
_MAX_BYTES = 2**42  # 10**12 float32 parameters
_MAX_SEC = 1e9  # so that no sum overflows
_MIN_SEC = 1e-12  # per sample, so that no rate overflows
_ADVICE = "save it again with kaitian-plan --save"


@dataclass(frozen=True)
class MeasuredRank:
    """A rank's device and its cost."""

    rank: int
    host: str
    kind: str
    device: str
    cost: RankCost
    fit_error: float
    """Root mean square of the relative errors of the cost model: 0.02 for 2%."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What was measured on the ranks of a job."""

    model: str
    emulated: bool
    """Whether any kind or slowdown was emulated."""
    gradient_bytes: int
    """Bytes of the whole model's gradients, as they are reduced."""
    global_batch_size: int
    """Samples per step of the job."""
    ranks: tuple[MeasuredRank, ...]
    allreduces: tuple[MeasuredAllreduce, ...]

    def cohorts(self) -> list[Cohort]:
        """Return a cohort for each measured rank."""
        return [Cohort(rank.kind, rank.cost) for rank in self.ranks]

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file that `read_measurements` reads."""
        return {
            "version": VERSION,
            "model": self.model,
            "emulated": self.emulated,
            "gradient_bytes": self.gradient_bytes,
            "global_batch_size": self.global_batch_size,
            "ranks": [
                {
                    "rank": rank.rank,
                    "host": rank.host,
                    "kind": rank.kind,
                    "device": rank.device,
                    "alpha_sec": rank.cost.model.alpha_sec,
                    "beta_sec_per_sample": rank.cost.model.beta_sec,
                    "fit_error": rank.fit_error,
                    "largest_micro_batch": rank.cost.largest_micro_batch,
                }
                for rank in self.ranks
            ],
            "allreduce": [
                {
                    "ranks_per_kind": dict(entry.ranks_per_kind),
                    "latency_sec": entry.cost.latency_sec,
                    "sec_per_byte": entry.cost.sec_per_byte,
                }
                for entry in self.allreduces
            ],
        }


def read_measurements(path: Path) -> Measurements:
    """Read a file of `kaitian-plan --save`; keys that it does not know are ignored.

    Raises:
        UserError: the file is missing, is another one, or has invalid values.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); name a file saved with kaitian-plan --save"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON ({error}); {_ADVICE}") from error
    root = _Node(content, str(path))
    if root["version"].whole(0, MAX_SAMPLES) != VERSION:
        raise root["version"].wrong(f"{VERSION}, which this version of kaitian-mpi reads")
    ranks = tuple(_read_rank(node) for node in root["ranks"].items())
    if len({rank.rank for rank in ranks}) < len(ranks):
        raise UserError(f"{path}: ranks: a rank is listed twice; {_ADVICE}")
    counts = Counter(rank.kind for rank in ranks)
    return Measurements(
        model=root["model"].text(),
        emulated=root["emulated"].flag(),
        gradient_bytes=root["gradient_bytes"].whole(0, _MAX_BYTES),
        global_batch_size=root["global_batch_size"].whole(1, MAX_SAMPLES),
        ranks=ranks,
        allreduces=tuple(_read_allreduce(node, counts) for node in root["allreduce"].items()),
    )


@dataclass(frozen=True)
class _Node:
    """A value in the file and its path there, for error messages."""

    value: Any
    place: str

    def __getitem__(self, key: str) -> _Node:
        if not isinstance(self.value, dict):
            raise self.wrong("a JSON object")
        if key not in self.value:
            raise UserError(f"{self.place}: has no key {key!r}; {_ADVICE}")
        return _Node(self.value[key], f"{self.place}: {key}")

    def items(self) -> list[_Node]:
        """Return the items of a list that is not empty."""
        if not isinstance(self.value, list) or not self.value:
            raise self.wrong("a list with at least one entry")
        return [_Node(value, f"{self.place}[{index}]") for index, value in enumerate(self.value)]

    def text(self) -> str:
        """Return printable text."""
        if not isinstance(self.value, str) or not self.value or not self.value.isprintable():
            raise self.wrong("printable text")
        return self.value

    def flag(self) -> bool:
        """Return a boolean."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`."""
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.value

    def number(self) -> float:
        """Return a finite number of at least 0."""
        # In Python a bool is an int; comparisons with NaN are false.
        if type(self.value) not in (int, float) or not 0 <= self.value <= _MAX_SEC:
            raise self.wrong(f"a number from 0 to {_MAX_SEC:g}")
        return float(self.value)

    def wrong(self, allowed: str) -> UserError:
        """Return the error for a value that is not allowed here."""
        shown = ascii(self.value)
        given = shown if len(shown) <= 40 else shown[:40] + "…"
        return UserError(f"{self.place}: must be {allowed}, not {given}; {_ADVICE}")


def _read_rank(node: _Node) -> MeasuredRank:
    alpha, beta, limit = (
        node[key] for key in ("alpha_sec", "beta_sec_per_sample", "largest_micro_batch")
    )
    if 0 < beta.number() < _MIN_SEC:
        raise beta.wrong(f"0, or at least {_MIN_SEC:g}")
    if alpha.number() == beta.number() == 0:
        raise beta.wrong("above 0 because alpha_sec is 0, and a sample takes some time")
    cost = RankCost(
        CostModel(alpha.number(), beta.number()),
        None if limit.value is None else limit.whole(1, MAX_SAMPLES),
    )
    return MeasuredRank(
        rank=node["rank"].whole(0, MAX_SAMPLES),
        host=node["host"].text(),
        kind=node["kind"].text(),
        device=node["device"].text(),
        cost=cost,
        fit_error=node["fit_error"].number(),
    )


def _read_allreduce(node: _Node, rank_counts: Mapping[str, int]) -> MeasuredAllreduce:
    counts = node["ranks_per_kind"]
    kinds = counts.value
    if not isinstance(kinds, dict) or not kinds or kinds.keys() - rank_counts.keys():
        raise counts.wrong(f"the number of ranks by kind, of {', '.join(rank_counts)}")
    return MeasuredAllreduce(
        {kind: counts[kind].whole(1, rank_counts[kind]) for kind in kinds},
        AllreduceCost(node["latency_sec"].number(), node["sec_per_byte"].number()),
    )
