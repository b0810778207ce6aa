"""Runtime of a rank under the launcher: MPI start-up and shutdown, aborts, signals, watchdog."""

RANK_VARIABLE = "KAITIAN_RANK"
"""The environment variable by which processes that a rank starts know that they are not a rank."""
