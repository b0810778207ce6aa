"""Times one rank: its fastest settings, the cost of a step, and how much fits in memory."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.balance.cost_model import MAX_CHANGE, RankCost, fit, fit_error, is_settled
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.devices import Device
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.progress import most_epochs
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import MEMORY_FORMATS, Computation

# The first batch size that is timed, and how fast it grows: on a host even a few samples keep a
# core busy. An accelerator takes a second to prepare its kernels for each size: there are few.
_FIRST_ON_HOST = 2
_FIRST_ON_ACCELERATOR = 8
_PART_ON_ACCELERATOR = 0.25
_GROWTH_ON_HOST, _GROWTH_ON_ACCELERATOR = 2, 4
_MIN_TIMED_SEC = 0.1
_LONG_STEP_SEC = 0.5  # on a host, larger batches cost too much time
_CANDIDATE_ROUNDS = 4
_CLOSE = 1 + MAX_CHANGE
_CLEAR_LEAD = 1.1
_MAX_ROUNDS = 4
_SIZES_IN_TRAINING = 8  # that a rank computes: those of some plans, and an epoch's last ones
SAFE_FRACTION = 0.9  # of the memory, because batches differ and allocators waste some
_PART = 0.25  # of the benchmark's seconds: to compare settings, to find batch sizes, for one step


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of a rank."""

    batches: list[int]
    seconds: list[float]
    """The time of a step with each of these batch sizes: the median of its rounds."""
    largest_micro_batch: int | None
    """The largest batch that is computed at once; None if the largest possible share is."""
    memory_format: str
    precision: str
    memory_bytes: float = 0.0
    memory_bytes_per_sample: float = 0.0
    """The memory that training takes: this, and for each sample of a micro-batch; about."""
    from_cache: bool = False
    """Whether the result comes from an earlier job."""
    rounds: list[list[float]] = field(default_factory=list)
    """The time of a step in each round, by batch size."""

    @cached_property
    def cost(self) -> RankCost:
        """The cost model fitted to the measurements, and the memory limit."""
        line = fit(self.batches, self.seconds)
        return replace(line, largest_micro_batch=self.largest_micro_batch)

    @property
    def repeat_error(self) -> float | None:
        """Half the range of a batch's rounds, relative to their median; the largest of any batch.

        None if nothing was repeated.
        """
        repeated = [rounds for rounds in self.rounds if len(rounds) > 1]
        errors = (
            (max(rounds) - min(rounds)) / 2 / statistics.median(rounds) for rounds in repeated
        )
        return max(errors, default=None)

    @property
    def fit_error(self) -> float:
        """Root mean square of the cost model's relative errors."""
        line = replace(self.cost, largest_micro_batch=None)
        return fit_error(line, self.batches, self.seconds)


class _BatchLimits(NamedTuple):
    """The batch sizes of a rank that come into question."""

    smallest: int
    """The fewest samples that the model trains on."""
    first: int
    """The first batch size that is timed."""
    largest: int
    """The most samples that are computed at once."""
    equal_share: int
    """A share as large as those of all other ranks."""
    largest_share: int
    """The largest possible share."""

    @classmethod
    def of(cls, config: TrainingConfig, world: World, min_batch: int) -> _BatchLimits:
        largest_share = max_share(config)
        share = equal_share(config, world.size)
        limit = min(largest_share, config.micro_batch_size or largest_share)
        first = _FIRST_ON_HOST
        if not world.device_kind.is_host:
            first = max(_FIRST_ON_ACCELERATOR, int(_PART_ON_ACCELERATOR * share))
        largest = max(min_batch, limit)
        first = min(largest, max(min_batch, first))
        return cls(min_batch, first, largest, share, largest_share)


