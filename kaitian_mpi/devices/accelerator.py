"""The base class of accelerators whose torch modules have the functions of `torch.cuda`."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.config.factory import one_line
from kaitian_mpi.devices.choice import VISIBILITY
from kaitian_mpi.devices.plugin import KindError, import_plugin
from kaitian_mpi.devices.protocol import Device, Mark, event_to_wait_for

_OUT_OF_MEMORY = (
    "out of memory",  # torch's allocators for CUDA, HIP, XPU, MPS, NPU, MLU and MUSA, and drivers
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN up to 8, hipBLAS, muBLAS, CNNL
    "_ALLOCATION_FAILED",  # cuDNN 9: CUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED
    "miopenStatusAllocFailed",  # MIOpen
    "Failed to CUDA calloc",  # NCCL and RCCL
    "ERROR_OUT_OF_DEVICE_MEMORY",  # Intel's UR_RESULT_… and ZE_RESULT_…
    "ERROR_OUT_OF_HOST_MEMORY",
    "ERROR_OUT_OF_RESOURCES",  # PI_ERROR_… for either, in oneAPI before 2025
    "MEM_OBJECT_ALLOCATION_FAILURE",
    "error code is 207001",  # CANN: ACL_ERROR_RT_MEMORY_ALLOCATION
    "EL0004",  # CANN: Memory_Allocation_Failure
    "EI0007",  # HCCL: Allocation_Failure, memory resources are exhausted
    "cnrtErrorNoMem",  # Cambricon's runtime
)
"""Phrases in torch's errors that mean that a driver or library is out of memory."""

_OFF = ("0", "n", "no", "f", "false")  # as `getCvarBool` of torch's Utils.hpp reads them


