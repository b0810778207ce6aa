"""The `kaitian` backend of torch.distributed, and the algorithms under it."""

BACKEND = "kaitian"
"""The backend's name, in `init_process_group(BACKEND, …)`."""

DEVICE_TYPES = ["cpu", "cuda"]
"""The torch device types whose tensors the backend takes."""

SCHEME = "mpi"
"""The rendezvous, in `init_method="mpi://"`."""
