"""The `kaitian` backend of torch.distributed: what torch and its users' scripts see of it."""

BACKEND = "kaitian"
"""The backend's name, in `init_process_group(BACKEND, …)`."""

SCHEME = "mpi"
"""The rendezvous, in `init_method="mpi://"`."""


def device_types() -> list[str]:
    """Return the torch device types that the backend accepts: the host's and the accelerator's.

    A build of torch, with a plug-in or without, drives one type of accelerator. The device kinds
    are not consulted: to find them among the installed packages would slow down `import torch`.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", *([accelerator.type] if accelerator else [])]
