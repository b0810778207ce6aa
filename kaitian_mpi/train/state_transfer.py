"""Copies a training state between ranks, files and devices, a piece of a tensor at a time.

A state may fill most of a host's memory: no rank holds a second copy of more than a piece, unless
it asks for a copy.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import broadcast_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

_MIN_BYTES = 1 << 16  # smaller tensors stay in the skeleton: the state without its large tensors
_PLAIN_TYPES = (int, float, bool, str, bytes, type(None))
_PIECE_BYTES = 16 << 20
_PLACE = "the place of a large tensor"  # a key that no state_dict has


def to_bytes(state: Any) -> bytes:
    """Serialize a state of tensors and plain values."""
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
        changed: Any = kind((plain(key), plain(value)) for key, value in state.items())
        if hasattr(state, "_metadata"):  # as in `_map`
            changed._metadata = state._metadata
        return changed
    if isinstance(state, list | tuple):
        items = [plain(item) for item in state]
        return items if isinstance(state, list) else tuple(items)
    return state


def check_loadable(value: Any, where: str) -> None:
    """Check that a safe torch.load will accept a value, as torch.save does.

    Args:
        value: with `plain` containers.
        where: its name in messages.

    Raises:
        UserError: it holds something else.
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


def reload(state: Any) -> Any:
    """Return a state as it would be after it was saved to a file and loaded.

    Large tensors are those of `state` themselves: any of them can be saved.

    Raises:
        Exception: it cannot be saved or loaded; of many types.
    """
    tensors = _Tensors()
    return _fill(from_bytes(to_bytes(tensors.take_out(state))), tensors.found)


def broadcast_state(
    comm: MPI.Intracomm,
    state: Any,
    root: int,
    receives: bool,
    into: Any = None,
    release: Callable[[torch.Tensor], None] | None = None,
) -> Any:
    """Send a state of tensors and plain values from one rank to some ranks. Collective.

    Args:
        comm: of all ranks that call this.
        state: sent by rank `root`, with tensors on any device; ignored elsewhere.
        root: the rank that sends.
        receives: whether this rank wants the state.
        into: a state of this rank that may be overwritten: its tensors in host memory are received
            into and become part of the result if shape, strides and dtype match. None for none.
        release: called on rank `root` with each piece of a tensor that is sent.

    Returns:
        The state, with its tensors in host memory; on rank `root`, `state` itself. None if this
        rank does not receive.
    """
    if comm.rank == root:
        own = _Tensors()
        broadcast_bytes(comm, to_bytes(own.take_out(state)), root)
        for tensor in own.found:
            for piece in _pieces(tensor.cpu()):  # copied one at a time
                comm.Bcast(piece.numpy(), root)
                if release is not None:
                    release(piece)
        return state if receives else None
    skeleton = from_bytes(broadcast_bytes(comm, None, root))
    tensors: list[torch.Tensor] = []
    unwanted = torch.empty(0 if receives else _PIECE_BYTES, dtype=torch.uint8)
    for place, present in _places(skeleton, into):
        if place["index"] < len(tensors):  # a tied weight, which is sent once
            continue
        target = _target(place, present) if receives else None
        size = torch.Size(place["shape"]).numel() * getattr(torch, place["dtype"]).itemsize
        for piece in _pieces(unwanted, size) if target is None else _pieces(target):
            comm.Bcast(piece.numpy(), root)
        tensors.append(unwanted if target is None else target)
    return _fill(skeleton, tensors) if receives else None


@torch.no_grad()
def copy_state(
    state: Any,
    into: Any = None,
    *,
    share: bool = False,
    release: Callable[[torch.Tensor], None] = lambda piece: None,
) -> Any:
    """Return a copy of a state, with new tensors in host memory.

    Args:
        state: with tensors on any device.
        into: a state that may be overwritten: its large tensors, on any device, become part of the
            copy if shape, strides and dtype match, as new memory takes many times as long as
            copying. None for none.
        share: whether a tensor that has all of its storage in host memory is kept, not copied.
        release: called with each piece of a large tensor that was copied.
    """
    return _copied(state, into, share, release, {})


