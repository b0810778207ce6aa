"""Weights in files: those that a run starts from (`--init`) and those it writes (`--export`)."""

from __future__ import annotations

import errno
import os
import textwrap
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.observe.files import describe_failure, replacing
from kaitian_mpi.observe.tensor_files import load_tensors
from kaitian_mpi.train.state_transfer import is_whole

_SAFETENSORS = ".safetensors"
_WRAPPERS = ("model", "state_dict", "model_state_dict")
"""Keys under which checkpoints, this package's too, have a model's weights beside other things."""
_OF_DDP = "module."
_OF_COMPILED = "_orig_mod."  # torch.compile wraps a module and gives its weights this prefix
_MAX_REASON = 400


def load_weights(model: nn.Module, path: str) -> None:
    """Load a file of weights into a model, which must have exactly these. Not collective.

    A weight that shares another one's memory may be missing in the file, and a prefix of DDP or
    torch.compile in its names does not matter.
    """
    model_state = model.state_dict()
    content = _weights_in(path, _read(path))
    names = dict(zip(_plain_names(model_state), model_state, strict=True))
    plain = zip(_plain_names(content), content.values(), strict=True)
    file_state = {names.get(name, name): value for name, value in plain}
    repeated = repeated_names(model_state, file_state)
    try:
        result = model.load_state_dict(file_state, strict=False)
        faults = [f"the model has no {key!r}" for key in result.unexpected_keys]
        faults += [
            f"the file lacks {key!r}"
            for key in result.missing_keys
            if isinstance(model_state.get(key), torch.Tensor)
            and repeated.get(key) not in file_state
        ]
    except Exception as error:  # also of a module's own loading code, which may raise anything
        faults = [str(error)]
    if faults:
        reason = textwrap.shorten("; ".join(faults), _MAX_REASON, placeholder=" …")
        raise UserError(
            f"--init {path}: the weights do not fit: {reason}; give the weights of exactly this "
            "model, or load the matching ones in your own code"
        )


def _read(path: str) -> Any:
    try:
        if path.endswith(_SAFETENSORS):
            return _safetensors(f"--init {path}").load_file(path)
        with open(path, "rb") as file:
            return load_tensors(file)
    except OSError as error:
        reason = error.strerror or str(error).partition(":")[0]  # of safetensors
        raise UserError(
            f"--init {path}: {reason}; name a file that can be read on rank 0's host"
        ) from error
    except (UserError, MemoryError):
        raise
    except Exception as error:  # UnusableError, or safetensors' own
        raise _without_weights(path, str(error).partition("\n")[0]) from error


def _weights_in(path: str, content: Any) -> dict[str, Any]:
    """Return the weights in a file's content: all of it, or the part that has them."""
    if isinstance(content, Mapping):
        parts = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
        if len(parts) > 1:
            raise _without_weights(path, f"it has both {' and '.join(map(repr, parts))}")
        content = content[parts[0]] if parts else content
        is_state = any(isinstance(value, torch.Tensor) for value in content.values())
        if is_state and all(isinstance(name, str) for name in content):
            return dict(content)
    raise _without_weights(path, f"it holds a {type(content).__name__} without tensors by name")


def _without_weights(path: str, reason: str) -> UserError:
    return UserError(
        f"--init {path}: it has no weights ({reason}); give what torch.save(model.state_dict(), "
        f"...) writes, or a {_SAFETENSORS} file"
    )


def _safetensors(flag: str) -> Any:
    """Return the module `safetensors.torch`, or raise a `UserError` about a flag and its file."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError(
            f"{flag}: the package safetensors is not installed; pip install 'kaitian-mpi[export]'"
        ) from error
    return safetensors.torch


def check_export(config: TrainingConfig, model: nn.Module, rank: int) -> None:
    """Check that `--export` can hold a model's weights, and that rank 0 can write it.

    Not collective. Any rank may be the one that writes it, should others be lost.
    """
    flag = f"--export {config.export}"
    save = _safetensors(flag).save
    if rank == 0:
        _check_target(flag, Path(os.path.realpath(config.export)), config.run_dir)
    try:
        save({name: value.new_empty(0) for name, value in _tensors_of(model).items()})
    except Exception as error:  # safetensors raises several types
        raise UserError(
            f"{flag}: a .safetensors file cannot hold the model's weights "
            f"({type(error).__name__}: {' '.join(str(error).split())}); leave --export out: the "
            "run folder has checkpoints/model.pt"
        ) from error


def _check_target(flag: str, target: Path, run_dir: str) -> None:
    if run_dir and target.is_relative_to(os.path.realpath(run_dir)):
        return  # the run folder is made, and checked, later
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        partial = target.with_name(f"{target.name}.partial")  # as when it is written
        partial.open("ab").close()
        partial.unlink()
    except OSError as error:
        raise UserError(
            f"{flag}: {error.strerror}; name a file in a folder that can be written"
        ) from error


def export_weights(path: str, model: nn.Module, state: Mapping[str, Any] | None = None) -> None:
    """Write a model's weights and buffers, by their plain names, atomically. Not collective.

    `safetensors.torch.load_model` loads them into such a model: tied weights are written once.
    `state` is its `state_dict`, if the model does not have all of it.
    """
    tensors_by_name = _tensors_in(model.state_dict() if state is None else state)
    repeated = repeated_names(tensors_by_name)
    tensors = {
        name: (value if is_whole(value) else value.clone()).cpu().contiguous()
        for name, value in tensors_by_name.items()
        if name not in repeated
    }
    # The names left out are there for a reader, as in safetensors' own files of models.
    content = _safetensors(path).save(tensors, {**repeated, "format": "pt"})
    target = Path(os.path.realpath(path))  # keeps a symbolic link
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, sync=True) as file:
            file.write(content)
    except OSError as error:
        reason = describe_failure(error, target.parent, len(content))
        raise StorageError(f"{path} could not be written: {reason}") from error


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return _tensors_in(model.state_dict())


def _tensors_in(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights and buffers by their plain names, without modules' extra state."""
    return {
        name.replace(_OF_COMPILED, ""): value.detach()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def _plain_names(names: Iterable[str]) -> list[str]:
    """Return the names in the module before DDP or torch.compile."""
    plain = [name.replace(_OF_COMPILED, "") for name in names]
    is_of_ddp = all(name.startswith(_OF_DDP) for name in plain)
    return [name.removeprefix(_OF_DDP) for name in plain] if is_of_ddp else plain


def repeated_names(state: Mapping[str, Any], preferred: Container[str] = ()) -> dict[str, str]:
    """Return the names of tensors whose memory belongs to another tensor, with that one's name.

    Such as tied weights: these are the names that `safetensors.torch.load_model` allows a file to
    lack. Of several tensors that have all of the same memory, a preferred one is named.
    """
    by_memory: dict[tuple[torch.device, int], list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            memory = (value.device, value.untyped_storage().data_ptr())
            by_memory.setdefault(memory, []).append(name)
    repeated: dict[str, str] = {}
    for names in by_memory.values():
        whole = [name for name in names if is_whole(state[name])]
        kept_name = next((name for name in whole if name in preferred), (*whole, "")[0])
        repeated |= {name: kept_name for name in names if kept_name and name != kept_name}
    return repeated
