"""Several command lines of one command in one job, so that they share its start.

As a script, it is a rank of that job: it writes how each command line ended to `line-NUMBER-RANK`.
The last one is then run again, and the job ends as the command ends it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


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
) -> tuple[dict[str, Result], Result]:
    """Run a command several times in one job, each time with further `flags`; see `run_ranks`.

    Return each result by its flags, and how the job has ended, which the last one ends.
    """
    from jobs import PYTHON, run_ranks

    program, *words = command
    lines = json.dumps([[*words, *own.split()] for own in flags])
    job = (*options, PYTHON, __file__, program, lines)
    ended = run_ranks(ranks, *job, cwd=cwd, fresh=fresh, code=None)
    whole = Result([ended.code], ended.text, frozenset())
    return {own: _read(cwd, number, ranks, whole) for number, own in enumerate(flags)}, whole


def _read(folder: Path, number: int, ranks: int, whole: Result) -> Result:
    paths = [folder / f"line-{number}-{rank}.json" for rank in range(ranks)]
    text = "".join(path.read_text() for path in sorted(folder.glob(f"line-{number}-*.txt")))
    if not all(path.exists() for path in paths):
        text = f"this one or an earlier one has ended the job\n{text}\n{whole.text}"
        return Result([None], text, frozenset())
    codes, loaded = zip(*(json.loads(path.read_text()) for path in paths), strict=True)
    return Result(list(codes), text, frozenset().union(*loaded))


def main() -> None:
    """Run the command with each command line."""
    from kaitian_mpi.runtime.launcher import read_launch

    rank = read_launch(os.environ).world_rank
    from kaitian_mpi.cli.train import main as run

    command, lines = sys.argv[1], json.loads(sys.argv[2])
    for number, arguments in enumerate(lines):
        sys.argv = [command, *arguments]
        code = None
        with _output_to(f"line-{number}-{rank}.txt"):
            try:
                run()
            except SystemExit as exit_:
                code = exit_.code
        loaded = sorted({"torch", "mpi4py.MPI"} & set(sys.modules))
        Path(f"line-{number}-{rank}.json").write_text(json.dumps([code, loaded]))
        if "torch" in loaded:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
    run()


@contextmanager
def _output_to(name):
    """Send the output of this process to a file, also that which does not go through Python."""
    kept = os.dup(1), os.dup(2)
    with open(name, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    yield
    sys.stdout.flush()
    for number, descriptor in enumerate(kept, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)


if __name__ == "__main__":
    main()
