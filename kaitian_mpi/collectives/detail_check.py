"""`TORCH_DISTRIBUTED_DEBUG=DETAIL`: before each collective, whether all ranks call the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.collectives.worker import Calls, Method

# Operations whose tensors may differ in shape between ranks.
_UNEVEN = ("all_to_all", "all_to_all_single", "all_gather", "reduce_scatter")


class AgreementCheck:
    """Compares what the ranks of a group are about to do, at the price of a small exchange."""

    def __init__(self, comm: MPI.Intracomm, arrive: Callable[[], None]) -> None:
        """Prepare for the ranks of `comm`; `arrive` waits until all of them have come."""
        self._comm = comm
        self._arrive = arrive

    def before(
        self,
        method: Method,
        calls: Calls,
        name: str,
        tensors: Sequence[torch.Tensor],
        details: Any,
    ) -> Callable[[], None]:
        """Return the calls of `method` with the comparison before them. Collective when it runs.

        It raises a `CollectiveError` that tells what each rank called.
        """
        own = _described(name, tensors, details)

        def checked() -> None:
            self._arrive()
            called = gather_values(self._comm, own)
            if any(call != called[0] for call in called):
                listed = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(called))
                raise CollectiveError(
                    f"the ranks call different collectives, or with different shapes: {listed}"
                )
            for arguments in calls:
                method(*arguments)

        return checked


def _described(name: str, tensors: Sequence[torch.Tensor], details: Any) -> str:
    """Return a call as a line that is to be the same on every rank."""
    # Each shape once: of a gather, the root has a list.
    shapes = [] if name in _UNEVEN else sorted({str(list(tensor.shape)) for tensor in tensors})
    types = sorted({str(tensor.dtype) for tensor in tensors})
    said = [] if details is None else [str(details)]
    return f"{name}({', '.join([*shapes, *types, *said])})"
