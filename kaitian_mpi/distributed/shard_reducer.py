"""Sums gradients to the ranks that own them, and brings the owners' new values back.

A bucket is laid out in the order of its owners, whose parts are of different lengths: a ragged
reduce-scatter sums it after backward, and a ragged all-gather returns what the owners made of it.
Parts that have mirrors are sent on to those, once they are summed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from kaitian_mpi.balance.ownership import BUCKET_CAPS, Part, cut_into_runs
from kaitian_mpi.distributed.collectives.staging import keep_for_current_stream
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.distributed.gathering import Gathering
from kaitian_mpi.distributed.gradients import group_into_buckets, uses_library
from kaitian_mpi.distributed.reducer import GradientArrivals, TrainedParameters
from kaitian_mpi.distributed.shard_buckets import BufferPool, ShardBucket
from kaitian_mpi.distributed.step_facts import StepFacts
from kaitian_mpi.distributed.value_gathers import IN_FLIGHT, Targets, ValueGathers
from kaitian_mpi.runtime.polling import WaitContext


class _Buckets:
    """The buckets of a model's trained parameters, and the buffers that these share."""

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Part],
        group: dist.ProcessGroup | None,
        gathering: Gathering | None,
        caps: tuple[int, int],
        buffers: int | None,
    ) -> None:
        """Lay out the buckets. Not collective.

        `buffers` is how many are used at once of each dtype and device; None: one for each bucket.
        """
        self.trained = TrainedParameters(dict(model.named_parameters()))
        numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        self.numbers = [numbers[parameter] for parameter in self.trained.parameters]
        """The trained parameters' numbers among all, by index."""
        self._sharded = gathering.numbers if gathering is not None else ()
        self.indices = self._group_into_buckets(caps)
        """The trained parameters' indices, by bucket."""
        self.buckets: list[ShardBucket] = []
        chosen: Any = group or dist.group.WORLD
        pads = uses_library(chosen)
        parts_of: dict[int, list[Part]] = {}
        for part in parts:
            parts_of.setdefault(part.parameter, []).append(part)
        for indices in self.indices:
            members = {self.numbers[index]: self.trained.parameters[index] for index in indices}
            members_parts = [part for number in members for part in parts_of[number]]
            is_sharded = self._is_sharded(indices[0])
            self.buckets.append(
                ShardBucket(members, members_parts, chosen.size(), chosen.rank(), is_sharded, pads)
            )
        whole = [bucket for bucket in self.buckets if not bucket.is_sharded]
        sharded = [bucket for bucket in self.buckets if bucket.is_sharded]
        self.pool = BufferPool(len(whole) if buffers is None else buffers)
        """For the buckets of parameters that are whole on each rank."""
        self.pool.prepare(whole)
        self.sharded_pool = BufferPool(IN_FLIGHT)
        self.sharded_pool.prepare(sharded)

    def clear(self) -> None:
        """Free the buckets and the buffers."""
        self.trained.clear()
        self.numbers = []
        self.indices = []
        self.buckets = []
        self.pool = BufferPool(0)
        self.sharded_pool = BufferPool(0)

    def pool_of(self, bucket: ShardBucket) -> BufferPool:
        """Return the pool of a bucket's buffers."""
        return self.sharded_pool if bucket.is_sharded else self.pool

    def _group_into_buckets(self, caps: tuple[int, int]) -> list[list[int]]:
        """Give each parameter that fills a bucket one of its own, which then needs no copy."""
        parameters = self.trained.parameters
        whole = [index for index in range(len(parameters)) if not self._is_sharded(index)]
        buckets: list[list[int]] = []
        for places in group_into_buckets([parameters[index] for index in whole], caps):
            indices = [whole[place] for place in places]
            large = [index for index in indices if parameters[index].nbytes >= caps[1]]
            small = [index for index in indices if index not in large]
            buckets += [[index] for index in large]
            if small:
                buckets.append(small)
        buckets += self._group_sharded(caps[1])
        return sorted(buckets, key=lambda bucket: -bucket[-1])

    def _group_sharded(self, cap: int) -> list[list[int]]:
        """Return the buckets of sharded parameters, of at most `cap` bytes or one parameter."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        sizes: dict[int, int] = {}
        for index, parameter in reversed([*enumerate(self.trained.parameters)]):
            if self._is_sharded(index):
                by_dtype.setdefault(parameter.dtype, []).append(index)
                sizes[index] = parameter.nbytes
        return [run for indices in by_dtype.values() for run in cut_into_runs(indices, sizes, cap)]

    def _is_sharded(self, index: int) -> bool:
        return self.numbers[index] in self._sharded


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


class _SumsInFlight:
    """The sums of buckets that are on their way, and those of mirrored parts after them."""

    def __init__(
        self,
        layout: _Buckets,
        values: ValueGathers,
        group: dist.ProcessGroup | None,
        waits: WaitContext,
    ) -> None:
        self._layout = layout
        self._values = values
        self._group = group
        self._waits = waits
        self._in_flight: deque[_BucketSum] = deque()
        self._sent_to_mirrors: list[Any] = []

    def limit_memory(self) -> None:
        """Wait until one more bucket takes no more memory than is planned."""
        while sum(map(self._takes_extra_memory, self._in_flight)) >= IN_FLIGHT:
            self.wait(len(self._in_flight) - 1)

    def start(
        self, bucket: ShardBucket, weight: float | None, adds: bool, is_last_round: bool
    ) -> None:
        """Start to sum a bucket's gradients, each rank's times its weight. Collective."""
        buffer = bucket.fill(weight, self._layout.pool_of(bucket))
        result = torch.empty_like(bucket.padded) if adds else bucket.padded
        work = bucket.start_sum(result, buffer, self._group)
        self._in_flight.append(_BucketSum(bucket, work, buffer, result, adds, is_last_round))

    def wait(self, limit: int = 0) -> None:
        """Wait until at most `limit` buckets are being summed."""
        if len(self._in_flight) <= limit:
            return
        with self._waits("the sum of gradients") if limit else nullcontext():
            while len(self._in_flight) > limit:
                bucket, work, buffer, result, adds, is_last_round = self._in_flight.popleft()
                work.wait()
                if adds:
                    keep_for_current_stream(result)  # it is of the stream that backward adds on
                    bucket.padded.add_(result)
                if is_last_round and bucket.has_mirrors:
                    self._sent_to_mirrors.append(bucket.start_mirroring(self._group))
                bucket.release(buffer, self._layout.pool_of(bucket))

    def wait_for_mirrors(self) -> None:
        """Wait for all sums, also at the mirrors."""
        self.wait()
        for work in self._sent_to_mirrors:
            work.wait()

    def clear(self) -> None:
        """Forget the sums; one in progress keeps its buffers."""
        self._in_flight.clear()
        self._sent_to_mirrors.clear()

    def _takes_extra_memory(self, bucket_sum: _BucketSum) -> bool:
        """Return whether a sum in progress takes memory beyond the buffers set aside.

        If values may arrive during the next forward, there are buffers for all buckets but those of
        one parameter and of sharded ones, and the device need not wait for a rank that is behind.
        """
        bucket = bucket_sum.bucket
        return not self._values.overlap or bucket.is_whole or bucket.is_sharded or bucket_sum.adds


@not_compiled
class ShardReducer:
    """Sums gradients as `GradientReducer` does, each to the rank that owns it.

    Only an owner has the sum after `finish`. Several micro-batches are each armed, and add up at
    the owners: so no rank ever has more than its parts and two buckets. A parameter's gradient is
    freed as soon as it is in its bucket.

    Attributes:
        values: gives every rank the owners' new values.
        gathering: gathers sharded parameters; None if all are whole.
        waits: makes the context in which earlier buckets and values are waited for.
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
            overlaps: whether values may arrive after `share_values`, which takes buffers for all
                buckets; else it waits for them, and takes two.
            gathering: gathers sharded parameters; None if there are none.
        """
        self.waits = waits
        self.gathering = gathering
        self._targets = targets
        self._group = group
        self._on_bucket = on_bucket
        self._weight: float | Callable[[], float | None] | None = 1.0
        self._number: torch.Tensor | None = None
        self._rounds = 1
        self._round = 0
        # From how many ranks each trained parameter got a gradient; of this rank, until `finish`.
        self._used: list[float] = []
        self._facts = StepFacts()
        self.values = ValueGathers(model, targets, group, waits, overlaps)
        if gathering is not None:
            bucket_caps = BUCKET_CAPS[0], gathering.together
        with torch._C.DisableTorchFunctionSubclass():  # of parameters without their values
            buffers = None if self.values.overlap else IN_FLIGHT
            self._layout = _Buckets(model, parts, group, gathering, bucket_caps, buffers)
            self._arrivals = GradientArrivals(self, self._layout.trained, self._layout.indices)
        self._sums = _SumsInFlight(self._layout, self.values, group, waits)
        self.values.begin_trial()

    @property
    def number(self) -> torch.Tensor:
        """The weighted sum of the ranks' numbers after `finish`; float64, without dimensions."""
        return self._facts.number

    @property
    def squared_norm(self) -> float:
        """Of the whole gradient, after `finish`; the same on every rank."""
        return self._facts.squared_norm

    @property
    def has_begun(self) -> bool:
        """Whether it has, or is to sum, gradients of the current step."""
        return self._arrivals.is_armed or self._round > 0

    @property
    def is_outdated(self) -> bool:
        """Whether the parameters that require gradients have changed.

        One that no longer requires them matters only if parameters are sharded: the order in which
        they are used and summed then changes.
        """
        trained = self._layout.trained
        if self.gathering is None:
            return bool(trained.unfrozen)
        with torch._C.DisableTorchFunctionSubclass():  # of parameters without their values
            some_are_frozen = not all(parameter.requires_grad for parameter in trained.parameters)
        return some_are_frozen or bool(trained.unfrozen)

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
        """Let the next backward add to the owners' sums, as one round of the step.

        `weight` and `number` are as in `GradientReducer.arm`. Collective if it completes a round.
        """
        ends_round = self._arrivals.is_armed and self._arrivals.is_backward_done
        if ends_round and self._round + 1 < self._rounds:
            self.end_round()
        self._layout.trained.check_none_unfrozen()
        self._arrivals.arm()
        self._weight = weight
        self._number = number

    def finish(self) -> None:
        """Complete the sums of all rounds, as the gradients of the targets. Collective."""
        if not self.has_begun:
            raise RuntimeError("finish() without arm()")
        try:
            self.values.check_all_seen()
            if self._arrivals.is_armed:
                self.end_round()
            while self._round < self._rounds:
                self._arrivals.rewind()
                self._weight = None
                self.end_round()
            self._sums.wait_for_mirrors()
            self._settle()
        finally:
            self.reset()

    def reset(self) -> None:
        """Disarm: to be called after a backward that raised. Not collective."""
        self._arrivals.disarm()
        self._weight = 0.0
        self._number = None
        self._round = 0
        if self.gathering is not None:
            self.gathering.reset()
        self._sums.clear()

    def is_finite(self) -> bool:
        """Return whether the gradients of the last `finish` have no NaN and no infinity."""
        return self._facts.is_finite

    def check_values(self) -> None:
        """Wait for the owners' values. Not collective.

        Raises:
            CollectiveError: they will not arrive, as a rank is lost.
        """
        self.values.check()

    def share_values(self) -> None:
        """Give every rank the owners' values of the parameters, as `ValueGathers` does."""
        self.values.share(self._layout.buckets, self._layout.pool)

    def close(self) -> None:
        """Remove the hooks from the model. Not collective."""
        self.values.close(self._layout.buckets)
        self.reset()
        self._arrivals.close()
        # The loop may outlive its end, but not the memory of the parts.
        self._layout.clear()
        self._targets = {}
        self._on_bucket = lambda is_last: None
        self.gathering = None

    def take_bucket(self) -> None:
        """Start the sum of the next bucket, whose gradients are ready. Collective."""
        if self.gathering is not None:
            self.gathering.next_bucket()
        self._sum_next()

    def _sum_next(self) -> None:
        """Fill a bucket, and start its sum."""
        self._sums.limit_memory()
        number = self._arrivals.next_bucket()
        bucket = self._layout.buckets[number]
        self.values.check_seen(bucket.parameters)
        is_last_round = self._round + 1 == self._rounds
        has_computed = self._weight is not None or self._round == 0
        if has_computed:  # else this rank has no micro-batches left
            is_last = is_last_round or self._number is not None
            self._on_bucket(is_last and self._arrivals.are_all_taken)
        if callable(self._weight):
            self._weight = self._weight()
        if self._round == 0 and number == 0:
            self._begin_sums()
        if self._weight is not None:
            for index in self._layout.indices[number]:
                self._used[index] += self._layout.trained.parameters[index].grad is not None
        self._sums.start(bucket, self._weight, self._adds(number), is_last_round)

    def _begin_sums(self) -> None:
        """Forget which parameters the last step has used."""
        self._used = [0.0] * len(self._layout.numbers)
        self._facts.forget_numbers()

    def _adds(self, number: int) -> bool:
        """Return whether a bucket is added to what its owners have of earlier rounds."""
        return self._round > 0

    def end_round(self) -> None:
        """Complete an armed backward; `arm` and `finish` do it otherwise. Collective."""
        with self._arrivals.lock:
            if self.gathering is not None:
                self.gathering.complete(self._sum_next)
            self._arrivals.take_rest()
            if self.gathering is not None:
                self.gathering.end_round()
        if self._number is not None and self._weight:
            self._facts.add_number(self._number, float(self._weight))  # type: ignore[arg-type]
        self._round += 1
        self._arrivals.end()
        self._number = None

    def _settle(self) -> None:
        """Exchange what all ranks must know, and give the owned gradients to the optimizers."""
        buckets = self._layout.buckets
        self._facts.measure([bucket.own for bucket in buckets])
        # The host has waited for the gradients, if this rank owns any.
        self.values.confirm(waits=all(bucket.own.numel() == 0 for bucket in buckets))
        self._set_gradients(self._facts.exchange(self._used, self._group))

    def _set_gradients(self, used: Sequence[float]) -> None:
        """Give the optimizers the gradients of the parameters that some rank has used."""
        counts = dict(zip(self._layout.numbers, used, strict=True))
        for bucket in self._layout.buckets:
            for part, gradient in bucket.gradients.items():
                is_used = counts[part.parameter] > 0
                self._targets[part].grad = gradient if is_used else None
