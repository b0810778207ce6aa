"""Device kinds: one small file a kind, behind one protocol.

To add a vendor, write a file with a class that satisfies `Device` and name it in `KINDS`.
"""

from __future__ import annotations

from importlib import import_module

from kaitian_mpi.devices.protocol import Device

# Looked through in this order by `--devices auto`; cpu is last because it is always there.
KINDS: dict[str, str] = {
    "cuda": "kaitian_mpi.devices.cuda:CudaDevice",
    "cpu": "kaitian_mpi.devices.cpu:CpuDevice",
}


def device_of_kind(kind: str) -> Device:
    """Return the device class of a kind, ready to be asked; `kind` must be in `KINDS`."""
    module, _, name = KINDS[kind].partition(":")
    device: Device = getattr(import_module(module), name)()
    return device


__all__ = ["KINDS", "Device", "device_of_kind"]
