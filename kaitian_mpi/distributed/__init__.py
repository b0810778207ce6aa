"""The `kaitian` backend as torch.distributed and users' scripts see it."""

BACKEND = "kaitian"
"""The backend's name, in `init_process_group(BACKEND, …)`."""

SCHEME = "mpi"
"""The rendezvous scheme, in `init_method="mpi://"`."""


def device_types() -> list[str]:
    """Return the torch device types that the backend accepts: the host's and the accelerator's.

    A build of torch, with or without a plug-in, supports one type of accelerator. The device kinds
    are not consulted, because finding them among the installed packages would slow down
    `import torch`.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", *([accelerator.type] if accelerator else [])]
