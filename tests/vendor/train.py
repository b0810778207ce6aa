"""`kaitian-train` with the fake accelerators' kinds: `--devices vendor:0,cpu`."""

import fake_kinds

from kaitian_mpi.cli.train import main

fake_kinds.register()
main()
