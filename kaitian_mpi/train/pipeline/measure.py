"""Measures what a model's layers take on each rank, and plans the pipeline from it."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from kaitian_mpi.balance.pipeline import Hop, PipelinePlan, Stage
from kaitian_mpi.balance.pipeline_plan import Layer, PipelineJob, RankFacts, plan_pipeline
from kaitian_mpi.balance.shares import split_micro_batches
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.measure.plan import Plan, min_batch_by_layers, profile_unmeasured
from kaitian_mpi.train.measure.rank_timer import equal_share, memory_limit
from kaitian_mpi.train.measure.room import usual_states
from kaitian_mpi.train.pipeline.chain import (
    Call,
    answered,
    captured,
    chain_of,
    move,
    put_together,
    run,
    take_apart,
)
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.sharded_step import check_clip_norm
from kaitian_mpi.train.task import Computation, Task, aside, borrowed, check_loss

_ROUNDS = 3
_SHARE_OF_TIME = 0.5  # of --benchmark-seconds
_LARGER = 4  # samples of the next size, times those of the one before
_PART_OF_MEMORY = 0.2  # for what one layer keeps
_TRIAL_NUMBERS = 1 << 18, 4 << 20
_PART_OF_TRIAL = 0.002  # of the memory's bytes, in numbers: of which AdamW needs five times as many
_TRIAL_BYTES = 1 << 20
_UNMEASURED_FIXED = 2.0  # a micro-batch's own time, in that of a sample


@dataclass(frozen=True)
class PipelineFacts:
    """What the stages are planned from; the same on every rank."""

    layers: tuple[Layer, ...]
    by_place: Mapping[str, RankFacts]
    links: Mapping[tuple[str, str], Hop]

    def plan(self, config: TrainingConfig, world: World, min_batch: int) -> Plan:
        """Plan the stages of these ranks. Collective."""
        own = None
        if world.rank == 0:  # others may round otherwise
            job = self.job(config, world, min_batch)
            found = plan_pipeline(job)
            own = asdict(found) if found is not None else self._too_large(job)
        own = gather_values(world.comm, own)[0]
        if isinstance(own, str):
            raise AgreedError(own)
        stages = tuple(
            Stage(each["begin"], each["end"], tuple(each["ranks"]), tuple(each["seconds"]))
            for each in own.pop("stages")
        )
        pipeline = PipelinePlan(stages, **own | {"bytes_by_rank": tuple(own["bytes_by_rank"])})
        sizes = split_micro_batches(config.global_batch_size, pipeline.micro_batch, min_batch)
        shares = pipeline.first_samples(sizes, world.size)
        return Plan(shares, [1.0] * world.size, None, pipeline.micro_batch, min_batch, pipeline)

    def job(self, config: TrainingConfig, world: World, min_batch: int) -> PipelineJob:
        """Return what the stages of these ranks are planned from."""
        ranks = tuple(self.by_place[info.place] for info in world.infos)
        sizes = config.global_batch_size, min_batch, config.micro_batch_size
        return PipelineJob(self.layers, ranks, *sizes, self.links)

    def _too_large(self, job: PipelineJob) -> str:
        needed = sum(layer.weight_bytes + layer.state_bytes for layer in self.layers)
        room = (max(0.0, facts.memory_bytes - facts.base_bytes) for facts in job.ranks)
        has = ", ".join(f"{each / 1e6:.0f}" for each in room)
        return (
            f"--layout pipeline: the layers, their gradients and optimizer state take "
            f"{needed / 1e6:.0f} MB, besides activations, and the ranks have room for {has} MB; "
            "start more ranks, divide the model in smaller layers, or use a smaller model"
        )


def find_facts(
    config: TrainingConfig, setup: Setup, world: World, chain: Sequence[nn.Module] | None = None
) -> PipelineFacts:
    """Measure each layer on each rank, one at a time. Collective.

    The model stays on the host, and is not changed. `chain` are the layers; None: the task's.

    Raises:
        AgreedError: the task cannot be trained so.
    """
    task, min_batch = setup.task, min_batch_by_layers(setup.task.model)
    layers: list[Layer] = []
    with agree_on_errors(world.comm):
        chain = chain or check_task(task)
        optimizers = task.make_optimizers(task.model)
        if world.rank == 0 and task.layers is not None:
            _check_chain(task, chain, setup.train[list(range(min_batch))])
    sleeping_barrier(world.comm)
    with agree_on_errors(world.comm), aside(world.device):
        timer = LayerTimer(config, setup, chain, world, min_batch)
        facts, kept, outputs = timer.measure(optimizers)
        layers = _layers(chain, optimizers, kept, outputs)
    enter_phase("comparing the benchmarks", waits=True, limited=False)
    own = asdict(facts), [asdict(layer) for layer in layers]
    gathered = gather_values(world.comm, own)
    by_place = {
        info.place: RankFacts(**{name: _tuple(value) for name, value in found.items()})
        for info, (found, _) in zip(world.infos, gathered, strict=True)
    }
    known = tuple(Layer(**each) for each in gathered[0][1])
    if config.balance == "off":
        by_place = {place: _unmeasured(each, known) for place, each in by_place.items()}
    return PipelineFacts(known, by_place, measure_links(world))


def check_task(task: Task) -> list[nn.Module]:
    """Return the layers of a task that can be trained in a pipeline.

    Raises:
        UserError: it cannot.
    """
    if task.loss is None:
        raise UserError(
            "--layout pipeline requires Task(loss=...), as no rank computes the whole model"
        )
    check_clip_norm(task, "pipeline")
    return chain_of(task)


@torch.no_grad()
def _check_chain(task: Task, chain: Sequence[nn.Module], batch: Any) -> None:
    """Check that the layers make of a batch what the model makes of it."""
    assert task.loss is not None
    with borrowed(task.model) as model:
        model.eval()
        call = captured(task.loss, model, batch)
        whole = list(tensors_in(model(*call.args, **call.kwargs)))
        chained = list(tensors_in(run(chain, call, None)))
    is_same = [each.shape for each in whole] == [each.shape for each in chained]
    if not is_same or not all(map(_is_close, whole, chained)):
        raise UserError(
            "Task: called one after the other, the layers return something else than the model; "
            "list all that it does, in order"
        )


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.double(), other.double()
    largest = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * largest, equal_nan=True)


class LayerTimer:
    """Times each layer on this rank, with small and large micro-batches."""

    def __init__(
        self,
        config: TrainingConfig,
        setup: Setup,
        chain: Sequence[nn.Module],
        world: World,
        min_batch: int,
    ) -> None:
        profile = profile_unmeasured(config, world.info)
        computation = Computation(world.device, profile.precision, profile.memory_format)
        self._computation, self._world, self._chain = computation, world, chain
        self._task, self._data = setup.task, setup.train
        share = equal_share(config, world.size)
        self._smallest, self._most = min_batch, max(min_batch, min(len(setup.train), share))
        self._times: dict[int, list[list[tuple[float, float]]]] = {}
        self._until = time.perf_counter() + _SHARE_OF_TIME * config.benchmark_seconds
        self._kept, self._outputs = [0.0] * len(chain), [0.0] * len(chain)

    def measure(
        self, optimizers: Sequence[Optimizer]
    ) -> tuple[RankFacts, list[float], list[float]]:
        """Return this rank's facts, and what each layer keeps and returns, in bytes a sample."""
        device, index = self._world.device_kind, self._world.device_index
        model = self._task.model
        on_host = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        start = on_host if device.is_host else 0
        used = max(0, device.memory_peak_bytes(index) - start)
        rates = self._update_sec(optimizers)  # first: what it frees, the layers use again
        with borrowed(model):
            self._grow(memory_limit(self._world) - used - start)
            small, large = min(self._times), max(self._times)
            for size in (small, large) * (_ROUNDS - 1):
                if time.perf_counter() < self._until:
                    self._round(size)
        times = {size: _medians(self._times[size]) for size in (small, large)}
        whole = [(sum(times[small][n]), sum(times[large][n])) for n in range(len(self._chain))]
        sample = [
            max((b - a) / (large - small), b / large / 10) if large > small else b / large
            for a, b in whole
        ]
        fixed = [max(0.0, b - large * own) for own, (_, b) in zip(sample, whole, strict=True)]
        forward = sum(a for a, _ in times[large]) / sum(b for _, b in whole)
        facts = RankFacts(
            self._world.info.kind,
            memory_limit(self._world),
            tuple(fixed),
            tuple(sample),
            forward,
            *rates,
            float(used),
            float(used + start),
            _steps_at_once(optimizers, device.is_host),
            self._world.info.node,
        )
        return facts, self._kept, self._outputs

    def _grow(self, memory: float) -> None:
        """Time larger and larger micro-batches, up to an equal share, while there is time."""
        size, long_sec = self._smallest, (self._until - time.perf_counter()) / _ROUNDS / 4
        while True:
            began = time.perf_counter()
            self._round(size)
            is_long = time.perf_counter() - began > long_sec
            larger = min(_LARGER * size, self._most)
            if larger == size or (is_long and len(self._times) > 1):
                return
            if larger * max(self._kept) > _PART_OF_MEMORY * memory:
                return
            size = larger

    def _round(self, size: int) -> None:
        """Time each layer's forward and backward."""
        enter_phase("the benchmark")
        task, found = self._task, []
        batch = self._computation.place(self._data[list(range(size))])
        assert task.loss is not None
        call: Call | None = captured(task.loss, task.model, batch)
        carried: Any = None
        for number, layer in enumerate(self._chain):
            is_last = number == len(self._chain) - 1
            with self._on_device(layer):
                if getattr(layer, "inplace", False):
                    carried = carried.clone()
                seconds, carried = self._time(
                    layer, call, carried, batch if is_last else None, number
                )
            found.append(seconds)
            call, carried = None, carried if is_last else _as_received(carried)
            self._outputs[number] = sum(t.nbytes for t in tensors_in(carried)) / size
            self._kept[number] /= size
        self._times.setdefault(size, []).append(found)

    def _time(
        self, layer: nn.Module, call: Call | None, carried: Any, batch: Any, number: int
    ) -> tuple[tuple[float, float], Any]:
        pace, task = self._world.device_kind.pace, self._task
        begin = self._now()
        pace.start()
        with self._computation.autocast(), _saved_by(layer) as saved:
            output = run([layer], call, carried)
            ends = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            if batch is not None:
                loss = check_loss(answered(task.loss, task.model, batch, output), False)  # type: ignore[arg-type]
                ends = [loss] * loss.requires_grad
        pace.catch_up()
        middle = self._now()
        self._kept[number] = float(sum(saved.values()))
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(each) for each in ends])
        pace.catch_up()
        return (middle - begin, self._now() - middle), output

    def _update_sec(self, optimizers: Sequence[Optimizer]) -> tuple[float, float]:
        """Return about the seconds to step, and to copy, a byte of the parameters."""
        # Larger than a cache, if there is memory. Not zeros: their first use would count.
        numbers = int(_PART_OF_TRIAL * memory_limit(self._world))
        numbers = max(_TRIAL_NUMBERS[0], min(_TRIAL_NUMBERS[1], numbers))
        parameter = nn.Parameter(torch.full((numbers,), 0.1, device=self._world.device))
        parameter.grad = gradient = torch.full_like(parameter, 0.1)
        kind = SGD if isinstance(optimizers[0], SGD) else AdamW
        trial = kind([parameter], lr=1e-3)
        steps = self._seconds(trial.step)
        copies = self._seconds(lambda: parameter.detach().copy_(gradient))
        return steps / parameter.nbytes, copies / parameter.nbytes

    def _seconds(self, work: Callable[[], Any]) -> float:
        pace, seconds = self._world.device_kind.pace, []
        for _ in range(2 * _ROUNDS):
            begin = self._now()
            pace.start()
            work()
            pace.catch_up()
            seconds.append(self._now() - begin)
        return statistics.median(seconds[1:])

    def _now(self) -> float:
        self._world.synchronize()
        return time.perf_counter()

    @contextmanager
    def _on_device(self, layer: nn.Module) -> Iterator[None]:
        """Have only this layer on the device, as there may be no memory for others."""
        move(layer, self._world.device)
        try:
            yield
        finally:
            move(layer, torch.device("cpu"))


