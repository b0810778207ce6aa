"""`kaitian-train`: train a model on all devices that mpirun has started a process for."""

from __future__ import annotations

import sys

from kaitian_mpi.cli.flags import parse_config
from kaitian_mpi.mpi.guard import abort_guard

PROGRAM = "kaitian-train"


def main() -> None:
    """Run the command."""
    if "-h" in sys.argv[1:] or "--help" in sys.argv[1:]:
        parse_config(PROGRAM, sys.argv[1:])
    with abort_guard(PROGRAM):
        config = parse_config(PROGRAM, sys.argv[1:])
        # After the flags are known to be good: these load torch and MPI, which takes seconds.
        import torch.distributed as dist

        from kaitian_mpi.collectives.startup import init
        from kaitian_mpi.training.run import train

        train(config, init(config.devices, config.emulate_kinds))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
