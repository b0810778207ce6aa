"""`kaitian_mpi.init` where torch.distributed is initialized already, and the end of the process."""

import pytest
import torch.distributed as dist

import kaitian_mpi
from kaitian_mpi.errors import UserError
from kaitian_mpi.runtime import lifecycle


def test_another_backend_is_named(monkeypatch):
    monkeypatch.setattr("kaitian_mpi.distributed.startup.install_abort_hook", lambda: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="initialized over gloo already; call"):
            kaitian_mpi.init()
    finally:
        dist.destroy_process_group()


def test_what_communicates_by_the_others_is_closed_first(monkeypatch):
    """A Training that the script never closes needs its communicators to save and to end."""
    monkeypatch.setattr(lifecycle, "_closers", [])
    order = []
    lifecycle.register_close(lambda: order.append("group"))
    lifecycle.register_close(lambda: order.append("training"), ends_work=True)
    lifecycle.register_close(lambda: order.append("group of its steps"))
    lifecycle._close_all()
    assert order == ["training", "group of its steps", "group"]
