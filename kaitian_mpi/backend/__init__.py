"""The `kaitian` backend of torch.distributed: what torch and its users' scripts see of it."""

BACKEND = "kaitian"
"""The backend's name, in `init_process_group(BACKEND, …)`."""

DEVICE_TYPES = ["cpu", "cuda"]
"""The torch device types whose tensors the backend takes."""

SCHEME = "mpi"
"""The rendezvous, in `init_method="mpi://"`."""
