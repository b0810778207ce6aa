"""Imports a user's own model or dataset, given on the command line as `module:factory`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kaitian_mpi.errors import UserError


def load_factory(flag: str, spec: str) -> Callable[..., Any]:
    """Import the callable given by a flag.

    Puts the current directory first on `sys.path`, as `python script.py` does with the script's.
    It stays there because data loading workers import the module again.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UserError(f"{flag} {spec!r} is not module:factory; write it like mycode:make")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise UserError(
                f"{flag} {spec}: no module named {missing!r}, neither installed nor in {folder}; "
                "start the command in the module's folder, or install it"
            ) from error
        raise UserError(
            f"{flag} {spec}: importing {module_name} raised {one_line(error)}; "
            f"python -c 'import {module_name}' shows where"
        ) from error
    factory = getattr(module, name, None)
    if factory is None:
        raise UserError(
            f"{flag} {spec}: module {module_name} has no attribute {name!r}; name a function or a "
            "class of it"
        )
    if not callable(factory):
        raise UserError(
            f"{flag} {spec} is an object of type {type(factory).__name__}; name a function or a "
            "class"
        )
    return factory


def one_line(error: BaseException) -> str:
    """Return an exception's type and message as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return a callable's parameters; None if unknown: some that are written in C tell nothing."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
