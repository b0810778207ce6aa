"""Making the ranks agree on faults and on values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI


@contextmanager
def faults_agreed(comm: MPI.Comm) -> Iterator[None]:
    """Turn any rank's `UserError` inside the block into the same `AgreedError` on every rank.

    Its exit code is the highest of those of the ranks' errors.

    Collective: every rank must enter and leave. Inside the block nothing may be collective, since
    a rank with a fault leaves it early.
    """
    fault, code = "", 0
    try:
        yield
    except UserError as error:
        fault, code = str(error), error.exit_code
    told = gather_values(comm, (fault, code))
    faults = [text for text, _ in told]
    if any(faults):
        raise AgreedError(describe_faults(faults), max(code for _, code in told))


def describe_faults(faults: list[str]) -> str:
    """Join the faults of all ranks (empty where there is none) into one line."""
    if len(set(faults)) == 1:
        return faults[0]
    return "; ".join(f"{_ranks(faults, text)}: {text}" for text in dict.fromkeys(faults) if text)


def check_same(comm: MPI.Comm, what: str, value: str, advice: str) -> None:
    """Check that every rank has the same value.

    Collective.

    Raises:
        AgreedError: the values differ; it names the ranks and the values.
    """
    values = gather_values(comm, value)
    if len(set(values)) > 1:
        held = ", ".join(f"{text} on {_ranks(values, text)}" for text in dict.fromkeys(values))
        raise AgreedError(f"{what} differs between ranks: {held}; {advice}")


def _ranks(values: list[str], value: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"
