"""A process's life under the launcher: start and end of MPI, faults, signals, watchdog."""
