"""Runs a command with several command lines, one after the other, in one job.

    mpirun -np 2 python planted_command_lines.py kaitian-train '[["--epochs", "0"], ["--lr", "x"]]'

Each rank writes the output of the first to `line-0-RANK.txt` and its exit code to
`line-0-RANK.json`. The last one is then run again, and the job ends as the command ends it.
"""

import importlib
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from kaitian_mpi.runtime.launcher import read_launch

MODULES = {"kaitian-train": "kaitian_mpi.cli.train", "kaitian-plan": "kaitian_mpi.cli.plan"}
RANK = read_launch(os.environ).world_rank


def main():
    command, lines = sys.argv[1], json.loads(sys.argv[2])
    run = importlib.import_module(MODULES[command]).main
    for number, arguments in enumerate(lines):
        sys.argv = [command, *arguments]
        with output_to(f"line-{number}-{RANK}.txt"):
            code = exit_code(run)
        loaded = sorted({"torch", "mpi4py.MPI"} & set(sys.modules))
        text = json.dumps({"code": code, "loaded": loaded})
        Path(f"line-{number}-{RANK}.json").write_text(text)
        destroy_process_group()
    run()


@contextmanager
def output_to(name):
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


def exit_code(run):
    try:
        run()
    except SystemExit as exit_:
        return exit_.code
    return None


def destroy_process_group():
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
