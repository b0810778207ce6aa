"""Runs a user's script or module in this process, as Python itself would."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors

if TYPE_CHECKING:
    from mpi4py import MPI


def check_script(script: str, is_module: bool) -> None:
    """Check that there is a script, or a module, before MPI is started; imports nothing.

    Raises:
        UserError: there is none.
    """
    if not is_module:
        if not os.path.isfile(script):
            raise UserError(f"there is no script {script}; name the file to run")
        return
    search_first(os.getcwd())
    names = script.split(".")
    if not all(names) or importlib.util.find_spec(names[0]) is None:
        raise no_module(script)


def no_module(name: str) -> UserError:
    """Return the error for a module that is not found."""
    return UserError(
        f"-m {name}: no module of this name, or a package without a __main__; start it from the "
        "folder in which `python -m` finds it, or install it"
    )


def search_first(folder: str) -> None:
    """Have Python look for modules in a folder in place of this command's own, as `python` does."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def run_script(script: str, arguments: Sequence[str], is_module: bool, comm: MPI.Intracomm) -> None:
    """Run as `python script args…` or `python -m module args…`; `sys.exit(0)` means success.

    Raises:
        AgreedError: there is no such module on a rank of `comm`.
    """
    sys.argv = ["-m" if is_module else script, *arguments]
    try:
        if is_module:
            with agree_on_errors(comm):
                find_module(script)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            search_first(str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


def find_module(name: str) -> None:
    """Find a module, or a package's `__main__`; imports the packages that it is in.

    Raises:
        UserError: there is none, though there is the package that it would be in.
    """
    for each in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(each)
        except ModuleNotFoundError as error:
            if not f"{each}.".startswith(f"{error.name}."):  # the packages' own imports fail
                raise
            spec = None
        if spec is None:
            raise no_module(name)
        if spec.submodule_search_locations is None:
            return
