"""Brings the new values of divided parameters from the ranks that own their parts to all ranks.

They come back while the next forward computes, if there is memory for that. A parameter that is
used too early waits for its values, whoever uses it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gradients import is_broken, uses_library
from kaitian_mpi.distributed.pending_parameter import (
    PendingParameter,
    is_compiled,
    is_compiling,
    memory_users,
)
from kaitian_mpi.distributed.shard_buckets import BufferPool, ShardBucket
from kaitian_mpi.errors import CollectiveError, UnsupportedError
from kaitian_mpi.runtime.polling import WaitContext

Targets = Mapping[Part, nn.Parameter]

IN_FLIGHT = 2
"""Buckets that are under way at once, besides those that have buffers anyway: of bounded memory."""

_NOT_ARRIVED = "the owners' values have not arrived"


class _Gather(NamedTuple):
    """A bucket whose values are on their way."""

    bucket: ShardBucket
    work: Any
    buffer: torch.Tensor


@not_compiled
class ValueGathers:
    """Gives every rank the values that owners have stepped, if possible during the next forward.

    Attributes:
        overlap: whether values may arrive after `share`, which takes buffers for all buckets; else
            it waits for them, and takes two.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        group: dist.ProcessGroup | None,
        waits: WaitContext,
        overlap: bool,
    ) -> None:
        """Share nothing yet. Not collective.

        Args:
            model: its parameters are numbered in the order of `parameters()`.
            targets: what the optimizers of this rank step, for each part that it owns or mirrors.
            group: of the ranks; None: all.
            waits: the context in which values are waited for.
            overlap: whether they may arrive later; not so if the model is compiled.
        """
        parameters = list(model.parameters())
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._targets = targets
        self._group: Any = group or dist.group.WORLD
        self._waits = waits
        # A parameter of another class keeps its class.
        are_plain = all(type(parameter) is nn.Parameter for parameter in parameters)
        self.overlap = overlap and are_plain and not any(map(is_compiled, model.modules()))
        counts = [1] * len(parameters)
        for part, target in targets.items():
            counts[part.parameter] += target is not parameters[part.parameter]
        trained = {id(parameter) for parameter in self._trained.values()}
        # The trained parameters, and how many tensors here share the memory of each.
        self._own_users = [
            (parameter, count)
            for parameter, count in zip(parameters, counts, strict=True)
            if id(parameter) in trained
        ]
        self._missing = 0  # buckets of which the owners' new values are not here
        self._are_confirmed = True  # that arrived values were not left by a library's abort
        self._mirrored: list[tuple[torch.Tensor, torch.Tensor]] = []  # mirrored parts, and copies
        self._failure: Exception | None = None
        self._in_flight: deque[_Gather] = deque()
        self._pool = BufferPool(0)
        self._lock = threading.RLock()
        self._streams: set[Any] = set()  # on which functions have used parameters
        self._pending_class: type[nn.Parameter] = type(
            "PendingParameter", (PendingParameter,), {"materialize": self.materialize}
        )

    def begin_trial(self) -> None:
        """Record in the first step which parameters functions of torch use: see `check_seen`."""
        if self.overlap and not is_compiling():
            for parameter in self._trained.values():
                parameter.__class__ = self._pending_class

    @property
    def are_here(self) -> bool:
        """Whether all of the owners' values are here, except those of sharded parameters.

        A library's work is done before the device has the values: if a rank is lost then, the
        others have what the abort has left. So they count only once the device has passed them.
        """
        return not self._missing and self._are_confirmed

    def share(self, buckets: Sequence[ShardBucket], pool: BufferPool) -> None:
        """Give every rank the owners' values of the parameters. Collective.

        They arrive in the order in which a forward uses them. An error, such as the loss of a rank,
        is raised by `check`: the step is done. Sharded parameters are gathered when they are used.
        """
        self._pool = pool
        self._are_confirmed = False
        shared = [bucket for bucket in buckets if not bucket.is_sharded]
        if uses_library(self._group):
            self._keep_mirrored({part for bucket in shared for part in bucket.parts})
        self._missing = len(shared)
        may_arrive_later = self.overlap and not (is_compiling() or self._has_views())
        limit = len(buckets) if may_arrive_later else IN_FLIGHT - 1
        for bucket in reversed(shared):
            buffer = bucket.values(pool)
            work = bucket.start_gather(buffer, self._group)
            if may_arrive_later:
                for parameter in bucket.parameters:
                    parameter.__class__ = self._pending_class  # type: ignore[assignment]
            self._in_flight.append(_Gather(bucket, work, buffer))
            if len(self._in_flight) > limit:
                with self._waits("the owners' values"):
                    self.wait(limit)
        if not may_arrive_later:
            with self._waits("the owners' values"):
                self.wait()

    def materialize(self, parameters: Sequence[nn.Parameter], function: Any = None) -> None:
        """Wait for the values of parameters that a function uses, at any time. Not collective.

        The current stream waits; the host waits too if the model uses parameters on several
        streams, which the first step shows.
        """
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            if (module := device_of(parameters[0].device).streams()) is not None:
                self._streams.add(module.current_stream(parameters[0].device))
            for parameter in parameters:
                with self._waits("the owners' values") if self._in_flight else nullcontext():
                    while type(parameter) is self._pending_class and self._in_flight:
                        self.wait(len(self._in_flight) - 1)
                parameter.__class__ = nn.Parameter

    def wait(self, limit: int = 0) -> None:
        """Wait until at most `limit` buckets are on their way. Not collective."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            while len(self._in_flight) > limit:
                bucket, work, buffer = self._in_flight[0]
                try:
                    work.wait()
                    if is_broken(self._group):
                        raise CollectiveError(_NOT_ARRIVED)
                    bucket.store(buffer)
                    if len(self._streams) > 1:  # others would use the values before they are here
                        device_of(buffer.device).mark().wait()
                    self._missing -= 1
                except Exception as error:
                    self._failure = self._failure or error
                bucket.release(buffer, self._pool)
                bucket.make_plain(self._pending_class)
                self._in_flight.popleft()

    def check(self) -> None:
        """Wait for all values. Not collective.

        Raises:
            CollectiveError: they will not arrive, as a rank is lost.
        """
        self.wait()
        if not self._are_confirmed:
            self.confirm(waits=True)
        if self._failure is not None:
            raise self._failure

    def confirm(self, waits: bool) -> None:
        """Note that the device has passed the values, after waiting for it if `waits`."""
        if waits:
            device_of(next(iter(self._trained.values())).device).mark().wait()
        self._are_confirmed = not is_broken(self._group)
        if self._are_confirmed:
            self._mirrored.clear()
        else:
            self._failure = self._failure or CollectiveError(_NOT_ARRIVED)

    def check_seen(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check that all code that has used these parameters has waited for them.

        TorchScript, CUDA graphs and some extensions use memory without torch's functions. The first
        step, whose values are all here, detects them; later values then arrive before the forward.
        """
        pending = [parameter for parameter in parameters if type(parameter) is self._pending_class]
        unseen = [parameter for parameter in pending if parameter.grad is not None]
        if unseen and self._in_flight:
            name = next(name for name, p in self._trained.items() if p is unseen[0])
            raise UnsupportedError(
                f"{name} was used before its new values had arrived, by code that bypasses torch's "
                "functions, such as TorchScript, a CUDA graph or an extension; run that code in "
                "the first step as well, or call detach() on the parameter before it"
            )
        if pending and not self._in_flight:
            self.overlap = self.overlap and not unseen
            for parameter in pending:
                parameter.__class__ = nn.Parameter

    def check_all_seen(self) -> None:
        """Check all parameters, and wait for the values that this rank has not used."""
        self.check_seen([*self._trained.values()])
        self.wait()

    def restore_mirrored(self) -> None:
        """Set mirrored parts to the values that this rank has stepped. Not collective."""
        with torch._C.DisableTorchFunctionSubclass():
            for target, stepped in self._mirrored:
                target.detach().copy_(stepped)
        self._mirrored.clear()

    def close(self, buckets: Sequence[ShardBucket]) -> None:
        """Stop waiting for the parameters, which become plain ones. Not collective."""
        for bucket in buckets:
            bucket.make_plain(self._pending_class)
        self._in_flight.clear()  # a gather in progress keeps its buffer
        self._pending_class = nn.Parameter  # else it would refer to this
        # The loop may outlive its end, but not the memory of the parts.
        self._trained = {}
        self._targets = {}
        self._own_users = []
        self._pool = BufferPool(0)
        self._failure = None

    def _keep_mirrored(self, shared: Collection[Part]) -> None:
        """Keep copies of this rank's mirrored parts, which the owners' values overwrite.

        If an owner is lost while a library brings its values, no rank has another copy.
        """
        rank: int = self._group.rank()
        self._mirrored = [
            (target, target.detach().clone())
            for part, target in self._targets.items()
            if part.mirror == rank and part in shared
        ]

    def _has_views(self) -> bool:
        """Return whether other tensors share a parameter's memory, and would not wait for values.

        For example, a script may keep the result of `state_dict` or `data`.
        """
        return any(memory_users(parameter) > count for parameter, count in self._own_users)
