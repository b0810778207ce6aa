"""The command-line programs: one module per command."""

from __future__ import annotations

import os
from importlib import import_module

from kaitian_mpi.runtime import FORKS_AT


def kaitian_train() -> None:
    """Run `kaitian-train`."""
    _run("kaitian_mpi.cli.train")


def kaitian_run() -> None:
    """Run `kaitian-run`."""
    _run("kaitian_mpi.cli.run")


def kaitian_plan() -> None:
    """Run `kaitian-plan`."""
    _run("kaitian_mpi.cli.plan")


def _run(module: str) -> None:
    """Run a command, or stand for a rank that another process forks to run it."""
    if FORKS_AT in os.environ:
        from kaitian_mpi.runtime.forked_rank import stand_for_forked_rank

        stand_for_forked_rank()  # returns if it is not forked
    import_module(module).main()
