"""The `kaitian` backend of torch.distributed, and the algorithms under it."""

BACKEND = "kaitian"
"""The backend's name, in `init_process_group(BACKEND, …)`."""

SCHEME = "mpi"
"""The rendezvous, in `init_method="mpi://"`."""
