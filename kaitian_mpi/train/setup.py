"""The task and the run folder, made and checked to be the same on every rank."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.distributed.sync_batch_norm import convert_sync_batchnorm
from kaitian_mpi.errors import UnsupportedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, check_same, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.run_folder import NoFolder, RunFolder, open_run_folder
from kaitian_mpi.runtime.watchdog import enter_phase, set_phase_limit, setup_limit
from kaitian_mpi.train.data.batches import as_batches
from kaitian_mpi.train.data.sample_digest import digest_samples
from kaitian_mpi.train.task import Task, borrowed

_log = logging.getLogger(__name__)

MakeTask = Callable[[World], Task]
_OWN_TO_DEVICE = ("params", "foreach", "fused", "capturable")


@dataclass(frozen=True)
class Setup:
    """Task and run folder of one rank."""

    task: Task
    folder: RunFolder
    job: str = ""
    """The ID of this job, and of those that kaitian-supervise starts in its place."""
    path: Path | None = None
    """The run folder's path on rank 0; None if nothing is written."""
    trial_values: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes a context in which a trial computes with the model: each parameter has values there,
    which may be any if the layout keeps its own elsewhere."""
    dataset_size: str = ""
    """The numbers of training and validation samples; the same on every rank."""

    @cached_property
    def train(self) -> Any:
        """The training data, which returns a batch when indexed by a list of sample indices."""
        return as_batches(self.task.data, self.task.collate)

    @cached_property
    def validation(self) -> Any:
        """The held-out data, likewise; None if there is none."""
        data = self.task.validation
        return None if data is None else as_batches(data, self.task.collate)

    @contextmanager
    def borrowed_model(self) -> Iterator[nn.Module]:
        """Compute with the task's model in the block; see `borrowed`. Not collective."""
        with self.trial_values(), borrowed(self.task.model) as model:
            yield model


def prepare(make_task: MakeTask, config: TrainingConfig, job: str, world: World) -> Setup:
    """Make the task and open the run folder, for the job of this ID. Collective."""
    setup = prepare_without_folder(make_task, config, world)
    if not config.resume:  # else it is not known yet whether there is a checkpoint
        start_from_file(config, setup.task.model, world)
    with agree_on_errors(world.comm):
        if config.export:
            from kaitian_mpi.train.weight_files import check_export

            check_export(config, setup.task.model, world.rank)
        # Last, so that a run that cannot start does not leave a folder behind.
        folder = open_run_folder(config, world.rank)
        folder.begin(config, job)
    # Reached only if no rank had an error, so `folder` is bound.
    writes = not isinstance(folder, NoFolder)
    path = gather_values(world.comm, str(folder.path) if writes else "")[0]
    return replace(setup, folder=folder, job=job, path=Path(path) if path else None)


def start_from_file(config: TrainingConfig, model: nn.Module, world: World) -> None:
    """Give every rank's model the weights of `--init`, if that is given. Collective."""
    if not config.init:
        return
    from kaitian_mpi.train.weight_files import load_weights

    with agree_on_errors(world.comm):
        if world.rank == 0:
            enter_phase("loading the weights of --init")
            load_weights(model, config.init)
        enter_phase("waiting for the weights of --init", waits=True, limited=False)
    broadcast_model(model)


def describe_start(config: TrainingConfig, folder: RunFolder, world: World) -> None:
    """Write config.json and topology.json, once it is clear that the job will train."""
    folder.write("config.json", asdict(config))
    folder.write(
        "topology.json",
        {
            "ranks": [asdict(info) for info in world.infos],
            "groups": [{**asdict(group), "leader": group.leader} for group in world.groups],
        },
    )


