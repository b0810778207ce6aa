"""Times a model's layers on this rank, one at a time, and what it does with their gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from kaitian_mpi.balance.pipeline_cost import Layer, LayerFacts
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import LayerTooLargeError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.layouts.moving import move, set_data
from kaitian_mpi.train.layouts.pipeline.chain import (
    ModelCall,
    all_need_call,
    capture_call,
    flatten,
    make_input,
    run,
    run_with_output,
)
from kaitian_mpi.train.layouts.shard.memory_budget import steps_at_once, usual_states
from kaitian_mpi.train.measure.plan import profile_unmeasured
from kaitian_mpi.train.measure.rank_timer import equal_share, memory_limit
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, borrowed, check_loss

_ROUNDS = 3  # of each size of micro-batches
_REPEATS = 4  # of a layer on an accelerator, so that it computes while the next are launched
_SHARE_OF_TIME = 0.5  # of --benchmark-seconds
_GROWTH = 4  # a size has so many times the samples of the size before
_PART_OF_MEMORY = 0.2  # that a layer's activations may take
# The trial of an optimizer steps one parameter of at least and at most so many numbers, and no more
# than this part of the memory's bytes, as AdamW needs memory for five times as many; and so many
# parameters of one number.
_TRIAL_NUMBERS = 1 << 18, 4 << 20
_PART_OF_TRIAL = 0.002
_SMALL_TRIALS = 64


class LayerBytes(NamedTuple):
    """The bytes of a layer that are not those of its parameters."""

    kept: float = 0.0
    """The bytes kept for a sample from its forward to its backward."""
    casts: float = 0.0
    """The bytes of the copies that autocast makes of its weights."""
    temporary: float = 0.0
    """The bytes used temporarily for a sample, beyond those kept."""
    output: float = 0.0
    """The bytes of the layer's output for a sample."""


