"""An accelerator with streams, its own memory and several devices, emulated on the host.

Its tensors are plain ones, of torch's device type for other accelerators (PrivateUse1), so that a
parameter's class and data may be changed as on a GPU, and hooks run in autograd's device thread.

- `streams`: each stream is a thread. Operations are queued on the current stream of the thread that
  asks, as on a GPU. `synchronizations` lists every time that the host has waited for the device:
  clear it, run a step, count. The current device and streams are each thread's; `contexts` has the
  devices that the process has touched.
- `memory`: an allocator with a cache. `set_limit(bytes)` is how much a device has; the functions of
  `torch.cuda`'s names say what is allocated and reserved, and the peaks. Memory that is dropped is
  overwritten as soon as the stream it was made on is done with it, unless `record_stream` named
  further streams.
- `bus`: a copy engine for each direction. `set_bandwidth` makes copies take their time; memory that
  is not page-locked is slow, and the host waits for its copy.
- `operations`: the host's kernels.

`KAITIAN_FAKE_DEVICE` switches on, separated by commas, what some real devices do:

`frozen-statistics`
    Batch norm does not update its running statistics.
`rounding`
    Results of 32-bit floats are rounded from 64 bits, so that they are not the CPU's to the bit.
`no-record-stream`
    `Tensor.record_stream` is missing, as in some plug-ins.
`-NAME`
    The device's module lacks a name, such as `-mem_get_info`.
"""

from __future__ import annotations

import types

import torch
from torch.utils import backend_registration

from . import bus, extension, memory, operations, streams
from .bus import CopyEngine, engines, set_bandwidth
from .memory import GARBAGE, set_limit
from .operations import VARIABLE, host_view, recorded_streams, switches
from .streams import (
    Event,
    Stream,
    contexts,
    current_stream,
    spins,
    stream,
    synchronizations,
    wait_until,
)

TYPE = "fake"

__all__ = [
    "GARBAGE",
    "TYPE",
    "VARIABLE",
    "CopyEngine",
    "Event",
    "Stream",
    "bus",
    "contexts",
    "current",
    "current_stream",
    "engines",
    "host_view",
    "install",
    "memory",
    "on_device",
    "operations",
    "recorded_streams",
    "set_bandwidth",
    "set_limit",
    "spins",
    "stream",
    "streams",
    "switches",
    "synchronizations",
    "values",
    "wait_until",
]


def current() -> torch.device:
    """Return this thread's device."""
    return torch.device(TYPE, streams.current_device())


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to the current device's memory."""
    return tensor.to(current())


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the current stream and return a tensor's values on the host."""
    if not operations.is_on_device(tensor):
        return tensor
    current_stream(tensor.device).queue.finish()
    return host_view(tensor.detach()).clone()


def _properties(device: object = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        total_memory=memory.memories[streams.index_of(device)].capacity_bytes
    )


def install() -> list[torch.library.Library]:
    """Register the device type with torch; keep what it returns."""
    extension.start(
        allocate=memory.allocate,
        release=memory.release,
        record=streams.record_for_torch,
        block=streams.block_for_torch,
        query=streams.query_for_torch,
        synchronize_event=streams.synchronize_event_for_torch,
        destroy=streams.destroy_for_torch,
        synchronize_stream=streams.synchronize_stream_for_torch,
        record_memory=memory.record_memory,
        new_stream=streams.new_stream_for_torch,
    )
    torch.utils.rename_privateuse1_backend(TYPE)
    backend_registration.generate_methods_for_privateuse1_backend()
    module = types.ModuleType(f"torch.{TYPE}")
    for source, names in _NAMES.items():
        vars(module).update({name: getattr(source, name) for name in names.split()})
    vars(module).update(
        get_device_name=lambda device=None: "fake accelerator",
        get_device_properties=_properties,
        device_count=lambda: len(memory.memories), is_available=lambda: True,
        is_initialized=lambda: True, manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False, _lazy_init=lambda: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    )  # fmt: skip
    for switch in switches():
        if switch.startswith("-"):
            delattr(module, switch[1:])
    torch._register_device_module(TYPE, module)
    return operations.register()


_NAMES = {
    streams: "Stream Event stream set_stream current_stream default_stream synchronize"
    " current_device set_device device",
    memory: "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"
    " reset_peak_memory_stats empty_cache mem_get_info set_per_process_memory_fraction",
}
"""The names of the device's module, by where they are."""
