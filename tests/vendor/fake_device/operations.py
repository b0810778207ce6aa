"""What torch computes on the emulated device: the host's kernels, queued on the current stream.

Operations return at once, also those that make new tensors: what these look like is learned from
the first call of each kind, which alone waits, as a device loads a kernel when it is first needed.
Only what needs a value on the host waits each time (`item`, `nonzero`), and what draws random
numbers, which are the host's and come in the order of the program.
"""

from __future__ import annotations

import functools
import os
import time

import torch
from torch.utils._pytree import tree_flatten, tree_map

from . import bus, memory, streams
from .bus import move
from .streams import contexts, current_stream, host_waits, stream_of

VARIABLE = "KAITIAN_FAKE_DEVICE"
aten = torch.ops.aten
_DIVISIONS = {aten.div.out, aten.div.out_mode}
_WAITING_TAGS = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
    torch.Tag.nondeterministic_seeded,
}
host_view = torch.ops.kaitian_fake.host_view.default
"""Returns a tensor of the host's with a device tensor's memory: to be used on the stream alone."""


def switches() -> set[str]:
    """Return what is switched on."""
    return set(os.environ.get(VARIABLE, "").split(","))


def is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "fake"


def view_of(value):
    return host_view(value) if is_on_device(value) else value


def run(func, *args, **kwargs):
    """Carry out any operation."""
    flat = tree_flatten((args, kwargs))[0]
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    if any(tensor.ndim and not is_on_device(tensor) for tensor in tensors):
        raise RuntimeError(f"{func}: mixes host memory with the accelerator's")
    devices = {tensor.device for tensor in tensors if tensor.device.type == "fake"}
    if len(devices) > 1:
        raise RuntimeError(f"{func}: mixes the memory of {sorted(map(str, devices))}")
    device = next(iter(devices), None) or torch.device("fake", streams.index_of(kwargs["device"]))
    stream = current_stream(device)
    kernel = _kernel(func, args)
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        raise NotImplementedError(f"{func} returns a view; add it to device.cpp")
    _size_outputs(func, args, kwargs, stream)
    raw_args, raw_kwargs = tree_map(_captured, args), tree_map(_captured, kwargs)
    if "device" in raw_kwargs:
        raw_kwargs["device"] = "cpu"
    call = functools.partial(kernel, *raw_args, **raw_kwargs)
    returns = func._schema.returns
    waits = bool(_WAITING_TAGS.intersection(func.tags))
    if func._schema.is_mutable and all(r.alias_info is not None for r in returns):
        if waits:
            stream.queue.finish()
            call()
        else:
            stream.give(call)
        return _written(func, args, kwargs)
    if waits:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            host_waits("item")
        stream.queue.finish()
        return tree_map(lambda value: _placed(value, device), call())
    return _new(func, call, flat, stream, device)


def _new(func, call, flat, stream, device):
    """Carry out an operation that makes new tensors."""
    key = (func, *map(_kind, flat))
    layouts = _layouts.get(key)
    if layouts is None:
        stream.queue.finish()
        result = call()
        _layouts[key] = tree_map(_layout, result)
        return tree_map(lambda value: _placed(value, device), result)
    made = tree_map(lambda layout: layout.make(device), layouts)
    targets = [view_of(tensor) for tensor in tree_flatten(made)[0]]

    def compute():
        for target, value in zip(targets, tree_flatten(call())[0], strict=True):
            if isinstance(value, torch.Tensor):
                move(target, value)

    stream.give(compute)
    return made


class _Layout:
    """What an operation returns in one place: a tensor that looks so, or always this value."""

    def __init__(self, value) -> None:
        self._is_tensor = isinstance(value, torch.Tensor)
        self._value = (value.shape, value.stride(), value.dtype) if self._is_tensor else value

    def make(self, device):
        if not self._is_tensor:
            return self._value
        shape, stride, dtype = self._value
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


_layout = _Layout
_layouts: dict[tuple, object] = {}  # by the operation and the looks of its arguments


def _kind(value):
    """Return what of an argument decides how the results look."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return type(value) if isinstance(value, float) else (type(value), value)


def _placed(value, device):
    """Return a result of the host's on the device, without waiting."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    target = host_view(made)
    # In stream order: what the memory held before may still have to be overwritten.
    current_stream(device).give(lambda: move(target, value))
    return made


