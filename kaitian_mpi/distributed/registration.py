"""Registers the backend with torch, without loading MPI.

torch calls `register` at the end of `import torch`, by the entry point `torch.backends`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kaitian_mpi.distributed import BACKEND, SCHEME, device_types
from kaitian_mpi.runtime.system import record_default_threads


def register() -> None:
    """Register the backend `kaitian` and the rendezvous `mpi://`.

    Call it again after a plug-in of torch is imported: the backend then accepts tensors of the
    plug-in's device type as well.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import register_rendezvous_handler

    if not dist.is_available():
        return
    if BACKEND in dist.Backend.backend_list:
        dist.Backend.backend_capability[BACKEND] = device_types()
        return
    defaults = dict(dist.Backend.default_device_backend_map)
    dist.Backend._plugins = _WithOurs(dist.Backend._plugins)
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=device_types())
    # Do not become any device type's default backend: that is the vendor's own.
    dist.Backend.default_device_backend_map.clear()
    dist.Backend.default_device_backend_map.update(defaults)
    register_rendezvous_handler(SCHEME, _rendezvous)
    record_default_threads()


class _WithOurs(dict[str, Any]):
    """torch's registered backends; ours is found by its name, but not listed.

    With any listed, torch gives a group such as `cpu:gloo,cuda:gloo` no default backend
    (github.com/pytorch/pytorch/issues/167305), also in scripts that never ask for ours.
    """

    _ours: Any = None

    def __setitem__(self, name: str, plugin: Any) -> None:
        if name == BACKEND.upper():
            self._ours = plugin
        else:
            super().__setitem__(name, plugin)

    def __contains__(self, name: object) -> bool:
        return name == BACKEND.upper() or super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        if name == BACKEND.upper():
            return self._ours
        raise KeyError(name)


def _create(options: Any, _: Any = None) -> Any:
    from kaitian_mpi.distributed.creation import create

    serve_our_groups()
    return create(options)


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    from kaitian_mpi.distributed.creation import rendezvous

    # torch puts the script's `rank` and `world_size` arguments into the URL.
    url_arguments = dict(parse_qsl(urlsplit(url).query))
    rank, size = (
        int(url_arguments[name]) if name in url_arguments else None
        for name in ("rank", "world_size")
    )
    for result in rendezvous(rank, size, options.get("timeout")):
        register()  # a plug-in of torch may have been imported with the devices
        yield result


def replace(old: Callable[..., Any], new: Callable[..., Any], name: str = "") -> None:
    """Replace a function in every loaded module that refers to it by `name`, or by its own name.

    For example, `device_mesh` has its own reference to `new_group`, and so may a script have.
    """
    name = name or old.__name__
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get(name) is old:
            names[name] = new


def serve_our_groups() -> None:
    """Have torch's functions serve our groups where a plug-in has replaced them.

    Importing torch_npu replaces some by others that call methods of HCCL's group, or another
    collective than the ranks of other kinds do (torch_npu's `distributed/distributed_c10d.py`:
    `_batch_isend_irecv`, `_gather`). Other groups keep the plug-in's.
    """
    import torch.distributed as dist

    for name in ("gather", "gather_object", "batch_isend_irecv"):
        theirs = getattr(dist, name)
        if theirs.__module__ != dist.distributed_c10d.__name__:
            replace(theirs, _shared(theirs, _torchs_own(name)), name)


def _shared(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls torch's own for our groups, and else the plug-in's."""
    import torch.distributed as dist

    signature = inspect.signature(ours)

    @functools.wraps(ours)
    def shared(*args: Any, **kwargs: Any) -> Any:
        call_arguments = signature.bind(*args, **kwargs).arguments
        operations = call_arguments.get("p2p_op_list")
        group = operations[0].group if operations else call_arguments.get("group")
        is_ours = dist.get_rank(group) >= 0 and dist.get_backend(group) == BACKEND
        return (ours if is_ours else theirs)(*args, **kwargs)

    return shared


def _torchs_own(name: str) -> Any:
    """Return one of torch's functions from its source: nothing else may refer to it now."""
    import torch.distributed as dist

    module = dist.distributed_c10d
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    namespace: dict[str, Any] = {}
    exec(compile(tree, module.__file__, "exec", dont_inherit=True), vars(module), namespace)  # noqa: S102
    return namespace[name]
