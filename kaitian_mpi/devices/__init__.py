"""Device kinds: one file per kind, with everything specific to it, behind one protocol."""

from kaitian_mpi.devices.protocol import Device
from kaitian_mpi.devices.registry import device_of, known_kinds

__all__ = ["Device", "device_of", "known_kinds"]
