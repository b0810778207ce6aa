"""Tensors for loading processes, in memory that no file system limits.

torch itself sends tensors through files in /dev/shm, which holds 64 MB in many containers.
"""

from __future__ import annotations

import io
import mmap
import os
import weakref
from multiprocessing import reduction
from typing import Any

import torch
from torch.utils.data import Dataset


class Parcel:
    """A value that arrives in another process as itself; its tensors lie in anonymous memory.

    To be sent by multiprocessing: to a process that is being started, or into a queue. What the
    receiver writes to the tensors stays its own. Tensors that are shared already stay shared.
    """

    def __init__(self, value: Any) -> None:
        self._value, self._region = value, _Region()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the tensors once, however many processes they are for."""
        stream = io.BytesIO()
        _Pickler(stream, self._region).dump(self._value)
        return reduction.ForkingPickler.loads, (stream.getvalue(),)


class _Region:
    """Anonymous memory that grows by what is put in; it arrives as a private mapping of it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("kaitian-data", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._starts: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no other takes its address

    def put(self, storage: torch.UntypedStorage) -> int:
        """Return where a storage begins in here, in bytes; it is copied unless it has been."""
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._starts:
            start = self._starts[address] = self._end
            self._kept.append(storage)
            self._end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # a mapping begins at a page
            os.ftruncate(self._file, self._end)
            memory = mmap.mmap(self._file, size, offset=start)
            torch.frombuffer(memory, dtype=torch.uint8).untyped_storage().copy_(storage)
        return self._starts[address]

    def __reduce__(self) -> tuple[Any, ...]:
        return _map, (reduction.DupFd(self._file),)


class _Pickler(reduction.ForkingPickler):
    """Puts the contents of plain tensors on the host into a region."""

    def __init__(self, stream: io.BytesIO, region: _Region) -> None:
        super().__init__(stream)
        self._region = region

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made in the other process; others as multiprocessing has it."""
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        if not is_plain or not value.is_cpu or value.requires_grad:
            return NotImplemented
        storage = value.untyped_storage()
        if value.is_conj() or value.is_neg() or value.is_quantized or storage.is_shared():
            return NotImplemented
        view = value.storage_offset(), tuple(value.shape), value.stride()
        if storage.nbytes() == 0:
            return _tensor, (None, 0, value.dtype, *view)
        start = self._region.put(storage)
        return _tensor, (self._region, start, value.dtype, *view)


def _map(file: Any) -> torch.UntypedStorage:
    number = file.detach()
    memory = mmap.mmap(number, 0, access=mmap.ACCESS_COPY)
    os.close(number)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _tensor(
    region: torch.UntypedStorage | None,
    start: int,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """Return a tensor in a region, from the byte at which its storage starts there."""
    if region is None:
        return torch.empty_strided(shape, stride, dtype=dtype)
    first = start // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype).set_(region, first, shape, stride)  # type: ignore[call-overload,no-any-return]


class ByParcel(Dataset[Any]):
    """A data set that goes to loading processes in a parcel, and whose batches come back in one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._parcel = dataset, Parcel(dataset)

    def __getitem__(self, indices: list[int]) -> Any:
        """Return a batch, for another process."""
        return Parcel(self._dataset[indices])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pack the data set."""
        return ByParcel, (self._parcel,)
