"""Sums gradients to the ranks that own them, and brings the owners' new values back.

A bucket is laid out in the order of its owners, whose parts are of unlike lengths: a ragged
reduce-scatter sums it after backward, and a ragged all-gather returns what the owners made of it.
Parts that have mirrors are sent on to those, once they are summed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.ownership import BUCKET_CAPS, Part, bucket_cap
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gathering import Gathering
from kaitian_mpi.distributed.gradients import judge, partition, sum_on_host, values_of
from kaitian_mpi.distributed.owners_values import IN_FLIGHT, OwnersValues, Targets, Waits
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.shard_buckets import ShardBucket, Spares


@not_compiled
class ShardReducer(GradientReducer):
    """Sums gradients as `GradientReducer` does, each to the rank that owns it.

    Only an owner has the sum after `finish`. Several micro-batches are each armed, and add up at
    the owners: so no rank ever has more than its parts and two buckets. A parameter's gradient is
    freed as soon as it is in its bucket.

    Attributes:
        values: what brings the owners' new values back.
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
        waits: Waits = lambda what: nullcontext(),
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
        self._own_numbers: list[tuple[torch.Tensor, float]] = []
        self._sum = torch.zeros(())
        self._has_library = bool(getattr(group or dist.group.WORLD, "uses_library", False))
        self._is_finite = True
        self.values = OwnersValues(model, targets, group, waits, overlaps)
        if gathering is not None:
            bucket_caps = BUCKET_CAPS[0], bucket_cap(max(p.nbytes for p in model.parameters()))
        with torch._C.DisableTorchFunctionSubclass():  # of parameters without their values
            super().__init__(model, group=group, on_bucket=on_bucket, bucket_caps=bucket_caps)
        self.values.begin_trial()

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
            self.values.check_all_seen()
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
        self.values.check()

    def share_values(self) -> None:
        """Give every rank the owners' values of the parameters, as `OwnersValues` does."""
        self.values.share(self._buckets, self._spares)

    def close(self) -> None:
        self.values.close(self._buckets)
        super().close()
        # The loop may outlive its end, but not the memory of the parts.
        self._targets = {}
        self._spares = Spares(0)
        self.gathering = None

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
        number = self._numbers[self._parameters[index]]
        return self.gathering is not None and number in self.gathering.numbers

    def _build(self) -> None:
        group: Any = self._group or dist.group.WORLD
        self._buckets: list[Any] = []
        self._spares = Spares(len(self._parts) if self.values.overlap else IN_FLIGHT)
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
        while sum(map(self._is_limited, self._flights)) >= IN_FLIGHT:
            self._land(len(self._flights) - 1)
        number, bucket = self._filled, self._buckets[self._filled]
        self._filled += 1
        self.values.check_seen(bucket.parameters)
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
        return not self.values.overlap or bucket.is_whole or adds

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
                bucket.release(buffer, self._spares)

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
        self.values.confirm(waits=all(bucket.own.numel() == 0 for bucket in self._buckets))
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
