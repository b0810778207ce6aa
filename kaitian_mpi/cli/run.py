"""`kaitian-run script.py args…`: what torchrun is to a user, for unlike devices, under mpirun."""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

from kaitian_mpi.cli.flags import OneLineParser
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.guard import abort_guard
from kaitian_mpi.mpi.launch import read_launch
from kaitian_mpi.mpi.runtime import start_mpi

PROGRAM = "kaitian-run"


def main() -> None:
    """Run the command."""
    options = sys.argv[1:]
    if not options or options[0] in ("-h", "--help"):
        if read_launch(os.environ).world_rank == 0:
            make_parser().print_help()
        return
    with abort_guard(PROGRAM):
        chosen = make_parser().parse_args(options)
        if not Path(chosen.script).is_file():
            raise UserError(f"found no script {chosen.script}; name the file to run")
        comm = start_mpi()
        host, port = gather_values(comm, free_address(comm.rank))[0]
        set_environment(os.environ, comm.rank, comm.size, (host, port))

        from kaitian_mpi.collectives.startup import use_backend_for
        from kaitian_mpi.mpi.world import join_world

        join_world(comm, chosen.devices, chosen.emulate_kinds)
        use_backend_for([name for name in chosen.backend_override.split(",") if name])
        run_script(chosen.script, chosen.arguments)


def make_parser() -> argparse.ArgumentParser:
    """Return the command's parser. What comes after the script's name is the script's."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Run a torch.distributed script on every rank that mpirun has started.",
        epilog=f"example: mpirun -np 4 {PROGRAM} --backend-override nccl,gloo train.py --lr 0.1",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--backend-override",
        default="",
        metavar="LIST",
        help="backends that the script names, such as nccl,gloo, for which it gets kaitian",
    )
    parser.add_argument(
        "--devices",
        default="auto",
        metavar="LIST",
        help="auto, cpu, or a list by local rank such as cuda:0,cuda:1,cpu",
    )
    parser.add_argument(
        "--emulate-kinds",
        default="",
        metavar="LIST",
        help="label CPU ranks with device kinds by world rank, such as gpu,gpu,mlu,mlu",
    )
    parser.add_argument("script", help="the Python file to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def set_environment(environ: Any, rank: int, size: int, master: tuple[str, int]) -> None:
    """Set the variables that torchrun sets; what the user has set of the last two stays."""
    launch = read_launch(environ)
    environ["RANK"], environ["WORLD_SIZE"] = str(rank), str(size)
    environ["LOCAL_RANK"] = str(launch.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(launch.local_size)
    environ["ROLE_RANK"], environ["ROLE_WORLD_SIZE"] = str(rank), str(size)
    environ.setdefault("MASTER_ADDR", master[0])
    environ.setdefault("MASTER_PORT", str(master[1]))


def free_address(rank: int) -> tuple[str, int] | None:
    """Return, on rank 0, its host's name and a port that is free now; nothing stays open."""
    if rank != 0:
        return None
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostname(), probe.getsockname()[1]


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script as `python script args…` would; `sys.exit()` and `sys.exit(0)` are good ends."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


if __name__ == "__main__":
    main()