class LayerTimer:
    """Times each layer on this rank, with small and large micro-batches.

    If the layers are not known, the whole model is taken as one layer, whatever the loss does with
    it. Without `is_timed` only the memory is measured, so layers run as often as that needs.
    """

    def __init__(
        self,
        config: TrainingConfig,
        setup: Setup,
        chain: Sequence[nn.Module] | None,
        world: World,
        min_batch: int,
        is_timed: bool = True,
    ) -> None:
        profile = profile_unmeasured(config, world.info)
        computation = Computation(world.device, profile.precision, profile.memory_format)
        self._computation = computation
        self._world = world
        self._is_whole = chain is None
        self._is_timed = is_timed
        self._task = setup.task
        self._data = setup.train
        self._chain = chain = chain or [setup.task.model]
        share = equal_share(config, world.size)
        self._smallest = min_batch
        self._most = max(min_batch, min(len(setup.train), share))
        self._times: dict[int, list[list[tuple[float, float]]]] = {}
        self._until = time.perf_counter() + _SHARE_OF_TIME * config.benchmark_seconds
        self._bytes = [LayerBytes() for _ in chain]
        self._repeats = 1 if world.device_kind.is_host else _REPEATS
        self._current = 0  # the number of the layer that computes

    def measure(self, optimizers: Sequence[Optimizer]) -> tuple[LayerFacts, list[Layer]]:
        """Return this rank's time and memory for each layer, and the layers. Not collective.

        Raises:
            LayerTooLargeError: the device has too little memory for the smallest micro-batch.
        """
        device = self._world.device_kind
        index = self._world.device_index
        model = self._task.model
        model_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        start_bytes = model_bytes if device.is_host else 0
        device.release_cached_memory()  # frees what earlier work, such as other models, has used
        device.restart_memory_peak(index)
        used_bytes = max(0, device.memory_peak_bytes(index) - start_bytes)
        rates = (0.0, 0.0, 0.0, 0.0)
        if self._is_timed:  # before the layers, which use the memory again
            rates = optimizer_rates(self._world, optimizers)
        with borrowed(model):
            self._grow(memory_limit(self._world) - used_bytes - start_bytes)
            if self._is_timed:
                self._repeat_rounds()
        if not device.is_host:  # count what libraries keep, such as cuBLAS's workspaces
            device.release_cached_memory()
            device.restart_memory_peak(index)
            used_bytes = device.memory_peak_bytes(index)
        fixed, sample, forward = self._fit()
        facts = LayerFacts(
            self._world.info.kind,
            memory_limit(self._world),
            tuple(fixed),
            tuple(sample),
            forward,
            *rates,
            float(used_bytes),
            float(used_bytes + start_bytes),
            steps_at_once(optimizers, device.is_host),
            self._world.info.node,
            device.is_host,
        )
        return facts, layers_of(self._chain, optimizers, self._bytes)

    def _repeat_rounds(self) -> None:
        """Time the smallest and the largest micro-batches again, while there is time."""
        sizes = min(self._times), max(self._times)
        for _ in range(_ROUNDS - 1):
            for size in sizes:
                if time.perf_counter() < self._until:
                    self._round(size)

    def _fit(self) -> tuple[list[float], list[float], float]:
        """Return the layers' seconds per micro-batch and per sample, and the forward's fraction."""
        small = min(self._times)
        large = max(self._times)
        small_times = _medians(self._times[small])
        large_times = _medians(self._times[large])
        fixed = []
        sample = []
        for small_pair, large_pair in zip(small_times, large_times, strict=True):
            small_sec = sum(small_pair)  # of forward and backward
            large_sec = sum(large_pair)
            sample_sec = large_sec / large
            if large > small:
                sample_sec = max((large_sec - small_sec) / (large - small), sample_sec / 10)
            fixed.append(max(0.0, large_sec - large * sample_sec))
            sample.append(sample_sec)
        forward_sec = sum(forward for forward, _ in large_times)
        return fixed, sample, forward_sec / sum(map(sum, large_times))

    def _grow(self, memory: float) -> None:
        """Time larger and larger micro-batches, up to an equal share, while there is time."""
        size = self._smallest
        long_sec = (self._until - time.perf_counter()) / _ROUNDS / 4
        while True:
            began = time.perf_counter()
            if not self._round(size):
                if not self._times:
                    raise LayerTooLargeError(self._too_large(size))
                return
            is_long = time.perf_counter() - began > long_sec
            larger = min(_GROWTH * size, self._most)
            if larger == size or (is_long and len(self._times) > 1):
                return
            sample_bytes = max(layer_bytes.kept for layer_bytes in self._bytes)
            if larger * sample_bytes * self._repeats > _PART_OF_MEMORY * memory:
                return
            size = larger

    def _round(self, size: int) -> bool:
        """Time each layer's forward and backward; return False if there is too little memory."""
        device = self._world.device_kind
        try:
            seconds = self._layers_seconds(size)
        except Exception as error:
            if not device.is_out_of_memory(error):
                raise
            seconds = None
        if seconds is None:  # after the handler, whose traceback keeps tensors
            device.release_cached_memory()
            return False
        self._times.setdefault(size, []).append(seconds)
        return True

    def _layers_seconds(self, size: int) -> list[tuple[float, float]]:
        """Return the seconds of each layer's forward and backward."""
        enter_phase("the benchmark")
        task = self._task
        layer_sec = []
        batch = self._computation.place(self._data[list(range(size))])
        assert task.loss is not None
        call = None if self._is_whole else capture_call(task.loss, task.model, batch)
        carried: Any = None
        for number, layer in enumerate(self._chain):
            is_last = number == len(self._chain) - 1
            self._current = number
            layer_input = call, carried, batch if is_last or self._is_whole else None
            with self._on_device(layer):
                if size not in self._times:  # this also prepares the device for these sizes
                    kept_bytes, cast_bytes = self._keeps(layer, _fresh(*layer_input))
                    temporary_bytes = self._at_once(layer, _fresh(*layer_input))
                    self._bytes[number] = LayerBytes(
                        kept_bytes / size, cast_bytes, temporary_bytes / size
                    )
                inputs = [_fresh(*layer_input) for _ in range(self._repeats)]
                seconds, carried = self._time(layer, inputs)
            layer_sec.append(seconds)
            call = call if all_need_call(self._chain) else None
            output = sum(t.nbytes for t in tensors_in(carried)) / size
            self._bytes[number] = self._bytes[number]._replace(output=output)
        return layer_sec

    def _too_large(self, size: int) -> str:
        """Return the error for a layer that is out of memory, with advice."""
        samples = "a sample" if size == 1 else f"{size} samples"
        layer = type(self._chain[self._current]).__name__
        name = f"layer {self._current + 1} of {len(self._chain)} ({layer})"
        if self._is_whole:
            name = "the whole model"
        return (
            f"{self._world.info.device} is out of memory for {samples} through {name}; give "
            "--layout shard, or divide the model in smaller layers; see docs/large-models.md"
        )

    def _through(self, layer: nn.Module, call: ModelCall | None, carried: Any, batch: Any) -> Any:
        """Return a layer's output, and the tensors from which backward begins."""
        loss: Any = self._task.loss
        if self._is_whole:
            loss_value = check_loss(loss(layer, batch), False)
            return loss_value, loss_value
        output = run([layer], call, carried)
        if batch is None:
            return output, output
        return output, check_loss(run_with_output(loss, self._task.model, batch, output), False)

    def _keeps(self, layer: nn.Module, given: _Given) -> tuple[float, float]:
        """Return the bytes that autograd keeps of a forward, and those of autocast's weights.

        Autocast's copy of a weight exists once in a stage, not for each micro-batch.
        """
        with (
            self._computation.autocast(),
            _copies_of(layer, self._computation.precision) as copies,
            saved_by(layer) as saved,
        ):
            _, last = self._through(layer, *given)
        _backward(last)
        kept_bytes = sum(size for memory, size in saved.items() if memory not in copies)
        return float(kept_bytes), float(sum(copies.values()))

    def _at_once(self, layer: nn.Module, given: _Given) -> float:
        """Return the most bytes of a layer's temporary tensors, besides activations and gradients.

        Backward adds to existing gradients, which takes as much as the largest parameter; that is
        not counted. 0 on the host, which does not count the memory of tensors.
        """
        device = self._world.device_kind
        index = self._world.device_index
        if device.is_host:
            return 0.0
        device.restart_memory_peak(index)
        with self._computation.autocast():
            _, last = self._through(layer, *given)
        kept_bytes, most_forward = device.tensor_bytes(index)
        device.restart_memory_peak(index)
        _backward(last)
        _, most_backward = device.tensor_bytes(index)
        largest = max((parameter.nbytes for parameter in layer.parameters()), default=0)
        return float(max(0, most_forward - kept_bytes, most_backward - kept_bytes - largest))

    def _time(self, layer: nn.Module, inputs: Sequence[_Given]) -> tuple[tuple[float, float], Any]:
        """Return the seconds of a forward and of a backward, and what the forward returns.

        If there are several inputs, they are queued one after the other, as a stage's layers are.
        """
        pace = self._world.device_kind.pace
        count = len(inputs)
        begin = self._now()
        pace.start()
        with self._computation.autocast():
            done = [self._through(layer, *layer_input) for layer_input in inputs]
        pace.catch_up()
        middle = self._now()
        output = done[-1][0]
        while done:
            _backward(done.pop()[1])
        pace.catch_up()
        return ((middle - begin) / count, (self._now() - middle) / count), output

    def _now(self) -> float:
        self._world.synchronize()
        return time.perf_counter()

    @contextmanager
    def _on_device(self, layer: nn.Module) -> Iterator[None]:
        """Move only this layer to the device, as there may be no memory for others."""
        on_host = [(parameter, parameter.detach()) for parameter in layer.parameters()]
        buffers = [(module, {**module._buffers}) for module in layer.modules()]
        try:
            move(layer, self._world.device)
            yield
        finally:
            for parameter, values in on_host:  # unchanged, so no value is copied back
                if parameter.device != values.device:
                    set_data(parameter, values)
            for module, saved in buffers:
                module._buffers.update(saved)


