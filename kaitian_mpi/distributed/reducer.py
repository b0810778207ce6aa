"""Sums a plain module's gradients over the ranks while backward still computes."""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gradients import Bucket, group_into_buckets, sum_gradients
from kaitian_mpi.distributed.residual import Residuals
from kaitian_mpi.errors import UnsupportedError, UserError

# Bytes at which a bucket is full: the first one, and the others. PyTorch's DDP has the same.
_BUCKET_CAPS = (1 << 20, 25 << 20)
# Over a slow link the first bytes should leave early, and every rank waits for the last bucket.
_BUCKET_CAPS_OF_SLOW_LINKS = (256 << 10, 1 << 20)
_EXACT = torch.float32, torch.float64
_UNARMED = -1  # among the indices of parameters


def _nothing(is_last: bool) -> None:
    pass


@not_compiled
class GradientReducer:
    """Sums gradients over the ranks, each rank's multiplied by its weight.

        reducer.arm(weight)
        loss.backward()
        reducer.finish()

    A backward that is not armed accumulates gradients as plain autograd does; the armed one adds to
    them, and then the ranks sum (so of several micro-batches, the last is armed). With a loss that
    is the mean over a rank's b_i samples, weights b_i / sum(b) give the gradient of the mean over
    the global batch.

    Unlike `DistributedDataParallel`, it does not wrap the module: whatever is computed with the
    parameters counts, in any number of forwards and by any method. Only parameters that require
    gradients are sent, and with them a number of the caller's, such as the loss.

    The gradients travel in buckets, from the last parameters to the first: the order in which they
    usually become ready. A rank that computes nothing calls `arm(None)` and `finish()`.

    The caller makes sure that `describe()` is the same on every rank, and that so are the values of
    the parameters.
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

        `on_bucket` is called when a bucket's gradients are ready, before they are sent, with
        whether it is the last. `bucket_caps` are bytes at which a bucket is full: the first one,
        and the others; None for those that suit the format of the `residuals`, by default fp32. The
        caller says when a step is done, by `Residuals.keep`.
        """
        named = dict(model.named_parameters())  # each once, also where modules share it
        if parameters is not None:
            named = dict(parameters)
        self._names = [name for name, p in named.items() if p.requires_grad]
        self._parameters = [named[name] for name in self._names]
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        if not self._parameters:
            raise UserError(
                f"the model has {len(named)} parameters, none of which requires gradients; "
                "set requires_grad=True for those to be trained"
            )
        self._group = group
        self._on_bucket = on_bucket
        self._lock = threading.RLock()  # devices have a thread each in backward
        self._weight: float | Callable[[], float | None] | None = 1.0
        self._number: torch.Tensor | None = None
        self._works: list[dist.Work] = []
        self._sums: list[torch.Tensor] = []
        self._filled = 0
        self._is_armed = self._is_backward_done = self._is_closed = False
        self._buckets: list[Bucket] = []
        self._carrier: Bucket | None = None
        self._residuals = residuals or Residuals()
        is_exact = self._residuals.wire == "fp32"
        default_caps = _BUCKET_CAPS if is_exact else _BUCKET_CAPS_OF_SLOW_LINKS
        self._bucket_indices = self._group_into_buckets(bucket_caps or default_caps)
        # The parameters of each bucket whose gradients are not ready; never empty if not armed.
        self._missing = [{_UNARMED} for _ in self._bucket_indices]
        self._ready: set[int] = set()
        self._build()
        # While these exist, autograd accumulates all gradients on the stream that is current now,
        # which waits for those that compute them; else each on one of its own.
        self._accumulators = [get_gradient_edge(parameter).node for parameter in self._parameters]
        # A parameter owns its hook: a strong reference to this would be a cycle.
        on_ready = weakref.WeakMethod(self._bucket_ready)
        handles = [
            self._parameters[index].register_post_accumulate_grad_hook(
                partial(_note_gradient, on_ready, self._missing[bucket], bucket, index)
            )
            for bucket, indices in enumerate(self._bucket_indices)
            for index in indices
        ]
        self._remove_hooks = weakref.finalize(self, _remove, handles)

    @property
    def is_outdated(self) -> bool:
        """Whether a parameter requires gradients that did not when this was created."""
        return any(parameter.requires_grad for parameter in self._frozen.values())

    @property
    def has_begun(self) -> bool:
        """Whether it has, or is to sum, gradients of the current step."""
        return self._is_armed

    @property
    def carries_number(self) -> bool:
        """Whether a number can be summed along with the gradients; the same on every rank.

        Not if all of these are of less than 32 bits, which would round it off.
        """
        return self._carrier is not None

    @property
    def number(self) -> torch.Tensor:
        """The weighted sum of the ranks' numbers, without dimensions, after `finish`.

        In the dtype and on the device of some gradient.
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
        collective that was started before. With 0, this rank's gradients are zero, even if it has
        computed a NaN; with None, they are ignored, as if it had not used any parameter. `number`,
        of one element, is summed as well if `carries_number`.
        """
        if self._is_closed:
            raise RuntimeError("arm() after close()")
        if self._is_armed and self._is_backward_done:
            raise RuntimeError("arm() before the finish() of the last armed backward()")
        names = [name for name, p in self._frozen.items() if p.requires_grad]
        if names:
            raise UnsupportedError(
                f"{names[0]} requires gradients now, and did not when the GradientReducer was "
                "created; create a new one"
            )
        if self._works:
            self._build()  # a sum in progress keeps its buffers
        self._ready.clear()
        for missing, indices in zip(self._missing, self._bucket_indices, strict=True):
            missing.clear()
            missing.update(indices)
        self._weight = weight
        self._number = number
        self._filled = 0
        self._sums = []
        self._is_armed = True
        self._is_backward_done = False

    def finish(self) -> None:
        """Complete the sums of the armed backward; `grad` of each parameter then holds its sum.

        It is the same bit by bit on all ranks, and a view of its bucket's buffer. A parameter that
        no rank has a gradient for has None. Collective.
        """
        if not self._is_armed:
            raise RuntimeError("finish() without arm()")
        try:
            with self._lock:
                while self._filled < len(self._buckets):
                    self._fill_next()
            for index, bucket in enumerate(self._buckets):
                if self._works:
                    self._works[index].wait()
                else:
                    sum_gradients(bucket.buffer, bucket.residual, self._group)
                # One number in which whatever is not finite shows; while the next is summed.
                self._sums.append(bucket.gradients.sum().float())
                bucket.settle()
            self._works.clear()
        finally:
            self.reset()

    def reset(self) -> None:
        """Disarm: to be called after a backward that raised. Not collective.

        The gradients are left as they are; set them to None before the next backward.
        """
        for missing in self._missing:
            missing.add(_UNARMED)
        self._is_armed = False
        self._weight = 0.0
        self._number = None

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity.

        The same on every rank, without communication, as all have the same sums.
        """
        if not self._sums:
            return True
        device = self._sums[0].device
        if math.isfinite(sum(total.to(device) for total in self._sums)):
            return True
        # Finite numbers may add up to more than a float can hold.
        return all(bool(bucket.gradients.isfinite().all()) for bucket in self._buckets)

    def check_values(self) -> None:
        """Wait for values that other ranks send: none here. Not collective.

        Raises:
            CollectiveError: they will not arrive, as a rank is lost.
        """

    def describe(self) -> str:
        """Return a short text that must be the same on every rank, for `check_same`."""
        devices: dict[torch.device, int] = {}
        rows = [
            (
                *(name, tuple(p.shape), p.stride(), str(p.dtype)),
                devices.setdefault(p.device, len(devices)),
            )
            for name, p in zip(self._names, self._parameters, strict=True)
        ]
        elements = sum(parameter.numel() for parameter in self._parameters)
        digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
        return f"{len(rows)} trainable parameters of {elements} elements, layout {digest}"

    def close(self) -> None:
        """Remove the hooks from the model; its gradients stay. Not collective."""
        self.reset()
        self._remove_hooks()
        self._is_closed = True
        self._on_bucket = _nothing
        self._parameters = []
        self._accumulators = []
        self._frozen = {}
        self._buckets = []
        self._bucket_indices = []
        self._missing = []
        self._carrier = None
        self._works = []

    def _group_into_buckets(self, caps: tuple[int, int]) -> list[list[int]]:
        return group_into_buckets(self._parameters, caps)

    def _build(self) -> None:
        self._works = []
        self._buckets = []
        self._residuals.clear()
        for indices in self._bucket_indices:
            bucket = Bucket({index: self._parameters[index] for index in indices})
            self._buckets.append(bucket)
            places = {self._names[index]: place for index, place in bucket.places.items()}
            bucket.use_residual(self._residuals.add(bucket.buffer, places))
        exact = [bucket for bucket in self._buckets if bucket.buffer.dtype in _EXACT]
        self._carrier = exact[-1] if exact else None

    def _bucket_ready(self, bucket: int, index: int) -> None:
        """Fill the buckets that can be, now that parameter `index` was the last of one."""
        with self._lock:
            if bucket < self._filled:
                self.reset()
                raise UnsupportedError(
                    f"{self._names[index]} received a gradient after its bucket was reduced: call "
                    "finish() and arm() before a second backward(), and checkpoint() with "
                    "use_reentrant=False"
                )
            if self._filled == 0:
                engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
                engine.queue_callback(self._backward_done)
            self._ready.add(bucket)
            while self._filled in self._ready:
                self._fill_next()

    def _fill_next(self) -> None:
        """Fill a bucket, and start its sum unless it is the only one."""
        bucket = self._buckets[self._filled]
        self._filled += 1
        self._on_bucket(self._filled == len(self._buckets))
        if callable(self._weight):
            self._weight = self._weight()
        bucket.fill(self._weight, self._number if bucket is self._carrier else None)
        # If all gradients are in one bucket, nothing is left to compute while it is summed, so
        # `finish` does that in the caller's thread, which saves two thread switches.
        if len(self._buckets) > 1:
            work = sum_gradients(bucket.buffer, bucket.residual, self._group, in_background=True)
            self._works.append(work)

    def _backward_done(self) -> None:
        self._is_backward_done = True


@not_compiled
def _note_gradient(
    on_ready: Callable[[], Any], missing: set[int], bucket: int, index: int, _: torch.Tensor
) -> None:
    """Note that a parameter's gradient is ready: the last of its bucket, or one too late."""
    missing.discard(index)
    if not missing and (bucket_ready := on_ready()) is not None:
        bucket_ready(bucket, index)


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