def _captured(value):
    """Return an argument as the kernel gets it: a number of the host's as it is now."""
    if is_on_device(value):
        return host_view(value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _outputs(func, kwargs):
    return {a.name: kwargs[a.name] for a in func._schema.arguments if a.is_out}


def _size_outputs(func, args, kwargs, stream):
    """Resize empty outputs, as a kernel would: it has only a view of their memory."""
    outputs = _outputs(func, kwargs)
    if not any(output.numel() == 0 for output in outputs.values()):
        return
    rest = {name: value for name, value in kwargs.items() if name not in outputs}
    flat = tree_flatten((args, rest))[0]
    key = (func, *map(_kind, flat))
    if key not in _layouts:
        stream.queue.finish()
        trial = {name: torch.empty(0, dtype=output.dtype) for name, output in outputs.items()}
        func(*tree_map(_captured, args), **tree_map(_captured, rest), **trial)
        _layouts[key] = {name: (output.shape, output.stride()) for name, output in trial.items()}
    for name, (shape, stride) in _layouts[key].items():
        if outputs[name].shape != shape:
            outputs[name].resize_(shape).as_strided_(shape, stride)


def _written(func, args, kwargs):
    """Return what an operation that changes tensors returns."""
    returned = [*_outputs(func, kwargs).values()] or [args[0]]
    count = len(func._schema.returns)
    if count == 0:
        return None
    return returned[0] if count == 1 else tuple(returned)


def _kernel(func, args):
    if func is aten.native_batch_norm_backward.default and None in (args[5], args[6]):
        # Normalization.cu, `batch_norm_backward_cuda`: also of fixed statistics.
        raise RuntimeError("save_mean and save_invstd should always be defined")
    kernel = _divide_as_a_gpu if func in _DIVISIONS else func
    if "rounding" in switches():
        kernel = _rounded(func, kernel)
    if "frozen-statistics" in switches() and "batch_norm" in func.name():
        kernel = functools.partial(_without_statistics, kernel)
    return kernel


def _without_statistics(kernel, *args, **kwargs):
    return kernel(*args[:3], *tree_map(_copied, list(args[3:5])), *args[5:], **kwargs)


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def _divide_as_a_gpu(dividend, divisor, *, out, rounding_mode=None):
    """Divide by multiplying with the reciprocal, which rounds differently, as CUDA does."""
    if rounding_mode is not None:
        return aten.div(dividend, divisor, out=out, rounding_mode=rounding_mode)
    is_number = not isinstance(divisor, torch.Tensor) or not divisor.ndim
    if not is_number or not dividend.is_floating_point():
        return aten.div(dividend, divisor, out=out)
    # A number of Python's is not rounded to a float first.
    divisor = torch.as_tensor(divisor, dtype=getattr(divisor, "dtype", torch.float64))
    # In the type that the kernel accumulates in, doubles for doubles.
    wide = torch.promote_types(dividend.dtype, torch.float32)
    return aten.mul.out(dividend, divisor.to(wide).reciprocal(), out=out)


def _rounded(func, kernel):
    """Return an operation that computes 32-bit floats in 64 bits."""
    if torch.Tag.nondeterministic_seeded in func.tags:  # another type has other random numbers
        return kernel

    def compute(*args, **kwargs):
        wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def widen(value):
            if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
                return value
            return wide.setdefault(id(value), (value, value.double()))[1]

        result = kernel(*tree_map(widen, list(args)), **tree_map(widen, kwargs))
        if func._schema.is_mutable or "batch_norm" in func.name():  # whose schema hides it
            for value, changed in wide.values():
                if torch._debug_has_internal_overlap(value) != 1:  # as an expanded input has
                    value.copy_(changed)
        return tree_map(lambda r: _narrow(r, wide, kwargs), result)

    return compute


def _narrow(result, wide, kwargs):
    is_wide = isinstance(result, torch.Tensor) and result.dtype is torch.float64
    if not is_wide or not wide or kwargs.get("dtype") is torch.float64:
        return result
    same = [value for value, changed in wide.values() if changed is result]
    return same[0] if same else result.float()


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False):
    """Copy in stream order; the host waits as CUDA's copies do (`ATen/native/cuda/Copy.cu`)."""
    crosses = is_on_device(target) != is_on_device(source)
    device = (source if is_on_device(source) else target).device
    contexts.add(device.index)
    on = current_stream(device)
    raw_target, raw_source = view_of(target), view_of(source)
    if not crosses:
        on.give(lambda: move(raw_target, raw_source))
        return target
    engine = bus.engines["back" if is_on_device(target) else "out"]
    if not engine.moves_data and on.is_foreseeable():
        ready_at = max(on.queue.ends_at, time.perf_counter())
        on.queue.ends_at = engine.book(ready_at, raw_source.nbytes)
    else:
        on.give(lambda: engine.copy(raw_target, raw_source))
    in_host_memory = target if is_on_device(source) else source
    is_paged = not bus.is_pinned(in_host_memory)
    if not non_blocking or is_paged:  # the driver stages what is not page-locked
        host_waits("pageable copy" if is_paged else "copy")
        on.queue.finish()
    return target


def item(tensor: torch.Tensor):
    host_waits("item")
    current_stream(tensor.device).queue.finish()
    return aten._local_scalar_dense(host_view(tensor))


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    if "no-record-stream" in switches():
        raise NotImplementedError("Could not run 'aten::record_stream' on this device")
    keep_memory(tensor, stream)


def keep_memory(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Tell the allocator that a stream uses a tensor."""
    address = tensor.untyped_storage().data_ptr()
    memory.record_memory(address, stream.stream_id, stream.device_index)


def recorded_streams(tensor: torch.Tensor) -> list[streams.Stream]:
    """Return the streams that the allocator was told of, for a tensor's memory."""
    return memory.blocks[tensor.untyped_storage().data_ptr()].recorded


def register() -> list[torch.library.Library]:
    """Give torch the operations; keep what it returns."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run, "PrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for name in ("convolution", "convolution_backward", "native_layer_norm", "native_group_norm"):
        overload = getattr(aten, name).default  # which torch would make of others for this device
        library.impl(name, functools.partial(run, overload), "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", item, "PrivateUse1")
    library.impl("record_stream", record_stream, "PrivateUse1")
    library.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "PrivateUse1")  # plain math
    return [everything, library]


__all__ = ["run", "stream_of"]
