"""A user's own training: the task that `kaitian-train --task module:build` trains."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from kaitian_mpi.config.factory import load_factory, one_line, parameters_of
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.task import Task

_log = logging.getLogger(__name__)


def build_task(
    spec: str, settings: Mapping[str, Any], seed: int, of_training: Collection[str] = ()
) -> Task:
    """Return the task built by a user's function."""
    enter_phase("building the task (--task)")
    build = load_factory("--task", spec)
    _check_settings(spec, build, settings, of_training)
    torch.manual_seed(seed)
    try:
        task = build(**settings)
    except UserError:
        raise
    except Exception as error:
        _log.debug("--task %s raised", spec, exc_info=True)
        raise UserError(
            f"--task {spec}: raised {one_line(error)}; --log-level debug shows where"
        ) from error
    if not isinstance(task, Task):
        raise UserError(
            f"--task {spec}: the function returned a {type(task).__name__}; it must return a "
            "kaitian_mpi.Task"
        )
    if task.loss is None:
        raise UserError(
            f"--task {spec}: the Task has no loss; give Task(loss=...), or run a script with its "
            "own loop without kaitian-train"
        )
    return task


def _check_settings(
    spec: str, build: Callable[..., Any], settings: Mapping[str, Any], of_training: Collection[str]
) -> None:
    parameters = parameters_of(build)
    if parameters is None:
        return
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    named = [name for name, parameter in parameters.items() if parameter.kind in by_name]
    for name in set(named).intersection(of_training):
        raise UserError(
            f"--set {name} is ambiguous, as it is both a setting and an argument of {spec}; give "
            f"the setting as {name} = ... and the argument as set.{name} = ... in a file for "
            "--config"
        )
    try:
        inspect.Signature(list(parameters.values())).bind(**settings)
    except TypeError as error:
        takes = f"it takes {', '.join(named)}" if named else "it takes none"
        problem = f"the values of --set do not fit: {error}; {takes}"
        raise UserError(f"--task {spec}: {problem}") from error
