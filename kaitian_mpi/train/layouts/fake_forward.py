"""Finds how many bytes a forward keeps for backward, by torch's fake tensors.

They have a shape and a dtype but no values, so neither the model nor its activations take memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kaitian_mpi.observe.tensor_files import tensors_in
from kaitian_mpi.train.layouts.pipeline.layer_timer import CastMode, LayerBytes
from kaitian_mpi.train.task import Computation, Task, borrowed, check_loss


@contextmanager
def without_values() -> Iterator[None]:
    """Let the parameters of modules that are made in the block take no memory."""

    def to_meta(_: nn.Module, __: str, parameter: Any) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def make_without_values(make_task: Callable[[], Task]) -> Task:
    """Return a task whose model takes no memory, if possible; otherwise the task as it is.

    It is not possible if the function computes with the model, for example to find out a size.
    """
    try:
        with without_values():
            return make_task()
    except Exception:  # of the user's code, which raises it again if it is wrong
        return make_task()


def activation_bytes(
    task: Task, computation: Computation, batch: Any, modules: Sequence[Sequence[nn.Module]]
) -> list[LayerBytes]:
    """Return the bytes of a batch in each layer, as the host's operators keep them.

    Memory that the operators themselves allocate, such as workspaces of a library, is not counted.
    Not collective.

    Args:
        task: whose parameters may have no values.
        computation: on the host.
        batch: on the host; it is not changed.
        modules: those of each layer, in the order in which the loss calls them.
    """
    assert task.loss is not None
    watch = _LayerWatch(modules)
    with ExitStack() as stack:
        stack.enter_context(_copied_buffers(task.model))  # torch changes small ones in place
        # Tensors of the batch, and buffers, become fake ones when they are used.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_fake_parameters(task.model))
        model = stack.enter_context(borrowed(task.model))
        parameters = list(model.parameters())
        live = LiveBytes([*parameters, *model.buffers(), *tensors_in(batch)])
        casts = CastMode(parameters)
        if computation.has_autocast:
            stack.enter_context(casts)
        stack.enter_context(live)
        stack.enter_context(watch.hooks())
        with watch.saved(parameters), computation.autocast():
            loss = check_loss(task.loss(model, batch))
        activations = live.now
        forward_peak = live.peak
        loss.backward()
        # Backward also makes gradients: at its peak, that of one parameter is new.
        largest = max((parameter.nbytes for parameter in parameters), default=0)
        temporary = max(0, forward_peak - activations, live.peak - activations - largest)
    return watch.layers(casts.copies, float(temporary))


class _LayerWatch:
    """Notes which layer computes, how many bytes autograd saves for it, and those it returns."""

    def __init__(self, modules: Sequence[Sequence[nn.Module]]) -> None:
        self._modules = modules
        self._current = 0  # the number of the layer that computes
        self._saved: dict[int, tuple[int, int]] = {}  # by memory: the layer, and the bytes
        self._output_bytes = [0] * len(modules)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Note which layer computes."""
        with ExitStack() as stack:
            for module in {module for layer in self._modules for module in layer}:
                stack.callback(module.register_forward_pre_hook(self._begin).remove)
                stack.callback(module.register_forward_hook(self._end).remove)
            yield

    def _begin(self, module: nn.Module, _: Any) -> None:
        later = range(self._current, len(self._modules))  # a module may be in several layers
        self._current = next((n for n in later if module in self._modules[n]), self._current)

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        self._output_bytes[self._current] = sum(tensor.nbytes for tensor in tensors_in(output))
        if module is self._modules[self._current][-1]:
            self._current = min(self._current + 1, len(self._modules) - 1)

    @contextmanager
    def saved(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Note what autograd saves in the block, without the parameters."""
        parameter_memory = {parameter.untyped_storage()._cdata for parameter in parameters}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            memory = tensor.untyped_storage()
            if memory._cdata not in parameter_memory:
                self._saved.setdefault(memory._cdata, (self._current, memory.nbytes()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield

    def layers(self, copies: dict[int, int], temporary: float) -> list[LayerBytes]:
        """Return the bytes of each layer.

        `copies` has the memory of autocast's copies of weights; each layer takes at most
        `temporary` bytes besides.
        """
        activations = [0] * len(self._modules)
        casts = [0] * len(self._modules)
        for memory, (layer, size) in self._saved.items():
            if memory in copies:
                casts[layer] += size
            else:
                activations[layer] += size
        return [
            LayerBytes(float(kept_bytes), float(cast_bytes), temporary, float(output_bytes))
            for kept_bytes, cast_bytes, output_bytes in zip(
                activations, casts, self._output_bytes, strict=True
            )
        ]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return, for as long as these exist.

    Attributes:
        now: the bytes that exist.
        peak: the most bytes that existed at a time.
    """

    def __init__(self, others: Sequence[torch.Tensor]) -> None:
        """Count nothing for the memory of `others`."""
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in others}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, memory: Any) -> None:
        key = memory._cdata
        if key not in self._sizes:
            self._sizes[key] = memory.nbytes()
            self.now += memory.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(memory, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """Let a model compute with copies of its buffers in the block."""
    originals = [(module, {**module._buffers}) for module in model.modules()]
    try:
        for module, buffers in originals:
            copies = {
                name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()
            }
            module._buffers.update(copies)
        yield
    finally:
        for module, buffers in originals:
            module._buffers.update(buffers)


@contextmanager
def _fake_parameters(model: nn.Module) -> Iterator[None]:
    """Let a model compute with fake parameters in the block; modules share them as before."""
    fakes: dict[int, nn.Parameter] = {}
    originals: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in fakes:
                values = torch.empty_strided(
                    parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu"
                )
                fakes[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            originals.append((module._parameters, name, parameter))
    try:
        for parameters, name, parameter in originals:
            parameters[name] = fakes[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in originals:
            parameters[name] = parameter
