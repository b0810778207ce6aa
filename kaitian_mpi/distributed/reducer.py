"""Sums a model's gradients over the ranks while backward is still running."""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gradients import Bucket, group_into_buckets, sum_gradients
from kaitian_mpi.distributed.residual import Residuals
from kaitian_mpi.errors import UnsupportedError, UserError

# Bytes at which a bucket is full: the first one, and the others. PyTorch's DDP uses the same.
_BUCKET_CAPS = (1 << 20, 25 << 20)
# Over a slow link the first bytes should leave early, and every rank waits for the last bucket.
_BUCKET_CAPS_OF_SLOW_LINKS = (256 << 10, 1 << 20)
_EXACT = torch.float32, torch.float64
_UNARMED = -1  # stands for a missing gradient, so that a bucket is never complete


def _nothing(is_last: bool) -> None:
    pass


class TrainedParameters:
    """The parameters of a model that require gradients; they must be the same on every rank."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        """Keep those of the parameters, by name, that require gradients now.

        Raises:
            UserError: none of them does.
        """
        self.names = [name for name, parameter in named.items() if parameter.requires_grad]
        self.parameters = [named[name] for name in self.names]
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        if not self.parameters:
            raise UserError(
                f"the model has {len(named)} parameters, none of which requires gradients; "
                "set requires_grad=True for those to be trained"
            )

    def clear(self) -> None:
        """Release all parameters."""
        self.names = []
        self.parameters = []
        self._frozen = {}

    @property
    def unfrozen(self) -> list[str]:
        """The names of parameters that require gradients now, but did not at first."""
        return [name for name, parameter in self._frozen.items() if parameter.requires_grad]

    def check_none_unfrozen(self) -> None:
        """Check that no parameter requires gradients now that did not at first. Not collective.

        Raises:
            UnsupportedError: one does.
        """
        if self.unfrozen:
            raise UnsupportedError(
                f"{self.unfrozen[0]} requires gradients now, and did not when the GradientReducer "
                "was created; create a new one"
            )

    def describe(self) -> str:
        """Return a short text that must be the same on every rank, for `check_same`."""
        devices: dict[torch.device, int] = {}
        rows = [
            (
                *(name, tuple(p.shape), p.stride(), str(p.dtype)),
                devices.setdefault(p.device, len(devices)),
            )
            for name, p in zip(self.names, self.parameters, strict=True)
        ]
        elements = sum(parameter.numel() for parameter in self.parameters)
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
        return f"{len(rows)} trainable parameters of {elements} elements, layout {digest}"


class TakesBuckets(Protocol):
    """Takes buckets whose gradients are ready, as a reducer does."""

    def take_bucket(self) -> None: ...
    def reset(self) -> None: ...


@not_compiled
class GradientArrivals:
    """Calls its owner for each bucket whose gradients are ready, in order, in an armed backward.

    It calls from the thread that computed the last of these gradients.
    """

    def __init__(
        self, owner: TakesBuckets, trained: TrainedParameters, buckets: Sequence[Sequence[int]]
    ) -> None:
        """Watch the parameters whose indices are in `buckets`. Not collective.

        When a bucket is ready, `owner.take_bucket` is called, which calls `next_bucket`.
        """
        # A parameter owns its hook: a strong reference to the owner would be a cycle.
        self._owner = weakref.ref(owner)
        self._names = trained.names
        self._buckets = buckets
        self.lock = threading.RLock()  # backward has a thread for each device
        """Held while the owner takes a bucket."""
        self.taken = 0
        """How many buckets of this backward the owner has taken."""
        self.is_armed = False
        self.is_backward_done = False
        self._is_closed = False
        # By bucket, the parameters whose gradients are not ready; never empty while not armed.
        self._missing = [{_UNARMED} for _ in buckets]
        self._ready: set[int] = set()
        # While these nodes exist, autograd accumulates all gradients on the stream that is current
        # now, which waits for the streams that compute them. Otherwise it would accumulate each
        # gradient on the stream that computed it.
        self._accumulators = [get_gradient_edge(p).node for p in trained.parameters]
        on_ready = weakref.WeakMethod(self._bucket_ready)
        handles = [
            trained.parameters[index].register_post_accumulate_grad_hook(
                partial(_note_gradient, on_ready, self._missing[bucket], bucket, index)
            )
            for bucket, indices in enumerate(buckets)
            for index in indices
        ]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    @property
    def are_all_taken(self) -> bool:
        """Whether the owner has taken every bucket."""
        return self.taken == len(self._buckets)

    def arm(self) -> None:
        """Call the owner for the buckets of the next backward. Not collective.

        Raises:
            RuntimeError: the last armed backward is not finished, or this is closed.
        """
        if self._is_closed:
            raise RuntimeError("arm() after close()")
        if self.is_armed and self.is_backward_done:
            raise RuntimeError("arm() before the finish() of the last armed backward()")
        self._ready.clear()
        for missing, indices in zip(self._missing, self._buckets, strict=True):
            missing.clear()
            missing.update(indices)
        self.taken = 0
        self.is_armed = True
        self.is_backward_done = False

    def disarm(self) -> None:
        """Do not call the owner in the next backward. Not collective."""
        for missing in self._missing:
            missing.add(_UNARMED)
        self.is_armed = False

    def next_bucket(self) -> int:
        """Return the number of the bucket that the owner takes now."""
        self.taken += 1
        return self.taken - 1

    def take_rest(self) -> None:
        """Let the owner take the buckets that it has not taken."""
        owner = self._owner()
        assert owner is not None  # it calls this itself
        with self.lock:
            while not self.are_all_taken:
                owner.take_bucket()

    def end(self) -> None:
        """Note that a backward is complete: until the next one is armed, a gradient is an error."""
        self.is_armed = False

    def rewind(self) -> None:
        """Let the owner take all buckets once more, without a backward."""
        self.taken = 0

    def close(self) -> None:
        """Remove the hooks from the parameters. Not collective."""
        self.disarm()
        self._is_closed = True
        self._remove_hooks()
        self._accumulators = []
        self._buckets = []
        self._missing = []

    def _bucket_ready(self, bucket: int, index: int) -> None:
        """Let the owner take this bucket, which parameter `index` has completed.

        Buckets are taken in order, so it may have to wait for earlier ones, or let later ones go.
        """
        owner = self._owner()
        if owner is None:
            return
        with self.lock:
            if bucket < self.taken:
                owner.reset()
                raise UnsupportedError(
                    f"{self._names[index]} received a gradient after its bucket was reduced: call "
                    "finish() and arm() before a second backward(), and checkpoint() with "
                    "use_reentrant=False"
                )
            if self.taken == 0:
                engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
                engine.queue_callback(self._backward_done)
            self._ready.add(bucket)
            while self.taken in self._ready:
                owner.take_bucket()

    def _backward_done(self) -> None:
        self.is_backward_done = True


@not_compiled
class GradientReducer:
    """Sums gradients over the ranks, each rank's multiplied by its weight.

        reducer.arm(weight)
        loss.backward()
        reducer.finish()

    A backward that is not armed accumulates gradients as plain autograd does. The armed one adds
    its own, and then the ranks sum the total: of several micro-batches, arm the last. If the loss
    is the mean over a rank's b_i samples, weights b_i / sum(b) give the gradient of the mean over
    the global batch.

    Unlike `DistributedDataParallel`, it does not wrap the module: whatever is computed with the
    parameters counts, in any number of forwards and by any method. Only the gradients of parameters
    that require them are sent, and with them one number of the caller's, such as the loss.

    The gradients travel in buckets, from the last parameters to the first: the order in which they
    usually become ready. A rank that computes nothing calls `arm(None)` and `finish()`.

    The caller makes sure that all ranks have the same `describe()`, and the same values of the
    parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        on_bucket: Callable[[bool], None] = _nothing,
        bucket_caps: tuple[int, int] | None = None,
        residuals: Residuals | None = None,
        parameters: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """Watch a model's parameters, or only those given by name. Not collective.

        `on_bucket` is called when a bucket's gradients are ready, before they are sent; its
        argument says whether the bucket is the last. `bucket_caps` are the bytes at which a bucket
        is full: the first one, and the others. None: those that suit the format in which gradients
        cross hosts, that of `residuals`, or fp32 without them. The caller calls `Residuals.keep`
        when a step is done.

        Raises:
            UserError: no parameter requires gradients.
        """
        # `named_parameters` has a parameter once, even if several modules share it.
        named = dict(model.named_parameters())
        self._trained = TrainedParameters(named if parameters is None else parameters)
        self._group = group
        self._on_bucket = on_bucket
        self._weight: float | Callable[[], float | None] | None = 1.0
        self._number: torch.Tensor | None = None
        self._works: list[dist.Work] = []
        self._totals: list[torch.Tensor] = []
        self._buckets: list[Bucket] = []
        self._carrier: Bucket | None = None
        self._residuals = residuals or Residuals()
        is_exact = self._residuals.wire == "fp32"
        default_caps = _BUCKET_CAPS if is_exact else _BUCKET_CAPS_OF_SLOW_LINKS
        caps = bucket_caps or default_caps
        self._bucket_indices = group_into_buckets(self._trained.parameters, caps)
        self._build()
        self._arrivals = GradientArrivals(self, self._trained, self._bucket_indices)

    @property
    def is_outdated(self) -> bool:
        """Whether a parameter requires gradients that did not when this was created."""
        return bool(self._trained.unfrozen)

    @property
    def carries_number(self) -> bool:
        """Whether a number can be summed along with the gradients; the same on every rank.

        Not if all gradients have less than 32 bits, which would round it off.
        """
        return self._carrier is not None

    @property
    def number(self) -> torch.Tensor:
        """The weighted sum of the ranks' numbers, of shape (), after `finish`.

        Its dtype and device are those of one of the gradients.
        """
        assert self._carrier is not None
        return self._carrier.number.clone()

    def arm(
        self,
        weight: float | Callable[[], float | None] | None,
        number: torch.Tensor | None = None,
    ) -> None:
        """Let the next backward sum over the ranks. Not collective.

        A callable `weight` is called once, when the first bucket is ready, and may wait for a
        collective that was started before. If the weight is 0, this rank's gradients are zero, even
        if it has computed a NaN; if None, they are ignored, as if it had not used any parameter.
        `number`, of one element, is summed as well if `carries_number`.

        Raises:
            RuntimeError: the last armed backward has no `finish` yet, or this is closed.
            UnsupportedError: a parameter requires gradients now that did not before.
        """
        self._trained.check_none_unfrozen()
        self._arrivals.arm()
        if self._works:
            self._build()  # a sum in progress still uses the old buffers
        self._weight = weight
        self._number = number
        self._totals = []

    def finish(self) -> None:
        """Complete the sums of the armed backward; `grad` of each parameter then holds its sum.

        It is the same bit by bit on all ranks, and a view of its bucket's buffer. It is None if no
        rank has a gradient for the parameter. Collective.

        Raises:
            RuntimeError: `arm` was not called.
        """
        if not self._arrivals.is_armed:
            raise RuntimeError("finish() without arm()")
        try:
            self._arrivals.take_rest()
            for index, bucket in enumerate(self._buckets):
                if self._works:
                    self._works[index].wait()
                else:
                    sum_gradients(bucket.buffer, bucket.residual, self._group)
                # Computed while the next bucket is summed: a total that is not finite if some
                # gradient is not.
                self._totals.append(bucket.gradients.sum().float())
                bucket.settle()
            self._works.clear()
        finally:
            self.reset()

    def reset(self) -> None:
        """Disarm; call this after a backward that raised. Not collective.

        The gradients are left as they are; set them to None before the next backward.
        """
        self._arrivals.disarm()
        self._weight = 0.0
        self._number = None

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity.

        The same on every rank, without communication, as all have the same sums.
        """
        if not self._totals:
            return True
        device = self._totals[0].device
        if math.isfinite(sum(total.to(device) for total in self._totals)):
            return True
        # Finite numbers may add up to more than a float can hold.
        return all(bool(bucket.gradients.isfinite().all()) for bucket in self._buckets)

    def check_values(self) -> None:
        """Wait for the values that other ranks send; here they send none. Not collective.

        Raises:
            CollectiveError: a rank was lost, so they will not arrive.
        """

    def describe(self) -> str:
        """Return a short text that must be the same on every rank, for `check_same`."""
        return self._trained.describe()

    def close(self) -> None:
        """Remove the hooks from the model; its gradients stay. Not collective."""
        self.reset()
        self._arrivals.close()
        self._trained.clear()
        self._on_bucket = _nothing
        self._buckets = []
        self._bucket_indices = []
        self._carrier = None
        self._works = []

    def _build(self) -> None:
        """Make the buckets, with new buffers."""
        self._works = []
        self._buckets = []
        self._residuals.clear()
        for indices in self._bucket_indices:
            bucket = Bucket({index: self._trained.parameters[index] for index in indices})
            self._buckets.append(bucket)
            places = {self._trained.names[index]: place for index, place in bucket.places.items()}
            bucket.use_residual(self._residuals.add(bucket.buffer, places))
        exact = [bucket for bucket in self._buckets if bucket.buffer.dtype in _EXACT]
        self._carrier = exact[-1] if exact else None

    def take_bucket(self) -> None:
        """Fill the next bucket, and start its sum unless it is the only one."""
        bucket = self._buckets[self._arrivals.next_bucket()]
        self._on_bucket(self._arrivals.are_all_taken)
        if callable(self._weight):
            self._weight = self._weight()
        bucket.fill(self._weight, self._number if bucket is self._carrier else None)
        # If all gradients are in one bucket, nothing is left to compute while it is summed, so
        # `finish` does that in the caller's thread, which saves two thread switches.
        if len(self._buckets) > 1:
            work = sum_gradients(bucket.buffer, bucket.residual, self._group, in_background=True)
            self._works.append(work)


@not_compiled
def _note_gradient(
    on_ready: Callable[[], Any], missing: set[int], bucket: int, index: int, _: torch.Tensor
) -> None:
    """Note that a parameter's gradient is ready; call `on_ready` if its bucket misses no other.

    So also for a gradient that comes after its bucket was reduced, which is an error.
    """
    missing.discard(index)
    if missing:
        return
    bucket_ready = on_ready()
    if bucket_ready is not None:
        bucket_ready(bucket, index)


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