def prepare_without_folder(make_task: MakeTask, config: TrainingConfig, world: World) -> Setup:
    """Make the task, the same on every rank. Collective.

    The initial weights are those of rank 0, since not every model draws them from torch's seeded
    generator.
    """
    with agree_on_errors(world.comm):
        set_phase_limit(setup_limit(config.step_timeout))
        enter_phase("making the task")
        task = make_task(world)
        parts = describe_parts(task)
        if config.sync_bn:
            try:
                convert_sync_batchnorm(task.model)
            except UnsupportedError as error:
                raise UserError(f"--sync-bn: {error}") from error
        enter_phase("waiting for the other ranks' data and models", waits=True, limited=False)
    lengths = [len(data) for data in (task.data, task.validation) if data is not None]
    setup = Setup(task, NoFolder(), dataset_size=f"{' + '.join(map(str, lengths))} samples")
    check_same(world.comm, {"the dataset": setup.dataset_size}, "give every host the same files")
    for name, part in (("training", setup.train), ("validation", setup.validation)):
        if part is not None:
            check_same_samples(world, name, part)
    parts["the model"] = describe_model(task.model)
    check_same(world.comm, parts, "give every rank the same code and settings")
    broadcast_model(task.model)
    # From here on random numbers differ between ranks: dropout must not be the same everywhere.
    torch.manual_seed(config.seed * world.size + world.rank)
    return setup


def check_same_samples(world: World, name: str, data: Any) -> None:
    """Compare some samples between the ranks, and warn if only numbers differ. Collective.

    Numbers may differ by random augmentation, or by a decoder's release.
    """
    digests = gather_values(world.comm, digest_samples(data))
    same_samples = list(zip(*digests, strict=False))  # a rank with slow storage may have read fewer
    for by_rank in same_samples:
        if len({text for text, _ in by_rank}) > 1:
            advice = "give every host the same files, in the same order"
            rank_text, _ = by_rank[world.rank]
            check_same(world.comm, {f"the {name} data": rank_text}, advice)
    differing = sum(len({digest for _, digest in by_rank}) > 1 for by_rank in same_samples)
    if differing and world.rank == 0:
        _log.warning(
            "the inputs of %d of %d %s samples differ between ranks, although their shapes and "
            "classes agree; unless augmentation is random, give every host the same files",
            differing,
            len(same_samples),
            name,
        )


@torch.no_grad()
def broadcast_model(model: nn.Module) -> None:
    """Copy rank 0's parameters and buffers, persistent or not, to every rank. Collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        # Into a copy, so that a rank lost meanwhile leaves the tensor as it is; on the host, where
        # the broadcast is known to be done when it returns.
        received = tensor.detach().to("cpu", copy=True)
        dist.broadcast(received, src=0)
        tensor.detach().copy_(received)


def describe_model(model: nn.Module) -> str:
    """Return a model's number of parameters, and a hash of their names, shapes and kinds."""
    rows: list[tuple[Any, ...]] = [
        (
            name,
            tuple(parameter.shape),
            parameter.stride(),
            str(parameter.dtype),
            parameter.requires_grad,
        )
        for name, parameter in model.named_parameters()
    ]
    rows += [
        (name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in model.named_buffers()
    ]
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count} parameters, layout {hashlib.sha256(repr(rows).encode()).hexdigest()[:8]}"


def describe_parts(task: Task) -> dict[str, str]:
    """Return a task's parts, as texts that must agree on all ranks; not its model and data."""
    names = "loss", "weight", "scheduler", "validation", "metrics", "extra_state"
    are_given = {f"Task({name}=...)": getattr(task, name) is not None for name in names}
    parts = {name: "given" if is_given else "not given" for name, is_given in are_given.items()}
    clip = "a function" if callable(task.clip_norm) else str(task.clip_norm)
    return {**parts, "Task(clip_norm=...)": clip, "Task(shuffle=...)": str(task.shuffle)}


def describe_optimizers(optimizers: Sequence[Optimizer]) -> str:
    """Return the classes of optimizers, and their settings that must be the same on every rank."""
    texts = []
    for optimizer in optimizers:
        texts.append(type(optimizer).__name__)
        for group in optimizer.param_groups:
            texts.append(f"{len(group['params'])} parameters")
            for name, value in group.items():
                if isinstance(value, torch.Tensor):
                    value = value.tolist()
                if name not in _OWN_TO_DEVICE and isinstance(value, Real | str | tuple):
                    texts.append(f"{name} {value}")
    return ", ".join(texts)
