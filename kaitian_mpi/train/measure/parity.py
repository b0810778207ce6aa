"""Compares forward and backward of the task between the kinds of devices, before training."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.devices import device_of
from kaitian_mpi.distributed.sync_batch_norm import local_statistics
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.topology import RankInfo
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.runtime.polling import sleeping_barrier
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.measure.plan import Profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state_transfer import broadcast_state
from kaitian_mpi.train.task import Computation, Task

FILE = "parity.json"
_SAMPLES = 4
_SHOWN = 3
_MAX_HOST_PARAMETERS = 50_000_000  # a larger model's reference would take too long on the host
_MAX_NUMBERS = 1 << 22  # of a gradient; of a larger one, some are compared
_LOSS_SCALES = (2.0**16, 2.0**8, 1.0)  # of fp16, until no gradient overflows
# Of the coarsest operation, relative; accelerators multiply float32 in TF32 or the like.
_UNITS = {"fp32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
_HOST_UNIT = 2.0**-20  # of float32: sums of hundreds of products round more than one operation
# What rounding may do in any case: a single one may switch a ReLU.
_LOSS_UNITS, _KINK = 32.0, 0.05
_TINY = 1e-300
_NOISE_FACTOR = 4.0  # how much more than small changes of weights and data rounding may do
_MAX_NORM_CHANGE = 0.9  # so that a gradient of zero is never taken for rounding
_RANDOM = "the loss draws random numbers"

Reference = tuple[str, dict[str, Any], dict[str, float]]
"""Its precision, an `Outcome` as a dict, and what may differ from it."""


@dataclass(frozen=True)
class Outcome:
    """The result of a forward and backward: flat float64 tensors in host memory."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """Of each parameter; zeros if it has got none."""
    buffers: torch.Tensor
    """The floating-point buffers, such as batch norms' statistics: [2, n], before and after."""


def check_parity(
    config: TrainingConfig,
    setup: Setup,
    profiles: Profiles,
    excluded: Collection[int],
    world: World,
) -> bool | None:
    """Compare the loss, gradient and buffers of a batch between the kinds of devices. Collective.

    One rank of each kind, and of each torch version, precision and memory format of it, computes
    the same few samples with the initial weights and without dropout. The reference is the same in
    float64 on a host, or else one kind's own result. The excluded ranks are not compared.

    Returns True if they agree; None if nothing is compared: with a task without a loss to compare,
    or a loss that is not finite or draws random numbers. Raises AgreedError if a kind differs by
    more than rounding explains.
    """
    began = time.perf_counter()
    task = replace(setup.task, loss=setup.task.loss or setup.task.parity_loss, parity_loss=None)
    if task.loss is None:
        why = "the script computes the loss itself; give Task(parity_loss=...), or leave it out"
        print_rank_0(world, f"parity: not compared, because {why} with Training(parity=False)")
        return None
    enter_phase("the parity check")
    first: dict[tuple[str, ...], int] = {}
    for rank, info in enumerate(world.infos):
        if info.world_rank not in excluded:
            profile = profiles.by_place[info.place]
            first.setdefault((*info.rounding, profile.precision, profile.memory_format), rank)
    own, is_host = profiles.by_place[world.info.place], world.device_kind.is_host
    own_unit = rounding_unit(task.model, own.precision, is_host)
    on_host, units = zip(*gather_values(world.comm, (is_host, own_unit)), strict=True)
    # If possible, one that computes on its host, whose float64 depends on no kind's kernels.
    source = on_host.index(True) if any(on_host) else min(first.values())
    unit = max(units[rank] for rank in first.values())
    batch = _shared_batch(setup, profiles, world, source)
    computation = Computation(world.device, own.precision, own.memory_format)
    is_compared = world.rank in first.values()
    outcome = known = found = None
    with agree_on_errors(world.comm):
        try:
            if is_compared:
                outcome = compute_outcome(task, batch, computation, config.seed)
            if world.rank == source:
                known = _make_reference(task, batch, computation, config.seed, unit)
        finally:
            enter_phase("waiting for the other ranks' parity check", waits=True, limited=False)
            sleeping_barrier(world.comm)
    known = broadcast_state(world.comm, known, source, is_compared)
    if is_compared:
        found = _compare(world.info, own.precision, outcome, known, unit)
    by_rank = gather_values(world.comm, found)
    return _conclude(setup.folder, world, source, by_rank, time.perf_counter() - began)


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
    left = iter(broadcast_state(world.comm, tensors, source, receives=True))
    return map_tensors(batch, lambda tensor: next(left, tensor) if is_plain(tensor) else tensor)


