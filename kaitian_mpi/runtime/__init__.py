"""Runtime of a rank under the launcher: MPI start-up and shutdown, aborts, signals, watchdog."""
