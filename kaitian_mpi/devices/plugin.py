"""Imports the plug-ins by which vendors extend torch, and limits what a faulty one breaks."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator

from kaitian_mpi.config.factory import one_line
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.launcher import Launch, prepare_environment
from kaitian_mpi.runtime.system import usable_cores

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""torch's variable that stops `import torch` from importing plug-ins, if it is 0."""
PLUGINS = {"mlu": "torch_mlu", "npu": "torch_npu", "musa": "torch_musa"}
"""The vendors' plug-ins of the built-in kinds, by kind."""


class KindError(UserError):
    """A device kind is installed but cannot be used: the reason, and what to do about it."""


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection in the block: importing torch then takes a third less CPU time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def import_for_optimizers() -> None:
    """Import in advance what the first step of any optimizer imports, which takes a second."""
    with without_collection():
        importlib.import_module("torch._dynamo")


def load_torch(launch: Launch, modules: Iterable[str]) -> None:
    """Import torch as a rank does that was launched so, and then modules that use it."""
    prepare_environment(os.environ, launch, len(usable_cores()))  # torch reads some of it
    import_torch()
    with without_collection():
        for name in modules:
            importlib.import_module(name)


def import_torch() -> None:
    """Import torch and the plug-ins of other kinds, for commands; `import_plugin` imports ours."""
    if "torch" in sys.modules or os.environ.get(AUTOLOAD, "1") == "0":
        return
    with _kept_variable(), without_collection():
        os.environ[AUTOLOAD] = "0"
        import torch  # noqa: F401
    for entry in importlib.metadata.entry_points(group="torch.backends"):
        if entry.module.partition(".")[0] not in PLUGINS.values():
            try:
                entry.load()()
            except (Exception, SystemExit) as error:
                raise KindError(
                    f"torch's plug-in {entry.name} ({entry.value}) cannot be imported: "
                    f"{one_line(error)}; correct or remove it, or set {AUTOLOAD}=0"
                ) from error


@contextlib.contextmanager
def _kept_variable() -> Iterator[None]:
    """Restore `AUTOLOAD` after the block, unless the block raises."""
    previous_value = os.environ.get(AUTOLOAD)
    yield
    os.environ.pop(AUTOLOAD, None)
    if previous_value is not None:
        os.environ[AUTOLOAD] = previous_value


def is_installed(plugin: str) -> bool:
    """Return whether a plug-in is installed, without importing it."""
    return plugin in sys.modules or importlib.util.find_spec(plugin) is not None


def import_plugin(plugin: str) -> None:
    """Import a vendor's plug-in of torch, once.

    What it prints goes to stderr, tensors are still made on the host, and `AUTOLOAD` stays as it
    was: torch_npu sets it to 0, and processes started later would find no plug-in.
    """
    if plugin in sys.modules:
        return
    import torch

    default = torch.get_default_device()
    try:
        with contextlib.redirect_stdout(sys.stderr), _kept_variable():
            importlib.import_module(plugin)
    except (Exception, SystemExit) as error:
        # Otherwise `import torch` would fail in every process that this one starts.
        os.environ[AUTOLOAD] = "0"
        raise KindError(
            f"the package {plugin} is installed, but importing it fails: {one_line(error)}; check "
            f"that its release is for torch {torch.__version__} and that the vendor's driver and "
            "libraries are installed and found, or uninstall it"
        ) from error
    finally:
        if torch.get_default_device() != default:
            torch.set_default_device(None if default.type == "cpu" else default)
