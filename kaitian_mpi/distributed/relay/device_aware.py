"""Whether MPI is given device memory: only if it says that it can, does it right, and is faster.

Some MPI libraries are built with support for CUDA, ROCm or Level Zero. What they say is not enough:
the memory may be out of reach all the same (another vendor's, or a transport without support), and
many of them copy a reduction's data to ordinary host memory first, which is slower than the relay.

Tried with the fake accelerator of tests/vendor only; not run on hardware.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.mpi import host_collectives
from kaitian_mpi.mpi.datatypes import Reduction, as_raw_buffer
from kaitian_mpi.mpi.exchange import gather_values

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)

TRIAL_BYTES = 4 << 20
REPEATS = 4  # the first one warms up

_DTYPES = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


def may_be_direct(dtype: torch.dtype, op: Reduction) -> bool:
    """Return whether a reduction is MPI's alone, without work of ours on the received data."""
    return dtype in _DTYPES and op.mpi_supports(dtype) and not op.is_average


def agree_on_direct(
    comm: MPI.Comm, device: torch.device, through_host: Callable[[torch.Tensor], None]
) -> bool:
    """Return whether MPI should be given tensors of the ranks' devices. Collective over `comm`.

    The same on every rank: the ranks agree after each step, so none is left alone in the next.

    Args:
        comm: the ranks; at least one has an accelerator.
        device: this rank's device.
        through_host: reduces a tensor over `comm` by the relay. Collective.
    """
    if not all(gather_values(comm, device_of(device).is_host or mpi_supports(device))):
        return False
    fault = ""
    if not all(gather_values(comm, moves_correctly(device))):
        fault = "a message from this rank to itself arrived wrong"
    tensor = torch.ones(TRIAL_BYTES // 4, device=device)
    if not fault and not all(gather_values(comm, reduces_correctly(comm, tensor))):
        fault = "a sum was wrong"
    if fault:
        if comm.rank == 0:
            _log.warning(
                "MPI says that it can access device memory, but %s on some rank: tensors go "
                "through host memory; correct MPI's installation, or ignore this",
                fault,
            )
        return False
    direct = _slowest_sec(comm, tensor, lambda each: reduce_directly(comm, each))
    relayed = _slowest_sec(comm, tensor, through_host)
    if comm.rank == 0:
        _log.info(
            "MPI reduces device memory itself in %.1f ms, the relay in %.1f ms",
            *(1e3 * direct, 1e3 * relayed),
        )
    return direct < relayed


def mpi_supports(device: torch.device) -> bool:
    """Return whether the MPI library says that it accesses a device's memory. Not collective."""
    from mpi4py import MPI

    query = device_of(device).mpi_query
    # Symbols of the MPI library are found through the module that is linked with it.
    found = getattr(ctypes.CDLL(MPI.__file__), query, None) if query else None
    return found is not None and bool(found())


def moves_correctly(device: torch.device) -> bool:
    """Return whether this process can send device memory to itself. Not collective."""
    from mpi4py import MPI

    sent = torch.arange(1, 1025, dtype=torch.int32).to(device)
    received = torch.zeros_like(sent)
    wait_for_device(sent)
    try:
        MPI.COMM_SELF.Sendrecv(as_raw_buffer(sent), 0, 0, as_raw_buffer(received), 0, 0)
    except (MPI.Exception, ValueError, RuntimeError):
        return False
    return torch.equal(received.cpu(), torch.arange(1, 1025, dtype=torch.int32))


def reduces_correctly(comm: MPI.Comm, tensor: torch.Tensor) -> bool:
    """Sum a tensor of ones, which becomes the number of ranks; return whether it does."""
    reduce_directly(comm, tensor)
    return bool((tensor.cpu() == comm.size).all())


def reduce_directly(comm: MPI.Comm, tensor: torch.Tensor) -> None:
    """Sum a flat tensor over the ranks, in place, by MPI alone. Collective."""
    wait_for_device(tensor)
    host_collectives.allreduce(comm, tensor)


def wait_for_device(tensor: torch.Tensor) -> None:
    """Block until the tensor's values are in its memory: MPI does not know of streams."""
    module = None if tensor.is_cpu else device_of(tensor.device).streams()
    if module is not None:
        module.current_stream(tensor.device).synchronize()


def _slowest_sec(
    comm: MPI.Comm, tensor: torch.Tensor, reduce: Callable[[torch.Tensor], None]
) -> float:
    seconds = []
    for _ in range(REPEATS):
        tensor.zero_()  # else it grows
        wait_for_device(tensor)
        began = time.perf_counter()
        reduce(tensor)
        wait_for_device(tensor)
        seconds.append(time.perf_counter() - began)
    return float(max(gather_values(comm, min(seconds[1:]))))
