"""Times one rank: its fastest settings, the cost of a step, and how much fits in memory."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

from kaitian_mpi.balance.cost_model import MAX_CHANGE, is_settled, is_straight
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.computation import MEMORY_FORMATS, Computation
from kaitian_mpi.train.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.train.measure.memory_gauge import MemoryGauge
from kaitian_mpi.train.setup import Setup

_PROBE_BATCH = 8
_MIN_TIMED_SEC = 0.1
_CANDIDATE_ROUNDS = 4
_CLOSE, _CLEAR_LEAD = 1 + MAX_CHANGE, 1.1
_MAX_ROUNDS = 5
# Parts of the benchmark's seconds: to compare settings, to find batch sizes, for one step, and to
# load samples before the same ones are used again.
_CANDIDATE_PART = 0.25
_GROWTH_PART = 0.25
_STEP_PART = 0.25
_LOADING_PART = 0.1
_MAX_ORDER = 1 << 16  # samples whose order is known; then they come again


@dataclass(frozen=True)
class Workload:
    """What the benchmark times on a rank."""

    config: TrainingConfig
    """The batch limits, precision, memory format and optimizer, and the benchmark's seconds."""
    world: World
    setup: Setup
    """This rank's task; its model is not changed."""
    min_batch: int = 1
    """The fewest samples that the model can train on at once."""


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of a rank."""

    batches: list[int]
    """The batch sizes that were timed."""
    seconds: list[float]
    """The time of a step with each of these batch sizes."""
    largest_micro_batch: int | None
    """The largest batch that fits in memory; None if the largest possible share does."""
    memory_format: str
    precision: str


class RankTimer:
    """Times training steps of one task on this rank. The model itself is not changed."""

    def __init__(self, workload: Workload) -> None:
        config, setup, min_batch = workload.config, workload.setup, workload.min_batch
        self._config, self._world = config, workload.world
        self._pace = workload.world.device_kind.pace
        self._task, self._data = setup.task, setup.train
        # In the order of training, so that samples of unlike sizes come as they do there.
        sampler = LoadAdaptiveSampler(setup.train, [1], 0, seed=config.seed)
        self._order = sampler.indices(0, min(len(setup.train), _MAX_ORDER))
        self._max_share = max_share(config)
        self._equal_share = equal_share(config, workload.world.size)
        self._max_batch = max(
            min_batch, min(self._max_share, config.micro_batch_size or self._max_share)
        )
        self._min_batch = min_batch
        self._batches: dict[int, Any] = {}
        self._draw, self._loading_sec = 0, 0.0
        self._smallest = min_batch
        self._began = time.perf_counter()

    def measure(self) -> RankMeasurement:
        """Time this rank within about `--benchmark-seconds`. Not collective.

        It ends before that when more of it would hardly change the predicted step, or when it has
        taken as long as the training will.

        Raises:
            UserError: not even the smallest batch fits in memory.
        """
        self._began = time.perf_counter()
        memory = MemoryGauge(self._world)
        self._copy = copy.deepcopy(self._task.model).to(self._world.device).train()
        self._optimizers = self._task.make_optimizers(self._copy)
        self._computation = self._fastest(min(self._max_batch, _PROBE_BATCH))
        grown = self._grow(memory)
        batches = list(grown)
        straight = is_straight(batches, list(grown.values()))
        # Of a line, its ends are enough.
        timed = sorted({batches[0], *(() if straight else batches[1:]), batches[-1]})
        self._smallest = batches[0]
        rounds: dict[int, list[float]] = {batch: [] for batch in timed}
        self._time_rounds(rounds)
        seconds = grown | {batch: statistics.median(times) for batch, times in rounds.items()}
        return RankMeasurement(
            batches,
            [seconds[batch] for batch in batches],
            memory.largest_batch(self._max_share),
            self._computation.memory_format,
            self._computation.precision,
        )

    def _time_rounds(self, rounds: dict[int, list[float]]) -> None:
        """Add a time to each batch size in each round, until the predicted step is settled."""
        smallest, largest = min(rounds), max(rounds)
        round_sec = 0.0
        for _ in range(_MAX_ROUNDS):
            if round_sec:
                per_sample = min(rounds[largest]) / largest
                limit_sec = min(self._config.benchmark_seconds, self._training_sec(per_sample))
                if self._elapsed() + round_sec > limit_sec:
                    return
            before = self._elapsed()
            self._draw_again()
            for batch in rounds:
                rounds[batch].append(self._mean_step(batch))
            round_sec = self._elapsed() - before
            if is_settled(rounds, max(self._equal_share, smallest)):
                return

    def _training_sec(self, per_sample: float) -> float:
        """Return about how many seconds this rank will train, at so many for a sample."""
        samples = self._config.epochs * len(self._data)
        global_batch = self._equal_share * self._world.size
        if self._config.max_steps:
            samples = min(samples, self._config.max_steps * global_batch)
        return samples / self._world.size * per_sample

    def keep_busy(self) -> None:
        """Run one step, to keep the cores loaded while other ranks are still timed."""
        self._time_step(self._smallest)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

    def _fastest(self, batch: int) -> Computation:
        """Return the fastest combination of the allowed memory formats and precisions."""
        memory_format = self._config.memory_format
        formats = list(MEMORY_FORMATS) if memory_format == "auto" else [memory_format]
        precision = self._config.precision
        precisions = ["fp32", "bf16"] if precision == "auto" else [precision]
        candidates = [self._compute_in(p, f) for p, f in itertools.product(precisions, formats)]
        if len(candidates) == 1:
            return candidates[0]
        try:
            return self._compare(candidates, batch)
        except Exception as error:
            if not self._world.device_kind.is_out_of_memory(error):
                raise
        # Outside the handler, which would keep references to the tensors that did not fit.
        return self._fastest(self._half(batch)) if batch > self._min_batch else candidates[0]

    def _compare(self, candidates: list[Computation], batch: int) -> Computation:
        """Return the candidate with the fastest step."""
        # On a core shared with other ranks, the candidates differ by less than the wait for the
        # core, which thread CPU time excludes. The minimum ignores the first step, which warms up.
        clock = time.thread_time if self._world.device_kind.is_host else time.perf_counter
        costs: list[list[float]] = [[] for _ in candidates]
        for round_number in range(_CANDIDATE_ROUNDS):
            for computation, seconds in zip(candidates, costs, strict=True):
                self._computation = computation
                before = clock()
                self._time_step(batch)
                seconds.append(clock() - before)
            cheapest = [min(values) for values in costs]
            best, second = sorted(cheapest)[:2]
            is_late = self._elapsed() > _CANDIDATE_PART * self._config.benchmark_seconds
            # Either all are about as fast, or one is clearly the fastest.
            is_clear = not _CLOSE * best < second < _CLEAR_LEAD * best
            if round_number and (is_late or is_clear):
                break
        return candidates[cheapest.index(min(cheapest))]

    def _grow(self, memory: MemoryGauge) -> dict[int, float]:
        """Return the seconds of a step by batch size.

        The sizes double until memory or time runs out, or larger ones would hardly change the cost
        model. On an accelerator, the memory of twice the usual share is tried nevertheless.
        """
        batch = min(self._max_batch, _PROBE_BATCH)
        deadline_sec = self._elapsed() + _GROWTH_PART * self._config.benchmark_seconds
        max_step_sec = _STEP_PART * self._config.benchmark_seconds
        enough = 0 if self._world.device_kind.is_host else 2 * self._equal_share
        grown: dict[int, float] = {}
        while memory.has_room_for(batch):
            seconds = self._try_step(batch, memory)
            if seconds is None:
                if grown:
                    break
                batch = self._half(batch)
                continue
            grown[batch] = seconds
            late = self._elapsed() > min(deadline_sec, self._training_sec(seconds / batch))
            if batch >= self._max_batch or 2 * seconds > max_step_sec or late:
                break
            if batch >= enough and is_straight(list(grown), list(grown.values())):
                break
            batch = min(2 * batch, self._max_batch)
        if len(grown) > 1:
            return grown
        # At least two sizes are needed to separate alpha from beta.
        smaller = max(self._min_batch, min(grown) // 4)
        return {smaller: self._time_step(smaller), **grown}

    def _try_step(self, batch: int, memory: MemoryGauge) -> float | None:
        """Return the seconds of a step; None if it does not fit in memory."""
        memory.restart()
        try:
            seconds = self._time_step(batch)
        except Exception as error:
            if not self._world.device_kind.is_out_of_memory(error):
                raise
            memory.record_too_large(batch)
            self._batches.clear()
            return None
        memory.record(batch)
        return seconds

    def _half(self, batch: int) -> int:
        if batch == self._min_batch:
            samples = "a single sample" if batch == 1 else f"{batch} samples"
            info = self._world.info
            raise UserError(
                f"{info.device} is out of memory for a step of {samples}, its smallest share; "
                "leave it out (name other devices with --devices, or start fewer ranks on "
                f"{info.host}), or make the step smaller: precision bf16, smaller samples, "
                "torch.utils.checkpoint in the model, an optimizer with less state, sync_bn if "
                "batch norm needs several samples; see 'A device that is too small' in "
                "docs/balance.md"
            )
        return max(self._min_batch, batch // 2)

    def _mean_step(self, batch: int) -> float:
        """Return the mean seconds of at least one step, over at least 0.1 s.

        A single short step is not representative on a shared core, where the operating system's
        time slices are as long.
        """
        steps, total = 0, 0.0
        while steps == 0 or total < _MIN_TIMED_SEC:
            total += self._time_step(batch)
            steps += 1
        return total / steps

    def _compute_in(self, precision: str, memory_format: str) -> Computation:
        return Computation(self._world.device, precision, memory_format)

    def _samples(self, batch: int) -> Any:
        """Return some samples of the dataset; cached, because loading is not timed."""
        if batch not in self._batches:
            began = time.perf_counter()
            length, first = len(self._order), self._draw * batch
            chosen = [self._order[(first + offset) % length] for offset in range(batch)]
            self._batches[batch] = self._data[chosen]
            self._loading_sec += time.perf_counter() - began
        return self._batches[batch]

    def _draw_again(self) -> None:
        """Take other samples from now on, where that costs little: they may be of unlike sizes."""
        if self._loading_sec < _LOADING_PART * self._config.benchmark_seconds:
            self._draw += 1
            self._batches.clear()

    def _time_step(self, batch: int) -> float:
        enter_phase("the benchmark")
        computation = self._computation
        placed = computation.place(self._samples(batch))
        self._world.synchronize()
        start = time.perf_counter()
        self._pace.start()
        with local_statistics():  # the ranks take unlike numbers of steps
            loss = computation.loss(self._task, self._copy, placed, needs_gradient=False)
        if loss.requires_grad:  # not of a batch in which nothing counts
            computation.scaler.scale(loss).backward()
        for optimizer in self._optimizers:
            computation.scaler.step(optimizer)
            optimizer.zero_grad()
        computation.scaler.update()
        self._world.synchronize()
        self._pace.catch_up()
        return time.perf_counter() - start


def equal_share(config: TrainingConfig, ranks: int) -> int:
    """Return the batch size at which the ranks' scores are compared."""
    if config.batch_policy == "paper":
        return config.batch_size
    return math.ceil(config.global_batch_size / ranks)


def max_share(config: TrainingConfig) -> int:
    """Return the largest possible share of a rank, in samples per step."""
    return config.batch_size if config.batch_policy == "paper" else config.global_batch_size
