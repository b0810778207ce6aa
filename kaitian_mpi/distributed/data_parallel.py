"""Stock DDP with any number of samples per rank: each rank is weighted by its batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.ddp_hook import WeightedSum
from kaitian_mpi.distributed.network.formats import check_wire
from kaitian_mpi.distributed.sums import sum_on_host
from kaitian_mpi.distributed.sync_batch_norm import Participation, participate, sync_batch_norms
from kaitian_mpi.errors import AgreedError, UnsupportedError
from kaitian_mpi.preflight.verdict import by_value

SamplesOf = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Returns how many samples a forward's positional and keyword arguments hold."""


def data_parallel(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    samples_of: SamplesOf | None = None,
    wire: str = "fp32",
    **ddp_options: Any,
) -> DistributedDataParallel:
    """Wrap a model in stock DDP, with the exact gradient of the global batch for any split.

    The loss must be the mean over a rank's own samples, as usual. Each rank's gradient is weighted
    by its fraction of all samples, so that the sum is the gradient of the mean over the global
    batch. The number of samples may differ between ranks and steps, and may be 0: then pass a batch
    of 0 rows (`DistributedDataParallel.join` is not needed).

    Samples are counted in each forward with gradients enabled since the last synchronizing
    backward. So run a forward whose result is discarded under `torch.no_grad()`. To accumulate
    gradients over micro-batches under `no_sync()`, split a rank's samples into equal micro-batches
    and divide the loss of each by their number; ranks may differ in both.

    Training starts with the parameters and buffers of the group's rank 0; as in stock DDP,
    `broadcast_buffers=False` leaves each rank's own buffers.

    Collective, like DDP; so are each synchronizing forward and its backward.

    Args:
        model: on this rank's device.
        group: the process group to sum over; None for the default one.
        samples_of: counts the samples of one forward from its (args, kwargs); None for the first
            dimension of the first tensor among them, also inside lists, tuples and dicts.
        wire: what gradients are sent as between hosts: `fp32`, or `bf16`, `int8` or `int4` for slow
            links. What that rounds off is sent with the next step's; a checkpoint may hold it:
            `residuals` of the result has a `state_dict`, each rank's own.
        ddp_options: options of DDP, such as `find_unused_parameters`.

    Raises:
        AgreedError: ranks with different releases of torch divide the gradients differently.
        UserError: `wire` is none of these.
        ValueError: in a forward, if there is no tensor to count samples by, or `samples_of`
            returned a number below 0.
        UnsupportedError: in a forward under `DistributedDataParallel.join`.
    """
    check_wire(wire)
    wrapped = DistributedDataParallel(model, process_group=group, **ddp_options)
    check_same_buckets(wrapped)
    weights = _Weights(group, samples_of or count_rows, wire)
    wrapped.residuals = weights.gradients.residuals  # type: ignore[assignment]
    weights.gradients.attach(wrapped)
    for norm in sync_batch_norms(model):
        norm.process_group = norm.process_group or group
    participate(model, Participation(lambda: weights.samples_of_forward))
    wrapped.register_forward_pre_hook(weights.before_forward, with_kwargs=True)
    wrapped.register_forward_hook(weights.after_forward)
    return wrapped