def _copied(
    value: Any,
    present: Any,
    share: bool,
    release: Callable[[torch.Tensor], None],
    copies: dict[tuple[Any, ...], torch.Tensor],
) -> Any:
    if not isinstance(value, torch.Tensor):
        others = (other for _, other in side_by_side(value, present))
        return _map(value, lambda item: _copied(item, next(others), share, release, copies))
    if share and value.is_cpu and is_whole(value):
        return value.detach()
    if not (_is_large(value) and _is_dense(value)):
        return torch.empty_like(value, device="cpu").copy_(value)
    known = _identity(value)
    if known not in copies:  # a tied weight is copied once
        fits = _fits(present, value.dtype, value.shape, value.stride())
        target = present.detach() if fits else torch.empty_like(value, device="cpu")
        if value.is_cpu:
            for piece, part in zip(_pieces(value), _pieces(target), strict=True):
                part.copy_(piece)
                release(piece)
        else:
            target.copy_(value)
        copies[known] = target
    return copies[known]


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all of its memory, rather than being a part of a larger one."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def side_by_side(state: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Return each item of a dict, list or tuple, with the item in the same place of another one.

    The second is None if the other has nothing there. Any other value has no items.
    """
    if isinstance(state, dict):
        present = other if isinstance(other, dict) else {}
        return zip(state.values(), map(present.get, state), strict=True)
    if isinstance(state, (list, tuple)):
        others = other if isinstance(other, (list, tuple)) else ()
        return zip(state, chain(others, repeat(None)), strict=False)
    return iter(())


class _Tensors:
    """The large tensors of a state, each once."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._indices: dict[tuple[Any, ...], int] = {}

    def take_out(self, state: Any) -> Any:
        """Return the state with each large tensor replaced by a description of it."""
        return self._describe(state) if _is_large(state) else _map(state, self.take_out)

    def _describe(self, tensor: torch.Tensor) -> dict[str, Any]:
        known = _identity(tensor)
        if known not in self._indices:
            self._indices[known] = len(self.found)
            dense = tensor.detach() if _is_dense(tensor) else tensor.detach().contiguous()
            self.found.append(dense)
        index = self._indices[known]
        return {
            _PLACE: True,
            "index": index,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(self.found[index].stride()),
        }


def _fill(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Return the state with its descriptions of tensors replaced by these tensors."""
    if isinstance(skeleton, dict) and _PLACE in skeleton:
        return tensors[skeleton["index"]]
    return _map(skeleton, lambda item: _fill(item, tensors))


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dict, list or tuple with its items changed; anything else as it is."""
    if type(value) in (dict, OrderedDict):
        changed = type(value)((key, change(item)) for key, item in value.items())
        if hasattr(value, "_metadata"):  # a module's state_dict has the versions of its parts
            changed._metadata = value._metadata
        return changed
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value


def _places(skeleton: Any, into: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Return the descriptions of tensors in order, each with what another state has there."""
    if isinstance(skeleton, dict) and _PLACE in skeleton:
        yield skeleton, into
        return
    for item, other in side_by_side(skeleton, into):
        yield from _places(item, other)


def _target(place: dict[str, Any], present: Any) -> torch.Tensor:
    """Return the tensor to receive into: the present one if it matches, or else a new one."""
    dtype, shape, stride = getattr(torch, place["dtype"]), place["shape"], place["stride"]
    if _fits(present, dtype, shape, stride) and present.is_cpu:
        return present.detach()
    return torch.empty_strided(shape, stride, dtype=dtype)


def _fits(
    present: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> TypeGuard[torch.Tensor]:
    """Return whether the present value is a large tensor with this layout in memory."""
    return (
        _is_large(present)
        and present.dtype == dtype
        and list(present.shape) == list(shape)
        and list(present.stride()) == list(stride)
    )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _pieces(tensor: torch.Tensor, size: int | None = None) -> Iterator[torch.Tensor]:
    """Return a dense tensor's memory in pieces, as flat tensors of bytes.

    Args:
        tensor: on any device.
        size: if given, `tensor` is a single piece, returned repeatedly for this many bytes: a
            buffer for unwanted tensors.
    """
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8)
    for begin in range(0, flat.numel() if size is None else size, _PIECE_BYTES):
        yield flat[begin : begin + _PIECE_BYTES] if size is None else flat[: size - begin]


def _is_large(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and not (value.is_quantized or value.is_conj() or value.is_neg())
        and value.numel() * value.element_size() >= _MIN_BYTES
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory has no gaps, whatever the order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
