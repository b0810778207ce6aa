"""The command-line programs: one module per command."""

from __future__ import annotations

from kaitian_mpi.runtime.forked_rank import stand_for_forked_rank


def kaitian_train() -> None:
    """Run `kaitian-train`."""
    stand_for_forked_rank()
    from kaitian_mpi.cli.train import main

    main()


def kaitian_run() -> None:
    """Run `kaitian-run`."""
    stand_for_forked_rank()
    from kaitian_mpi.cli.run import main

    main()
