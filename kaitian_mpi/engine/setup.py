"""Creates data, model and run folder from the config, and checks that all ranks have the same."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.data.sample_digest import digest_samples
from kaitian_mpi.datasets.sources import DataSource, load_data
from kaitian_mpi.devices.emulation import Schedule, is_slowed, parse_slowdown
from kaitian_mpi.errors import UserError
from kaitian_mpi.models import build_model
from kaitian_mpi.mpi.exchange import agree_on_errors, check_same, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.run_folder import NoFolder, RunFolder, open_run_folder
from kaitian_mpi.runtime.watchdog import enter_phase, set_phase_limit, setup_limit

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """A rank's data, model and run folder."""

    data: DataSource
    model: nn.Module
    folder: RunFolder
    slowdowns: tuple[Schedule, ...]
    """The emulated slowdown of every rank; empty if there is none."""
    path: Path = Path()
    """The run folder's path on rank 0."""
    dataset_size: str = ""
    """The numbers of training and validation samples; the same on every rank."""


def prepare(config: TrainConfig, world: World) -> Setup:
    """Load the data, build the model and open the run folder. Collective.

    Raises:
        AgreedError: one of these fails on a rank, or the ranks' data or models differ.
    """
    setup = prepare_without_folder(config, world)
    with agree_on_errors(world.comm):
        # Last, so that a run that cannot start does not leave a folder behind.
        given = Path(config.run_dir) if config.run_dir else None
        folder = open_run_folder(config, given, world.rank)
    # Reached only if no rank had an error, so `folder` is bound.
    path = Path(gather_values(world.comm, str(folder.path))[0])
    return replace(setup, folder=folder, path=path)


def describe_start(config: TrainConfig, world: World, folder: RunFolder) -> None:
    """Write config.json and topology.json, once it is clear that the job will train."""
    folder.write("config.json", asdict(config))
    folder.write(
        "topology.json",
        {
            "ranks": [asdict(info) for info in world.infos],
            "groups": [{**asdict(group), "leader": group.leader} for group in world.groups],
        },
    )


def prepare_without_folder(config: TrainConfig, world: World) -> Setup:
    """Load the data and build the model, the same on every rank. Collective.

    The initial weights are those of rank 0, since not every model draws them from torch's seeded
    generator.

    Raises:
        AgreedError: one of these fails on a rank, or the ranks' data or models differ.
    """
    with agree_on_errors(world.comm):
        slowdowns = parse_slowdown(config.emulate_slowdown, world.started)
        if any(map(is_slowed, slowdowns)) and not world.device_kind.is_host:
            raise UserError(
                f"--emulate-slowdown: found a {world.info.device} rank, needed CPU ranks only; "
                "give --devices cpu"
            )
        set_phase_limit(setup_limit(config.step_timeout))
        enter_phase("loading the dataset (--dataset)")
        torch.manual_seed(config.seed)  # for synthetic data, which must be the same on every rank
        data = load_data(config)
        torch.manual_seed(config.seed)
        enter_phase("building the model (--model)")
        model = build_model(config.model, data.num_classes)
        enter_phase("waiting for the other ranks' data and models", waits=True, limited=False)
    length = f"{len(data.train)} + {len(data.validation)} samples"  # type: ignore[arg-type]
    check_same(world.comm, "the dataset", length, "give every host the same files")
    for name, part in (("training", data.train), ("validation", data.validation)):
        check_same_samples(world, name, part)
    check_same(world.comm, "the model", describe_model(model), "give every host the same code")
    broadcast_model(model)
    # From here on random numbers differ between ranks: dropout must not be the same everywhere.
    torch.manual_seed(config.seed * world.size + world.rank)
    return Setup(data, model, NoFolder(), slowdowns, dataset_size=length)


def check_same_samples(world: World, name: str, data: Dataset) -> None:
    """Compare some samples between the ranks, and warn if only their inputs differ. Collective.

    Inputs may differ because of random augmentation or another version of an image decoder.

    Raises:
        AgreedError: classes, shapes or dtypes differ, e.g. because hosts list files in different
            orders.
    """
    digests = gather_values(world.comm, digest_samples(data))
    same_samples = list(zip(*digests, strict=False))  # a rank with slow storage may have read fewer
    for by_rank in same_samples:
        if len({text for text, _ in by_rank}) > 1:
            advice = "give every host the same files, in the same order"
            own, _ = by_rank[world.rank]
            check_same(world.comm, f"the {name} data", own, advice)
    differing = sum(len({digest for _, digest in by_rank}) > 1 for by_rank in same_samples)
    if differing and world.rank == 0:
        _log.warning(
            "the inputs of %d of %d %s samples differ between ranks, but not their classes; unless "
            "they are augmented at random, give every host the same files",
            *(differing, len(same_samples), name),
        )


@torch.no_grad()
def broadcast_model(model: nn.Module) -> None:
    """Copy rank 0's parameters and all its buffers, persistent or not, to every rank. Collective.

    Args:
        model: with the same parameters and buffers on every rank, on any device.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor, src=0)


def describe_model(model: nn.Module) -> str:
    """Return a model's number of parameters, and a hash of their names, shapes and dtypes."""
    state = model.state_dict()
    text = ";".join(f"{name}:{tuple(value.shape)}:{value.dtype}" for name, value in state.items())
    count = sum(parameter.numel() for parameter in model.parameters())
    return f"{count} parameters, layout {hashlib.sha256(text.encode()).hexdigest()[:8]}"
