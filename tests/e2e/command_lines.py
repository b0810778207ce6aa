"""Several command lines of one command in one job, so that they share its start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import PLANTED, PYTHON, Ended, run_ranks

_SCRIPT = str(PLANTED / "planted_command_lines.py")


@dataclass
class Result:
    """How a command has answered one command line."""

    codes: list[int | None]
    """The exit code of each rank."""
    text: str
    """The output of all ranks."""
    loaded: frozenset[str]
    """Which of torch and MPI any rank had loaded by then."""


def run_each(
    ranks: int, command: Sequence[str], flags: Sequence[str], *options: str, cwd: Path, fresh: bool
) -> tuple[dict[str, Result], Ended]:
    """Run a command several times in one job.

    Args:
        ranks: their number.
        command: the program and the arguments that all command lines have.
        flags: the further arguments of each command line.
        options: mpirun's.
        cwd: the folder of the job.
        fresh: as for `run_ranks`.

    Returns:
        The result of each command line by its flags; and how the job has ended, which the last one
        ends.
    """
    program, *words = command
    lines = json.dumps([[*words, *own.split()] for own in flags])
    ended = run_ranks(
        ranks, *options, PYTHON, _SCRIPT, program, lines, cwd=cwd, fresh=fresh, code=None
    )
    return {own: _read(cwd, number, ranks, ended) for number, own in enumerate(flags)}, ended


def _read(folder: Path, number: int, ranks: int, ended: Ended) -> Result:
    paths = [folder / f"line-{number}-{rank}.json" for rank in range(ranks)]
    texts = [path.with_suffix(".txt") for path in paths]
    text = "".join(path.read_text() for path in texts if path.exists())
    if not all(path.exists() for path in paths):
        return Result([None], f"this one or an earlier one has ended the job\n{text}\n{ended.text}")
    results = [json.loads(path.read_text()) for path in paths]
    loaded = frozenset(name for result in results for name in result["loaded"])
    return Result([result["code"] for result in results], text, loaded)
