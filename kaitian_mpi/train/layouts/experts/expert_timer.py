"""Times a model's experts on this rank, and finds out how many tokens they get."""

from __future__ import annotations

import copy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.experts import Expert, ExpertRank
from kaitian_mpi.balance.pipeline_cost import TEMPORARIES
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.experts import Experts, without_experts
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.runtime import ulfm
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.layouts.experts.expert_owners import experts_of, find_mixtures
from kaitian_mpi.train.layouts.pipeline.layer_timer import optimizer_rates, saved_by
from kaitian_mpi.train.layouts.shard.memory_budget import (
    memory_in_use,
    steps_at_once,
    usual_states,
)
from kaitian_mpi.train.measure.plan import profile_unmeasured
from kaitian_mpi.train.measure.rank_timer import equal_share, memory_limit, seconds_if_it_fits
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, borrowed

_MOST_SAMPLES = 64  # by which the tokens of experts are counted
_MOST_TOKENS = 1 << 14  # by which an expert is timed
_SMALLER = 4
_ROUNDS = 3
_COPIED_BYTES = 64 << 20  # of parameters that are timed at once, at most
_MIN_TIMED_SEC = 0.01
_LONG_SEC = 0.5
_SHARE_OF_TIME = 0.25  # of --benchmark-seconds
_BUCKET_BYTES = 8 << 20
_BUFFERS = 2  # of a bucket
# The fraction of a rank's memory for experts with mirrors. On a host also for moving them after a
# loss: they exist in their new place before they are freed in the old one.
_MIRRORED, _MIRRORED_ON_HOST = 0.75, 0.4
_COPIES = 4  # of a token, while it travels, and in backward
_UNMEASURED = RankCost(0.0, 0.0)
_UNTIMED = 1e-9  # seconds a byte of parameters: all ranks count as equally fast
_NEVER_SEC = 1.0  # a token of an expert that a rank has no memory for


class Rows(NamedTuple):
    """What a mixture gets."""

    width: int = 0
    """Of a token; 0 if the loss does not use the mixture."""
    dtype: torch.dtype = torch.float32
    counts: tuple[int, ...] = ()
    """By expert, the tokens of some samples."""

    @property
    def row_bytes(self) -> int:
        """The bytes of a token."""
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class RankExperts:
    """A rank's measurements of the experts, and what they are like on every rank."""

    rank: ExpertRank
    experts: tuple[Expert, ...]
    counts: tuple[int, ...]
    """By expert, the tokens of `samples`."""
    samples: int


