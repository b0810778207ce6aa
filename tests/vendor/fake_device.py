"""An accelerator with streams, in Python: operations run asynchronously, in stream order.

Each stream is a thread. What changes a tensor in place, and copies, are queued on the current
stream of the thread that asks, as on a GPU; what makes a new tensor waits for that stream first.
The memory of a tensor that is dropped is overwritten as soon as the stream it was made on is done
with what it had been given, unless `record_stream` named further streams.

`KAITIAN_FAKE_DEVICE` switches on, separated by commas, what some real devices do:

`frozen-statistics`
    Batch norm does not update its running statistics.
`rounding`
    Results of 32-bit floats are rounded from 64 bits, so that they are not the CPU's to the bit.
`no-record-stream`
    `Tensor.record_stream` is missing, as in some plug-ins.
`-NAME`
    The device's module lacks a name, such as `-mem_get_info`.

A bus with a copy engine for each direction connects it with the host: `set_bandwidth` makes a copy
take its time, during which neither other copies in the other direction nor other work are delayed.
A copy reads and writes memory at its end, so that whoever does not wait for it sees old values.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import types
import weakref

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

from kaitian_mpi.runtime.abort import abort_with_traceback
from kaitian_mpi.runtime.polling import reduce_timer_slack

# torch 2.8 cannot register a device guard from Python, which most operations need on a device of
# type `privateuseone`. Of those that have a guard in every build, `lazy` is used by nothing else.
HAS_PYTHON_DEVICES = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
TYPE, DISPATCH_KEY = ("fake", "PrivateUse1") if HAS_PYTHON_DEVICES else ("lazy", "Lazy")
COPY = torch.ops.aten.copy_.default
BATCH_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
DIVISIONS = {
    torch.ops.aten.div.Tensor: torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor_mode: torch.ops.aten.mul.Tensor,
    torch.ops.aten.div_.Tensor: torch.ops.aten.mul_.Tensor,
    torch.ops.aten.div_.Tensor_mode: torch.ops.aten.mul_.Tensor,
}
GARBAGE = 0xAB
VARIABLE = "KAITIAN_FAKE_DEVICE"
LATE_SEC = 100e-6  # by which a thread may wake up late

spins: list[Event] = []
"""The events for which the host has waited on a core, as for those of CUDA without `blocking`."""

_local = threading.local()


def switches() -> set[str]:
    """Return what is switched on."""
    return set(os.environ.get(VARIABLE, "").split(","))


class Stream:
    """Runs operations asynchronously, in the order of submission.

    Work that only takes time, and of which it is known when it ends, is but noted: it needs no
    thread, as on a device, whose copy engines need no processor. All other work is the thread's.
    """

    def __init__(self, device: object = None) -> None:
        self.ends_at = 0.0
        """When what has been noted ends; what the thread still has to do ends later."""
        self._work = StreamWork()
        self._thread = threading.Thread(target=self._work.do, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._work.tasks.put, None).atexit = False
        streams.add(self)

    def give(self, task, then=lambda: None) -> None:
        """Queue a task for the thread, and what it does once it no longer has the task."""
        with self._work.lock:
            self._work.left += 1
        self._work.tasks.put((self.ends_at, task, then))

    def is_foreseeable(self) -> bool:
        """Return whether all that it was given ends at a known time."""
        return not self._work.left

    def wait_event(self, event: Event) -> None:
        reached, reached_at = event.reached, event.reached_at
        if reached is not None and not reached.is_set():
            self.give(lambda: wait_until(reached))
        elif reached is None and self.is_foreseeable():
            self.ends_at = max(self.ends_at, reached_at)
        elif reached is None:
            self.give(lambda: sleep_until(reached_at))

    def record_event(self) -> Event:
        return Event(self)

    def synchronize(self) -> None:
        if threading.current_thread() is not self._thread:
            Event(self, blocking=True).synchronize()


streams: weakref.WeakSet[Stream] = weakref.WeakSet()


@atexit.register
def end_streams() -> None:
    """End the threads before the interpreter does: one inside torch would abort the process."""
    for stream in list(streams):
        stream._work.tasks.put(None)
        stream._thread.join(5)


class StreamWork:
    """What a stream's thread has to do. It does not keep the stream, with which it ends."""

    def __init__(self) -> None:
        self.left = 0
        """How many tasks have not been done."""
        self.lock = threading.Lock()
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()

    def do(self) -> None:
        reduce_timer_slack()
        while (given := self.tasks.get()) is not None:
            try:
                begins_at, task, then = given
                sleep_until(begins_at)
                task()
                with self.lock:
                    self.left -= 1
                then()
                del given, task, then  # which may keep the stream
            except BaseException:
                abort_with_traceback("the fake accelerator failed:\n")