class Accelerator(Device):
    """A device with its own memory and streams, accessed through `torch.get_device_module`.

    A kind's class sets `kind` and `torch_type`, and overrides what its vendor does differently. A
    `KindError` names what a plug-in lacks.
    """

    moved: frozenset[torch.dtype] = frozenset()
    reduced: frozenset[torch.dtype] = frozenset()
    """The dtypes that the vendor's library can move, and those that it can reduce."""
    reductions: frozenset[str] = frozenset()
    refused: frozenset[tuple[str, torch.dtype]] = frozenset()
    """Its reductions, except of these dtypes."""

    _kept: tuple[tuple[torch.Tensor, Any, Any], ...] = ()

    lists_devices = ""
    """The command that lists the driver's devices, for a kind that torch's own builds have."""

    @property
    def visibility(self) -> tuple[str, ...]:
        """The environment variables that limit which devices a process sees, by index."""
        return VISIBILITY.get(self.kind, ())

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        if reduction is None:
            return dtype in self.moved
        is_refused = (reduction, dtype) in self.refused
        return dtype in self.reduced and reduction in self.reductions and not is_refused

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return a group of the backend registered by a plug-in, or of torch's own backend."""
        plugin, built_in = self._backends()
        if fault := self.missing_library():
            raise KindError(fault)
        if plugin is None:
            options = built_in.Options()
            options._timeout = timeout
            return built_in(store, rank, size, options)
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store = store
        options.group_rank = rank
        options.group_size = size
        options.timeout = timeout
        return plugin.creator_fn(options, None)

    def missing_library(self) -> str:
        if self.vendor_backend is None or any(backend is not None for backend in self._backends()):
            return ""
        return (
            f"{self.plugin or 'this build of torch'} has no torch.distributed backend "
            f"{self.vendor_backend!r}, so {self.kind} devices communicate through host memory, "
            "which is slower; install a release of it with distributed support"
        )

    def _backends(self) -> tuple[Any, Any]:
        """Return the vendor's backend in a plug-in and in torch itself, None if missing."""
        name = (self.vendor_backend or "").upper()
        built_in = getattr(dist.distributed_c10d, f"ProcessGroup{name}", None)
        return dist.Backend._plugins.get(name), built_in

    def leave_losses_to_caller(self) -> list[str]:
        """Turn off what torch's backend does about errors of its own accord.

        NCCL's watchdog ends the process, or sleeps for a minute with a lock that others need
        (`ProcessGroupNCCL.cpp`: `ErrorHandlingMode`, `HeartbeatMonitor`, `Watchdog::runLoop`).
        The vendors' plug-ins have the same, with their library's name in the variables' names.
        """
        faults = []
        for name, off in self.error_handling().items():
            value = os.environ.setdefault(name, off[0])
            if value.strip().lower() not in off:
                faults.append(
                    f"{name}={value} lets torch end or delay the ranks that survive a loss; "
                    "unset it"
                )
        return faults

    def error_handling(self) -> dict[str, tuple[str, ...]]:
        """Return the variables that `leave_losses_to_caller` sets, and the values that mean off."""
        library = (self.vendor_backend or "").upper()
        errors: dict[str, tuple[str, ...]]
        errors = {f"TORCH_{library}_ASYNC_ERROR_HANDLING": ("0", "2")}  # 2: aborts only the group
        if self.plugin:  # whose older releases, and all of torch_npu, have no prefix here
            errors[f"{library}_ASYNC_ERROR_HANDLING"] = ("0", "2")
        errors[f"TORCH_{library}_WAIT_TIMEOUT_DUMP_MILSEC"] = ("0",)
        names = ("ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR")
        return {**errors, **{f"TORCH_{library}_{name}": _OFF for name in names}}

    def count(self) -> int:
        try:
            module = self._module()
        except RuntimeError:  # no plug-in has registered it
            return 0
        try:
            count = int(module.device_count()) if self._may_have_devices(module) else 0
        except (Exception, SystemExit) as error:
            raise self._unusable(f"asking it for devices fails: {one_line(error)}") from error
        is_hidden = any(os.environ.get(n, "0").strip() in ("", "-1") for n in self.visibility)
        if not count and not is_hidden and (reason := self._why_none()):
            raise self._unusable(reason)
        return count

    def select(self, index: int) -> None:
        self._call("set_device", index)
        self.random_state(index)  # a plug-in without it is refused now, not at the first checkpoint

    def synchronize(self, index: int) -> None:
        self._call("synchronize", index)

    def name(self, index: int) -> str:
        module = self._module()
        if hasattr(module, "get_device_name"):
            return str(module.get_device_name(index))
        return str(getattr(self._properties(index), "name", self.kind))

    def physical_id(self, index: int) -> str:
        """Return the device's PCI address (which NCCL compares), its UUID, or else its index."""
        names = [self._hardware_id(number) for number in range(self.count())]
        name = names[index]
        # Some devices of one board have the same address or UUID.
        return name if name and names.count(name) == 1 else f"{name}#{self._host_index(index)}"

    def memory_bytes(self, index: int) -> int:
        total = getattr(self._properties(index), "total_memory", None)
        return int(self._call("mem_get_info", index)[1] if total is None else total)

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        reserved = self._call("memory_reserved", index)
        return int(reserved + self._call("mem_get_info", index)[0] // sharers)

    def restart_memory_peak(self, index: int) -> None:
        with suppress(KindError):
            self._call("reset_peak_memory_stats", index)

    def memory_peak_bytes(self, index: int) -> int:
        # An allocator without a cache may count only what is allocated.
        reserved = self._call("max_memory_reserved", index)
        return int(reserved or self._call("max_memory_allocated", index))

    def tensor_bytes(self, index: int) -> tuple[int, int]:
        with suppress(KindError):
            names = "memory_allocated", "max_memory_allocated"
            now, most = (int(self._call(name, index)) for name in names)
            return now, most
        return 0, 0

    def release_cached_memory(self) -> None:
        with suppress(KindError):
            self._call("empty_cache")

    def is_out_of_memory(self, error: BaseException) -> bool:
        if super().is_out_of_memory(error):
            return True
        # torch's allocators raise a type of their own; drivers and libraries do not.
        return isinstance(error, RuntimeError) and any(map(str(error).__contains__, _OUT_OF_MEMORY))

    def streams(self) -> Any | None:
        """Return torch's module for the device; None if it has no streams."""
        module = self._module()
        names = ("Stream", "Event", "stream", "current_stream")
        return module if all(hasattr(module, name) for name in names) else None

    def mark(self) -> Mark:
        streams = self.streams()
        return EventMark(event_to_wait_for(streams, enable_timing=True)) if streams else Mark()

    def keep_until_done(self, tensor: torch.Tensor, stream: Any) -> None:
        try:
            tensor.record_stream(stream)
        except NotImplementedError:  # some plug-ins lack it
            end = stream.record_event()  # after all uses of the tensors kept before
            pending = [(t, s, end if e is None and s == stream else e) for t, s, e in self._kept]
            pending = [(t, s, e) for t, s, e in pending if e is None or not e.query()]
            self._kept = (*pending, (tensor, stream, None))

    def random_state(self, index: int) -> torch.Tensor | None:
        state: torch.Tensor = self._call("get_rng_state", index)
        return state

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        self._call("set_rng_state", state, index)

    def _module(self) -> Any:
        if self.plugin:
            import_plugin(self.plugin)
        return torch.get_device_module(self.torch_type)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the device's module."""
        module = self._module()
        if not hasattr(module, name):
            raise KindError(
                f"{self.kind} devices: torch.{self.torch_type} has no {name}; install a release of "
                f"the plug-in that has it, or override the methods of {type(self).__name__} that "
                "need it"
            )
        return getattr(module, name)(*arguments)

    def _properties(self, index: int) -> Any:
        module = self._module()
        if not hasattr(module, "get_device_properties"):
            return None
        return module.get_device_properties(index)

    def _may_have_devices(self, module: Any) -> bool:
        return bool(module.is_available())

    def _why_none(self) -> str:
        """Return why having no device is a fault; "" if it is not."""
        if self.lists_devices:
            return f"it finds none ({self.lists_devices} lists those of the driver)"
        return "it finds no device" if self.plugin else ""

    def _unusable(self, reason: str) -> KindError:
        source = f"the package {self.plugin}" if self.plugin else "torch's build"
        return KindError(
            f"{source} supports {self.kind} devices, but {reason}; check that the vendor's driver "
            "is loaded and that this process may open its devices"
            f"{', or uninstall the package' if self.plugin else ''}"
        )

    def _hardware_id(self, index: int) -> str:
        try:
            properties = self._properties(index)
        except Exception:  # a faulty device has an index as well
            return ""
        if hasattr(properties, "pci_bus_id"):
            domain = getattr(properties, "pci_domain_id", 0)
            device = getattr(properties, "pci_device_id", 0)
            return f"{domain:04x}:{properties.pci_bus_id:02x}:{device:02x}"
        uuid = str(getattr(properties, "uuid", ""))
        return uuid if uuid.strip("0-") else ""  # all zeros: not set

    def _host_index(self, index: int) -> str:
        """Return the device's index on the host, by the variables that limit what is visible."""
        for name in self.visibility:
            visible = os.environ.get(name, "")
            listed = [entry.strip() for entry in visible.split(",")]
            if visible and index < len(listed) and all(entry.isdigit() for entry in listed):
                return listed[index]
            if visible:
                return f"{index} of {visible}"
        return str(index)


class UnlistedAccelerator(Accelerator):
    """The kind of tensors whose torch device type is that of no known kind."""

    def __init__(self, torch_type: str) -> None:
        self.kind = self.torch_type = torch_type


class EventMark(Mark):
    """An event, recorded on the current stream, with the device's own time."""

    def __init__(self, event: Any) -> None:
        self._event = event
        event.record()

    def is_reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: EventMark) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3
