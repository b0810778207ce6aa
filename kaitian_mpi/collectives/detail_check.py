"""`TORCH_DISTRIBUTED_DEBUG=DETAIL`: before each collective, whether all ranks call the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.collectives.collective import Collective


class AgreementCheck:
    """Compares what the ranks of a group are about to do, at the price of a small exchange."""

    def __init__(self, comm: MPI.Intracomm, arrive: Callable[[], None]) -> None:
        """Prepare for the ranks of `comm`; `arrive` waits until all of them have come."""
        self._comm = comm
        self._arrive = arrive

    def compare(self, collective: Collective) -> None:
        """Compare what the ranks are about to do. Collective.

        Raises:
            CollectiveError: it is not the same; the error tells what each rank called.
        """
        self._arrive()
        called = gather_values(self._comm, _described(collective))
        if any(call != called[0] for call in called):
            listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(called))
            raise CollectiveError(
                f"the ranks call different collectives, or with different shapes: {listed}"
            )

    def before(self, call: Callable[[], None], collective: Collective) -> Callable[[], None]:
        """Return `call` with the comparison before it."""

        def checked() -> None:
            self.compare(collective)
            call()

        return checked


def _described(collective: Collective) -> str:
    """Return a call as a line that is to be the same on every rank."""
    tensors, op = collective.result, collective.op
    # Each shape once: of a gather, the root has a list.
    shapes = sorted({str(list(tensor.shape)) for tensor in tensors})
    parts = [] if collective.may_be_uneven else shapes
    parts += sorted({str(tensor.dtype) for tensor in tensors})
    parts += [] if op is None else [str(op.op)]
    parts += [] if collective.root < 0 else [f"root {collective.root}"]
    return f"{collective.name}({', '.join(parts)})"
