"""Weights in files: those that a run starts from (`--init`) and those it writes (`--export`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.files import describe_failure, replacing
from kaitian_mpi.observe.tensor_files import UnusableError, load_tensors
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.state_transfer import is_whole

SAFETENSORS = ".safetensors"
_WRAPPERS = ("model", "state_dict", "model_state_dict")
"""Keys under which checkpoints, this package's too, have a model's weights beside other things."""
_OF_DDP = "module."
_OF_COMPILED = "_orig_mod."  # torch.compile wraps a module and gives its weights this prefix
_FITTING = "give weights of this very model, or load those that fit in your own code"


def check_initial_file(config: TrainingConfig, world: World) -> None:
    """Check that the file of `--init` is there, before anything is made. Collective.

    A run that is resumed does not need it.

    Raises:
        AgreedError: rank 0 finds no such file, or cannot read files of its kind.
    """
    with agree_on_errors(world.comm):
        if world.rank == 0 and config.init and not config.resume:
            _check_file(config.init)


def load_initial_weights(config: TrainingConfig, model: nn.Module, world: World) -> None:
    """Load the file of `--init` on rank 0, the only one to need it. Collective.

    Raises:
        AgreedError: it cannot be read, or is not of this model.
    """
    with agree_on_errors(world.comm):
        if world.rank == 0:
            enter_phase("loading the weights of --init")
            _check_file(config.init)
            load_weights(model, config.init)
        enter_phase("waiting for the weights of --init", waits=True, limited=False)


def _check_file(path: str) -> None:
    if not os.path.isfile(path):  # unlike Path.is_file, it never raises
        raise UserError(
            f"--init: there is no file {path} on rank 0's host; give a model's weights, a .pt file "
            f"of torch.save or a {SAFETENSORS} file"
        )
    if path.endswith(SAFETENSORS):
        _check_safetensors("--init", path)


def _check_safetensors(flag: str, path: str) -> None:
    """Raise a `UserError` that names this flag and its file if safetensors is not installed."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{flag} {path}: the package safetensors is not installed; "
            "pip install 'kaitian-mpi[export]'"
        ) from error


def load_weights(model: nn.Module, path: str) -> None:
    """Load a file of weights into a model, which must have exactly these. Not collective.

    Args:
        model: anywhere. A weight that shares another one's memory may be missing in the file, and
            a prefix of DDP or torch.compile in its names does not matter.
        path: a .pt file of torch.save, or a .safetensors file.

    Raises:
        UserError: the file cannot be read, or is not of this model; then the model may have some
            of its weights.
    """
    own = model.state_dict()
    given = _renamed(_find_state(path, _read(path)), own)
    _check_tensors(path, given, own)
    try:
        result = model.load_state_dict(given, strict=False)
    except Exception as error:  # also of a module's own loading code, which may raise anything
        reason = " ".join(str(error).split())
        raise UserError(f"--init {path}: the weights do not fit ({reason}); {_FITTING}") from error
    repeated = repeated_names(own, given)
    missing = [
        name
        for name in result.missing_keys
        if isinstance(own.get(name), torch.Tensor) and repeated.get(name) not in given
    ]
    faults = []
    if result.unexpected_keys:
        faults.append(f"the model does not have {_list(result.unexpected_keys)}")
    if missing:
        faults.append(f"the file lacks {_list(missing)}")
    if faults:
        raise UserError(f"--init {path}: {', and '.join(faults)}; {_FITTING}")


def _read(path: str) -> Any:
    try:
        if path.endswith(SAFETENSORS):
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            try:
                return load_file(path)
            except SafetensorError as error:
                raise UnusableError(f"safetensors: {error}".partition("\n")[0]) from error
        with open(path, "rb") as file:
            return load_tensors(file)
    except OSError as error:
        raise UserError(
            f"--init {path}: {error.strerror or error}; name a file that can be read"
        ) from error
    except UnusableError as error:
        raise UserError(
            f"--init {path}: it has no weights ({error}); give what "
            f"torch.save(model.state_dict(), ...) writes, or a {SAFETENSORS} file"
        ) from error


def _find_state(path: str, content: Any) -> dict[str, Any]:
    """Return the weights in a file's content: all of it, or the part that has them."""
    if isinstance(content, Mapping):
        parts = [name for name in _WRAPPERS if isinstance(content.get(name), Mapping)]
        if len(parts) > 1:
            raise UserError(
                f"--init {path}: it has {' and '.join(map(repr, parts))}; save the weights to "
                "start from in a file of their own"
            )
        if parts:
            content = content[parts[0]]
        is_state = any(isinstance(value, torch.Tensor) for value in content.values())
        if is_state and all(isinstance(name, str) for name in content):
            return dict(content)
    raise UserError(
        f"--init {path}: it holds a {type(content).__name__} without tensors by name; give what "
        "torch.save(model.state_dict(), ...) writes"
    )


