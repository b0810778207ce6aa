"""Pure arithmetic of load balancing: no torch, no MPI."""
