"""Compares forward and backward of the task between the kinds of devices, before training."""

from __future__ import annotations

import io
import zlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, broadcast_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.gradient_probe import Gradients, compute_gradients, rounding_unit
from kaitian_mpi.train.measure.parity_reference import Reference, make_reference
from kaitian_mpi.train.measure.parity_report import KindReport, conclude
from kaitian_mpi.train.measure.parity_tolerance import Difference, Tolerance, differences
from kaitian_mpi.train.measure.profiles import Profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Task

_SAMPLES = 4
_SHOWN = 3


@dataclass(frozen=True)
class _Part:
    """This rank's part in a comparison."""

    world: World
    task: Task
    """With the loss that is compared."""
    computation: Computation
    seed: int
    """Of random numbers."""
    is_chosen: bool
    """Whether the rank stands for a kind."""
    source: int
    """The rank that computes the reference."""

    @property
    def unit(self) -> float:
        """The unit roundoff of what this rank computes."""
        return rounding_unit(self.task.model, self.computation)


def check_parity(
    config: TrainingConfig,
    setup: Setup,
    profiles: Profiles,
    excluded: Collection[int],
    world: World,
) -> bool | None:
    """Compare what a batch leads to between the kinds of devices. Collective.

    That is the loss, the gradients, and what the forward does to buffers, such as the statistics of
    batch norms, which only show in an evaluation.

    One rank of each kind, and of each torch version, precision and memory format of it, computes
    the same few samples with the initial weights, each with the same random numbers and without
    dropout. The reference is the same in float64 on a host, or else one kind's own result.

    Args:
        config: the seed.
        setup: the task, which is not changed.
        profiles: how each rank computes.
        excluded: world ranks that do not train.
        world: all ranks.

    Returns:
        True, as they agree; None if nothing is compared: with a task without a loss to compare, or
        a loss that is not finite.

    Raises:
        AgreedError: a kind differs by more than rounding explains.
    """
    task = _task_to_compare(setup, world)
    if task is None:
        return None
    began = perf_counter()
    part = _make_part(config, task, profiles, excluded, world)
    enter_phase("the parity check")
    batch = _same_batch(setup, profiles, world, part.source)
    own, reference = _compute_all(part, batch)
    shared = _share(world, part.source, reference)
    worst = _compare(part, shared, own)
    reports = _gather_reports(part, own, worst)
    return conclude(setup, world, reports, shared, perf_counter() - began)


def _task_to_compare(setup: Setup, world: World) -> Task | None:
    """Return the task with the loss that is compared; None without such a loss."""
    compared = setup.task.loss or setup.task.parity_loss
    if compared is None:
        print_rank_0(
            world,
            "parity: not compared, because the script computes the loss itself; give "
            "Task(parity_loss=...), or leave it out with Training(parity=False)",
        )
        return None
    return replace(setup.task, loss=compared, parity_loss=None)


def _make_part(
    config: TrainingConfig,
    task: Task,
    profiles: Profiles,
    excluded: Collection[int],
    world: World,
) -> _Part:
    """Choose the ranks that compute, and return this rank's part. Collective."""
    profile = profiles.by_place[world.info.place]
    chosen = _representatives(world, profiles, excluded)
    return _Part(
        world=world,
        task=task,
        computation=Computation(world.device, profile.precision, profile.memory_format),
        seed=config.seed,
        is_chosen=world.rank in chosen,
        source=_reference_rank(world, chosen),
    )


def _compute_all(part: _Part, batch: Any) -> tuple[Gradients | None, Reference | None]:
    """Return this rank's gradients if it is chosen, and the reference on its rank. Collective.

    Raises:
        AgreedError: an error of the user's, on any rank.
    """
    world = part.world
    known = gather_values(world.comm, part.unit if part.is_chosen else 0.0)
    common = part.task, batch, part.computation, part.seed
    own: Gradients | None = None
    reference: Reference | None = None
    with agree_on_errors(world.comm):
        try:
            if part.is_chosen:
                own = compute_gradients(*common)
            if world.rank == part.source:
                reference = make_reference(*common, sorted({u for u in known if u}), world)
        except UserError:
            _wait_for_others(world)
            raise
        except Exception as error:
            error.add_note("in the parity check before training, which --no-parity leaves out")
            raise
        _wait_for_others(world)
    return own, reference


def _wait_for_others(world: World) -> None:
    """Wait asleep until every rank has computed, or found an error of the user's. Collective."""
    enter_phase("waiting for the other ranks' parity check", waits=True, limited=False)
    sleeping_barrier(world.comm)