def _renamed(given: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights by the model's own names, without prefixes that only one of them has."""
    own_names = {plain_name(name): name for name in own}
    names = {name: plain_name(name) for name in given}
    if not any(name.startswith(_OF_DDP) for name in own_names) and all(
        name.startswith(_OF_DDP) for name in names.values()
    ):
        names = {name: plain.removeprefix(_OF_DDP) for name, plain in names.items()}
    return {own_names.get(names[name], names[name]): value for name, value in given.items()}


def _check_tensors(path: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check the shapes and types of weights that both have."""
    wrong = []
    for name, target in own.items():
        value = given.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(target, torch.Tensor):
            continue
        if value.shape != target.shape:
            shapes = f"shape {tuple(value.shape)}, the model's has {tuple(target.shape)}"
            wrong.append(f"{name!r} has {shapes}")
        elif not torch.can_cast(value.dtype, target.dtype):
            wrong.append(f"{name!r} has type {value.dtype}, the model's has {target.dtype}")
    if wrong:
        more = f" ({len(wrong) - 1} more do not fit)" if len(wrong) > 1 else ""
        raise UserError(f"--init {path}: {wrong[0]}{more}; {_FITTING}")


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def check_export(config: TrainingConfig, world: World) -> None:
    """Check that the file of `--export` can be written, before anything is made. Collective.

    Any rank may be the one that writes it, should others be lost; the folder is checked on rank 0.

    Raises:
        AgreedError: a package or the folder is missing, or the folder cannot be written.
    """
    with agree_on_errors(world.comm):
        if config.export and world.rank == 0:
            _check_target(config.export, config.run_dir)
        if config.export:
            _check_safetensors("--export", config.export)


def check_exportable(config: TrainingConfig, model: nn.Module) -> None:
    """Check that the format of `--export` can hold this model's weights. Not collective.

    Raises:
        UserError: it cannot.
    """
    if not config.export:
        return
    from safetensors.torch import save

    for name, value in _tensors_of(model).items():
        try:
            save({name: value.new_empty(0)})
        except Exception as error:  # safetensors raises several types
            kind = f"{str(value.layout).partition('.')[2]} tensor of type {value.dtype}"
            raise UserError(
                f"--export {config.export}: {name!r} is a {kind}, which a .safetensors file cannot "
                "hold; leave --export out: the run folder has checkpoints/model.pt"
            ) from error


def export_weights(path: str, model: nn.Module) -> None:
    """Write a model's weights and buffers, by their plain names, atomically. Not collective.

    `safetensors.torch.load_model` loads them into such a model: tied weights are written once.

    Args:
        path: the file; a missing folder is created.
        model: on any device.

    Raises:
        StorageError: the disk is full, or cannot be written for another reason.
    """
    from safetensors.torch import save

    state = _tensors_of(model)
    repeated = repeated_names(state)
    tensors = {name: _own(value) for name, value in state.items() if name not in repeated}
    # The names left out are there for a reader, as in safetensors' own files of models.
    content = save(tensors, {**repeated, "format": "pt"})
    target = Path(os.path.realpath(path))  # keeps a symbolic link
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, sync=True) as file:
            file.write(content)
    except OSError as error:
        reason = describe_failure(error, target.parent, len(content))
        raise StorageError(f"{path} could not be written: {reason}") from error


def _check_target(path: str, run_dir: str) -> None:
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not target.parent.is_dir():
            if run_dir and target.is_relative_to(os.path.realpath(run_dir)):
                return  # the run folder is made, and checked, later
            raise UserError(
                f"--export {path}: there is no folder {target.parent}; create it, or name another"
            )
        partial = target.with_name(f"{target.name}.partial")  # as when it is written
        partial.open("ab").close()
        os.unlink(partial)
    except OSError as error:
        raise UserError(
            f"--export {path}: {error.strerror}; name a file in a folder that can be written"
        ) from error


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights and buffers by their plain names, without modules' extra state."""
    return {
        plain_name(name): value.detach()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor contiguous in host memory, of which no other has a part."""
    if not is_whole(tensor):
        tensor = tensor.clone()
    return tensor.cpu().contiguous()


def plain_name(name: str) -> str:
    """Return a weight's name in the module before torch.compile."""
    return name.replace(_OF_COMPILED, "")


def repeated_names(state: Mapping[str, Any], preferred: Container[str] = ()) -> dict[str, str]:
    """Return the names of tensors whose memory belongs to another tensor, with that one's name.

    Such as tied weights: saving or loading the other one is enough. These are the names that
    `safetensors.torch.load_model` allows a file to lack.

    Args:
        state: a module's `state_dict()`, whose tensors share memory as the module's do.
        preferred: names to choose from if several tensors have all of the same memory.
    """
    by_memory: dict[tuple[torch.device, int], list[str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.numel():
            memory = (value.device, value.untyped_storage().data_ptr())
            by_memory.setdefault(memory, []).append(name)
    repeated: dict[str, str] = {}
    for names in by_memory.values():
        whole = [name for name in names if is_whole(state[name])]
        if whole:
            kept = next((name for name in whole if name in preferred), whole[0])
            repeated |= {name: kept for name in names if name != kept}
    return repeated
