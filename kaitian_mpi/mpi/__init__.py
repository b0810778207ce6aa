"""All that touches MPI: starting and ending it, topology, rendezvous, collectives on host memory."""