def _representatives(world: World, profiles: Profiles, excluded: Collection[int]) -> list[int]:
    """Return the first rank of each kind, and of whatever else chooses other kernels."""
    first: dict[tuple[str, ...], int] = {}
    for rank, info in enumerate(world.infos):
        profile = profiles.by_place[info.place]
        if info.world_rank not in excluded:
            key = (*info.rounding, profile.precision, profile.memory_format)
            first.setdefault(key, rank)
    return list(first.values())


def _reference_rank(world: World, chosen: Sequence[int]) -> int:
    """Return the rank that computes the reference: if possible one that computes on its host.

    Preferably one that stands for no kind, so that both are computed at once. Collective.
    """
    on_host = gather_values(world.comm, world.device_kind.is_host)
    hosts = [rank for rank in range(world.size) if on_host[rank]]
    free = [rank for rank in hosts if rank not in chosen]
    return (free or hosts or list(chosen))[0]


def _same_batch(setup: Setup, profiles: Profiles, world: World, source: int) -> Any:
    """Return a few samples, spread over the data, the same on every rank. Collective.

    Where a random augmentation or a decoder has made others of them, they are the source's.

    Raises:
        AgreedError: the samples cannot be loaded, or have other shapes.
    """
    costs = [profiles.by_place[info.place].cost for info in world.infos]
    most = [cost.largest_micro_batch for cost in costs if cost and cost.largest_micro_batch]
    total = len(setup.train)
    count = min(total, max(profiles.min_batch, min([_SAMPLES, *most])))
    tensors: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if _is_plain(tensor):
            tensors.append(tensor.contiguous())
        return tensor

    with agree_on_errors(world.comm), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of a random augmentation
        batch = map_tensors(setup.train[[index * total // count for index in range(count)]], note)
    content = io.BytesIO()
    torch.save(tensors, content)
    if len(set(gather_values(world.comm, zlib.crc32(content.getvalue())))) == 1:
        return batch
    sent = content.getvalue() if world.rank == source else None
    received = torch.load(io.BytesIO(broadcast_bytes(world.comm, sent, source)), weights_only=True)
    with agree_on_errors(world.comm):
        own, others = ([list(each.shape) for each in some] for some in (tensors, received))
        if own != others:
            raise UserError(
                f"the parity check: found samples of shapes {own}, needed those of rank {source}, "
                f"{others}; give every host the same data, or skip this with --no-parity"
            )
    left = iter(received)
    return map_tensors(batch, lambda tensor: next(left) if _is_plain(tensor) else tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be sent: no sparse or nested one, nor of a class of its own."""
    return tensor.layout is torch.strided and type(tensor) is torch.Tensor


def _share(world: World, source: int, reference: Reference | None) -> dict[str, Any]:
    """Return what all ranks need to know of the reference but the gradients. Collective."""
    shared = None
    if reference is not None:
        gradients = reference.gradients.tensors
        shared = {
            "text": reference.text,
            "loss": reference.gradients.loss,
            "shapes": {name: list(each.shape) for name, each in gradients.items()},
            "doubles": [name for name, each in gradients.items() if each.dtype == torch.float64],
            "tolerances": [(unit, asdict(each)) for unit, each in reference.tolerances.items()],
            "gradients": None,
        }
    found: dict[str, Any] = gather_values(world.comm, shared)[source]
    found["gradients"] = None if reference is None else reference.gradients.tensors
    return found


def _compare(part: _Part, shared: dict[str, Any], own: Gradients | None) -> list[Difference]:
    """Return by what this rank's result differs most, if it has one. Collective.

    Args:
        part: this rank's.
        shared: of the reference.
        own: this rank's result; None if it stands for no kind.
    """
    received = shared["gradients"] or {}
    for name, shape in shared["shapes"].items():
        if shared["gradients"] is None:
            dtype = torch.float64 if name in shared["doubles"] else torch.float32
            received[name] = torch.empty(shape, dtype=dtype)
        dist.broadcast(received[name], part.source)
    if own is None:
        return []
    tolerance = Tolerance(**dict(shared["tolerances"])[part.unit])
    return differences(own, received, shared["loss"], tolerance)[:_SHOWN]


def _gather_reports(
    part: _Part, own: Gradients | None, worst: Sequence[Difference]
) -> list[KindReport]:
    """Return what was found on each of the chosen ranks. Collective.

    Args:
        part: this rank's.
        own: this rank's result; None if it stands for no kind.
        worst: by what that differs most from the reference.
    """
    info, report = part.world.info, None
    if own is not None:
        report = KindReport(
            rank=info.world_rank,
            kind=info.kind,
            place=str(info),
            torch_version=info.torch_version,
            precision=part.computation.precision,
            memory_format=part.computation.memory_format,
            loss=own.loss,
            worst=[asdict(each) for each in worst],
        )
    gathered = gather_values(part.world.comm, None if report is None else asdict(report))
    return [KindReport(**each) for each in gathered if each is not None]