def _make_reference(
    task: Task, batch: Any, computation: Computation, seed: int, unit: float
) -> Reference | str:
    """Return what is expected of the batch, or why nothing is compared.

    It is computed on the host in float64, or else as this rank trains: a large model takes too long
    there, and a model's code may be for one device or dtype only.
    """
    parameters, outcomes = list(task.model.parameters()), None
    is_large = sum(parameter.numel() for parameter in parameters) > _MAX_HOST_PARAMETERS
    if not is_large and not any(parameter.is_complex() for parameter in parameters):
        # Contiguous, as any model takes it and convolutions in float64 are faster so.
        host = Computation(torch.device("cpu"), "fp32", "contiguous")
        way, parts = "float64", (task, batch, host, seed, torch.float64)
        with suppress(Exception):
            outcomes = compute_outcome(*parts), compute_outcome(*parts, unit)
    if outcomes is None:
        way, own = computation.precision, (task, batch, computation, seed, None)
        outcomes = compute_outcome(*own), compute_outcome(*own, unit)
    expected, changed = outcomes
    if expected is None or changed is None:
        return _RANDOM
    if not math.isfinite(expected.loss):
        return f"the loss of the first samples is {expected.loss}"
    return way, vars(expected), tolerances(distances(changed, expected, unit), unit)


def _compare(
    info: RankInfo, precision: str, own: Outcome | None, known: Reference | str, unit: float
) -> dict[str, Any] | str:
    """Return how an outcome differs from the reference, or why it is not compared."""
    if isinstance(known, str) or own is None:
        return known if isinstance(known, str) else _RANDOM
    way, expected, allowed = known
    found = distances(own, Outcome(**expected), unit)
    pairs = ((name, own.gradients[name] - g) for name, g in expected["gradients"].items())
    far = {name: float(each.norm().nan_to_num(math.inf)) for name, each in pairs}
    texts = {name: f"{name} {found[name]:.1e} (allowed {allowed[name]:.1e})" for name in found}
    wrong = [texts[name] for name in found if not found[name] <= allowed[name]]  # also NaN
    most = sorted(far, key=lambda name: -far[name])[:_SHOWN]
    where = {"rank": info.world_rank, "kind": info.kind, "reference": way}
    place = f"{info}, torch {info.torch_version}, {precision}"
    what = {"differences": list(texts.values()), "wrong": wrong, "most_in": most}
    return {**where, "place": place, **what}


def _conclude(
    folder: RunFolder, world: World, source: int, by_rank: Sequence[Any], seconds: float
) -> bool | None:
    """Write parity.json, and report what was found; raise an error if a kind is wrong."""
    if reasons := [each for each in by_rank if isinstance(each, str)]:
        print_rank_0(world, f"parity: not compared, because {reasons[0]}")
        return None
    kinds = [each for each in by_rank if each]
    wrong = [
        f"{each['kind']} ({each['place']}): {', '.join(each['wrong'])}, gradients most in "
        f"{', '.join(each['most_in'])}"
        for each in kinds
        if each["wrong"]
    ]
    reference = f"{world.infos[source]} in {kinds[0]['reference']}"
    content = {"agrees": not wrong, "reference": reference, "kinds": kinds}
    folder.write(FILE, {**content, "seconds": round(seconds, 3)})
    if wrong:
        raise AgreedError(
            f"parity: forward and backward differ from those of {reference} by more than rounding "
            f"on {'; '.join(wrong)}; update that device's driver or torch plug-in, start without "
            "it, or skip this with --no-parity"
        )
    names = ", ".join(dict.fromkeys(each["kind"] for each in kinds))
    print_rank_0(world, f"parity: {names} agree with {reference} ({seconds:.1f} s)")
    return True


class _WithoutDropout(TorchFunctionMode):
    """Applies no dropout, of which devices of different kinds draw different masks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else options["input"]
        if name == "scaled_dot_product_attention":
            options |= dict(zip(("dropout_p", "is_causal"), args[4:], strict=False))
            return func(*args[:4], **options | {"dropout_p": 0.0})
        return func(*args, **options)


def compute_outcome(
    task: Task,
    batch: Any,
    computation: Computation,
    seed: int,
    dtype: torch.dtype | None = None,
    change: float = 0.0,
) -> Outcome | None:
    """Return what the task's model makes of a batch, without dropout. Not collective.

    The model itself, its buffers and torch's random numbers stay as they are. With a `dtype`, the
    floating-point numbers are converted; with a `change`, they are changed at random by at most
    that part. None if the loss draws random numbers, which differ between kinds of devices.
    """
    device = computation.device
    is_host = device_of(device).is_host
    eager = dtype is not None and "torch._dynamo" in sys.modules  # importing it takes a second
    with (
        torch.random.fork_rng([] if is_host else [device], device_type=device.type),
        local_statistics(),
        torch.compiler.set_stance("force_eager") if eager else nullcontext(),
    ):
        for scale in _LOSS_SCALES if computation.scaler.is_enabled() else (1.0,):
            torch.manual_seed(seed)
            model = copy.deepcopy(task.model).to(device=device, dtype=dtype).train()
            placed = computation.place(_prepare(model, batch, dtype, change))
            before = _random_state(device)
            outcome = _compute(task, model, placed, computation, scale)
            if not torch.equal(before, _random_state(device)):
                return None
            if all(bool(each.isfinite().all()) for each in outcome.gradients.values()):
                break
    return outcome


def _random_state(device: torch.device) -> torch.Tensor:
    state = device_of(device).random_state(device.index or 0)
    return torch.get_rng_state() if state is None else state


def _prepare(model: nn.Module, batch: Any, dtype: torch.dtype | None, change: float) -> Any:
    """Switch off the dropout within kernels, change the model, and return the changed batch."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        tensor = tensor.to(dtype or tensor.dtype)
        return tensor * (1 + change * (2 * torch.rand(tensor.shape) - 1)).to(tensor)

    for module in model.modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    with torch.no_grad():
        for parameter in model.parameters() if change else ():
            parameter.copy_(changed(parameter))
    return map_tensors(batch, changed)


