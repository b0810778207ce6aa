"""The `kaitian` backend of torch.distributed: what torch and its users' scripts see of it."""

BACKEND = "kaitian"
"""The backend's name, in `init_process_group(BACKEND, …)`."""

SCHEME = "mpi"
"""The rendezvous, in `init_method="mpi://"`."""


def device_types() -> list[str]:
    """Return the torch device types whose tensors the backend takes: the host's, and this torch's.

    A build of torch, with the plug-in that it has loaded, drives one type of accelerator. The kinds
    are not asked, for `import torch` would have to look through all installed packages.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return ["cpu", *([accelerator.type] if accelerator else [])]