class Event:
    """An event recorded on a stream."""

    def __init__(
        self, stream: Stream | None = None, enable_timing: bool = False, blocking: bool = False
    ) -> None:
        self.blocking = blocking
        self.reached: threading.Event | None = None
        """Set by the stream's thread; None where it is known when the stream reaches it."""
        self.reached_at = 0.0
        if stream is not None:
            self.record(stream)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if stream.is_foreseeable():
            self.reached, self.reached_at = None, max(stream.ends_at, time.perf_counter())
            return
        self.reached = threading.Event()
        stream.give(self._note_time, self.reached.set)

    def _note_time(self) -> None:
        self.reached_at = time.perf_counter()

    def query(self) -> bool:
        if self.reached is None:
            return time.perf_counter() >= self.reached_at
        return self.reached.is_set()

    def synchronize(self) -> None:
        if not self.blocking:
            spins.append(self)
        if self.reached is None:
            sleep_until(self.reached_at)
        else:
            wait_until(self.reached)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1e3 * (end.reached_at - self.reached_at)


def sleep_until(reached_at: float) -> None:
    """Return at a time; a sleep alone would return somewhat later."""
    left = reached_at - LATE_SEC - time.perf_counter()
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < reached_at:
        os.sched_yield()


def wait_until(reached: threading.Event) -> None:
    reached.wait()  # however long it takes, as a device's synchronization does


def current_stream(device: object = None) -> Stream:
    return getattr(_local, "stream", None) or default_stream


@contextlib.contextmanager
def stream(chosen: Stream):
    before = current_stream()
    _local.stream = chosen
    try:
        yield
    finally:
        _local.stream = before


def _move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on a stream's thread, which is in no inference mode, whatever tensors were made in."""
    with torch.inference_mode() if target.is_inference() else contextlib.nullcontext():
        COPY(target, source)


class CopyEngine:
    """Copies between the host and the accelerator in one direction, one after the other."""

    def __init__(self) -> None:
        self.bytes_per_sec = float("inf")
        self.moves_data = True
        """Whether the processor copies the data. A real engine needs no processor, so where both of
        this host's cores are busy, timing is truer without."""
        self._turn = threading.Lock()
        self._free_at = 0.0
        self._sec_per_byte = 0.0  # of the processor's own copy, which is part of the time

    def book(self, ready_at: float, nbytes: int) -> float:
        """Let a copy without data follow those before it; return when it ends."""
        with self._turn:
            self._free_at = max(self._free_at, ready_at) + nbytes / self.bytes_per_sec
            return self._free_at

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.bytes_per_sec == float("inf"):
            _move(target, source)
            return
        with self._turn:
            # What follows another copy begins at its end, even if this thread woke up late.
            began = max(self._free_at, time.perf_counter() - LATE_SEC)
            self._free_at = began + source.nbytes / self.bytes_per_sec
            own_sec = source.nbytes * self._sec_per_byte * self.moves_data
            time.sleep(max(0.0, self._free_at - own_sec - time.perf_counter()))
            awake_at = time.perf_counter()
            if not self.moves_data:
                return
            _move(target, source)
            self._sec_per_byte = (time.perf_counter() - awake_at) / max(1, source.nbytes)
            sleep_until(self._free_at)  # this copy was faster than the last one, say on a busy core