class _TimedModel:
    """A model whose steps are timed, with its optimizers and the samples of its batches."""

    def __init__(
        self,
        world: World,
        setup: Setup,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        order: Sequence[int],
    ) -> None:
        """Load nothing yet; a batch has the first samples of the `order`."""
        self._world = world
        self._task = setup.task
        self._data = setup.train
        self._model = model
        self._optimizers = optimizers
        self._order = order
        self._batches: dict[int, Any] = {}

    def time_step(self, computation: Computation, batch_size: int) -> float:
        """Return the seconds of a training step, without loading its batch."""
        enter_phase("the benchmark")
        batch = computation.place(self._batch(batch_size))
        device = self._world.device_kind
        self._world.synchronize()
        start = time.perf_counter()
        device.pace.start()
        loss = computation.loss(self._task, self._model, batch, needs_gradient=False)
        if loss.requires_grad:  # not of a batch in which nothing counts
            computation.scaler.scale(loss).backward()
        for optimizer in self._optimizers:
            computation.scaler.step(optimizer)
            optimizer.zero_grad()
        computation.scaler.update()
        self._world.synchronize()
        device.pace.catch_up()
        return time.perf_counter() - start

    def mean_step(self, computation: Computation, batch_size: int) -> float:
        """Return the mean seconds of at least one step, over at least 0.1 s.

        A single short step is not representative on a shared core, where the operating system's
        time slices are as long.
        """
        steps, total = 0, 0.0
        while steps == 0 or total < _MIN_TIMED_SEC:
            total += self.time_step(computation, batch_size)
            steps += 1
        return total / steps

    def free_batches(self) -> None:
        """Free the memory of the batches loaded so far."""
        self._batches.clear()

    def _batch(self, size: int) -> Any:
        if size not in self._batches:
            indices = [self._order[index % len(self._order)] for index in range(size)]
            self._batches[size] = self._data[indices]
        return self._batches[size]


