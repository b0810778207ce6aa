"""MPI communication: world and topology, collectives on host memory, messages, the store."""
