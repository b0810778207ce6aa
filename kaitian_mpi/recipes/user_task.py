"""A user's own training: the task that `kaitian-train --task module:build` trains."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kaitian_mpi.config.factory import load_factory, one_line
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.task import Task

_log = logging.getLogger(__name__)


def build_task(spec: str, settings: Mapping[str, Any], seed: int) -> Task:
    """Return the task that a user's function makes.

    Args:
        spec: `package.module:build`, as `--task`.
        settings: the function's keyword arguments, as `--set`.
        seed: of torch's random numbers while the function runs, the same on every rank.

    Raises:
        UserError: there is no such function, it does not take these settings, it raises, or it does
            not return a task with a loss.
    """
    enter_phase("building the task (--task)")
    build = load_factory("--task", spec)
    _check_settings(spec, build, settings)
    torch.manual_seed(seed)
    try:
        task = build(**settings)
    except UserError:
        raise
    except Exception as error:
        _log.debug("--task %s raised", spec, exc_info=True)
        raise UserError(
            f"--task {spec}: raised {one_line(error)}; correct it, or see where with --log-level "
            "debug"
        ) from error
    if not isinstance(task, Task):
        raise UserError(
            f"--task {spec}: found a function that returned a {type(task).__name__}, needed one "
            "that returns a kaitian_mpi.Task"
        )
    if task.loss is None:
        raise UserError(
            f"--task {spec}: found a Task without loss, needed Task(loss=...); a script with its "
            "own loop runs without kaitian-train"
        )
    return task


def _check_settings(spec: str, build: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(build).parameters
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = {
        name: one
        for name, one in parameters.items()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    for name in settings:
        if name not in named and not takes_any:
            raise UserError(
                f"--set {name}: found no such parameter of {spec}, needed "
                f"{_nearest(name, list(named))}"
            )
    missing = [name for name, one in named.items() if one.default is one.empty]
    missing = [name for name in missing if name not in settings]
    if missing:
        needed = " ".join(f"--set {name}=..." for name in missing)
        raise UserError(f"--task {spec}: found no value for {', '.join(missing)}; give {needed}")
    positional = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_ONLY]
    if any(parameters[name].default is inspect.Parameter.empty for name in positional):
        raise UserError(
            f"--task {spec}: found positional-only parameters ({', '.join(positional)}), needed "
            "ones that can be given by name"
        )


def _nearest(name: str, names: list[str]) -> str:
    if not names:
        return "no --set at all: it has no parameters"
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"one of {', '.join(names)}{hint}"
