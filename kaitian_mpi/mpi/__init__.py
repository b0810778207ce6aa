"""MPI moves data: world and topology, collectives on host memory, messages, the store."""
