"""The base class of accelerators whose torch module is like `torch.cuda`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.devices.cpu import is_host_out_of_memory
from kaitian_mpi.devices.plugin import KindError, import_plugin, one_line


class Accelerator:
    """A device with its own memory and streams, accessed through `torch.get_device_module`.

    A kind's class sets `kind` and `torch_type`, and overrides what its vendor does differently.
    Vendors' plug-ins imitate the functions of `torch.cuda`; `torch.accelerator` has only some of
    them in the releases that the package supports.
    """

    kind: str
    torch_type: str
    vendor_backend: str | None = None
    library = ""
    plugin = ""
    visibility: tuple[str, ...] = ()
    """The environment variables that limit which devices a process sees, by index."""
    run_on_hardware = ""
    mpi_query = ""
    """The function by which an MPI library says that it can access the devices' memory."""
    is_host = False
    pins_memory = False
    futures_handle_streams = False

    def vendor_supports(self, dtype: torch.dtype, reduction: str | None) -> bool:
        """Return False: collectives use host memory, unless the kind overrides this."""
        return False

    def create_vendor_group(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> Any:
        """Return a process group of the backend that the vendor's plug-in registered."""
        assert self.vendor_backend is not None
        if self.vendor_backend.upper() not in dist.Backend._plugins:
            raise KindError(
                f"found no torch.distributed backend {self.vendor_backend!r} for {self.kind} "
                f"devices, needed the one that {self.plugin or 'its plug-in of torch'} registers; "
                "install a release of it with distributed support"
            )
        plugin = dist.Backend._plugins[self.vendor_backend.upper()]
        if not plugin.extended_api:
            return plugin.creator_fn(store, rank, size, timeout)
        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, size
        options.timeout = timeout
        return plugin.creator_fn(options, None)

    def count(self) -> int:
        """Return the number of visible devices; 0 if torch does not know the type.

        Raises:
            KindError: the kind's plug-in cannot be imported, or finds no device or driver.
        """
        try:
            module = self._module()
        except RuntimeError:  # no plug-in has registered it
            return 0
        try:
            count = int(module.device_count()) if module.is_available() else 0
        except (Exception, SystemExit) as error:
            raise self._unusable(f"asking it for devices fails: {one_line(error)}") from error
        if self.plugin and not count and not self._is_hidden():
            raise self._unusable("it finds no device")
        return count

    def torch_device(self, index: int) -> torch.device:
        """Return the torch device, such as `cuda:0`."""
        return torch.device(self.torch_type, index)

    def select(self, index: int) -> None:
        """Make this device the current one."""
        self._module().set_device(index)

    def synchronize(self, index: int) -> None:
        """Wait for all streams of the device."""
        self._module().synchronize(index)

    def name(self, index: int) -> str:
        """Return the device's name."""
        return str(self._module().get_device_name(index))

    def physical_id(self, index: int) -> str:
        """Return the device's PCI address or UUID, else its index on the host.

        The PCI address comes first because NCCL compares it to find two ranks on one device.
        """
        names = [self._hardware_id(each) for each in range(self.count())]
        name = names[index]
        # Some devices of one board have the same address or UUID.
        return name if name and names.count(name) == 1 else f"{name}#{self._host_index(index)}"

    def library_id(self, index: int) -> str:
        """Return the physical id."""
        return self.physical_id(index)

    def memory_bytes(self, index: int) -> int:
        """Return the device's memory in bytes."""
        return int(self._module().get_device_properties(index).total_memory)

    def memory_limit_bytes(self, index: int, sharers: int) -> int:
        """Return the memory this process already uses, plus its part of the free memory."""
        free, _ = self._module().mem_get_info(index)
        return int(self._module().memory_reserved(index) + free // sharers)

    def restart_memory_peak(self, index: int) -> None:
        """Reset the peak of torch's allocator."""
        self._module().reset_peak_memory_stats(index)

    def memory_peak_bytes(self, index: int) -> int:
        """Return the allocator's peak."""
        return int(self._module().max_memory_reserved(index))

    def release_cached_memory(self) -> None:
        """Empty the allocator's cache."""
        self._module().empty_cache()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether the allocator, the driver or the host had too little memory."""
        if isinstance(error, torch.OutOfMemoryError) or is_host_out_of_memory(error):
            return True
        # Plug-ins and drivers raise other errors, such as "CUDA error: out of memory".
        return isinstance(error, RuntimeError) and "out of memory" in str(error)

    def streams(self) -> Any | None:
        """Return torch's module for the device, if it has streams."""
        module = self._module()
        return module if hasattr(module, "Stream") else None

    def mark(self) -> EventMark:
        """Record an event on the current stream."""
        return EventMark(self._module().Event(enable_timing=True))

    def random_state(self, index: int) -> torch.Tensor | None:
        """Return the state of the device's generator."""
        state: torch.Tensor = self._module().get_rng_state(index)
        return state

    def set_random_state(self, index: int, state: torch.Tensor) -> None:
        """Set the state of the device's generator."""
        self._module().set_rng_state(state, index)

    def _module(self) -> Any:
        if self.plugin:
            import_plugin(self.plugin)
        return torch.get_device_module(self.torch_type)

    def _unusable(self, reason: str) -> KindError:
        source = f"the package {self.plugin}" if self.plugin else "torch's build"
        return KindError(
            f"{source} supports {self.kind} devices, but {reason}; check that the vendor's driver "
            "is loaded and that this process may open its devices, or uninstall the package"
        )

    def _is_hidden(self) -> bool:
        """Return whether the user hides all devices from this process."""
        return any(os.environ.get(name, "0").strip() in ("", "-1") for name in self.visibility)

    def _hardware_id(self, index: int) -> str:
        """Return the device's PCI address or UUID; "" if torch's module has neither."""
        try:
            found = self._module().get_device_properties(index)
        except Exception:  # a faulty device has an index as well
            return ""
        if hasattr(found, "pci_bus_id"):
            domain = getattr(found, "pci_domain_id", 0)
            return f"{domain:04x}:{found.pci_bus_id:02x}:{getattr(found, 'pci_device_id', 0):02x}"
        uuid = str(getattr(found, "uuid", ""))
        return uuid if uuid.strip("0-") else ""  # one of zeros is not set

    def _host_index(self, index: int) -> str:
        """Return the device's index on the host, by the variables that limit what is visible."""
        for name in self.visibility:
            given = os.environ.get(name, "")
            listed = [entry.strip() for entry in given.split(",")]
            if given and index < len(listed) and all(entry.isdigit() for entry in listed):
                return listed[index]
            if given:
                return f"{index} of {given}"
        return str(index)


class UnlistedAccelerator(Accelerator):
    """The kind of tensors whose torch device type belongs to no known kind."""

    def __init__(self, torch_type: str) -> None:
        self.kind = self.torch_type = torch_type


class EventMark:
    """An event, recorded on the current stream."""

    def __init__(self, event: Any) -> None:
        self._event = event
        event.record()

    def is_reached(self) -> bool:
        """Return whether the stream has passed it."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block until the stream has passed it."""
        self._event.synchronize()

    def seconds_since(self, earlier: EventMark) -> float:
        """Return the seconds by the device's own clock."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3