class ExpertTimer:
    """Times each kind of expert on this rank; the model is not changed. Not collective.

    Experts are alike if their modules and parameters are. Without `is_timed`, only what is the same
    on all ranks counts: each expert by its size.
    """

    def __init__(
        self, config: TrainingConfig, setup: Setup, world: World, is_timed: bool = True
    ) -> None:
        profile = profile_unmeasured(config, world.info)
        self._computation = Computation(world.device, profile.precision, profile.memory_format)
        self._config = config
        self._setup = setup
        self._world = world
        self._device = world.device_kind
        self._is_timed = is_timed
        self._model = setup.task.model
        self._mixtures = find_mixtures(self._model)
        self._last: Callable[[], object] = _sleep

    def measure(self, optimizers: Sequence[Optimizer]) -> RankExperts:
        """Return the seconds and the memory of experts on this rank, and how many tokens they get.

        Raises:
            UserError: this rank has no memory for the model without its experts.
        """
        enter_phase("the benchmark")
        base = self._base_bytes(optimizers)
        limit = max(base, memory_limit(self._world))
        samples = 0
        sample_bytes = 0.0
        rows = [Rows() for _ in self._mixtures]
        if self._setup.task.loss is not None:
            samples, sample_bytes, rows = self._count_tokens()
        experts, times = self._measure_experts(rows, samples, optimizers)
        counts: list[int] = []
        for mixture, mixture_rows in zip(self._mixtures.values(), rows, strict=True):
            counts += mixture_rows.counts or [0] * len(mixture.experts)
            if samples:  # tokens that are sent, and what comes back
                sample_bytes += (
                    _COPIES * mixture_rows.row_bytes * sum(mixture_rows.counts) / samples
                )
        fixed_sec, token_sec, update_sec = (tuple(column) for column in zip(*times, strict=True))
        # While an optimizer steps all at once, it allocates as much as what it steps.
        is_at_once = steps_at_once(optimizers, self._device.is_host)
        temporary = is_at_once / (2 + usual_states(optimizers))
        info = self._world.info
        rank = ExpertRank(
            info.kind,
            info.node,
            _UNMEASURED,
            fixed_sec,
            token_sec,
            update_sec,
            (limit - base) / (1 + temporary),
            sample_bytes,
            base,
            _MIRRORED_ON_HOST if self._device.is_host else _MIRRORED,
            self._device.pace.factor if self._device.is_host else 0.0,
        )
        return RankExperts(rank, tuple(experts), tuple(counts), samples)

    def _measure_experts(
        self, rows: Sequence[Rows], samples: int, optimizers: Sequence[Optimizer]
    ) -> tuple[list[Expert], list[tuple[float, float, float]]]:
        """Return the experts of all mixtures, with the seconds of a call, a token and an update.

        Experts that are alike are timed once. `rows` are those of each mixture for so many samples.
        """
        states = usual_states(optimizers)
        rates = optimizer_rates(self._world, optimizers) if self._is_timed else (0.0, 0.0)
        alike = Counter(map(_structure, experts_of(self._mixtures)))
        timed: dict[Any, tuple[float, float, float]] = {}
        experts: list[Expert] = []
        times: list[tuple[float, float, float]] = []
        for number, (mixture, mixture_rows) in enumerate(
            zip(self._mixtures.values(), rows, strict=True)
        ):
            tokens_per_expert = 0.0  # of a step on this rank
            if samples:
                step_tokens = sum(mixture_rows.counts) * self._config.global_batch_size
                shares = samples * len(mixture.experts) * self._world.size
                tokens_per_expert = step_tokens / shares
            for expert in mixture.experts:
                key = (_structure(expert), mixture_rows.width, mixture_rows.dtype)
                if key not in timed:
                    held = -(-alike[_structure(expert)] // self._world.size)
                    timed[key] = self._time(
                        expert, mixture_rows, int(tokens_per_expert), len(timed), held
                    )
                call_sec, token_sec, token_bytes = timed[key]
                trained = [p for p in expert.parameters() if p.requires_grad]
                trained_bytes = sum(p.nbytes for p in trained)
                update_sec = len(trained) * rates[0] + trained_bytes * rates[1]
                weight_bytes = sum(p.nbytes for p in (*expert.parameters(), *expert.buffers()))
                experts.append(
                    Expert(
                        mixture=number,
                        held_bytes=weight_bytes + trained_bytes * (1 + states),
                        kept_bytes=token_bytes + _COPIES * mixture_rows.row_bytes,
                        row_bytes=mixture_rows.row_bytes,
                        trained_bytes=trained_bytes,
                        weight_bytes=weight_bytes,
                    )
                )
                times.append((call_sec, token_sec, update_sec))
        return experts, times

    def keep_busy(self) -> None:
        """Compute something, to keep the cores loaded while other ranks are still timed."""
        if seconds_if_it_fits(self._device, self._keep_busy) is None:
            self._last = _sleep

    def _keep_busy(self) -> float:
        self._last()
        return 0.0

    def _base_bytes(self, optimizers: Sequence[Optimizer]) -> float:
        """Return the memory for all but experts and activations."""
        held = {p for expert in experts_of(self._mixtures) for p in expert.parameters()}
        buffers = [b for expert in experts_of(self._mixtures) for b in expert.buffers()]
        dense = [p for p in self._model.parameters() if p not in held]
        self._device.return_freed_memory()  # of other measurements
        used = float(memory_in_use(self._world))
        if self._device.is_host:  # the model is there, and experts are freed
            used -= sum(tensor.nbytes for tensor in (*held, *buffers))
        else:
            used += sum(p.nbytes for p in dense)
        trained = sum(p.nbytes for p in dense if p.requires_grad)
        state = trained * (1 + usual_states(optimizers))
        state += _BUFFERS * min(trained, _BUCKET_BYTES)
        if self._config.mirrors and ulfm.is_enabled():  # gradients go to them in buckets
            largest = max((p.nbytes for p in held), default=0)
            state += _BUFFERS * max(largest, min(sum(p.nbytes for p in held), _BUCKET_BYTES))
        state += TEMPORARIES * max((p.nbytes for p in self._model.parameters()), default=0)
        if steps_at_once(optimizers, self._device.is_host):
            state += trained
        return max(0.0, used) + state

    def _count_tokens(self) -> tuple[int, float, list[Rows]]:
        """Return a number of samples, the bytes of activations of a sample, and the mixtures' rows.

        The rows have the tokens that each expert gets of these samples.
        """
        data = self._setup.train
        world = self._world
        count = max(1, min(len(data), _MOST_SAMPLES, equal_share(self._config, world.size)))
        indices = [(world.rank * count + index) % len(data) for index in range(count)]
        batch = self._computation.place(data[indices])
        measured: list[tuple[float, list[Rows]]] = []

        def forward() -> float:
            with without_experts(), self._dense_model() as model, watched(model) as rows:
                with saved_by(model) as saved:
                    self._computation.loss(self._setup.task, model, batch, needs_gradient=False)
                measured.append((sum(saved.values()) / count, rows()))
            return 0.0

        if seconds_if_it_fits(self._device, forward) is None:
            raise UserError(
                f"{world.info.device} is out of memory for {count} samples of the model without "
                "its experts; give --layout auto or pipeline, leave the device out, or lower "
                "--global-batch-size"
            )
        return count, *measured[0]

    @contextmanager
    def _dense_model(self) -> Iterator[nn.Module]:
        """Return the model without its experts on this rank's device, as in training."""
        if self._device.is_host:
            with borrowed(self._model) as model:
                yield model
            return
        yield copy.deepcopy(self._model).to(self._world.device).train()

    def _time(
        self, expert: nn.Module, rows: Rows, tokens: int, done: int, held: int
    ) -> tuple[float, float, float]:
        """Return the seconds of a call and of a token, and the bytes that are kept of a token.

        Copies of the expert are timed in turn, up to the `held` experts like it that a rank holds,
        so that the parameters of one are not in a cache, as in training. `done` experts have been
        timed before, and leave less time for this one.
        """
        size = sum(parameter.nbytes for parameter in expert.parameters())
        if not self._is_timed or not rows.width:
            return 0.0, _UNTIMED * (size + 1), 0.0
        result: list[tuple[float, float, float]] = []

        def trial() -> float:
            count = max(1, min(held, _COPIED_BYTES // max(1, size)))
            copies = [copy.deepcopy(expert).to(self._world.device).train() for _ in range(count)]
            result.append(self._trial(copies, rows, tokens, done))
            return 0.0

        if seconds_if_it_fits(self._device, trial) is None:
            self._last = _sleep  # the copies are freed
            return 0.0, _NEVER_SEC, 0.0
        return result[0]

    def _trial(
        self, copies: Sequence[nn.Module], rows: Rows, tokens: int, done: int
    ) -> tuple[float, float, float]:
        large = max(_SMALLER, min(tokens, _MOST_TOKENS))
        small = max(1, large // _SMALLER)
        until = time.perf_counter() + _SHARE_OF_TIME * self._config.benchmark_seconds / (1 + done)
        input_rows = torch.randn(small, rows.width, device=self._world.device).to(rows.dtype)
        with saved_by(copies[0]) as saved, self._computation.autocast():
            copies[0](input_rows.requires_grad_())
        kept_bytes = sum(saved.values()) / small
        seconds: dict[int, list[float]] = {}
        self._last = lambda: self._call(copies, rows, small)
        self._call(copies, rows, small)  # prepares libraries
        has_both = len(copies) * self._call(copies, rows, small) < _LONG_SEC
        if has_both:
            self._call(copies, rows, large)
        for number in range(_ROUNDS):
            for size in (small, large) if has_both else (small,):
                if number and time.perf_counter() > until:
                    break
                seconds.setdefault(size, []).append(self._mean_call(copies, rows, size))
        low = statistics.median(seconds[small])
        if large not in seconds:
            return 0.0, low / small, kept_bytes
        high = statistics.median(seconds[large])
        per_token = max((high - low) / (large - small), high / large / 10)
        return max(0.0, high - large * per_token), per_token, kept_bytes

    def _mean_call(self, copies: Sequence[nn.Module], rows: Rows, size: int) -> float:
        calls, total = 0, 0.0
        while not calls or total < _MIN_TIMED_SEC:
            total += self._call(copies, rows, size)
            calls += 1
        return total / calls

    def _call(self, copies: Sequence[nn.Module], rows: Rows, size: int) -> float:
        """Return an expert's seconds of a forward and a backward of so many tokens."""
        count = len(copies)
        tokens = torch.randn(count * size, rows.width, device=self._world.device).to(rows.dtype)
        tokens.requires_grad_()
        gradient = torch.ones_like(tokens)
        pace = self._device.pace
        self._world.synchronize()
        begin = time.perf_counter()
        pace.start()
        with self._computation.autocast():
            parts = zip(copies, tokens.split(size), strict=True)
            output = torch.cat([expert(part).to(rows.dtype) for expert, part in parts])
        output.backward(gradient)
        self._world.synchronize()
        pace.catch_up()
        return (time.perf_counter() - begin) / count


def _sleep() -> None:
    time.sleep(0.01)


@contextmanager
def watched(model: nn.Module) -> Iterator[Callable[[], list[Rows]]]:
    """Yield a function that returns what each mixture of a model got in the block so far."""
    rows_of: dict[nn.Module, Rows] = {}

    def note(module: nn.Module, inputs: Any, _: Any) -> None:
        assert isinstance(module, Experts)
        counts = module.tokens_by_expert
        before = rows_of.get(module, Rows()).counts
        if before:  # it is called several times
            counts = [a + b for a, b in zip(counts, before, strict=True)]
        tokens = inputs[0]
        rows_of[module] = Rows(tokens.shape[-1], tokens.dtype, tuple(counts))

    mixtures = list(find_mixtures(model).values())
    handles = [mixture.register_forward_hook(note) for mixture in mixtures]
    try:
        yield lambda: [rows_of.get(mixture, Rows()) for mixture in mixtures]
    finally:
        for handle in handles:
            handle.remove()


def _structure(expert: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for experts that take the same time."""
    shapes = [(p.shape, p.dtype, p.requires_grad) for p in expert.parameters()]
    return (str(expert), *shapes)