def set_bandwidth(out: float = float("inf"), back: float | None = None) -> None:
    """Set how many bytes a second the bus moves to the host, and back (None: as many)."""
    engines["out"].bytes_per_sec = out
    engines["back"].bytes_per_sec = out if back is None else back


engines = {"out": CopyEngine(), "back": CopyEngine()}
"""The bus: from the accelerator to the host, and back."""


class Memory:
    """The storage of a tensor and its views."""

    def __init__(self, content: torch.Tensor) -> None:
        self.recorded: list[Stream] = []
        owner = current_stream()
        weakref.finalize(self, _use_again, content, owner, self.recorded).atexit = False


def _use_again(content: torch.Tensor, owner: Stream, recorded: list[Stream]) -> None:
    for each in (owner, *recorded):
        reaper.wait_event(Event(each))
    reaper.give(lambda: content.untyped_storage().fill_(GARBAGE))


class DeviceTensor(torch.Tensor):
    """A tensor in the accelerator's memory, which the host cannot touch."""

    # A real device's tensors are of no class of their own, so that calls cost less.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, content: torch.Tensor, memory: Memory | None = None) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, content.size(), strides=content.stride(), storage_offset=content.storage_offset(),
            dtype=content.dtype, device=torch.device(TYPE, 0),
        )  # fmt: skip

    def __init__(self, content: torch.Tensor, memory: Memory | None = None) -> None:
        self.content = content
        self.memory = memory or Memory(content)

    def __repr__(self) -> str:
        return f"DeviceTensor({tuple(self.shape)})"

    def __reduce_ex__(self, protocol):
        return values(self).__reduce_ex__(protocol)  # a checkpoint is loaded to the host

    def record_stream(self, stream: Stream) -> None:
        if "no-record-stream" in switches():
            raise NotImplementedError("Could not run 'aten::record_stream' on this device")
        self.memory.recorded.append(stream)

    @classmethod
    def __torch_dispatch__(cls, func, classes, args=(), kwargs=None):
        if func is COPY:
            return _copy(*args, **kwargs or {})
        kwargs = dict(kwargs or {})
        given = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        if any(a.ndim and not isinstance(a, DeviceTensor) for a in given):
            raise RuntimeError(f"{func}: mixes host memory with the accelerator's")
        to_host = torch.device(kwargs.get("device") or TYPE).type == "cpu"
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func is BATCH_NORM_BACKWARD and None in (args[5], args[6]):
            # Normalization.cu, `batch_norm_backward_cuda`: also of fixed statistics.
            raise RuntimeError("save_mean and save_invstd should always be defined")
        raw_args, raw_kwargs = tree_map(_content, args), tree_map(_content, kwargs)
        func, raw_args, raw_kwargs = _divided_as_on_a_gpu(func, raw_args, raw_kwargs)
        if "frozen-statistics" in switches() and "batch_norm" in func.name():
            raw_args = [*raw_args[:3], *tree_map(_copied, raw_args[3:5]), *raw_args[5:]]
        run = _rounded(func) if "rounding" in switches() else func
        returns = func._schema.returns
        if func._schema.is_mutable and all(r.alias_info is not None for r in returns):
            current_stream().give(lambda: run(*raw_args, **raw_kwargs))
            return kwargs.get("out", args[0]) if returns else None
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view:
            current_stream().synchronize()
        owners = {_address(a.content): a.memory for a in given if isinstance(a, DeviceTensor)}
        same = {id(a.content): a for a in given if isinstance(a, DeviceTensor)}

        def wrap(value):
            if not isinstance(value, torch.Tensor) or to_host:
                return value
            if id(value) in same:
                return same[id(value)]
            return DeviceTensor(value, owners.get(_address(value)))

        return tree_map(wrap, (func if is_view else run)(*raw_args, **raw_kwargs))


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def _rounded(func):
    """Return an operation that computes 32-bit floats in 64 bits."""
    if torch.Tag.nondeterministic_seeded in func.tags:  # another type has other random numbers
        return func

    def run(*args, **kwargs):
        wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def widen(value):
            if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
                return value
            return wide.setdefault(id(value), (value, value.double()))[1]

        result = func(*tree_map(widen, list(args)), **tree_map(widen, kwargs))
        if func._schema.is_mutable or "batch_norm" in func.name():  # whose schema hides it
            for value, changed in wide.values():
                value.copy_(changed)
        return tree_map(lambda r: _narrow(r, wide, kwargs), result)

    return run


