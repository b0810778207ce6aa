"""Compares forward and backward of the task between the kinds of devices, before training."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import agree_on_errors, broadcast_bytes, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.measure.outcome import (
    Outcome,
    compute_outcome,
    distances,
    rounding_unit,
    tolerances,
)
from kaitian_mpi.train.measure.plan import Profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.task import Computation, Task

FILE = "parity.json"
_SAMPLES = 4
_SHOWN = 3
_NOT = "parity: not compared, because "
_MAX_HOST_PARAMETERS = 50_000_000  # a larger model's reference would take too long on the host


def check_parity(
    config: TrainingConfig,
    setup: Setup,
    profiles: Profiles,
    excluded: Collection[int],
    world: World,
) -> bool | None:
    """Compare what a batch leads to between the kinds of devices. Collective.

    That is the loss, the gradient as a whole, and what the forward does to buffers, such as the
    statistics of batch norms, which only show in an evaluation.

    One rank of each kind, and of each torch version, precision and memory format of it, computes
    the same few samples with the initial weights and without dropout. The reference is the same in
    float64 on a host, or else one kind's own result. The excluded ranks are not compared.

    Returns:
        True, as they agree; None if nothing is compared: with a task without a loss to compare, or
        a loss that is not finite or draws random numbers.

    Raises:
        AgreedError: a kind differs by more than rounding explains.
    """
    loss = setup.task.loss or setup.task.parity_loss
    if loss is None:
        why = (
            "the script computes the loss itself; give Task(parity_loss=...), or leave it out with "
        )
        print_rank_0(world, f"{_NOT}{why}Training(parity=False)")
        return None
    began = time.perf_counter()
    enter_phase("the parity check")
    task = replace(setup.task, loss=loss, parity_loss=None)
    profile = profiles.by_place[world.info.place]
    computation = Computation(world.device, profile.precision, profile.memory_format)
    chosen = _representatives(world, profiles, excluded)
    # If possible, one that computes on its host, whose float64 depends on no kind's kernels.
    on_host = gather_values(world.comm, world.device_kind.is_host)
    source = next((rank for rank in range(world.size) if on_host[rank]), chosen[0])
    batch = _shared_batch(setup, profiles, world, source)
    is_chosen = world.rank in chosen
    units = gather_values(world.comm, is_chosen and rounding_unit(task.model, computation))
    own, made = None, None
    with agree_on_errors(world.comm):
        try:
            if is_chosen:
                own = compute_outcome(task, batch, computation, config.seed)
            if world.rank == source:
                made = _make_reference(task, batch, computation, config.seed, max(units))
        finally:
            enter_phase("waiting for the other ranks' parity check", waits=True, limited=False)
            sleeping_barrier(world.comm)
    shared = _from_source(world, made, source)
    if shared is None:
        print_rank_0(world, f"{_NOT}the loss draws random numbers")
        return None
    if not math.isfinite(shared["reference"]["loss"]):
        print_rank_0(world, f"{_NOT}the loss of the first samples is {shared['reference']['loss']}")
        return None
    report = None if own is None else _report(world, profile.precision, own, shared, max(units))
    reports = [each for each in gather_values(world.comm, report) if each is not None]
    text = f"{world.infos[source]} in {shared['precision']}"
    return _conclude(setup, world, reports, text, time.perf_counter() - began)


def _from_source(world: World, value: Any, source: int) -> Any:
    """Return a rank's tensors, or what holds them, on every rank. Collective."""
    content = io.BytesIO()
    torch.save(value, content)
    own = content.getvalue() if world.rank == source else None
    return torch.load(io.BytesIO(broadcast_bytes(world.comm, own, source)), weights_only=True)


def _representatives(world: World, profiles: Profiles, excluded: Collection[int]) -> list[int]:
    """Return the first rank of each kind, device model, torch version, precision and format."""
    first: dict[tuple[str, ...], int] = {}
    for rank, info in enumerate(world.infos):
        profile = profiles.by_place[info.place]
        if info.world_rank not in excluded:
            key = (*info.rounding, profile.precision, profile.memory_format)
            first.setdefault(key, rank)
    return list(first.values())