@contextmanager
def _saved_by(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the bytes that autograd keeps of a forward, by memory, without the parameters'."""
    known = {parameter.data_ptr() for parameter in layer.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in known:
            saved[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def _medians(rounds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the median seconds of each layer's forward and backward."""
    return [
        (statistics.median(a for a, _ in layer), statistics.median(b for _, b in layer))
        for layer in zip(*rounds, strict=True)
    ]


def measure_links(world: World) -> dict[tuple[str, str], Hop]:
    """Return what messages between ranks of two kinds take: if possible, of two hosts. Collective.

    Within a kind as well; a pair of kinds is in alphabetical order.
    """
    own: dict[str, list[float]] = {}
    pairs = list(itertools.combinations_with_replacement(sorted(set(world.kinds)), 2))
    for number, (one, other) in enumerate(pairs):
        ranks = _apart(world, one, other)
        if ranks is not None and world.rank in ranks:
            enter_phase("measuring a link", waits=True, limited=False)
            peer = ranks[1 - ranks.index(world.rank)]
            small, large = (
                _round_trip(size, peer, ranks[0] == world.rank) for size in (8, _TRIAL_BYTES)
            )
            own[str(number)] = [small / 2, max(0.0, large - small) / 2 / _TRIAL_BYTES]
    enter_phase("waiting for the other ranks' links", waits=True, limited=False)
    found: dict[str, list[float]] = {}
    for each in gather_values(world.comm, own):
        found |= each
    return {pairs[int(number)]: Hop(*each) for number, each in found.items()}


def _apart(world: World, one: str, other: str) -> tuple[int, int] | None:
    """Return a rank of each of two kinds, on different hosts if there are such."""
    infos = world.infos
    found = [
        (infos[a].node != infos[b].node, -a, -b)
        for a in range(world.size)
        for b in range(world.size)
        if a != b and infos[a].kind == one and infos[b].kind == other
    ]
    if not found:
        return None
    _, a, b = max(found)
    return -a, -b


def _round_trip(size: int, peer: int, begins: bool) -> float:
    buffer, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        steps: list[Callable[..., Any]] = [dist.send, dist.recv]
        for step in steps if begins else steps[::-1]:
            step(buffer, peer)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _layers(
    chain: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    kept: Sequence[float],
    outputs: Sequence[float],
) -> list[Layer]:
    states = usual_states(optimizers)
    stepped = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    found = []
    for layer, own, output in zip(chain, kept, outputs, strict=True):
        parameters = list(layer.parameters())
        trained = sum(p.nbytes for p in parameters if p.requires_grad and p in stepped)
        size = sum(p.nbytes for p in parameters) + sum(b.nbytes for b in layer.buffers())
        largest = max((p.nbytes for p in parameters), default=0)
        found.append(Layer(size, trained * (1 + states), own, output, largest))
    return found


def _steps_at_once(optimizers: Sequence[Optimizer], is_host: bool) -> bool:
    """Return whether optimizers use torch's `foreach`: its default is the device's."""
    chosen = [group.get("foreach") for each in optimizers for group in each.param_groups]
    fused = [group.get("fused") for each in optimizers for group in each.param_groups]
    return not all(fused) and any(not is_host if each is None else each for each in chosen)


def _unmeasured(facts: RankFacts, layers: Sequence[Layer]) -> RankFacts:
    """Return facts as if each rank took the same, in proportion to a layer's parameters."""
    seconds = tuple(1e-9 * (layer.weight_bytes + layer.output_bytes + 1) for layer in layers)
    fixed = tuple(_UNMEASURED_FIXED * each for each in seconds)
    return replace(
        facts, fixed_sec=fixed, sample_sec=seconds, forward=1 / 3, update_sec_per_byte=0.0
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_received(value: Any) -> Any:
    """Return what a layer has returned as the next one would get it from another rank."""
    spec, tensors = take_apart(value)
    rows = zip(tensors, spec.tensors, strict=True)
    return put_together(spec.form, [t.detach().requires_grad_(grows) for t, (_, _, grows) in rows])
