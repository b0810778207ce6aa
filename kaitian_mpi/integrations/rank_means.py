"""The mean of a value that Accelerate gathers from each rank: over the rows of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import operations

from kaitian_mpi.integrations.taken_batches import BatchRows


@contextmanager
def means_over_rows(rows: BatchRows | None) -> Iterator[None]:
    """Weight the means of the ranks' means by their rows, in a step of a trainer.

    Trainers, such as TRL's of rewards, log values that each rank computes and all gather:
    `accelerator.gather(rank_mean).mean()`. The mean of the gathered values is weighted by the rows
    of each rank; other functions of them are not.

    Args:
        rows: of the step's batch; None if they are not known.
    """
    gather = operations._gpu_gather
    if rows is None:
        yield
        return
    operations._gpu_gather = _gather_with_rows(gather, rows)
    try:
        yield
    finally:
        operations._gpu_gather = gather


def _gather_with_rows(gather: Callable[[Any], Any], rows: BatchRows) -> Callable[[Any], Any]:
    @functools.cache
    def rows_on(device: torch.device) -> torch.Tensor:
        rank_rows = torch.tensor([rows.this_rank], dtype=torch.float32, device=device)
        all_rows = [torch.empty_like(rank_rows) for _ in range(dist.get_world_size())]
        dist.all_gather(all_rows, rank_rows)
        return torch.cat(all_rows)

    def gather_tensor(tensor: torch.Tensor) -> Any:
        gathered = gather(tensor)
        return gathered if tensor.dim() else _RankValues.of(gathered, rows_on(tensor.device))

    @functools.wraps(gather)
    def gather_all(tensor: Any) -> Any:
        return operations.recursively_apply(gather_tensor, tensor, error_on_other_type=True)

    return gather_all


class _RankValues(torch.Tensor):
    """A value of each rank, shape (ranks,); functions of it return plain tensors."""

    rows: torch.Tensor
    """The number of rows of each rank, shape (ranks,)."""

    @classmethod
    def of(cls, values: torch.Tensor, rows: torch.Tensor) -> _RankValues:
        ranks = values.as_subclass(cls)
        ranks.rows = rows
        return ranks

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            ranks = args[0] if args else None
            if not isinstance(ranks, cls):
                return result
            if func in _SELECT:  # such as `gather_for_metrics` at the end of an epoch
                return cls.of(result, func(ranks.rows, *args[1:]))
            if func in _MEAN and result.dim() == 0:
                present = ranks.rows > 0
                return (ranks * ranks.rows)[present].sum().div(ranks.rows.sum()).to(result.dtype)
            return result


_MEAN = torch.mean, torch.Tensor.mean
_SELECT = torch.Tensor.__getitem__, torch.Tensor.detach
