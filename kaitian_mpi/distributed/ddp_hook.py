"""The exact gradient of the global batch: a DDP communication hook."""

# No postponed annotations here: DDP checks those of its hook.
import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.network.residual import Residual, Residuals
from kaitian_mpi.distributed.sums import sum_gradients
from kaitian_mpi.distributed.sync_batch_norm import Participation, participate


def _nothing(is_last: bool) -> None:
    pass


@not_compiled
class WeightedSum:
    """Sums each bucket over the ranks, weighted by each rank's fraction of the global batch.

    With a loss that is the mean over a rank's b_i samples, weight b_i / sum(b) gives the gradient
    of the mean over the whole global batch, for any split. (A mean of the groups' means, as in
    published implementations, is biased when the groups' batches differ.)
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        on_bucket: Callable[[bool], None] = _nothing,
        wire: str = "fp32",
    ) -> None:
        """Create the hook's state.

        Args:
            group: the process group to sum over; None for the default one.
            on_bucket: called when a bucket's gradients are ready, before they are sent, with
                whether it is the last of a backward.
            wire: the format in which gradients cross between hosts.
        """
        self.weight = 1.0
        self.residuals = Residuals(wire)
        """What slow links have rounded off, for a checkpoint. Each rank has its own."""
        self._names: dict[int, str] = {}
        self._buckets: dict[int, tuple[list[int], Residual | None]] = {}
        self._sums: list[torch.Tensor] = []
        self._group = group
        self._on_bucket = on_bucket

    def attach(self, model: DistributedDataParallel) -> None:
        """Make `model` reduce its gradients by this hook.

        Its batch norms over all ranks weight the ranks likewise: so set `weight` before backward.
        """
        participate(model, Participation(lambda: self.weight))
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        model.register_comm_hook(self, _reduce)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Start the weighted sum of one bucket; return a future of it."""
        self._on_bucket(bucket.is_last())
        gradient, residual = bucket.buffer(), self._residual_of(bucket)
        if self.weight == 0:
            gradient.zero_()  # not multiplied by 0, which would keep a NaN
        else:
            gradient.mul_(self.weight)
        work = sum_gradients(gradient, residual, self._group, in_background=True)
        return work.get_future().then(lambda future: self._summed(future.value()[0]))

    def is_finite(self, model: torch.nn.Module) -> bool:
        """Return whether the gradients summed since the last call have no NaN and no infinity.

        The same on every rank without communication, because all have the same sums.
        """
        sums, self._sums = self._sums, []
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return True
        # Finite numbers may add up to more than a float can hold.
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return all(bool(gradient.isfinite().all()) for gradient in gradients)

    def _residual_of(self, bucket: dist.GradBucket) -> Residual | None:
        """Return what slow links round off a bucket; DDP may change its buckets between steps."""
        if self.residuals.wire == "fp32":
            return None
        if bucket.index() == 0:
            self.residuals.keep()
        parameters = bucket.parameters()
        identities = [id(parameter) for parameter in parameters]
        known, residual = self._buckets.get(bucket.index(), ([], None))
        if known != identities:
            if known:
                self.residuals.clear()
                self._buckets.clear()
            ends = list(itertools.accumulate(parameter.numel() for parameter in parameters))
            places = {
                self._names[identity]: slice(end - parameter.numel(), end)
                for identity, parameter, end in zip(identities, parameters, ends, strict=True)
            }
            residual = self.residuals.add(bucket.buffer(), places)
            self._buckets[bucket.index()] = identities, residual
        return residual

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        # One number per bucket, on its device, that is not finite if the bucket is not.
        self._sums.append(gradient.sum().float())
        return gradient


def _reduce(state: WeightedSum, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)