def check_same_buckets(model: DistributedDataParallel) -> None:
    """Check that DDP has put the gradients into the same buckets on every rank.

    The first backward uses what each rank's torch has chosen, the others what rank 0's has chosen.
    Collective if the ranks have different releases of torch; else it does nothing.

    Raises:
        AgreedError: the buckets differ.
    """
    versions = getattr(model.process_group, "torch_versions", ())
    if len(set(versions)) < 2:
        return
    sizes = str(model._get_ddp_logging_data()["bucket_sizes"])
    own = torch.tensor([len(sizes.split(",")), zlib.crc32(sizes.encode())])
    found = [torch.empty_like(own) for _ in versions]
    dist.all_gather(found, own, group=model.process_group)
    layouts = {rank: (int(each[0]), int(each[1])) for rank, each in enumerate(found)}
    if len(set(layouts.values())) > 1:
        texts = {
            rank: f"{count} (layout {digest:08x}, torch {versions[rank]})"
            for rank, (count, digest) in layouts.items()
        }
        raise AgreedError(
            f"DistributedDataParallel's buckets differ between ranks: {by_value(texts)}; install "
            "one release of torch, or use kaitian_mpi.Training, which makes its own buckets"
        )


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the length of the first tensor with a dimension among a forward's arguments.

    Raises:
        ValueError: there is none.
    """
    rows = _first_length([*args, *kwargs.values()])
    if rows is None:
        names = [type(value).__name__ for value in (*args, *kwargs.values())]
        raise ValueError(
            f"found no tensor to count samples by in a forward of ({', '.join(names)}), needed "
            "one whose first dimension is the batch; pass samples_of= to data_parallel"
        )
    return rows


def _first_length(values: Iterable[Any]) -> int | None:
    for value in values:
        length = None
        if isinstance(value, torch.Tensor):
            length = value.size(0) if value.dim() else None
        elif isinstance(value, Mapping):
            length = _first_length(value.values())
        elif isinstance(value, list | tuple):
            length = _first_length(value)
        if length is not None:
            return length
    return None


@not_compiled
class _Weights:
    """Sets the hook's weight to this rank's fraction of the samples of a backward.

    The all-reduce of the samples starts after the forward and is awaited at the backward's first
    bucket, so that no rank waits for a slower one's forward. It does not start before the forward:
    DDP's own collectives come at the start of a step's first forward, this one at the end of its
    last.
    """

    def __init__(self, group: dist.ProcessGroup | None, samples_of: SamplesOf, wire: str) -> None:
        self.gradients = WeightedSum(group, on_bucket=self._bucket_ready, wire=wire)
        self._group = group
        self._samples_of = samples_of
        self._samples = 0
        self.samples_of_forward = 0
        """The samples of the last forward, by which its batch norms' sums are weighted."""
        self._samples_in_eval: int | None = None
        self._sum: tuple[dist.Work, torch.Tensor] | None = None

    def before_forward(
        self, model: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count the samples of a forward that may be followed by a backward."""
        if not torch.is_grad_enabled():
            return
        if model._join_config.enable:
            raise UnsupportedError(
                "found a forward under join(), which data_parallel does not support; "
                "pass batches of 0 rows on a rank that has run out of samples"
            )
        samples = int(self._samples_of(args, kwargs))
        if samples < 0:
            raise ValueError(f"samples_of: found {samples}, needed a number of at least 0")
        self.samples_of_forward = samples
        if not model.training:
            # Either an evaluation without no_grad, perhaps on one rank only, or training with
            # dropout and batch norm switched off: only then a bucket will follow.
            self._samples_in_eval = samples + (self._samples_in_eval or 0)
            return
        self._samples_in_eval = None
        self._samples += samples

    def after_forward(self, model: DistributedDataParallel, *_: Any) -> None:
        """Start the sum if a synchronizing backward may follow."""
        if torch.is_grad_enabled() and model.training and model.require_backward_grad_sync:
            self._start_sum()

    def _bucket_ready(self, is_last: bool) -> None:
        """Set the weight at a backward's first bucket; do nothing at the others."""
        if self._sum is None:
            if self._samples_in_eval is None:
                return
            self._samples += self._samples_in_eval
            self._start_sum()
        assert self._sum is not None
        work, total = self._sum
        work.wait()
        # If no rank has any samples, there is nothing to average.
        self.gradients.weight = self._samples / max(int(total), 1)
        self._samples, self._samples_in_eval, self._sum = 0, None, None

    def _start_sum(self) -> None:
        # A second forward before the backward replaces the sum of the first.
        total = torch.tensor(self._samples)
        self._sum = sum_on_host(total, self._group), total
