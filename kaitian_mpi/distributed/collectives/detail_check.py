"""Checks before each collective that all ranks call the same: always, or the first ones only.

With `TORCH_DISTRIBUTED_DEBUG=DETAIL`, each. If the ranks have different releases of torch, the
first ones: DistributedDataParallel divides the gradients into buckets in each rank for itself until
its first backward has ended, and then as rank 0 says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from kaitian_mpi.errors import CollectiveError
from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

    from kaitian_mpi.distributed.collectives.collective import Collective

_FIRST_CALLS = 1_000


def agreement_check(
    comm: MPI.Intracomm, arrive: Callable[[], None], torch_versions: Sequence[str]
) -> AgreementCheck | None:
    """Return the check that a group needs; None if it needs none."""
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return AgreementCheck(comm, arrive, math.inf, ())
    if len(set(torch_versions)) > 1:
        return AgreementCheck(comm, arrive, _FIRST_CALLS, torch_versions)
    return None


class AgreementCheck:
    """Compares the collectives that the ranks of a group call, by a small exchange before each."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        arrive: Callable[[], None],
        calls: float,
        torch_versions: Sequence[str],
    ) -> None:
        """Compare the first `calls` calls; `arrive` waits until all ranks have arrived."""
        self._comm, self._arrive = comm, arrive
        self._calls_left = calls
        self._torch_versions = torch_versions

    def compare(self, collective: Collective) -> None:
        """Compare the ranks' calls. Collective.

        Raises:
            CollectiveError: the calls differ; the message lists each rank's call.
        """
        if self._calls_left <= 0:
            return
        self._calls_left -= 1
        self._arrive()
        calls = gather_values(self._comm, _describe(collective))
        if any(call != calls[0] for call in calls):
            versions = [f" (torch {version})" for version in self._torch_versions]
            raise CollectiveError(
                "the ranks call different collectives, or with different shapes: "
                + "; ".join(
                    f"rank {rank}{versions[rank] if versions else ''}: {call}"
                    for rank, call in enumerate(calls)
                )
            )

    def stop_unless_detailed(self) -> None:
        """Compare no further calls, unless torch's debug level asks for it."""
        if self._torch_versions:
            self._calls_left = 0

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
