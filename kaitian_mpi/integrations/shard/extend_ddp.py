"""Lets every DistributedDataParallel sum gradients to the owners of their rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel, distributed

from kaitian_mpi.devices.memory_limit import unlimited
from kaitian_mpi.distributed.collectives.torch_releases import not_compiled
from kaitian_mpi.errors import UserError
from kaitian_mpi.integrations.shard.host_parameters import is_large
from kaitian_mpi.integrations.shard.layout_choice import replicates
from kaitian_mpi.integrations.shard.replaced import replace_all
from kaitian_mpi.integrations.shard.trainer_shards import TrainerShards

_REFUSED = "register_comm_hook", "_register_builtin_comm_hook", "join"


def extend_ddp(shards: TrainerShards) -> Callable[[], None]:
    """Extend each DDP that is created from now on; return what restores the class."""
    ddp: Any = DistributedDataParallel
    being_created: list[DistributedDataParallel] = []  # and not copied, as by one rank alone
    verify: Any = distributed._verify_param_shape_across_processes
    restore_torch = replace_all(
        [
            (distributed, "_verify_param_shape_across_processes", _verify(verify)),
            (distributed, "_sync_module_states", _sync(distributed._sync_module_states, shards)),
            (ddp, "__init__", _create(ddp.__init__, shards, being_created)),
            (ddp, "_ddp_init_helper", _make_reducer(ddp._ddp_init_helper, shards, being_created)),
            *((ddp, name, _refuse(name)) for name in _REFUSED),
        ]
    )
    _active.append(shards)

    def restore() -> None:
        _active.clear()
        restore_torch()

    return restore


def _create(stock: Any, shards: TrainerShards, being_created: list[DistributedDataParallel]) -> Any:
    arguments = inspect.signature(stock)

    @functools.wraps(stock)
    def create(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        call_arguments = arguments.bind(ddp, *args, **kwargs).arguments
        shards.placement.begin(call_arguments["module"], call_arguments.get("init_sync", True))
        being_created.append(ddp)
        try:
            stock(ddp, *args, **kwargs)
        finally:
            being_created.pop()

    return create


def _make_reducer(
    stock: Any, shards: TrainerShards, being_created: Sequence[DistributedDataParallel]
) -> Any:
    def is_replicated(ddp: DistributedDataParallel) -> bool:
        if shards.settings.layout != "auto":
            return False
        if ddp in being_created:
            return replicates(shards.settings, shards.world, ddp.module, _has_sums(ddp))
        return not _is_watched(ddp)

    def make_reducer(ddp: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        if is_replicated(ddp):
            with unlimited():  # an emulated limit holds from here on
                pass
            shards.placement.move_whole(ddp.module)
            stock(ddp, *args, **kwargs)
            return
        _check(ddp, shards.world.size)
        nothing: Any = _NoReducer()
        ddp.reducer = nothing
        ddp.logger = nothing
        ddp._passing_sync_batchnorm_handle(ddp.module)
        shards.add_model(ddp)
        if not _is_watched(ddp):
            ddp.register_forward_pre_hook(_BeginForward())
            ddp.register_forward_hook(_EndForward(), always_call=True)

    return make_reducer


def _verify(stock: Any) -> Any:
    def verify_small(group: Any, parameters: Any, logger: Any = None) -> Any:
        """Compare the parameters of which no rank has a stand-in, with other strides."""
        small = [parameter for parameter in parameters if not is_large(parameter)]
        # One at least, as torch reads the first, and all ranks must come.
        return stock(group, [*small, torch.zeros(1, device=parameters[0].device)], logger)

    return verify_small


def _sync(stock: Any, shards: TrainerShards) -> Any:
    def sync_plain(*, module: nn.Module, **kwargs: Any) -> None:
        ignored = {
            *kwargs.pop("params_and_buffers_to_ignore"),
            *shards.placement.synchronize(module),
        }
        stock(module=module, params_and_buffers_to_ignore=ignored, **kwargs)

    return sync_plain


def _is_watched(ddp: DistributedDataParallel) -> bool:
    """Return whether a DDP has the hooks of one that is sharded, as a copy has as well."""
    return any(isinstance(hook, _BeginForward) for hook in ddp._forward_pre_hooks.values())


def _refuse(name: str) -> Callable[..., NoReturn]:
    def call(*_: Any, **__: Any) -> NoReturn:
        raise UserError(f"--layout shard does not support DDP's {name}; remove it")

    return call


def _check(ddp: DistributedDataParallel, ranks: int) -> None:
    """Refuse a DDP whose gradients cannot be summed to owners."""
    group: Any = ddp.process_group
    if not _has_sums(ddp):
        raise UserError(
            "--layout shard needs a process group of kaitian's; add --backend-override with the "
            "backends that the script names, such as gloo,nccl"
        )
    if group.size() != ranks:
        raise UserError(
            f"--layout shard needs DDP over all {ranks} ranks, not {group.size()}; give DDP no "
            "process_group of its own"
        )
    if ddp.mixed_precision is not None:
        raise UserError("--layout shard does not support DDP's mixed_precision; use torch.autocast")
    if ddp._delay_all_reduce_params:
        raise UserError("--layout shard does not support delay_all_reduce_named_params; remove it")
    for name, module in ddp.module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UserError(
                f"--layout shard does not support max_norm of an embedding: {name}; each rank "
                "would scale the rows of its own batch; limit the norms after optimizer.step()"
            )
    for name, parameter in ddp.module.named_parameters():
        if parameter.requires_grad and name in ddp.parameters_to_ignore:
            raise UserError(
                f"--layout shard does not support a parameter that DDP ignores: {name}; freeze it, "
                "or let DDP sum its gradient"
            )
        if parameter.requires_grad and parameter.is_complex():
            raise UserError(
                f"--layout shard does not support complex parameters: {name}; give --layout "
                "replicate"
            )


def _has_sums(ddp: DistributedDataParallel) -> bool:
    # Its class is not imported, as that would start MPI.
    return hasattr(ddp.process_group, "sum_gradients")


class _NoReducer:
    """What DDP calls of its reducer and its logger, which have nothing to do."""

    def prepare_for_forward(self) -> None: ...
    def prepare_for_backward(self, outputs: Any) -> None: ...
    def set_runtime_stats_and_log(self) -> None: ...
    def set_error_and_log(self, error: str) -> None: ...
    def _remove_autograd_hooks(self) -> None: ...
    def _check_reducer_finalized(self) -> None: ...
    def _set_static_graph(self) -> None: ...
    def _delay_all_reduce(self) -> None: ...
    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None: ...

    def _rebuild_buckets(self) -> bool:
        return False

    def _get_ddp_logging_data(self) -> Any:
        return type("Data", (), {"strs_map": {}, "ints_map": {}})


_active: list[TrainerShards] = []


@not_compiled
class _BeginForward:
    """A forward pre-hook; without a state of its own, so that a model can be copied and pickled."""

    def __call__(self, ddp: Any, *_: Any) -> None:
        if _active:
            _active[0].begin_forward(ddp)


@not_compiled
class _EndForward:
    """A forward hook; without a state of its own, as the other one."""

    def __call__(self, ddp: Any, _: Any, output: Any) -> None:
        if _active:
            _active[0].end_forward(ddp, output)
