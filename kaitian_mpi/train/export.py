"""The trained weights in a .safetensors file, for `--export`."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch
from torch import nn

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import StorageError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.files import describe_failure, replacing
from kaitian_mpi.observe.tensor_files import check_safetensors
from kaitian_mpi.train.weight_names import is_whole, plain_name, repeated_names


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
            check_safetensors("--export", config.export)


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
                f"--export {config.export}: found {name!r}, a {kind}, which a .safetensors file "
                "cannot hold; leave --export out: the run folder has checkpoints/model.pt"
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
                f"--export {path}: found no folder {target.parent}, needed one that exists; "
                "create it, or name another"
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
