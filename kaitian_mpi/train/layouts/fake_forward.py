"""Finds what a forward keeps for its backward without computing it, by torch's fake tensors.

These have a shape, a dtype and no values: neither the model nor its activations take memory.
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
    """Have the parameters of modules that are made in the block take no memory."""

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
    """Return a task whose model takes no memory, or else one as it is made for a training.

    It has to be if the function computes with the model, as to find out a size.
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

    Memory that the operators themselves allocate, such as workspaces of a library, is left out.

    Args:
        task: whose parameters may have no values.
        computation: on the host.
        batch: on the host; it stays as it is.
        modules: those of each layer, in the order in which the loss has them called.
    """
    assert task.loss is not None
    watch = _LayerWatch(modules)
    with ExitStack() as stack:
        stack.enter_context(_copied_buffers(task.model))  # as torch changes small ones in place
        # Tensors of the batch, and buffers, are converted when they are used.
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_fake_parameters(task.model))
        model = stack.enter_context(borrowed(task.model))
        parameters = list(model.parameters())
        live = LiveBytes([*parameters, *model.buffers(), *tensors_in(batch)])
        casts = CastMode(parameters)
        for mode in (casts, live) if computation.has_autocast else (live,):
            stack.enter_context(mode)
        stack.enter_context(watch.hooks())
        with watch.saved(parameters), computation.autocast():
            loss = check_loss(task.loss(model, batch))
        kept, forward = live.now, live.most
        loss.backward()
        largest = max((parameter.nbytes for parameter in parameters), default=0)
        temporary = max(0, forward - kept, live.most - kept - largest)
    return watch.layers(casts.copies, float(temporary))


class _LayerWatch:
    """Notes which layer computes, what autograd keeps meanwhile, and what it returns."""

    def __init__(self, modules: Sequence[Sequence[nn.Module]]) -> None:
        self._modules = modules
        self._at_work = 0
        self._kept: dict[int, tuple[int, int]] = {}
        self._outputs = [0] * len(modules)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Note which layer computes."""
        with ExitStack() as stack:
            for module in {module for layer in self._modules for module in layer}:
                stack.callback(module.register_forward_pre_hook(self._begin).remove)
                stack.callback(module.register_forward_hook(self._end).remove)
            yield

    def _begin(self, module: nn.Module, _: Any) -> None:
        later = range(self._at_work, len(self._modules))  # a module may be in several layers
        self._at_work = next((n for n in later if module in self._modules[n]), self._at_work)

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        self._outputs[self._at_work] = sum(tensor.nbytes for tensor in tensors_in(output))
        if module is self._modules[self._at_work][-1]:
            self._at_work = min(self._at_work + 1, len(self._modules) - 1)

    @contextmanager
    def saved(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Note what autograd keeps, without the parameters."""
        known = {parameter.untyped_storage()._cdata for parameter in parameters}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            memory = tensor.untyped_storage()
            if memory._cdata not in known:
                self._kept.setdefault(memory._cdata, (self._at_work, memory.nbytes()))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def layers(self, copies: dict[int, int], temporary: float) -> list[LayerBytes]:
        """Return the bytes of each layer; `copies` are those of autocast, by memory."""
        kept = [0] * len(self._modules)
        casts = [0] * len(self._modules)
        for memory, (layer, size) in self._kept.items():
            (casts if memory in copies else kept)[layer] += size
        rows = zip(kept, casts, self._outputs, strict=True)
        return [LayerBytes(float(a), float(b), temporary, float(c)) for a, b, c in rows]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operators return, for as long as these exist."""

    def __init__(self, others: Sequence[torch.Tensor]) -> None:
        """Count nothing for the memory of `others`."""
        super().__init__()
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in others}
        self.now = 0
        self.most = 0

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
            self.most = max(self.most, self.now)
            weakref.finalize(memory, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@contextmanager
def _copied_buffers(model: nn.Module) -> Iterator[None]:
    """Have a model compute with copies of its buffers in the block."""
    own = [(module, {**module._buffers}) for module in model.modules()]
    try:
        for module, buffers in own:
            copies = {
                name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()
            }
            module._buffers.update(copies)
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)


@contextmanager
def _fake_parameters(model: nn.Module) -> Iterator[None]:
    """Have a model compute with fake parameters in the block, shared as its own are."""
    replaced: dict[int, nn.Parameter] = {}
    own: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in replaced:
                form = parameter.shape, parameter.stride()
                values = torch.empty_strided(*form, dtype=parameter.dtype, device="cpu")
                replaced[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
            own.append((module._parameters, name, parameter))
    try:
        for parameters, name, parameter in own:
            parameters[name] = replaced[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in own:
            parameters[name] = parameter
