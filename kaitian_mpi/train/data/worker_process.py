"""Keeps MPI from starting in processes that load data: import it there before MPI.

They import the script and the module of the dataset, which may import `Training` and so MPI. With
the environment of its rank, MPI would take such a process for the rank itself, and crash the job.
"""

from __future__ import annotations

from contextlib import suppress

with suppress(ImportError):
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