def _narrow(result, wide, kwargs):
    is_wide = isinstance(result, torch.Tensor) and result.dtype is torch.float64
    if not is_wide or not wide or kwargs.get("dtype") is torch.float64:
        return result
    same = [value for value, changed in wide.values() if changed is result]
    return same[0] if same else result.float()


def _divided_as_on_a_gpu(func, args, kwargs):
    """Divide by multiplying with the reciprocal, which rounds differently, as CUDA does."""
    if func not in DIVISIONS or kwargs.get("rounding_mode") is not None:
        return func, args, kwargs
    by = torch.as_tensor(args[1])
    if by.ndim or not args[0].is_floating_point():
        return func, args, kwargs
    # In the type that the kernel accumulates in, doubles for doubles.
    wide = torch.promote_types(args[0].dtype, torch.float32)
    return DIVISIONS[func], (args[0], torch.as_tensor(args[1], dtype=wide).reciprocal()), {}


def _content(value):
    return value.content if isinstance(value, DeviceTensor) else value


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    raw_target, raw_source = _content(target), _content(source)
    crosses = isinstance(target, DeviceTensor) != isinstance(source, DeviceTensor)
    engine = engines["back" if isinstance(target, DeviceTensor) else "out"]
    on = current_stream()
    if crosses and not engine.moves_data and on.is_foreseeable():
        on.ends_at = engine.book(max(on.ends_at, time.perf_counter()), raw_source.nbytes)
    else:
        copy = engine.copy if crosses else _move
        on.give(lambda: copy(raw_target, raw_source))
    if not non_blocking and not (
        isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor)
    ):
        current_stream().synchronize()
    return target


def on_device(tensor: torch.Tensor) -> DeviceTensor:
    """Copy a host tensor to the accelerator's memory."""
    return DeviceTensor(tensor.clone())


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the current stream and return a tensor's values on the host."""
    if not isinstance(tensor, DeviceTensor):
        return tensor
    current_stream().synchronize()
    return tensor.detach().content.clone()


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return DeviceTensor(torch.empty(size, dtype=dtype, memory_format=memory_format))


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    return DeviceTensor(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source, target, non_blocking=False):
    return _copy(target, source, non_blocking)


def _synchronize(device: object = None) -> None:
    default_stream.synchronize()
    current_stream().synchronize()


def install() -> torch.library.Library:
    """Register the device type with torch; keep what it returns."""
    global default_stream, reaper
    default_stream, reaper = Stream(), Stream()
    module = types.ModuleType(TYPE)
    vars(module).update(
        Stream=Stream, Event=Event, stream=stream, current_stream=current_stream,
        default_stream=lambda device=None: default_stream, synchronize=_synchronize,
        current_device=lambda: 0, set_device=lambda device: None,
        get_device_name=lambda device=None: "fake accelerator",
        get_device_properties=lambda device=None: types.SimpleNamespace(total_memory=1 << 32),
        reset_peak_memory_stats=lambda device=None: None, empty_cache=lambda: None,
        device_count=lambda: 1, is_available=lambda: True, is_initialized=lambda: True,
        manual_seed_all=lambda seed: None, _is_in_bad_fork=lambda: False,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )  # fmt: skip
    for switch in switches():
        if switch.startswith("-"):
            delattr(module, switch[1:])
    if HAS_PYTHON_DEVICES:
        backend_registration._setup_privateuseone_for_python_backend(TYPE, module)
    else:
        torch._register_device_module(TYPE, module)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, DISPATCH_KEY)
    library.impl("empty_strided", _empty_strided, DISPATCH_KEY)
    library.impl("_copy_from", _copy_from, DISPATCH_KEY)
    return library
