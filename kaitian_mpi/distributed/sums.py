"""Sums over the ranks of a group of any backend; ours has methods of its own for two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from kaitian_mpi.distributed.residual import Residual


def sum_on_host(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> Any:
    """Start to sum a host tensor over a group's ranks, in place; return the work. Collective.

    `dist.all_reduce` would take it to the devices of a group that a vendor's library connects, and
    back.
    """
    chosen: Any = group or dist.group.WORLD
    if hasattr(chosen, "sum_on_host"):  # its class is not imported: that would start MPI
        return chosen.sum_on_host(tensor)
    return dist.all_reduce(tensor, group=chosen, async_op=True)


def sum_gradients(
    buffer: torch.Tensor,
    residual: Residual | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    in_background: bool = False,
) -> Any:
    """Sum a buffer of gradients over a group's ranks, in place. Collective.

    Between device kinds and hosts it may lose digits: see `--relay-dtype` and `--wire`. With a
    residual, the buffer has the same format on every rank. Returns the work; None if it is done.
    """
    chosen: Any = group or dist.group.WORLD
    if not hasattr(chosen, "sum_gradients"):
        return dist.all_reduce(buffer, group=chosen, async_op=in_background)
    work = chosen.sum_gradients(buffer, residual, in_background)
    if in_background:
        return work
    work.wait()
    return None


class Fraction:
    """This rank's fraction of a total over the ranks, which it sums, collectively, if not given."""

    def __init__(
        self, own: float, total: float | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._own, self._total = own, total
        if total is None:
            self._sum = torch.tensor(own, dtype=torch.float64)
            self._work = sum_on_host(self._sum, group)

    @property
    def total(self) -> float:
        """The sum of all ranks' numbers; waits for it."""
        if self._total is None:
            self._work.wait()
            self._total = self._sum.item()
        return self._total

    def value(self) -> float:
        """Return the fraction; 0 if there is nothing in all. Waits for the sum."""
        return self._own / self.total if self.total else 0.0
