"""Sends tensors to and from data loading workers in anonymous shared memory.

torch itself sends them through files in /dev/shm, which is limited to 64 MB in many containers.
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

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.system import anonymous_file


class SharedTensors:
    """Wraps a value for sending to another process, with its tensors in anonymous memory.

    The receiver gets the value itself, without the wrapper. It is sent by multiprocessing: to a
    process that is being started, or through a queue. The receiver's writes to the tensors are
    private. Tensors that are already shared stay shared.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._region = _Region()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value; its tensors are copied once, whatever the number of receivers."""
        stream = io.BytesIO()
        _Pickler(stream, self._region).dump(self._value)
        return reduction.ForkingPickler.loads, (stream.getvalue(),)


class _Region:
    """Growing anonymous memory that holds tensors; the receiver gets a private mapping of it."""

    def __init__(self) -> None:
        self._file = anonymous_file("kaitian-data")
        weakref.finalize(self, os.close, self._file)
        self._end = 0
        self._starts: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []  # so that no other storage reuses its address

    def put(self, storage: torch.UntypedStorage) -> int:
        """Return a storage's offset in this region, in bytes; copies it the first time."""
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._starts:
            start = self._starts[address] = self._end
            self._kept.append(storage)
            self._end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # a mapping starts at a page
            os.ftruncate(self._file, self._end)
            memory = mmap.mmap(self._file, size, offset=start)
            torch.frombuffer(memory, dtype=torch.uint8).untyped_storage().copy_(storage)
        return self._starts[address]

    def __reduce__(self) -> tuple[Any, ...]:
        return _map, (reduction.DupFd(self._file),)


class _Pickler(reduction.ForkingPickler):
    """Puts the contents of plain CPU tensors into a region."""

    def __init__(self, stream: io.BytesIO, region: _Region) -> None:
        super().__init__(stream)
        self._region = region

    def reducer_override(self, value: Any) -> Any:
        """Return how to rebuild a plain CPU tensor; leave all else to multiprocessing."""
        is_plain = type(value) is torch.Tensor and value.layout is torch.strided
        is_plain = is_plain and not value.is_nested
        if not is_plain or not value.is_cpu or value.requires_grad:
            return NotImplemented
        storage = value.untyped_storage()
        if value.is_conj() or value.is_neg() or value.is_quantized or storage.is_shared():
            return NotImplemented
        is_empty = storage.nbytes() == 0
        place = (None, 0) if is_empty else (self._region, self._region.put(storage))
        shape = tuple(value.shape), value.stride()
        return _tensor, (*place, value.dtype, value.storage_offset(), shape)


def _map(file: Any) -> torch.UntypedStorage:
    descriptor = file.detach()
    memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    os.close(descriptor)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _tensor(region: Any, start: int, dtype: torch.dtype, offset: int, shape: Any) -> torch.Tensor:
    """Return a tensor of a shape and strides, given the byte offset of its storage in a region."""
    if region is None:
        return torch.empty_strided(*shape, dtype=dtype)
    first = start // dtype.itemsize + offset
    return torch.empty(0, dtype=dtype).set_(region, first, *shape)


class SharedTensorDataset(Dataset[Any]):
    """Wraps a dataset so that it is sent to workers, and its batches back, as a `SharedTensors`.

    A `UserError` is sent back as a value: torch's loader would add the worker's traceback to it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._shared = SharedTensors(dataset)

    def __getitem__(self, indices: list[int]) -> Any:
        try:
            return SharedTensors(self._dataset[indices])
        except UserError as error:
            return UserError(str(error))

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedTensorDataset, (self._shared,)