def _compute(
    task: Task, model: nn.Module, batch: Any, computation: Computation, scale: float
) -> Outcome:
    with _WithoutDropout():
        loss = computation.loss(task, model, batch, needs_gradient=False)
    if loss.requires_grad:  # not of a batch in which nothing counts
        (loss * scale).backward()
    stride = -(-sum(p.numel() for p in model.parameters()) // _MAX_NUMBERS)
    gradients = {
        name: _flat(torch.zeros_like(p) if p.grad is None else p.grad, stride) / scale
        for name, p in model.named_parameters()
    }
    now = dict(model.named_buffers())
    buffers = [
        torch.stack([_flat(own), _flat(now[name])])
        for name, own in task.model.named_buffers()
        if own.is_floating_point() and name in now and now[name].shape == own.shape
    ]
    return Outcome(loss.item(), gradients, torch.cat([torch.zeros(2, 1), *buffers], dim=1))


def _flat(tensor: torch.Tensor, stride: int = 1) -> torch.Tensor:
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.to_dense()
    parts = torch.view_as_real(dense) if dense.is_complex() else dense
    return parts.flatten()[::stride].to("cpu").double()


def rounding_unit(model: nn.Module, precision: str, is_host: bool) -> float:
    """Return the relative error of a rank's coarsest operation, such as 2^-20 in float32."""
    units = [_HOST_UNIT if is_host and precision == "fp32" else _UNITS[precision]]
    if torch.get_float32_matmul_precision() != "highest":
        units.append(_UNITS["bf16"])
    units += [torch.finfo(p.dtype).eps / 2 for p in model.parameters() if p.is_floating_point()]
    return max(units)


def distances(own: Outcome, reference: Outcome, unit: float) -> dict[str, float]:
    """Return how much an outcome differs from the reference, by quantity; NaN where it is NaN."""
    names = list(reference.gradients)
    mine, other = (torch.cat([each.gradients[n] for n in names]) for each in (own, reference))
    norm, expected = float(mine.norm()), float(other.norm())
    is_zero = norm == expected == 0
    added, rise = (each.buffers[1] - each.buffers[0] for each in (own, reference))
    # Buffers are rounded even if they do not change.
    changed = max(float(rise.norm()), unit * float(reference.buffers[1].norm()), _TINY)
    return {
        "the loss": abs(own.loss - reference.loss) / max(abs(reference.loss), unit),
        "the gradient's norm": 0.0 if is_zero else abs(norm - expected) / max(expected, _TINY),
        "the gradient's direction": 0.0
        if is_zero
        else 1 - float(mine @ other) / (norm * expected or _TINY),
        "the buffers": float((added - rise).norm()) / changed,
    }


def tolerances(noise: Mapping[str, float], unit: float) -> dict[str, float]:
    """Return the largest differences that rounding may explain.

    That is four times what random changes of the weights and the data by a rounding do: little to a
    shallow model, much to one whose gradient is ill-conditioned, as with batch norms over few
    samples. It is at least 32 roundings of the loss, and 5% of the rest.
    """
    loss, norm, direction, buffers = (_NOISE_FACTOR * each for each in noise.values())
    # Of what turns the gradient by an angle, as much may change its norm.
    turned = max(norm, (2 * _NOISE_FACTOR * max(0.0, direction)) ** 0.5)
    norm, direction = min(turned, _MAX_NORM_CHANGE), max(_KINK**2 / 2, direction)
    allowed = max(_LOSS_UNITS * unit, loss), max(_KINK, norm), direction, max(_KINK, buffers)
    return dict(zip(noise, allowed, strict=True))
