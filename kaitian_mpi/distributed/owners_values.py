"""Brings the new values of divided parameters from the ranks that own their parts to all ranks.

They come back while the next forward computes, if there is memory for that. A parameter that is
used too early waits for its values, whoever uses it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.ownership import Part
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.late_values import Late, is_compiled, is_compiling, memory_users
from kaitian_mpi.distributed.shard_buckets import ShardBucket, Spares
from kaitian_mpi.errors import CollectiveError, UnsupportedError

Targets = Mapping[Part, nn.Parameter]
Waits = Callable[[str], AbstractContextManager[Any]]

IN_FLIGHT = 2
"""Buckets that are under way at once, besides those that have buffers anyway: of bounded memory."""

_NOT_ARRIVED = "the owners' values have not arrived"


@not_compiled
class OwnersValues:
    """The owners' values that are on their way to this rank, or have arrived.

    Attributes:
        overlap: whether values may arrive after `share`, which takes buffers for all buckets; else
            it waits for them, and takes two.
    """

    def __init__(
        self,
        model: nn.Module,
        targets: Targets,
        group: dist.ProcessGroup | None,
        waits: Waits,
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
        self._all = list(model.parameters())
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._targets = targets
        self._group: Any = group or dist.group.WORLD
        self._waits = waits
        # A parameter of another class keeps it.
        are_plain = all(type(parameter) is nn.Parameter for parameter in self._all)
        self.overlap = overlap and are_plain and not any(map(is_compiled, model.modules()))
        self._missing = 0  # buckets of which the owners' new values are not here
        self._are_confirmed = True  # that what has arrived was not left by a library's abort
        self._stepped: list[tuple[torch.Tensor, torch.Tensor]] = []  # what it mirrors, and a copy
        self._failure: Exception | None = None
        self._sharing: deque[tuple[ShardBucket, Any, torch.Tensor]] = deque()
        self._spares = Spares(0)
        self._lock = threading.RLock()
        self._using: set[Any] = set()  # the streams on which functions have used parameters
        self._late: type[nn.Parameter] = type("Late", (Late,), {"arrive": self.arrive})

    def begin_trial(self) -> None:
        """Take note in the first step of what uses parameters: see `check_seen`."""
        if self.overlap and not is_compiling():
            for parameter in self._trained.values():
                parameter.__class__ = self._late

    @property
    def are_here(self) -> bool:
        """Whether all of the owners' values are here, besides those of parameters in parts.

        A library's work counts as done before the device has the values: if a rank is lost then,
        the others have what the abort has left. So they count when the device has come further.
        """
        return not self._missing and self._are_confirmed

    def share(self, buckets: Sequence[ShardBucket], spares: Spares) -> None:
        """Give every rank the owners' values of the parameters. Collective.

        They arrive in the order in which a forward uses them. An error, such as the loss of a rank,
        is raised by `check`: the step is done. Parameters in parts are brought when they are used.
        """
        self._spares = spares
        self._are_confirmed = False
        shared = [bucket for bucket in buckets if not bucket.is_parted]
        if getattr(self._group, "uses_library", False):
            self._keep_mirrored({part for bucket in shared for part in bucket.parts})
        self._missing = len(shared)
        is_late = self.overlap and not (is_compiling() or self._has_views())
        most = len(buckets) if is_late else IN_FLIGHT - 1
        for bucket in reversed(shared):
            buffer = bucket.values(spares)
            work = bucket.start_gather(buffer, self._group)
            if is_late:
                for parameter in bucket.parameters:
                    parameter.__class__ = self._late  # type: ignore[assignment]
            self._sharing.append((bucket, work, buffer))
            self.wait(most)
        if not is_late:
            self.wait()

    def arrive(self, parameters: Sequence[nn.Parameter], function: Any = None) -> None:
        """Wait for the values of what a function uses, at any time. Not collective.

        The current stream does. In the first step each parameter is asked for, so it is known then
        whether a model uses several: in such, the host waits as well.
        """
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            if (module := device_of(parameters[0].device).streams()) is not None:
                self._using.add(module.current_stream(parameters[0].device))
            for parameter in parameters:
                with self._waits("the owners' values") if self._sharing else nullcontext():
                    while type(parameter) is self._late and self._sharing:
                        self.wait(len(self._sharing) - 1)
                parameter.__class__ = nn.Parameter

    def wait(self, most: int = 0) -> None:
        """Wait until at most so many buckets are on their way. Not collective."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            while len(self._sharing) > most:
                bucket, work, buffer = self._sharing[0]
                try:
                    work.wait()
                    if getattr(self._group, "is_broken", False):
                        raise CollectiveError(_NOT_ARRIVED)
                    bucket.take(buffer)
                    if len(self._using) > 1:  # others would use the values before they are here
                        device_of(buffer.device).mark().wait()
                    self._missing -= 1
                except Exception as error:
                    self._failure = self._failure or error
                bucket.release(buffer, self._spares)
                bucket.settle(self._late)
                self._sharing.popleft()

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
        """Note that the device has reached what comes after the values; it may have to wait."""
        if waits:
            device_of(next(iter(self._trained.values())).device).mark().wait()
        self._are_confirmed = not getattr(self._group, "is_broken", False)
        if self._are_confirmed:
            self._stepped.clear()
        else:
            self._failure = self._failure or CollectiveError(_NOT_ARRIVED)

    def check_seen(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check that whatever has used a parameter has waited for it.

        TorchScript, CUDA graphs and some extensions use memory without torch's functions. In the
        first step, whose values are all here, they are found out; later values then arrive at once.
        """
        late = [parameter for parameter in parameters if type(parameter) is self._late]
        unseen = [parameter for parameter in late if parameter.grad is not None]
        if unseen and self._sharing:
            name = next(name for name, p in self._trained.items() if p is unseen[0])
            raise UnsupportedError(
                f"{name} was used before its new values had arrived, by code that "
                "torch does not see, such as TorchScript, a CUDA graph or an extension; use it so "
                "in the first step, too, or pass it through a function of torch, as detach()"
            )
        if late and not self._sharing:
            self.overlap = self.overlap and not unseen
            for parameter in late:
                parameter.__class__ = nn.Parameter

    def check_all_seen(self) -> None:
        """Check so all parameters, and wait for the values that no rank has used."""
        self.check_seen([*self._trained.values()])
        self.wait()

    def restore_mirrored(self) -> None:
        """Set mirrored parts to what this rank has stepped, after a loss. Not collective."""
        with torch._C.DisableTorchFunctionSubclass():
            for target, stepped in self._stepped:
                target.detach().copy_(stepped)
        self._stepped.clear()

    def close(self, buckets: Sequence[ShardBucket]) -> None:
        """Leave the parameters alone from now on. Not collective."""
        for bucket in buckets:
            bucket.settle(self._late)
        self._sharing.clear()  # what is under way keeps its buffers
        self._late = nn.Parameter  # else it would refer to this
        # The loop may outlive its end, but not the memory of the parts.
        self._all = []
        self._trained = {}
        self._targets = {}
        self._spares = Spares(0)
        self._failure = None

    def _keep_mirrored(self, shared: Collection[Part]) -> None:
        """Keep a copy of what this rank mirrors, over which its owner's value comes.

        If the owner is lost while a library brings it, there is no other copy of this part.
        """
        rank: int = self._group.rank()
        self._stepped = [
            (target, target.detach().clone())
            for part, target in self._targets.items()
            if part.mirror == rank and part in shared
        ]

    def _has_views(self) -> bool:
        """Return whether something else has a parameter's memory, and would not wait for values.

        Such as a script that keeps what `state_dict` or `data` has returned.
        """
        known = dict.fromkeys(self._trained.values(), 1)
        for part, target in self._targets.items():
            parameter = self._all[part.parameter]
            if target is not parameter and parameter in known:
                known[parameter] += 1
        return any(memory_users(parameter) > count for parameter, count in known.items())
