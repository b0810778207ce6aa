"""Stands for the memory of values in `torch.save`, which reads one storage after the other.

`torch.save` pickles tensors without their storages, notes these by `persistent_id`, and writes them
at its end, each copied to the host by its `cpu()` before: see `torch.serialization._save`. So a
storage may be read from its owners then, and freed before the next one. Any other pickler
gets the bytes of an older format, as from each of torch's typed storages.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

import torch
from torch.storage import TypedStorage, UntypedStorage

from kaitian_mpi.distributed.pending_parameter import memory_users
from kaitian_mpi.errors import UserError


class SavedValues(Protocol):
    """Values that are read when they are written."""

    @property
    def like(self) -> torch.Tensor:
        """A tensor on meta of the same shape, strides and dtype."""

    def version(self) -> Any:
        """Return a value that differs after each change of the values."""

    def read_into(self, values: torch.Tensor) -> None:
        """Read the values into a tensor in host memory."""


class SavedMemory:
    """Host memory for one storage after the other of what is saved."""

    def __init__(self) -> None:
        """Take no memory yet."""
        self._bytes = 0
        self._memory: torch.Tensor | None = None
        self._lock = threading.Lock()

    def expect(self, size: int) -> None:
        """Be large enough for a storage of so many bytes."""
        self._bytes = max(self._bytes, size)

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor like another one: the former one's, if that is not in use."""
        with self._lock:
            memory = self._memory
            if memory is None or memory.nbytes < like.nbytes or memory_users(memory) > 1:
                self._memory = memory = None
                self._memory = memory = torch.empty(self._bytes, dtype=torch.uint8)
            return memory[: like.nbytes].view(like.dtype).as_strided(like.shape, like.stride())


_memory_of_saves: weakref.WeakValueDictionary[int, SavedMemory] = weakref.WeakValueDictionary()
"""By the thread that saves; the storages of a save keep it."""


def _join_save(size: int) -> SavedMemory:
    """Return the memory of this thread's save for one more storage, or that of a new save."""
    thread = threading.get_ident()
    memory = _memory_of_saves.get(thread)
    if memory is None:
        memory = _memory_of_saves[thread] = SavedMemory()
    memory.expect(size)
    return memory


class SavedStorage:
    """What `torch.save` takes for the untyped storage of values.

    Attributes:
        device: one that is not the host, so that `cpu` is called.
    """

    device = torch.device("meta")

    def __init__(self, values: SavedValues) -> None:
        """Stand for the storage of the values of now."""
        self._values = values
        self._version = values.version()
        self._memory = _join_save(values.like.nbytes)

    @property
    def _cdata(self) -> int:
        """A number of this storage alone, and of others that stand for the same values."""
        return id(self._values)

    def data_ptr(self) -> int:
        """Return 0, as a storage without memory."""
        return 0

    def nbytes(self) -> int:
        """Return the size of the values."""
        return self._values.like.nbytes

    def cpu(self) -> UntypedStorage:
        """Return the storage with the values, read now.

        Raises:
            UserError: they have changed since this was made.
        """
        values = self._memory.empty(self._values.like)
        self._values.read_into(values)
        if self._values.version() != self._version:
            raise UserError(
                "--layout shard: values have changed while they were saved; save between "
                "optimizer.step() and the next backward(), and not from another thread"
            )
        return values.untyped_storage()[: values.nbytes]

    def _write_file(self, *arguments: Any) -> None:
        """Write the values, as the format of before torch 1.6 does."""
        self.cpu()._write_file(*arguments)


class TypedSavedStorage(TypedStorage):
    """What a tensor's pickle has in place of its storage."""

    def __new__(cls, *_: Any) -> TypedSavedStorage:
        """Make one without the arguments of torch's storages."""
        return object.__new__(cls)

    def __init__(self, storage: SavedStorage, dtype: torch.dtype) -> None:
        """Stand for a storage of elements of a dtype."""
        self._untyped_storage = storage  # type: ignore[assignment]
        self.dtype = dtype


def standing_in(values: SavedValues, protocol: Any) -> Any:
    """Return how values are pickled, as by a tensor's `__reduce_ex__`, without reading them.

    None if a tensor of their dtype is pickled in another way than by a typed storage.
    """
    like = values.like
    function, arguments = torch.empty(0, dtype=like.dtype).__reduce_ex__(protocol)
    is_usual = function is torch._utils._rebuild_tensor_v2 and type(arguments[0]) is TypedStorage
    if not is_usual or not like.numel():
        return None
    storage = TypedSavedStorage(SavedStorage(values), like.dtype)
    return function, (storage, 0, tuple(like.shape), like.stride(), *arguments[4:])


def _location(storage: Any) -> str | None:
    return "cpu" if isinstance(storage, SavedStorage) else None


# Before those of devices, of which no storage is of this class.
torch.serialization.register_package(-1, _location, lambda *_: None)
