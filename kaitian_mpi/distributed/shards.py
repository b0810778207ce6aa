"""Sums gradients to the ranks that own them, and brings the owners' new values back.

A bucket is laid out in the order of its owners, whose parts are of unlike lengths: a ragged
reduce-scatter sums it after backward, and a ragged all-gather returns what the owners made of it.
Parts that have mirrors are sent on to those, once they are summed.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.ownership import BUCKET_CAPS, Part, bucket_cap
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gathering import Gathering
from kaitian_mpi.distributed.gradients import judge, partition, sum_on_host, values_of
from kaitian_mpi.distributed.late_values import Late, is_compiled, is_compiling, memory_users
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.shard_buckets import ShardBucket, Spares
from kaitian_mpi.errors import CollectiveError, UnsupportedError

# Buckets that are summed at once, besides those that have buffers anyway; backward waits for more,
# so that memory is bounded.
_IN_FLIGHT = 2
_NOT_ARRIVED = "the owners' values have not arrived"

Targets = Mapping[Part, nn.Parameter]


@not_compiled
class ShardReducer(GradientReducer):
    """Sums gradients as `GradientReducer` does, each to the rank that owns it.

    Only an owner has the sum after `finish`. Several micro-batches are each armed, and add up at
    the owners: so no rank ever has more than its parts and two buckets. A parameter's gradient is
    freed as soon as it is in its bucket.

    The owners' values come back while the next forward computes, if there is memory for that. A
    parameter that is used too early waits for its values, whoever uses it.

    Attributes:
        rounds: how often the rank with the most micro-batches arms the reducer in this step; the
            same on every rank.
        gathering: of parameters in parts; None if all are whole.
        squared_norm: of the whole gradient, after `finish`; the same on every rank.
        factor: what its numbers are to be multiplied with.
    """

    carries_number = True
    factor = 1.0

    def __init__(
        self,
        model: nn.Module,
        *,
        parts: Sequence[Part],
        targets: Targets,
        group: dist.ProcessGroup | None = None,
        on_bucket: Callable[[bool], None] = lambda is_last: None,
        waits: Callable[[str], AbstractContextManager[Any]] = lambda what: nullcontext(),
        bucket_caps: tuple[int, int] = BUCKET_CAPS,
        residuals: Any = None,
        overlaps: bool = True,
        gathering: Gathering | None = None,
    ) -> None:
        """Watch a model's parameters. Not collective.

        Args:
            model: its parameters are numbered in the order of `parameters()`.
            parts: of all of them, by all ranks.
            targets: what the optimizers of this rank step, for each part that it owns or mirrors.
            group: of the ranks; None: all.
            on_bucket: called when a bucket of this step is ready, with whether it is the last.
            waits: the context in which backward waits for earlier buckets.
            bucket_caps: bytes at which a bucket is full: the first one, and the others.
            residuals: for the signature of `GradientReducer`; all is exact here.
            overlaps: whether values may arrive after `share_values`, which takes buffers for all
                buckets; else it waits for them, and takes two.
            gathering: of the parameters that are in parts; None if there are none.
        """
        self._numbers = {p: number for number, p in enumerate(model.parameters())}
        self._of: dict[int, list[Part]] = {}
        for part in parts:
            self._of.setdefault(part.parameter, []).append(part)
        self._targets = targets
        self.waits = waits
        self.gathering = gathering
        self._flights: deque[Any] = deque()  # bucket, work, sum, whether it adds, ends; buffer
        self._mirroring: list[Any] = []
        self.rounds = 1
        self._round = 0
        self.squared_norm = 0.0
        self._missing = 0  # buckets of which the owners' new values are not here
        self._own_numbers: list[tuple[torch.Tensor, float]] = []
        self._sum = torch.zeros(())
        self._are_confirmed = True  # that what has arrived was not left by a library's abort
        self._stepped: list[tuple[torch.Tensor, torch.Tensor]] = []  # what it mirrors, and a copy
        self._has_library = bool(getattr(group or dist.group.WORLD, "uses_library", False))
        self._is_finite = True
        self._failure: Exception | None = None
        # A parameter of another class keeps it.
        are_plain = all(type(p) is nn.Parameter for p in self._numbers)
        self._overlaps = overlaps and are_plain and not any(map(is_compiled, model.modules()))
        self._sharing: deque[tuple[ShardBucket, Any, torch.Tensor]] = deque()
        self._arriving = threading.RLock()
        self._using: set[Any] = set()  # the streams on which functions have used parameters
        self._late: type[nn.Parameter] = type("Late", (Late,), {"arrive": self.arrive})
        if gathering is not None:
            bucket_caps = BUCKET_CAPS[0], bucket_cap(max(p.nbytes for p in model.parameters()))
        with torch._C.DisableTorchFunctionSubclass():  # of parameters without their values
            super().__init__(model, group=group, on_bucket=on_bucket, bucket_caps=bucket_caps)
        if self._overlaps and not is_compiling():
            for parameter in self._parameters:  # a trial: see `_check_seen`
                parameter.__class__ = self._late

    @property
    def number(self) -> torch.Tensor:
        return self._sum

    @property
    def has_begun(self) -> bool:
        return self._is_armed or self._round > 0

    @property
    def is_outdated(self) -> bool:
        """Whether another parameter requires gradients; of some in parts, also one less.

        The order in which these are used, and buckets are summed, is then another one.
        """
        has_order = self.gathering is not None
        return super().is_outdated or (
            has_order and not all(parameter.requires_grad for parameter in self._parameters)
        )

    @property
    def has_values(self) -> bool:
        """Whether all of the owners' values are here, besides those of parameters in parts.

        A library's work counts as done before the device has the values: if a rank is lost then,
        the others have what the abort has left. So they count when the device has come further.
        """
        return not self._missing and self._are_confirmed

    def arm(
        self,
        weight: float | Callable[[], float | None] | None,
        number: torch.Tensor | None = None,
    ) -> None:
        """Let the next backward add to the owners' sums; it is one of the step's `rounds`."""
        if self._is_armed and self._is_backward_done and self._round + 1 < self.rounds:
            self.end_round()
        super().arm(weight, number)

    def finish(self) -> None:
        """Complete the sums of all rounds; `grad` of each target then holds its own. Collective."""
        if not (self._is_armed or self._round):
            raise RuntimeError("finish() without arm()")
        try:
            self._check_seen(self._parameters)
            self._arrive(0)  # what no rank has used
            if self._is_armed:
                self.end_round()
            while self._round < self.rounds:
                self._filled = 0
                self._weight = None
                self.end_round()
            self._land(0)
            for work in self._mirroring:
                work.wait()
            self._settle()
        finally:
            self.reset()

    def reset(self) -> None:
        super().reset()
        self._round = 0
        if self.gathering is not None:
            self.gathering.reset()
        self._flights.clear()  # what is being summed keeps its buffers
        self._mirroring.clear()

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        return self._is_finite

    def check_values(self) -> None:
        self._arrive(0)
        if not self._are_confirmed:
            self._confirm(waits=True)
        if self._failure is not None:
            raise self._failure

    def share_values(self) -> None:
        """Give every rank the owners' values of the parameters. Collective.

        They arrive in the order in which a forward uses them. An error, such as the loss of a rank,
        is raised by `check_values`: the step is done.
        """
        self._missing = sum(not bucket.is_parted for bucket in self._buckets)
        self._are_confirmed = False
        self._keep_mirrored()
        is_late = self._overlaps and not (is_compiling() or self._has_views())
        most = len(self._buckets) if is_late else _IN_FLIGHT - 1
        for bucket in reversed(self._buckets):
            if bucket.is_parted:
                continue
            buffer = bucket.values(self._spares)
            work = bucket.start_gather(buffer, self._group)
            if is_late:
                for parameter in bucket.parameters:
                    parameter.__class__ = self._late
            self._sharing.append((bucket, work, buffer))
            self._arrive(most)
        if not is_late:
            self._arrive(0)

    def restore_mirrored(self) -> None:
        """Set mirrored parts to what this rank has stepped, after a loss. Not collective."""
        with torch._C.DisableTorchFunctionSubclass():
            for target, stepped in self._stepped:
                target.detach().copy_(stepped)
        self._stepped.clear()

    def _keep_mirrored(self) -> None:
        """Keep a copy of what this rank mirrors, over which its owner's values come.

        If the owner is lost while a library brings them, there is no other copy of this part.
        """
        rank: int = (self._group or dist.group.WORLD).rank()  # type: ignore[union-attr]
        self._stepped = [
            (target, target.detach().clone())
            for part, target in self._targets.items()
            if part.mirror == rank and self._has_library and not self._is_in_parts(part.parameter)
        ]

    def _confirm(self, waits: bool) -> None:
        """Note that the device has reached what comes after the values; it may have to wait."""
        if waits:
            device_of(self._parameters[0].device).mark().wait()
        self._are_confirmed = not getattr(self._group or dist.group.WORLD, "is_broken", False)
        if self._are_confirmed:
            self._stepped.clear()
        else:
            self._failure = self._failure or CollectiveError(_NOT_ARRIVED)

    def arrive(self, parameters: Sequence[nn.Parameter], function: Any = None) -> None:
        """Wait for the values of what a function uses, at any time. Not collective.

        The current stream does. In the first step each parameter is asked for, so it is known then
        whether a model uses several: in such, the host waits as well.
        """
        with self._arriving, torch._C.DisableTorchFunctionSubclass():
            if (module := device_of(parameters[0].device).streams()) is not None:
                self._using.add(module.current_stream(parameters[0].device))
            for parameter in parameters:
                with self.waits("the owners' values") if self._sharing else nullcontext():
                    while type(parameter) is self._late and self._sharing:
                        self._arrive(len(self._sharing) - 1)
                parameter.__class__ = nn.Parameter

    def close(self) -> None:
        for bucket in self._buckets:
            bucket.settle(self._late)
        self._sharing.clear()  # what is under way keeps its buffers
        self._late = nn.Parameter  # else it would refer to this
        super().close()
        # The loop may outlive its end, but not the memory of the parts.
        self._targets = {}
        self._spares = Spares(0)
        self.gathering = None
        self._failure = None

    def _has_views(self) -> bool:
        """Return whether something else has a parameter's memory, and would not wait for values.

        Such as a script that keeps what `state_dict` or `data` has returned.
        """
        parameters, known = [*self._numbers], dict.fromkeys(self._parameters, 1)
        for part, target in self._targets.items():
            parameter = parameters[part.parameter]
            if target is not parameter and parameter in known:
                known[parameter] += 1
        return any(memory_users(parameter) > count for parameter, count in known.items())

    def _check_seen(self, parameters: Sequence[nn.Parameter]) -> None:
        """Check that whatever has used a parameter has waited for it.

        TorchScript, CUDA graphs and some extensions use memory without torch's functions. In the
        first step, whose values are all here, they are found out; later values then arrive at once.
        """
        late = [parameter for parameter in parameters if type(parameter) is self._late]
        unseen = [parameter for parameter in late if parameter.grad is not None]
        if unseen and self._sharing:
            number = next(n for n, p in enumerate(self._parameters) if p is unseen[0])
            raise UnsupportedError(
                f"{self._names[number]} was used before its new values had arrived, by code that "
                "torch does not see, such as TorchScript, a CUDA graph or an extension; use it so "
                "in the first step, too, or pass it through a function of torch, as detach()"
            )
        if late and not self._sharing:
            self._overlaps = self._overlaps and not unseen
            for parameter in late:
                parameter.__class__ = nn.Parameter

    def _arrive(self, most: int) -> None:
        """Wait until at most so many buckets are on their way."""
        with self._arriving, torch._C.DisableTorchFunctionSubclass():
            while len(self._sharing) > most:
                bucket, work, buffer = self._sharing[0]
                try:
                    work.wait()
                    if getattr(self._group or dist.group.WORLD, "is_broken", False):
                        raise CollectiveError(_NOT_ARRIVED)
                    bucket.take(buffer)
                    if len(self._using) > 1:  # others would use the values before they are here
                        device_of(buffer.device).mark().wait()
                    self._missing -= 1
                except Exception as error:
                    self._failure = self._failure or error
                self._release(bucket, buffer)
                bucket.settle(self._late)
                self._sharing.popleft()

    def _release(self, bucket: ShardBucket, buffer: torch.Tensor) -> None:
        if not bucket.is_whole:
            self._spares.give(buffer)

    def _partition(self, caps: tuple[int, int]) -> list[list[int]]:
        """Give each parameter that fills a bucket one of its own, which then needs no copy."""
        found = []
        for part in partition(self._parameters, caps):
            large = [i for i in part if self._parameters[i].nbytes >= caps[1]]
            found += [[index] for index in large]
            small = [index for index in part if index not in large]
            parted = [index for index in small if self._is_parted(index)]
            whole = [index for index in small if index not in parted]
            found += filter(None, (parted, whole))
        return found

    def _is_parted(self, index: int) -> bool:
        return self._is_in_parts(self._numbers[self._parameters[index]])

    def _is_in_parts(self, number: int) -> bool:
        return self.gathering is not None and number in self.gathering.numbers

    def _build(self) -> None:
        group: Any = self._group or dist.group.WORLD
        self._buckets: list[Any] = []
        self._spares = Spares(len(self._parts) if self._overlaps else _IN_FLIGHT)
        for indices in self._parts:
            numbers = {self._numbers[self._parameters[i]]: self._parameters[i] for i in indices}
            parts = [part for number in numbers for part in self._of[number]]
            ranks, is_parted = (group.size(), group.rank()), self._is_parted(indices[0])
            self._buckets.append(ShardBucket(numbers, parts, *ranks, is_parted, self._has_library))
        self._spares.prepare(self._buckets)
        self._used: list[float] = []
        self._carrier = None

    def _fill_next(self) -> None:
        if self.gathering is not None:
            self.gathering.next_bucket()
        self._sum_next()

    def _sum_next(self) -> None:
        """Fill a bucket, and start its sum."""
        while sum(map(self._is_limited, self._flights)) >= _IN_FLIGHT:
            self._land(len(self._flights) - 1)
        number, bucket = self._filled, self._buckets[self._filled]
        self._filled += 1
        self._check_seen(bucket.parameters)
        is_real = self._weight is not None or self._round == 0
        if is_real:  # else this rank has nothing left to compute
            is_last = self._round + 1 == self.rounds or self._number is not None
            self._on_bucket(is_last and self._filled == len(self._buckets))
        if callable(self._weight):
            self._weight = self._weight()
        if self._round == 0 and number == 0:
            self._used = [0.0] * len(self._parameters)
            self._own_numbers = []
        if self._weight is not None:
            for index in self._parts[number]:
                self._used[index] += self._parameters[index].grad is not None
        buffer = bucket.fill(self._weight, self._spares)
        adds = self._round > 0
        arriving = torch.empty_like(bucket.padded) if adds else bucket.padded
        work = bucket.start_sum(arriving, buffer, self._group)
        is_last = self._round + 1 == self.rounds
        self._flights.append((bucket, work, arriving, adds, is_last, buffer))

    def _is_limited(self, flight: Any) -> bool:
        """Return whether a bucket that is being summed takes memory that nothing has set aside.

        If values may arrive late, there are buffers for all buckets but those of one parameter, and
        the device need not wait for a rank that is behind.
        """
        bucket, _, _, adds, *_ = flight
        return not self._overlaps or bucket.is_whole or adds

    def _land(self, most: int) -> None:
        """Wait until at most so many buckets are being summed."""
        if len(self._flights) <= most:
            return
        with self.waits("the sum of gradients") if most else nullcontext():
            while len(self._flights) > most:
                bucket, work, arriving, adds, is_last, buffer = self._flights.popleft()
                work.wait()
                if adds:
                    keep_for_current_stream(arriving)  # it is of the stream that backward adds on
                    bucket.padded.add_(arriving)
                if is_last and bucket.has_mirrors:
                    self._mirror(bucket)
                self._release(bucket, buffer)

    def _mirror(self, bucket: ShardBucket) -> None:
        """Start to send the sums of this rank's parts to their mirrors."""
        # By messages: after a loss, one that MPI's own all-to-all has left may end the job.
        arriving = list(bucket.copy.split(bucket.mirrored))
        pieces = list(bucket.own.split(bucket.mirrors))
        work = dist.all_to_all(arriving, pieces, group=self._group, async_op=True)
        self._mirroring.append(work)

    def end_round(self) -> None:
        """Complete an armed backward; at the latest, the next one does. Collective."""
        with self._lock:
            if self.gathering is not None:
                self.gathering.complete(self._sum_next)
            while self._filled < len(self._buckets):
                self._fill_next()
            if self.gathering is not None:
                self.gathering.end_round()
        if self._number is not None and self._weight:
            self._own_numbers.append((self._number, float(self._weight)))  # type: ignore[arg-type]
        self._round += 1
        self._is_armed = False
        self._number = None

    def _settle(self) -> None:
        """Exchange what all ranks must know, and give the owned gradients to the optimizers."""
        is_finite, squared_norm = judge([bucket.own for bucket in self._buckets])
        # The host has waited for the gradients, if there are any.
        self._confirm(waits=all(bucket.own.numel() == 0 for bucket in self._buckets))
        values = values_of([number for number, _ in self._own_numbers])
        weights = [weight for _, weight in self._own_numbers]
        own_number = sum(map(operator.mul, values, weights), 0.0)
        facts = own_number, float(not is_finite), squared_norm
        total = torch.tensor([*facts, *self._used], dtype=torch.float64)
        sum_on_host(total, self._group).wait()
        number, faults, self.squared_norm, *used = total.tolist()
        self._is_finite = faults == 0
        self._sum = torch.tensor(number, dtype=torch.float64)
        for bucket, indices in zip(self._buckets, self._parts, strict=True):
            counts = {self._numbers[self._parameters[i]]: used[i] for i in indices}
            for part, gradient in bucket.gradients.items():
                is_used = counts[part.parameter] > 0
                self._targets[part].grad = gradient if is_used else None
