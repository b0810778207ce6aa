"""Runtime of a rank under the launcher: MPI start-up and shutdown, aborts, signals, watchdog."""

RANK_VARIABLE = "KAITIAN_RANK"
"""The environment variable that tells a process that it was started by a rank."""

FORKS_AT = "KAITIAN_FORKS_AT"
"""The environment variable with the name of the socket of a process that forks ranks."""
