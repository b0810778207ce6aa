"""The relay: device memory, host memory, MPI, host memory, device memory, in chunks."""
