"""Sums gradients to the ranks that own them, and brings the owners' new values back.

A bucket is laid out in the order of its owners, whose parts are of different lengths: a ragged
reduce-scatter sums it after backward, and a ragged all-gather returns what the owners made of it.
Parts that have mirrors are sent on to those, once they are summed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.ownership import BUCKET_CAPS, Part, bucket_cap
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gathering import Gathering
from kaitian_mpi.distributed.gradients import (
    finite_and_norm,
    group_into_buckets,
    sum_on_host,
    values_of,
)
from kaitian_mpi.distributed.owners_values import IN_FLIGHT, OwnersValues, Targets
from kaitian_mpi.distributed.reducer import GradientReducer
from kaitian_mpi.distributed.shard_buckets import BufferPool, ShardBucket
from kaitian_mpi.runtime.polling import WaitContext


class _BucketSum(NamedTuple):
    """A bucket that is being summed to its owners."""

    bucket: ShardBucket
    work: Any
    buffer: torch.Tensor
    """This rank's gradients."""
    result: torch.Tensor
    """Receives the sum of this rank's parts: the bucket's own memory, unless the sum `adds`."""
    adds: bool
    """Whether the sum is added to that of earlier rounds."""
    is_last_round: bool


@not_compiled
class ShardReducer(GradientReducer):
    """Sums gradients as `GradientReducer` does, each to the rank that owns it.

    Only an owner has the sum after `finish`. Several micro-batches are each armed, and add up at
    the owners: so no rank ever has more than its parts and two buckets. A parameter's gradient is
    freed as soon as it is in its bucket.

    Attributes:
        values: gives every rank the owners' new values.
        gathering: gathers sharded parameters; None if all are whole.
        squared_norm: of the whole gradient, after `finish`; the same on every rank.
        factor: the factor by which the summed gradients must still be multiplied.
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
        waits: WaitContext = lambda name: nullcontext(),
        bucket_caps: tuple[int, int] = BUCKET_CAPS,
        residuals: Any = None,
        overlaps: bool = True,
        gathering: Gathering | None = None,
    ) -> None:
        """Watch a model's parameters. Not collective.

        Args:
            model: its parameters are numbered in the order of `parameters()`.
            parts: of all parameters, on all ranks.
            targets: the tensors that this rank's optimizers step, by part that it owns or mirrors.
            group: of the ranks; None: all.
            on_bucket: called when a bucket of this step is ready, with whether it is the last.
            waits: makes the context in which backward waits for earlier buckets.
            bucket_caps: bytes at which a bucket is full: the first one, and the others.
            residuals: ignored, as all sums are exact here; `GradientReducer` takes them.
            overlaps: whether values may arrive after `share_values`, which takes buffers for all
                buckets; else it waits for them, and takes two.
            gathering: gathers sharded parameters; None if there are none.
        """
        self._numbers = {p: number for number, p in enumerate(model.parameters())}
        self._parts_of: dict[int, list[Part]] = {}
        for part in parts:
            self._parts_of.setdefault(part.parameter, []).append(part)
        self._targets = targets
        self.waits = waits
        self.gathering = gathering
        self._in_flight: deque[_BucketSum] = deque()
        self._sent_to_mirrors: list[Any] = []
        self._rounds = 1
        self._round = 0
        self.squared_norm = 0.0
        self._rank_numbers: list[tuple[torch.Tensor, float]] = []
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
        """Whether the parameters that require gradients have changed.

        One that no longer requires them matters only if parameters are sharded: the order in which
        they are used and summed then changes.
        """
        if super().is_outdated:
            return True
        some_are_frozen = not all(parameter.requires_grad for parameter in self._parameters)
        return self.gathering is not None and some_are_frozen

    def begin_step(self, rounds: int) -> None:
        """Begin a step in which the reducer is armed up to `rounds` times. Not collective.

        That is the number of micro-batches of the rank with most; the same on every rank.
        """
        self._rounds = rounds

    def arm(
        self,
        weight: float | Callable[[], float | None] | None,
        number: torch.Tensor | None = None,
    ) -> None:
        """Let the next backward add to the owners' sums, as one round of the step."""
        if self._is_armed and self._is_backward_done and self._round + 1 < self._rounds:
            self.end_round()
        super().arm(weight, number)

    def finish(self) -> None:
        """Complete the sums of all rounds, as the gradients of the targets. Collective."""
        if not (self._is_armed or self._round):
            raise RuntimeError("finish() without arm()")
        try:
            self.values.check_all_seen()
            if self._is_armed:
                self.end_round()
            while self._round < self._rounds:
                self._filled = 0
                self._weight = None
                self.end_round()
            self._wait_for_sums(0)
            for work in self._sent_to_mirrors:
                work.wait()
            self._settle()
        finally:
            self.reset()

    def reset(self) -> None:
        super().reset()
        self._round = 0
        if self.gathering is not None:
            self.gathering.reset()
        self._in_flight.clear()  # a sum in progress keeps its buffers
        self._sent_to_mirrors.clear()

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        return self._is_finite

    def check_values(self) -> None:
        self.values.check()

    def share_values(self) -> None:
        """Give every rank the owners' values of the parameters, as `OwnersValues` does."""
        self.values.share(self._buckets, self._pool)

    def close(self) -> None:
        self.values.close(self._buckets)
        super().close()
        # The loop may outlive its end, but not the memory of the parts.
        self._targets = {}
        self._pool = BufferPool(0)
        self.gathering = None

    def _group_into_buckets(self, caps: tuple[int, int]) -> list[list[int]]:
        """Give each parameter that fills a bucket one of its own, which then needs no copy."""
        buckets = []
        for indices in group_into_buckets(self._parameters, caps):
            large = [index for index in indices if self._parameters[index].nbytes >= caps[1]]
            buckets += [[index] for index in large]
            small = [index for index in indices if index not in large]
            sharded = [index for index in small if self._is_sharded(index)]
            whole = [index for index in small if index not in sharded]
            buckets += filter(None, (sharded, whole))
        return buckets

    def _is_sharded(self, index: int) -> bool:
        number = self._numbers[self._parameters[index]]
        return self.gathering is not None and number in self.gathering.numbers

    def _build(self) -> None:
        group: Any = self._group or dist.group.WORLD
        self._buckets: list[Any] = []
        self._pool = BufferPool(len(self._bucket_indices) if self.values.overlap else IN_FLIGHT)
        for indices in self._bucket_indices:
            numbers = {self._numbers[self._parameters[i]]: self._parameters[i] for i in indices}
            parts = [part for number in numbers for part in self._parts_of[number]]
            ranks, is_sharded = (group.size(), group.rank()), self._is_sharded(indices[0])
            self._buckets.append(ShardBucket(numbers, parts, *ranks, is_sharded, self._has_library))
        self._pool.prepare(self._buckets)
        self._used: list[float] = []
        self._carrier = None

    def _fill_next(self) -> None:
        if self.gathering is not None:
            self.gathering.next_bucket()
        self._sum_next()

    def _sum_next(self) -> None:
        """Fill a bucket, and start its sum."""
        while sum(map(self._takes_extra_memory, self._in_flight)) >= IN_FLIGHT:
            self._wait_for_sums(len(self._in_flight) - 1)
        number, bucket = self._filled, self._buckets[self._filled]
        self._filled += 1
        self.values.check_seen(bucket.parameters)
        has_computed = self._weight is not None or self._round == 0
        if has_computed:  # else this rank has no micro-batches left
            is_last = self._round + 1 == self._rounds or self._number is not None
            self._on_bucket(is_last and self._filled == len(self._buckets))
        if callable(self._weight):
            self._weight = self._weight()
        if self._round == 0 and number == 0:
            self._begin_sums()
        if self._weight is not None:
            for index in self._bucket_indices[number]:
                self._used[index] += self._parameters[index].grad is not None
        buffer = bucket.fill(self._weight, self._pool)
        adds = self._adds(number)
        result = torch.empty_like(bucket.padded) if adds else bucket.padded
        work = bucket.start_sum(result, buffer, self._group)
        is_last_round = self._round + 1 == self._rounds
        self._in_flight.append(_BucketSum(bucket, work, buffer, result, adds, is_last_round))

    def _begin_sums(self) -> None:
        """Forget which parameters the last step has used."""
        self._used = [0.0] * len(self._parameters)
        self._rank_numbers = []

    def _adds(self, number: int) -> bool:
        """Return whether a bucket is added to what its owners have of earlier rounds."""
        return self._round > 0

    def _takes_extra_memory(self, bucket_sum: _BucketSum) -> bool:
        """Return whether a sum in progress takes memory beyond the buffers set aside.

        If values may arrive during the next forward, there are buffers for all buckets but those of
        one parameter, and the device need not wait for a rank that is behind.
        """
        return not self.values.overlap or bucket_sum.bucket.is_whole or bucket_sum.adds

    def _wait_for_sums(self, limit: int) -> None:
        """Wait until at most `limit` buckets are being summed."""
        if len(self._in_flight) <= limit:
            return
        with self.waits("the sum of gradients") if limit else nullcontext():
            while len(self._in_flight) > limit:
                bucket, work, buffer, result, adds, is_last_round = self._in_flight.popleft()
                work.wait()
                if adds:
                    keep_for_current_stream(result)  # it is of the stream that backward adds on
                    bucket.padded.add_(result)
                if is_last_round and bucket.has_mirrors:
                    self._sent_to_mirrors.append(bucket.start_mirroring(self._group))
                bucket.release(buffer, self._pool)

    def end_round(self) -> None:
        """Complete an armed backward; `arm` and `finish` do it otherwise. Collective."""
        with self._lock:
            if self.gathering is not None:
                self.gathering.complete(self._sum_next)
            while self._filled < len(self._buckets):
                self._fill_next()
            if self.gathering is not None:
                self.gathering.end_round()
        if self._number is not None and self._weight:
            self._rank_numbers.append((self._number, float(self._weight)))  # type: ignore[arg-type]
        self._round += 1
        self._is_armed = False
        self._number = None

    def _settle(self) -> None:
        """Exchange what all ranks must know, and give the owned gradients to the optimizers."""
        is_finite, squared_norm = finite_and_norm([bucket.own for bucket in self._buckets])
        # The host has waited for the gradients, if this rank owns any.
        self.values.confirm(waits=all(bucket.own.numel() == 0 for bucket in self._buckets))
        values = values_of([number for number, _ in self._rank_numbers])
        weights = [weight for _, weight in self._rank_numbers]
        rank_number = sum(map(operator.mul, values, weights), 0.0)
        facts = rank_number, float(not is_finite), squared_norm
        total = torch.tensor([*facts, *self._used], dtype=torch.float64)
        sum_on_host(total, self._group).wait()
        number, faults, self.squared_norm, *used = total.tolist()
        self._is_finite = faults == 0
        self._sum = torch.tensor(number, dtype=torch.float64)
        self._set_gradients(used)

    def _set_gradients(self, used: Sequence[float]) -> None:
        """Give the optimizers the gradients of the parameters that some rank has used."""
        for bucket, indices in zip(self._buckets, self._bucket_indices, strict=True):
            counts = {self._numbers[self._parameters[i]]: used[i] for i in indices}
            for part, gradient in bucket.gradients.items():
                is_used = counts[part.parameter] > 0
                self._targets[part].grad = gradient if is_used else None
