"""Stock DDP with any number of samples per rank: a communication hook weights each by its batch."""

# No postponed annotations here: DDP checks those of its hook.
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gradients import Fraction, sum_gradients
from kaitian_mpi.distributed.sync_batch_norm import Participation, participate, sync_batch_norms
from kaitian_mpi.errors import AgreedError, UnsupportedError
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.preflight.verdict import by_value

SamplesOf = Callable[[tuple[Any, ...], dict[str, Any]], int]
"""Returns how many samples a forward's positional and keyword arguments hold."""


def data_parallel(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    samples_of: SamplesOf | None = None,
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
        ddp_options: options of DDP, such as `find_unused_parameters`.

    Raises:
        AgreedError: ranks with different releases of torch divide the gradients differently.
        ValueError: in a forward, if there is no tensor to count samples by, or `samples_of`
            returned a number below 0.
        UnsupportedError: in a forward under `DistributedDataParallel.join`.
    """
    wrapped = DistributedDataParallel(model, process_group=group, **ddp_options)
    _check_same_buckets(wrapped)
    weights = _CountedSum(group, samples_of or count_rows)
    weights.attach(wrapped)
    for norm in sync_batch_norms(model):
        norm.process_group = norm.process_group or group
    participate(model, Participation(lambda: weights.samples_of_forward))
    wrapped.register_forward_pre_hook(weights.before_forward, with_kwargs=True)
    wrapped.register_forward_hook(weights.after_forward)
    return wrapped


@not_compiled
class WeightedSum:
    """A DDP communication hook: sums each bucket, weighted by each rank's fraction of the batch.

    With a loss that is the mean over a rank's b_i samples, weight b_i / sum(b) gives the gradient
    of the mean over the whole global batch, for any split. (A mean of the groups' means, as in
    published implementations, is biased when the groups' batches differ.)
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.weight = 1.0
        self._group = group

    def attach(self, model: DistributedDataParallel) -> None:
        """Make `model` reduce its gradients by this hook.

        Its batch norms over all ranks weight the ranks likewise: so set `weight` before backward.
        """
        participate(model, Participation(lambda: self.weight))
        model.register_comm_hook(self, type(self).reduce)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the weighted sum of one bucket; return a future of it."""
        gradient = bucket.buffer()
        if self.weight == 0:
            gradient.zero_()  # not multiplied by 0, which would keep a NaN
        else:
            gradient.mul_(self.weight)
        work = sum_gradients(gradient, group=self._group, in_background=True)
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def _check_same_buckets(model: DistributedDataParallel) -> None:
    """Check that DDP has put the gradients into the same buckets on every rank.

    The first backward uses what each rank's torch has chosen, the others what rank 0's has chosen.
    Collective if the ranks have different releases of torch; else it does nothing.
    """
    versions = getattr(model.process_group, "torch_versions", ())
    if len(set(versions)) < 2:
        return
    checksum = torch.tensor(
        [zlib.crc32(str(model._get_ddp_logging_data()["bucket_sizes"]).encode())]
    )
    checksums = [torch.empty_like(checksum) for _ in versions]
    dist.all_gather(checksums, checksum, group=model.process_group)  # in the group's order of calls
    if len({int(value) for value in checksums}) > 1:
        releases = by_value({rank: f"torch {version}" for rank, version in enumerate(versions)})
        raise AgreedError(
            f"DistributedDataParallel divides the gradients differently: {releases}; install one "
            "release of torch, or use kaitian_mpi.Training, which cuts buckets itself"
        )


def first_length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the length of the first tensor with a dimension among a forward's arguments."""
    tensors = tensors_in([*args, *kwargs.values()])
    return next((tensor.size(0) for tensor in tensors if tensor.dim()), None)


def count_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return `first_length`; raise a ValueError if there is no such tensor."""
    rows = first_length(args, kwargs)
    if rows is None:
        names = [type(value).__name__ for value in (*args, *kwargs.values())]
        raise ValueError(
            f"cannot count the samples of forward({', '.join(names)}): no argument has a tensor "
            "with a batch dimension; pass samples_of= to data_parallel"
        )
    return rows


@not_compiled
class _CountedSum(WeightedSum):
    """Weights the ranks by their samples of a backward.

    The all-reduce of the samples starts after the forward and is awaited at the backward's first
    bucket, so that no rank waits for a slower one's forward. It does not start before the forward:
    DDP's own collectives come at the start of a step's first forward, this one at the end of its
    last.
    """

    def __init__(self, group: dist.ProcessGroup | None, samples_of: SamplesOf) -> None:
        super().__init__(group)
        self._samples_of = samples_of
        self._samples = 0
        self.samples_of_forward = 0
        """The samples of the last forward, by which its batch norms' sums are weighted."""
        self._samples_in_eval: int | None = None
        self._sum: Fraction | None = None

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._weigh()
        return super().reduce(bucket)

    def before_forward(
        self, model: DistributedDataParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Count the samples of a forward that may be followed by a backward."""
        if not torch.is_grad_enabled():
            return
        if model._join_config.enable:
            raise UnsupportedError(
                "data_parallel does not support join(); pass batches of 0 rows on a rank that has "
                "run out of samples"
            )
        samples = int(self._samples_of(args, kwargs))
        if samples < 0:
            raise ValueError(f"samples_of returned {samples}; it must return 0 or more")
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

    def _weigh(self) -> None:
        """Set the weight at a backward's first bucket; do nothing at the others."""
        if self._sum is None:
            if self._samples_in_eval is None:
                return
            self._samples += self._samples_in_eval
            self._start_sum()
        assert self._sum is not None
        self.weight = self._sum.value()
        self._samples = 0
        self._samples_in_eval = None
        self._sum = None

    def _start_sum(self) -> None:
        # A second forward before the backward replaces the sum of the first.
        self._sum = Fraction(self._samples, group=self._group)
