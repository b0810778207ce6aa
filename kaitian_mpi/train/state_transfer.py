"""Copies a training state between ranks, files and devices, a piece of a tensor at a time.

A state is nested dicts, lists and tuples of tensors and plain values. It may fill most of a host's
memory: no rank holds a second copy of more than a piece, unless it asks for a copy.
"""

from __future__ import annotations

import ctypes
import io
import mmap
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime import tags

if TYPE_CHECKING:
    from mpi4py import MPI

_MIN_BYTES = 1 << 16  # smaller tensors are copied and sent as they are
_PLAIN_TYPES = (int, float, bool, str, bytes, type(None))
_TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter)
_PIECE_BYTES = 16 << 20
_OF_COMPILED = "_orig_mod."


def to_bytes(state: Any) -> bytes:
    """Serialize a state."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def from_bytes(content: bytes) -> Any:
    """Deserialize a state that `to_bytes` serialized; its tensors are in host memory."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def plain(state: Any) -> Any:
    """Return a state with numpy's numbers as Python's, and its containers as dicts and lists."""
    if isinstance(state, np.generic):
        return state.item()
    if isinstance(state, dict):
        kind = OrderedDict if type(state) is OrderedDict else dict
        pairs = kind((plain(key), plain(value)) for key, value in state.items())
        return _with_metadata(pairs, state)
    if isinstance(state, list | tuple):
        items = [plain(item) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return state


def named_as(state: dict[str, Any], names_from: dict[str, Any]) -> dict[str, Any]:
    """Return a module's `state_dict` by the names in `names_from`, its current one.

    torch.compile, which may be on in one job and off in the next, gives a prefix to the names.
    """
    names = {_without_compile(name): name for name in names_from}
    if state.keys() <= names_from.keys() or len(names) < len(names_from):
        return state
    renamed = type(state)((names.get(_without_compile(n), n), value) for n, value in state.items())
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        module_names = {
            _without_compile(name): name for name in getattr(names_from, "_metadata", {})
        }
        pairs = metadata.items()
        versions = {module_names.get(_without_compile(n), n): value for n, value in pairs}
        vars(renamed)["_metadata"] = versions
    return renamed


def _without_compile(name: str) -> str:
    """Return the name of a module's part as it is without torch.compile."""
    return f"{name}.".replace(_OF_COMPILED, "").removesuffix(".")


def check_loadable(value: Any, where: str) -> None:
    """Raise a `UserError` if a safe torch.load does not accept a value of `plain` containers.

    `where` is its name in messages.
    """
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            check_loadable(key, f"a key of {where}")
            check_loadable(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_loadable(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN_TYPES and not isinstance(value, torch.Tensor):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise UserError(
            f"{where} is a {kind}, which checkpoints cannot hold; turn it into tensors, numbers "
            "or texts, or lists, tuples or dicts of them"
        )


def check_reloadable(state: Any, where: str) -> None:
    """Raise a `UserError` if a state, without its large tensors, cannot be saved and reloaded."""
    try:
        from_bytes(to_bytes(_split(state)[0]))
    except Exception as error:  # of tensors of the user's own classes
        raise UserError(
            f"{where} cannot be saved and loaded again ({type(error).__name__}); return tensors, "
            "numbers and strings, in dicts, lists and tuples"
        ) from error


def broadcast_state(
    comm: MPI.Intracomm, state: Any, root: int, receives: bool, into: Any = None
) -> Any:
    """Send a state from rank `root` to those that want it, of all that call this. Collective.

    Its tensors are on any device, and in host memory where they are received: in that of `into`,
    which may be overwritten, if shape, strides and dtype match. Returns the state, on rank `root`
    itself; None on a rank that does not receive.
    """
    share = partial(comm.Bcast, root=root)
    if comm.rank == root:
        put_state(state, share)
        return state if receives else None
    return get_state(share, receives, into, on_host=True)


def send_state(
    comm: MPI.Intracomm,
    state: Any,
    source: int,
    target: int,
    on_piece: Callable[[], None] = lambda: None,
) -> Any:
    """Send a state from one rank to another. Collective over these two; the others do nothing.

    On rank `target`, `on_piece` is called whenever a piece of it has arrived.

    Returns:
        The state on rank `target`, with its tensors in new host memory; None on the others.
    """
    if comm.rank == source:
        put_state(state, partial(comm.Send, dest=target, tag=tags.STATE))
    if comm.rank != target:
        return None

    def receive(buffer: np.ndarray) -> None:
        comm.Recv(buffer, source, tags.STATE)
        on_piece()

    return get_state(receive)


def put_state(state: Any, put: Callable[[np.ndarray], None]) -> None:
    """Send a state: what is not a large tensor, and then those, copied a piece at a time."""
    layout, tensors = _split(state)
    content = np.frombuffer(to_bytes(layout), dtype=np.uint8)
    put(np.array([content.size]))
    put(content)
    for tensor in tensors:
        for piece in _pieces(tensor.cpu()):
            put(piece.numpy())


def get_state(
    get: Callable[[np.ndarray], None], receives: bool = True, into: Any = None, **options: bool
) -> Any:
    """Receive what `put_state` sends; None if it is not wanted."""
    get(length := np.zeros(1, dtype=np.int64))
    get(content := np.empty(int(length[0]), dtype=np.uint8))
    unwanted = torch.empty(0 if receives else _PIECE_BYTES, dtype=torch.uint8)
    received: dict[int, torch.Tensor] = {}

    def receive(meta: torch.Tensor, present: Any) -> torch.Tensor:
        if not meta.is_meta or id(meta) in received:  # small, or a tied weight, sent once
            return received.get(id(meta), meta)
        target = _memory_like(meta, present, **options) if receives else unwanted
        left = range(meta.nbytes, 0, -_PIECE_BYTES)
        for piece in _pieces(target) if receives else (unwanted[:size] for size in left):
            get(piece.numpy())
        received[id(meta)] = target
        return target

    result = _map(receive, from_bytes(content.tobytes()), into)
    return result if receives else None


def put_tensor(tensor: torch.Tensor, put: Callable[[np.ndarray], None]) -> None:
    """Send a tensor's values, whose shape and dtype the receiver knows."""
    for piece in _pieces(tensor.detach().cpu().contiguous()):
        put(piece.numpy())


@torch.no_grad()
def get_tensor(get: Callable[[np.ndarray], None], into: torch.Tensor) -> None:
    """Receive what `put_tensor` sends into a tensor, on any device."""
    is_direct = into.is_cpu and into.is_contiguous()
    received = into if is_direct else torch.empty(into.shape, dtype=into.dtype)
    for piece in _pieces(received):
        get(piece.numpy())
    if not is_direct:
        into.copy_(received)


@torch.no_grad()
def copy_state(
    state: Any, into: Any = None, *, share: bool = False, is_mapped: bool = False
) -> Any:
    """Return a copy of a state, with tensors on any device, in new host memory.

    The large tensors of `into`, on any device, become part of the copy if shape, strides and dtype
    match: new memory takes many times as long as copying. If `share`, a tensor that has all of its
    storage in host memory is kept; if `is_mapped`, pieces of a file that were copied leave memory.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy(tensor: torch.Tensor, present: Any) -> torch.Tensor:
        if share and tensor.is_cpu and is_whole(tensor):
            return tensor.detach()
        if not (_is_large(tensor) and _is_dense(tensor)):
            return torch.empty_like(tensor, device="cpu").copy_(tensor)
        identity = _identity(tensor)
        if identity in copies:  # a tied weight is copied once
            return copies[identity]
        copies[identity] = target = _memory_like(tensor, present)
        if not is_mapped:
            return target.copy_(tensor)
        for piece, part in zip(_pieces(tensor), _pieces(target), strict=True):
            part.copy_(piece)
            _leave_memory(piece)
        return target

    return _map(copy, state, into)


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all of its memory, rather than being a part of a larger one."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _split(state: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return a state with meta tensors in the place of large ones, and those, each once."""
    metas: dict[tuple[Any, ...], torch.Tensor] = {}
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor, _: Any) -> torch.Tensor:
        if not _is_large(tensor):
            return tensor
        identity = _identity(tensor)
        if identity not in metas:
            dense = tensor.detach() if _is_dense(tensor) else tensor.detach().contiguous()
            tensors.append(dense)
            metas[identity] = dense.to("meta")
        return metas[identity]

    return _map(take, state), tensors


def _map(change: Callable[[torch.Tensor, Any], Any], state: Any, other: Any = None) -> Any:
    """Return a state with each tensor changed, given what another state has in its place."""
    if isinstance(state, torch.Tensor):
        return change(state, other)
    if type(state) in (dict, OrderedDict):
        present = other if isinstance(other, dict) else {}
        pairs = ((key, _map(change, item, present.get(key))) for key, item in state.items())
        return _with_metadata(type(state)(pairs), state)
    if type(state) in (list, tuple):
        others = dict(enumerate(other)) if isinstance(other, (list, tuple)) else {}
        items = enumerate(state)
        return type(state)([_map(change, item, others.get(index)) for index, item in items])
    return state


def _with_metadata(changed: Any, state: Any) -> Any:
    """Return a changed state with the versions of a module's parts, which a state_dict has."""
    if hasattr(state, "_metadata"):
        changed._metadata = state._metadata
    return changed


def _memory_like(like: torch.Tensor, present: Any, on_host: bool = False) -> torch.Tensor:
    """Return the present value, if it is a tensor of this layout in memory, or new host memory."""
    if (
        _is_large(present)
        and (present.is_cpu or not on_host)
        and (present.dtype, present.shape) == (like.dtype, like.shape)
        and present.stride() == like.stride()
    ):
        return present.detach()
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a dense tensor's memory in pieces, as flat tensors of bytes."""
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
    return flat.split(_PIECE_BYTES)


def _leave_memory(piece: torch.Tensor) -> None:
    """Free the memory of a part of a mapped file, whose values can be read again."""
    begin = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = piece.data_ptr() + piece.nbytes - begin
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _is_large(value: Any) -> bool:
    return (
        type(value) in _TENSOR_TYPES
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
        and value.numel() * value.element_size() >= _MIN_BYTES
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory has no gaps, whatever the order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