def optimizer_rates(
    world: World, optimizers: Sequence[Optimizer]
) -> tuple[float, float, float, float]:
    """Return estimates of the seconds to step a parameter, and a byte of it, and to copy each.

    On this rank's device, by an optimizer like the first one. Not collective.
    """
    # Larger than the caches, if there is memory.
    numbers = int(_PART_OF_TRIAL * memory_limit(world))
    numbers = max(_TRIAL_NUMBERS[0], min(_TRIAL_NUMBERS[1], numbers))
    first = optimizers[0]
    kind = SGD if isinstance(first, SGD) else AdamW
    group = first.param_groups[0]
    options = {name: group[name] for name in ("foreach", "fused") if name in group}

    def trial(count: int, length: int) -> tuple[float, float]:
        # Not zeros: their first use would count.
        full = partial(torch.full, (length,), 0.1, device=world.device)
        parameters = [nn.Parameter(full()) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = full()

        def copy() -> None:
            for parameter in parameters:
                parameter.detach().copy_(parameter.grad)  # type: ignore[arg-type]

        optimizer = kind(parameters, lr=1e-3, **options)
        return _seconds(world, optimizer.step), _seconds(world, copy)

    small = [elapsed / _SMALL_TRIALS for elapsed in trial(_SMALL_TRIALS, 1)]
    large = [elapsed / (4 * numbers) for elapsed in trial(1, numbers)]
    return small[0], large[0], small[1], large[1]


def _seconds(world: World, work: Callable[[], Any]) -> float:
    pace = world.device_kind.pace
    seconds = []
    for _ in range(2 * _ROUNDS):
        world.synchronize()
        begin = time.perf_counter()
        pace.start()
        work()
        pace.catch_up()
        world.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _backward(last: Any) -> None:
    """Run the backward of what a layer has returned."""
    ends = [tensor for tensor in tensors_in(last) if tensor.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


class CastMode(TorchDispatchMode):
    """Notes the bytes of copies that are made of parameters, in another dtype, by memory."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._known = {id(parameter) for parameter in parameters if parameter.requires_grad}
        self.copies = dict[int, int]()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self._known:
            self.count += 1
            memory = result.untyped_storage()
            self.copies[memory._cdata] = memory.nbytes()  # fake tensors have no address
        return result


@contextmanager
def _copies_of(layer: nn.Module, precision: str) -> Iterator[dict[int, int]]:
    """Collect the bytes of the copies that autocast makes of trained parameters, by memory."""
    if precision == "fp32":
        yield {}
        return
    with CastMode(list(layer.parameters())) as mode:
        yield mode.copies


@contextmanager
def saved_by(layer: nn.Module) -> Iterator[dict[int, int]]:
    """Collect the bytes that autograd keeps of a forward, by memory, without the parameters'."""
    parameter_memory = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor
        while torch._C._functorch.is_functorch_wrapped_tensor(plain):  # of torch.func
            plain = torch._C._functorch.get_unwrapped(plain)
        memory = plain.untyped_storage()
        if memory._cdata not in parameter_memory:
            saved[memory._cdata] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


def _medians(rounds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the median seconds of each layer's forward and backward."""
    return [
        (statistics.median(a for a, _ in layer), statistics.median(b for _, b in layer))
        for layer in zip(*rounds, strict=True)
    ]


def layers_of(
    chain: Sequence[nn.Module], optimizers: Sequence[Optimizer], measured: Sequence[LayerBytes]
) -> list[Layer]:
    """Return the layers' costs, given their activation and output bytes as measured."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    stepped = {parameter for group in groups for parameter in group["params"]}
    states = usual_states(optimizers)
    pairs = zip(chain, measured, strict=True)
    return [_layer_of(layer, stepped, states, layer_bytes) for layer, layer_bytes in pairs]


def _layer_of(
    layer: nn.Module, stepped: set[torch.Tensor], states: int, layer_bytes: LayerBytes
) -> Layer:
    parameters = list(layer.parameters())
    trained = [p.nbytes for p in parameters if p.requires_grad and p in stepped]
    size = sum(p.nbytes for p in parameters) + sum(b.nbytes for b in layer.buffers())
    return Layer(
        size,
        sum(trained) * (1 + states),
        layer_bytes.kept,
        layer_bytes.output,
        max((p.nbytes for p in parameters), default=0),
        sum(trained),
        len(trained),
        layer_bytes.casts,
        layer_bytes.temporary,
    )


_Given = tuple[Any, Any, Any]
"""The call of the model, the previous layer's output, and the batch; None if not needed."""


def _fresh(call: ModelCall | None, carried: Any, batch: Any) -> _Given:
    """Return a copy of a layer's input, as it may change it in place."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf

    if carried is not None:
        spec, tensors = flatten(carried)
        carried, _ = make_input(spec, list(map(copied, tensors)))
    return tree_map(copied, call), carried, tree_map(copied, batch)
