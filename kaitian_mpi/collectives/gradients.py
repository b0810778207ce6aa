"""The exact gradient of the global batch: a DDP communication hook."""

# No postponed annotations here: DDP reads those of its hook.
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def _nothing() -> None:
    pass


class WeightedSum:
    """Sums each bucket over the ranks, each weighted by its part of the global batch.

    With a loss that is the mean over a rank's b_i samples, weight b_i / sum(b) gives the gradient
    of the mean over the whole global batch, whatever the split. (A mean of the groups' means, as
    published implementations have it, is biased when the groups' batches differ.)
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, on_bucket: Callable[[], None] = _nothing
    ) -> None:
        """Make the hook's state.

        Args:
            group: the process group to sum over; None for the default one.
            on_bucket: called when a bucket's gradients are ready, before they are sent.
        """
        self.weight = 1.0
        self._group = group
        self._on_bucket = on_bucket

    def attach(self, model: DistributedDataParallel) -> None:
        """Make `model` reduce its gradients by this hook."""
        model.register_comm_hook(self, _reduce)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Start the weighted sum of one bucket; the future holds it."""
        self._on_bucket()
        gradient = bucket.buffer()
        if self.weight == 0:
            gradient.zero_()  # and not 0 x gradient, which keeps a NaN
        else:
            gradient.mul_(self.weight)
        work = dist.all_reduce(gradient, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])


def _reduce(state: WeightedSum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)