def _shared_batch(setup: Setup, profiles: Profiles, world: World, source: int) -> Any:
    """Return a few samples, spread over the data, with one rank's tensors. Collective."""
    costs = [profiles.by_place[info.place].cost for info in world.infos]
    most = [cost.largest_micro_batch for cost in costs if cost and cost.largest_micro_batch]
    total = len(setup.train)
    count = min(total, max(profiles.min_batch, min([_SAMPLES, *most])))
    tensors: list[torch.Tensor] = []

    def is_plain(tensor: torch.Tensor) -> bool:  # and so can be sent
        return tensor.layout is torch.strided and type(tensor) is torch.Tensor

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        tensors.extend([tensor.contiguous()] if is_plain(tensor) else [])
        return tensor

    with agree_on_errors(world.comm):
        batch = map_tensors(setup.train[[index * total // count for index in range(count)]], keep)
    left = iter(_from_source(world, tensors, source))
    return map_tensors(batch, lambda tensor: next(left, tensor) if is_plain(tensor) else tensor)


def _make_reference(
    task: Task, batch: Any, computation: Computation, seed: int, unit: float
) -> dict[str, Any] | None:
    """Return the reference, and by how much a result may differ from it; None of random numbers.

    It is computed on the host in float64, or else as this rank trains: a large model takes too long
    there, and a model's code may be for one device or dtype only.
    """
    # Contiguous, as any model takes it and convolutions in float64 are faster so.
    host = Computation(torch.device("cpu"), "fp32", "contiguous")
    parameters = list(task.model.parameters())
    is_small = sum(parameter.numel() for parameter in parameters) <= _MAX_HOST_PARAMETERS
    ways: list[tuple[Computation, torch.dtype | None]] = [(computation, None)]
    if is_small and not any(parameter.is_complex() for parameter in parameters):
        ways.insert(0, (host, torch.float64))
    for way, dtype in ways:
        try:
            reference = compute_outcome(task, batch, way, seed, dtype)
            changed = compute_outcome(task, batch, way, seed, dtype, change=unit)
        except Exception:  # of user code that is for one device or dtype
            if way is computation:
                raise
            continue
        if reference is None or changed is None:
            return None
        return {
            "reference": vars(reference),
            "allowed": tolerances(distances(changed, reference, unit), unit),
            "precision": "float64" if dtype else way.precision,
        }
    raise AssertionError("the last way returns or raises")


def _report(
    world: World, precision: str, own: Outcome, shared: Mapping[str, Any], unit: float
) -> dict[str, Any]:
    """Return what was found on this rank, as in parity.json."""
    info, reference = world.info, Outcome(**shared["reference"])
    allowed, found = shared["allowed"], distances(own, reference, unit)
    far = {name: float((own.gradients[name] - g).norm()) for name, g in reference.gradients.items()}
    nearest = sorted(far, key=lambda name: far[name] if far[name] >= 0 else math.inf)  # NaN last
    return {
        "rank": info.world_rank,
        "kind": info.kind,
        "place": f"{info}, torch {info.torch_version}, {precision}",
        "differences": {n: f"{each:.1e} (allowed {allowed[n]:.1e})" for n, each in found.items()},
        "most_in": nearest[: -_SHOWN - 1 : -1],
        "wrong": [name for name, each in found.items() if not each <= allowed[name]],  # also NaN
    }


def _conclude(
    setup: Setup, world: World, reports: Sequence[Mapping[str, Any]], text: str, seconds: float
) -> bool:
    """Write and log the result; the same on every rank."""
    wrong = [
        f"{each['kind']} ({each['place']}): "
        + ", ".join(f"{name} {each['differences'][name]}" for name in each["wrong"])
        + f", gradients most in {', '.join(each['most_in'])}"
        for each in reports
        if each["wrong"]
    ]
    content = {"agrees": not wrong, "reference": text, "seconds": round(seconds, 3)}
    setup.folder.write(FILE, {**content, "kinds": list(reports)})
    if wrong:
        raise AgreedError(
            f"parity: forward and backward differ from those of {text} by more than rounding on "
            f"{'; '.join(wrong)}; update that device's driver or torch plug-in, start without it, "
            "or skip this with --no-parity"
        )
    kinds = ", ".join(dict.fromkeys(report["kind"] for report in reports))
    print_rank_0(world, f"parity: {kinds} compute like {text} ({seconds:.1f} s)")
    return True
