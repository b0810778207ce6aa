"""Compares forward and backward of the task between the kinds of devices, before training."""

from __future__ import annotations

import io
import math
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError, UserError
from kaitian_mpi.mpi.exchange import agree_on_errors, broadcast_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.computation import Computation
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.measure.outcome import (
    Outcome,
    compute_outcome,
    rounding_unit,
    size_of,
)
from kaitian_mpi.train.measure.profiles import Profiles
from kaitian_mpi.train.measure.tolerance import Difference, differences, distances, tolerances
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Task

FILE = "parity.json"
_SAMPLES = 4
_SHOWN = 3
# On the host, the reference must be cheap beside the training.
_MAX_HOST_PARAMETERS = 50_000_000
_MAX_HOST_FORWARD_SEC = 0.5


@dataclass(frozen=True)
class _Part:
    """This rank's part in a comparison."""

    world: World
    task: Task
    """With the loss that is compared."""
    computation: Computation
    seed: int
    """Of random numbers."""
    unit: float
    """The unit roundoff of what this rank computes."""
    is_chosen: bool
    """Whether the rank stands for a kind."""
    source: int
    """The rank that computes the reference."""


def check_parity(
    config: TrainingConfig,
    setup: Setup,
    profiles: Profiles,
    excluded: Collection[int],
    world: World,
) -> bool | None:
    """Compare what a batch leads to between the kinds of devices. Collective.

    That is the loss, the model's outputs, the gradient as a whole, and what the forward does to
    buffers, such as the statistics of batch norms, which only show in an evaluation.

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
    began = time.perf_counter()
    part = _make_part(config, task, profiles, excluded, world)
    enter_phase("the parity check")
    batch = _same_batch(setup, profiles, world, part.source)
    own, reference, shared = _compute_all(part, batch)
    reference = _receive(part, reference, shared)
    reports = _gather_reports(part, own, reference, shared)
    return _conclude(setup, world, reports, shared, time.perf_counter() - began)


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
    computation = Computation(world.device, profile.precision, profile.memory_format)
    return _Part(
        world=world,
        task=task,
        computation=computation,
        seed=config.seed,
        unit=rounding_unit(task.model, computation),
        is_chosen=world.rank in chosen,
        source=_reference_rank(world, chosen),
    )


def _compute_all(part: _Part, batch: Any) -> tuple[Outcome | None, Outcome | None, dict[str, Any]]:
    """Return this rank's outcome if it is chosen, and the reference on its rank. Collective.

    Also what all ranks need to know of the reference: its loss, where it was computed, and by how
    much a result may differ from it, by unit roundoff.

    Raises:
        AgreedError: an error of the user's, on any rank.
    """
    world = part.world
    units = set(gather_values(world.comm, part.unit if part.is_chosen else 0.0))
    own: Outcome | None = None
    reference: Outcome | None = None
    shared: dict[str, Any] | None = None
    with agree_on_errors(world.comm):
        try:
            if part.is_chosen:
                own = compute_outcome(part.task, batch, part.computation, part.seed)
            if world.rank == part.source:
                reference, shared = _make_reference(part, batch, sorted(units - {0.0}))
        except UserError:
            _wait_for_others(world)
            raise
        except Exception as error:
            error.add_note("in the parity check before training, which --no-parity leaves out")
            raise
        _wait_for_others(world)
    found: dict[str, Any] = gather_values(world.comm, shared)[part.source]
    return own, reference, found


def _make_reference(
    part: _Part, batch: Any, units: Sequence[float]
) -> tuple[Outcome, dict[str, Any]]:
    """Compute the reference: on the host in float64, then float32, then as this rank trains.

    The host comes first because it depends on no kind's kernels and so shows which kind is wrong;
    but a large model takes too long there, and a model's code may be for one device or dtype only.
    """
    # Contiguous, as any model takes it and convolutions in float64 are faster so.
    host = Computation(torch.device("cpu"), "fp32", "contiguous")
    ways: list[tuple[Computation, torch.dtype | None]] = [(part.computation, None)]
    if _is_cheap_on_host(part, batch, host):
        ways = [(host, None), *ways]
        if not any(parameter.is_complex() for parameter in part.task.model.parameters()):
            ways = [(host, torch.float64), *ways]
    for computation, dtype in ways:
        try:
            common = part.task, batch, computation, part.seed, dtype
            reference = compute_outcome(*common)
            allowed = {}
            for unit in units:
                changed = compute_outcome(*common, change=unit)
                allowed[unit] = tolerances(distances(changed, reference, unit), reference, unit)
        except Exception:  # of user code that is for one device or dtype
            if computation is part.computation:
                raise
            continue
        how = "in float64 on its host" if dtype else f"in {computation.precision}"
        shared = {
            "text": f"{part.world.info} {how}",
            "loss": reference.loss,
            "outputs": reference.outputs.numel(),
            "levels": reference.levels,
            "allowed": list(allowed.items()),
        }
        return reference, shared
    raise AssertionError("the last way returns or raises")


def _is_cheap_on_host(part: _Part, batch: Any, host: Computation) -> bool:
    """Return whether the host computes the batch without delaying the start by much."""
    if sum(p.numel() for p in part.task.model.parameters()) > _MAX_HOST_PARAMETERS:
        return False
    began = time.perf_counter()
    try:
        with torch.no_grad():
            compute_outcome(part.task, batch, host, part.seed, torch.float32)
    except Exception:  # user code that runs on its device only may raise anything
        return False
    return time.perf_counter() - began < _MAX_HOST_FORWARD_SEC


def _wait_for_others(world: World) -> None:
    """Wait asleep until every rank has computed, or found an error of the user's. Collective."""
    enter_phase("waiting for the other ranks' parity check", waits=True, limited=False)
    sleeping_barrier(world.comm)


