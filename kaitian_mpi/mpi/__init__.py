"""All that touches MPI: start and end, topology, rendezvous, collectives on host memory."""
