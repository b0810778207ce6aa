"""`kaitian_mpi.init` in a process that has initialized torch.distributed already."""

import pytest
import torch.distributed as dist

import kaitian_mpi
from kaitian_mpi.errors import UserError


def test_another_backend_is_named(monkeypatch):
    monkeypatch.setattr("kaitian_mpi.backend.startup.install_abort_hook", lambda: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="initialized over gloo, needed this call in place of"):
            kaitian_mpi.init()
    finally:
        dist.destroy_process_group()