def _representatives(world: World, profiles: Profiles, excluded: Collection[int]) -> list[int]:
    """Return the first rank of each kind, device model, torch version, precision and format."""
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

    If random augmentation or a decoder makes them differ, they are the source's.

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
                f"the parity check: the samples have shapes {own} here and {others} on rank "
                f"{source}; give every host the same data, or skip this with --no-parity"
            )
    left = iter(received)
    return map_tensors(batch, lambda tensor: next(left) if _is_plain(tensor) else tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be sent: no sparse or nested one, nor of a class of its own."""
    return tensor.layout is torch.strided and type(tensor) is torch.Tensor


def _receive(part: _Part, reference: Outcome | None, shared: Mapping[str, Any]) -> Outcome:
    """Return the reference, which its rank sends to all others. Collective."""
    model = part.task.model
    if reference is None:
        gradients = {
            name: torch.empty(
                size_of(p), dtype=torch.float64 if p.dtype == torch.float64 else torch.float32
            )
            for name, p in model.named_parameters()
        }
        buffers = {
            name: torch.empty(size_of(b), dtype=torch.float64) for name, b in model.named_buffers()
        }
        outputs = torch.empty(shared["outputs"], dtype=torch.float64)
        reference = Outcome(shared["loss"], outputs, gradients, buffers, shared["levels"])
    for each in (*reference.gradients.values(), *reference.buffers.values(), reference.outputs):
        if each.numel():
            dist.broadcast(each, part.source)
    return reference


def _gather_reports(
    part: _Part, own: Outcome | None, reference: Outcome, shared: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return what was found on each of the chosen ranks, as in parity.json. Collective."""
    info, report = part.world.info, None
    if own is not None:
        found = differences(own, reference, part.unit, dict(shared["allowed"])[part.unit])
        report = {
            "rank": info.world_rank,
            "kind": info.kind,
            "place": str(info),
            "torch_version": info.torch_version,
            "precision": part.computation.precision,
            "memory_format": part.computation.memory_format,
            "loss": own.loss,
            "worst": [asdict(each) for each in found[:_SHOWN]],
        }
    return [each for each in gather_values(part.world.comm, report) if each is not None]


def _worst_of(report: Mapping[str, Any]) -> list[Difference]:
    return [Difference(**each) for each in report["worst"]]


def _describe(report: Mapping[str, Any]) -> str:
    found = ", ".join(map(str, _worst_of(report)))
    return (
        f"{report['kind']} ({report['place']}, torch {report['torch_version']}, "
        f"{report['precision']}): {found}"
    )


def _conclude(
    setup: Setup,
    world: World,
    reports: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Any],
    seconds: float,
) -> bool | None:
    """Write and log the result; the same on every rank.

    Raises:
        AgreedError: a kind does not agree.
    """
    wrong = [each for each in reports if _worst_of(each)[0].excess > 1]
    is_number = math.isfinite(shared["loss"])
    content = {
        "agrees": not wrong if is_number else None,
        "reference": shared["text"],
        "reference_loss": shared["loss"],
        "seconds": round(seconds, 3),
        "kinds": list(reports),
    }
    setup.folder.write(FILE, content)
    if not is_number:
        print_rank_0(
            world,
            f"parity: not compared, because the loss of the first samples is {shared['loss']}",
        )
        return None
    if wrong:
        raise AgreedError(
            f"parity: forward and backward differ from those of {shared['text']} by more than "
            f"rounding on {'; '.join(map(_describe, wrong))}; update that device's driver or torch "
            "plug-in, start without it, or skip this with --no-parity"
        )
    kinds = ", ".join(dict.fromkeys(report["kind"] for report in reports))
    kind, nearest = max(
        ((report["kind"], _worst_of(report)[0]) for report in reports),
        key=lambda found: found[1].excess,
    )
    print_rank_0(world, f"parity: {kinds} compute like {shared['text']} ({seconds:.1f} s)")
    print_rank_0(world, f"parity: nearest to its limit is {kind}: {nearest}")
    return True
