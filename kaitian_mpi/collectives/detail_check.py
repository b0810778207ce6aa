"""`TORCH_DISTRIBUTED_DEBUG=DETAIL`: checks before each collective that all ranks call the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.collectives.collective import Collective


class AgreementCheck:
    """Compares the collectives that the ranks of a group call, by a small exchange before each."""

    def __init__(self, comm: MPI.Intracomm, arrive: Callable[[], None]) -> None:
        """Compare over the ranks of `comm`; `arrive` waits until all of them have arrived."""
        self._comm = comm
        self._arrive = arrive

    def compare(self, collective: Collective) -> None:
        """Compare the ranks' calls. Collective.

        Raises:
            CollectiveError: the calls differ; the message lists each rank's call.
        """
        self._arrive()
        calls = gather_values(self._comm, _describe(collective))
        if any(call != calls[0] for call in calls):
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            raise CollectiveError(
                f"the ranks call different collectives, or with different shapes: {listed}"
            )

    def before(self, call: Callable[[], None], collective: Collective) -> Callable[[], None]:
        """Return a function that compares the ranks' calls and then executes `call`."""

        def checked() -> None:
            self.compare(collective)
            call()

        return checked


def _describe(collective: Collective) -> str:
    """Return a call as text that must be the same on every rank."""
    tensors, op = collective.result, collective.op
    # Each shape once, because only the root of a gather has a list of tensors.
    shapes = sorted({str(list(tensor.shape)) for tensor in tensors})
    parts = [] if collective.may_be_uneven else shapes
    parts += sorted({str(tensor.dtype) for tensor in tensors})
    parts += [] if op is None else [str(op.op)]
    parts += [] if collective.root < 0 else [f"root {collective.root}"]
    return f"{collective.name}({', '.join(parts)})"