class RankTimer:
    """Times training steps of one task on this rank. The model itself is not changed."""

    def __init__(
        self,
        config: TrainingConfig,
        world: World,
        setup: Setup,
        min_batch: int = 1,
        reserved: int | None = None,
    ) -> None:
        """Prepare to time a copy of the model, or the model itself. Not collective.

        The model itself is timed, as there may be no memory for a copy, if `reserved` is given: the
        bytes that the training takes besides.
        """
        self._config = config
        self._world = world
        self._device = world.device_kind
        self._setup = setup
        self._limits = _BatchLimits.of(config, world, min_batch)
        self._busy_batch = min_batch
        self._reserved = reserved
        self._end = ExitStack()
        self.close = self._end.close

    def measure(self, repeats: bool = True) -> RankMeasurement:
        """Time this rank within about `--benchmark-seconds`. Not collective.

        Without `repeats`, it times each batch size once. With them, it ends when more of it cannot
        change the predicted step by more than 3%, or when it has taken as long as the training
        will.
        """
        self._began = time.perf_counter()
        reserved = self._reserved or 0
        memory = MemoryGauge(self._world, reserved)
        self._model = self._make_model()
        self._computation = self._fastest(self._limits.first)
        times = {batch: [seconds] for batch, seconds in self._grow(memory).items()}
        if repeats:
            self._repeat(times)
        limits = memory.largest_batch(self._limits.largest_share), self._config.micro_batch_size
        largest = [max(limit, self._limits.smallest) for limit in limits if limit]
        return RankMeasurement(
            list(times),
            [statistics.median(rounds) for rounds in times.values()],
            min(largest, default=None),
            self._computation.memory_format,
            self._computation.precision,
            *memory.line(reserved),
            rounds=list(times.values()),
        )

    def _make_model(self) -> _TimedModel:
        setup = self._setup
        task = self._setup.task
        # In the order of training, so that samples of different sizes come as they do there.
        sampler = LoadAdaptiveSampler(
            setup.train, [1], 0, shuffle=task.shuffles, seed=self._config.seed
        )
        order = sampler.indices(0, min(len(setup.train), self._limits.largest_share))
        if self._reserved is not None:
            model = self._end.enter_context(setup.borrowed_model())
            return _TimedModel(self._world, setup, model, [], order)
        try:
            model = copy.deepcopy(task.model).to(self._world.device).train()
            return _TimedModel(self._world, setup, model, task.make_optimizers(model), order)
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
            raise self._too_small("a copy of the model") from error

    def _repeat(self, times: dict[int, list[float]]) -> None:
        """Time the ends of the line again, until the predicted step is settled."""
        smallest, largest = min(times), max(times)
        self._busy_batch = smallest
        ends = {batch: times[batch] for batch in (smallest, largest)}
        share = max(self._limits.equal_share, smallest)
        round_sec = 0.0
        for _ in range(_MAX_ROUNDS):
            training_sec = self._training_sec(min(times[largest]) / largest)
            limit_sec = min(self._config.benchmark_seconds, training_sec)
            if is_settled(ends, share) or self._elapsed() + round_sec > limit_sec:
                return
            before = self._elapsed()
            for batch, seconds in ends.items():
                seconds.append(self._model.mean_step(self._computation, batch))
            round_sec = self._elapsed() - before

    def _training_sec(self, per_sample: float) -> float:
        """Return about how many seconds this rank will train, given the seconds per sample."""
        samples = most_epochs(self._config) * len(self._setup.train) / self._world.size
        most = self._config.max_steps * self._limits.equal_share
        return per_sample * (min(samples, most) if most else samples)

    def keep_busy(self) -> None:
        """Run one step, to keep the cores loaded while other ranks are still timed."""
        self._model.time_step(self._computation, self._busy_batch)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _fastest(self, batch: int) -> Computation:
        """Return the fastest combination of the allowed memory formats and precisions."""
        formats, precisions = [self._config.memory_format], [self._config.precision]
        candidates = [
            Computation(self._world.device, precision, memory_format)
            for precision in (["fp32", "bf16"] if precisions == ["auto"] else precisions)
            for memory_format in (MEMORY_FORMATS if formats == ["auto"] else formats)
        ]
        if len(candidates) == 1:
            return candidates[0]
        seconds, first = [math.inf] * len(candidates), [math.inf] * len(candidates)
        # On a core shared with other ranks, the candidates differ by less than the wait for the
        # core, which thread CPU time excludes. The minimum ignores the first step, which warms up.
        clock = time.thread_time if self._device.is_host else time.perf_counter
        if not self._device.is_host:  # load its libraries, which no candidate's first step should
            first_batch = max(self._limits.smallest, batch // 2)
            time_step = partial(self._model.time_step, candidates[0], first_batch)
            seconds_if_it_fits(self._device, time_step)
        for round_number in range(_CANDIDATE_ROUNDS):
            for index, candidate in enumerate(candidates):
                before = clock()
                time_step = partial(self._model.time_step, candidate, batch)
                if seconds_if_it_fits(self._device, time_step) is None:
                    return candidates[0]  # there is too little memory to compare them
                took = clock() - before
                first[index] = first[index] if round_number else took
                seconds[index] = min(seconds[index], took)
            best, second = sorted(seconds)[:2]
            is_late = self._elapsed() > _PART * self._config.benchmark_seconds
            # Either all are about as fast, or one is clearly the fastest.
            is_clear = not _CLOSE * best < second < _CLEAR_LEAD * best
            if round_number and (is_late or is_clear):
                break
        if not self._device.is_host:
            seconds = [
                self._with_preparation(first_sec, later_sec, batch)
                for first_sec, later_sec in zip(first, seconds, strict=True)
            ]
        return candidates[seconds.index(min(seconds))]

    def _with_preparation(self, first: float, second: float, batch: int) -> float:
        """Return a training's seconds, with what an accelerator takes to prepare new batch sizes.

        An H200 took 0.1 s for each with contiguous memory, and 4 s with channels_last.
        """
        return self._training_sec(second / batch) + _SIZES_IN_TRAINING * (first - second)

    def _grow(self, memory: MemoryGauge) -> dict[int, float]:
        """Return the seconds of a step by batch size, from small to large.

        The sizes grow up to the usual share, or on an accelerator twice that; until a step takes
        half a second on a host; or until memory or time runs out. On an accelerator the first step
        of a size never counts: an H200 took 0.1 to 4 s for one of 30 ms.
        """
        limits = self._limits
        time_step = partial(self._model.time_step, self._computation)
        batch = limits.first
        part_sec = _PART * self._config.benchmark_seconds
        deadline_sec = self._elapsed() + part_sec
        is_host = self._device.is_host
        growth = _GROWTH_ON_HOST if is_host else _GROWTH_ON_ACCELERATOR
        enough = min(limits.equal_share * (1 if is_host else 2), limits.largest)
        long_sec = min(part_sec / 2, _LONG_STEP_SEC if is_host else part_sec)
        grown: dict[int, float] = {}
        while memory.can_hold(batch):
            seconds = memory.try_step(batch, time_step)
            if seconds is None:
                self._model.free_batches()
                if grown:
                    break
                batch = self._half(batch)
                continue
            grown[batch] = seconds
            late = self._elapsed() > min(deadline_sec, self._training_sec(seconds / batch))
            if not is_host or (seconds < _MIN_TIMED_SEC and not late):
                grown[batch] = seconds = time_step(batch)
            if batch >= enough or seconds > long_sec or late:
                break
            batch = min(growth * batch, limits.largest if is_host else enough)
        if len(grown) > 1:
            return grown
        # At least two sizes are needed to separate alpha from beta.
        smaller = max(limits.smallest, min(grown) // 4)
        seconds = memory.try_step(smaller, time_step)
        if not is_host or seconds is None:
            seconds = time_step(smaller)
        return {smaller: seconds, **grown}

    def _half(self, batch: int) -> int:
        if batch == self._limits.smallest:
            samples = "a single sample" if batch == 1 else f"{batch} samples"
            raise self._too_small(f"a step of {samples}, its smallest share")
        return max(self._limits.smallest, batch // 2)

    def _too_small(self, need: str) -> UserError:
        info = self._world.info
        return UserError(
            f"{info.device} is out of memory for {need}; give --layout auto, which may divide the "
            f"model (docs/large-models.md), leave it out (other --devices, or fewer ranks on "
            f"{info.host}), or see 'A device that is too small' in docs/balance.md"
        )


class MemoryGauge:
    """Tracks the peak memory of steps with growing batches, and predicts which batches fit.

    The peak is assumed to be linear in the batch size, on the line through the last two
    measurements; a batch fits if the line is below 90% of this rank's fair share there.
    """

    def __init__(self, world: World, reserved: int = 0) -> None:
        """Read this rank's fair share of the free memory, without what is `reserved`, in bytes."""
        self._device = world.device_kind
        self._index = world.device_index
        self._limit = memory_limit(world) - reserved
        self._peaks: dict[int, int] = {}
        self._too_large: int | None = None

    def try_step(self, batch: int, step: Callable[[int], float]) -> float | None:
        """Return the seconds that a step with this batch takes; None if it runs out of memory."""

        def step_from_here() -> float:
            self._device.release_cached_memory()  # of earlier steps: it would count as this one's
            self._device.restart_memory_peak(self._index)
            return step(batch)

        seconds = seconds_if_it_fits(self._device, step_from_here)
        if seconds is None:
            self._too_large = batch
        else:
            self._peaks[batch] = self._device.memory_peak_bytes(self._index)
        return seconds

    def can_hold(self, batch: int) -> bool:
        """Return whether a batch is expected to fit; True with less than two measurements."""
        if self._too_large is not None and batch >= self._too_large:
            return False
        base, per_sample = self._line()
        return base + per_sample * batch <= self._limit

    def largest_batch(self, wanted: int) -> int | None:
        """Return the largest batch that fits, at least 1; None if `wanted` fits."""
        if self.can_hold(wanted):
            return None
        tried = max(self._peaks, default=1)
        base, per_sample = self._line()
        fits = int((self._limit - base) / per_sample) if per_sample else tried
        if self._too_large is not None:
            # At most half of what was too large, or what has fit, whatever the line predicts.
            fits = min(fits, max(tried, self._too_large // 2))
        return max(1, min(fits, wanted))

    def line(self, reserved: int) -> tuple[float, float]:
        """Return the bytes without samples and for each, with what was `reserved`."""
        base, per_sample = self._line()
        return (base or max(self._peaks.values(), default=0)) + reserved, per_sample

    def _line(self) -> tuple[float, float]:
        """Return the bytes without samples, and per sample; 0 with less than two measurements."""
        if len(self._peaks) < 2:
            return 0.0, 0.0
        smaller, larger = sorted(self._peaks)[-2:]
        per_sample = (self._peaks[larger] - self._peaks[smaller]) / (larger - smaller)
        return self._peaks[larger] - per_sample * larger, max(0.0, per_sample)


def seconds_if_it_fits(device: Device, work: Callable[[], float]) -> float | None:
    """Return the seconds that a work returns; None if it runs out of memory."""
    try:
        return work()
    except Exception as error:
        if not device.is_out_of_memory(error):
            raise
    device.release_cached_memory()  # after the handler, whose traceback keeps the tensors
    return None


def memory_limit(world: World) -> float:
    """Return the bytes that this rank may use, with a margin: its fair share of what is free."""
    sharers = sum(_memory_of(info) == _memory_of(world.info) for info in world.infos)
    limit = world.device_kind.memory_limit_bytes(world.device_index, sharers)
    return SAFE_FRACTION * limit


def _memory_of(info: RankInfo) -> tuple[str, str]:
    """Identify the memory that a rank uses; two devices may both be the `cuda:0` of their rank."""
    return info.host, info.physical_device or info.device


def equal_share(config: TrainingConfig, ranks: int) -> int:
    """Return the batch size at which the ranks' scores are compared."""
    if config.batch_policy == "paper":
        return config.batch_size
    return math.ceil(config.global_batch_size / ranks)


def max_share(config: TrainingConfig) -> int:
    """Return the largest possible share of a rank, in samples per step."""
    return config.batch_size if config.batch_policy == "paper" else config.global_batch_size
