"""Compares forward and backward of the task between the kinds of devices, before training."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from kaitian_mpi.devices import device_of
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import agree_on_errors, gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.observe.console import print_rank_0
from kaitian_mpi.observe.run_folder import RunFolder
from kaitian_mpi.runtime.watchdog import enter_phase
from kaitian_mpi.train.data.batches import map_tensors
from kaitian_mpi.train.divergence import numbers_of, rounding_unit
from kaitian_mpi.train.measure.plan import Profiles
from kaitian_mpi.train.setup import Setup
from kaitian_mpi.train.state_transfer import broadcast_state
from kaitian_mpi.train.task import Computation, Task, aside

FILE = "parity.json"
_SAMPLES = 4  # to compute
_SHOWN = 3  # parameters to name whose gradients differ most
_MAX_HOST_PARAMETERS = 50_000_000  # a larger model's reference would take too long on the host
_MAX_NUMBERS = 1 << 22  # of all gradients to compare: if there are more, every n-th
_LOSS_SCALES = (2.0**16, 2.0**8, 1.0)  # to try with fp16, until no gradient overflows
# The least tolerances: of the loss, in roundings, and of all else, as one rounding may switch a
# ReLU.
_LOSS_UNITS = 32.0
_KINK = 0.05
_TINY = 1e-300
_NOISE_FACTOR = 4.0  # rounding may do so many times what small changes of weights and data do
_MAX_NORM_CHANGE = 0.9  # below 1, so that a gradient of zero is never taken for rounding


@dataclass(frozen=True)
class ParityResult:
    """The result of a forward and backward: flat float64 tensors in host memory."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """By the parameter's name; zeros for one without a gradient."""
    buffers: torch.Tensor
    """The numbers of floating-point buffers, as of batch norms: [2, n], before and after."""
    is_random: bool = False
    """Whether the loss drew random numbers, which differ between kinds."""


def check_parity(
    setup: Setup, profiles: Profiles, excluded: Collection[int], seed: int, world: World
) -> bool | None:
    """Compare the loss, gradient and buffers of a batch between the kinds of devices. Collective.

    One rank of each kind, and of each torch version, precision and memory format of it, computes
    the same few samples with the initial weights and without dropout. The reference is computed in
    float64 on a host, or if that is not possible, as one of these ranks trains. Excluded ranks are
    not compared.

    Returns:
        True if they agree; None if nothing is compared: there is no loss, it is not finite, or it
        draws random numbers.

    Raises:
        AgreedError: a kind differs by more than rounding explains.
    """
    began = time.perf_counter()
    task = replace(setup.task, loss=setup.task.loss or setup.task.parity_loss, parity_loss=None)
    if task.loss is None:
        why = "the script computes the loss itself; give Task(parity_loss=...), or leave it out"
        print_rank_0(world, f"parity: not compared, because {why} with Training(parity=False)")
        return None
    enter_phase("the parity check")
    compared = _ranks_to_compare(profiles, excluded, world)
    # If possible, a rank that computes on its host makes the reference: its float64 depends on no
    # kind's kernels.
    hosts = [rank for rank, info in enumerate(world.infos) if info.is_on_host]
    source = (hosts or compared)[0]
    info = world.info
    profile = profiles.by_place[info.place]
    units = gather_values(world.comm, rounding_unit(task.model, profile.precision, info.is_on_host))
    unit = max(units[rank] for rank in compared)
    batch = _shared_batch(setup, profiles, world, source)
    computation = Computation(world.device, profile.precision, profile.memory_format)
    outcome = reference = None
    with agree_on_errors(world.comm):
        if world.rank in compared:
            outcome = compute_outcome(task, batch, computation, seed)
        if world.rank == source:
            reference = _make_reference(task, batch, computation, seed, unit)
        enter_phase("waiting for the other ranks' parity check", waits=True, limited=False)
    reference = broadcast_state(world.comm, reference, source, receives=world.rank in compared)
    comparison = reference and _compare(world, profile.precision, outcome, reference, unit)
    by_rank = gather_values(world.comm, comparison)
    return _conclude(setup.folder, world, source, by_rank, time.perf_counter() - began)


def _ranks_to_compare(profiles: Profiles, excluded: Collection[int], world: World) -> list[int]:
    """Return the first rank of each kind that computes in its own way."""
    first: dict[tuple[str, ...], int] = {}
    for rank, info in enumerate(world.infos):
        if info.world_rank not in excluded:
            profile = profiles.by_place[info.place]
            first.setdefault((*info.rounding, profile.precision, profile.memory_format), rank)
    return list(first.values())


def _shared_batch(setup: Setup, profiles: Profiles, world: World, source: int) -> Any:
    """Return a few samples, spread over the data, with one rank's tensors. Collective."""
    limits = [cost.largest_micro_batch for cost in profiles.costs(world.infos) or ()]
    total = len(setup.train)
    count = min(total, max(profiles.min_batch, min([_SAMPLES, *filter(None, limits)])))
    tensors: list[torch.Tensor] = []

    def can_be_sent(tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and type(tensor) is torch.Tensor

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if can_be_sent(tensor):
            tensors.append(tensor.contiguous())
        return tensor

    with agree_on_errors(world.comm):
        indices = [index * total // count for index in range(count)]
        batch = map_tensors(setup.train[indices], collect)
    received = iter(broadcast_state(world.comm, tensors, source, receives=True))

    def replace_sent(tensor: torch.Tensor) -> torch.Tensor:
        return next(received, tensor) if can_be_sent(tensor) else tensor

    return map_tensors(batch, replace_sent)


def _make_reference(
    task: Task, batch: Any, computation: Computation, seed: int, unit: float
) -> tuple[str, dict[str, Any], dict[str, float]]:
    """Return the reference: its precision, its `ParityResult` as a dict, and the tolerances.

    It is computed on the host in float64; or as this rank trains, if the model is so large that it
    would take too long, or its code is for one device or dtype only.
    """
    is_large = sum(p.numel() for p in task.model.parameters()) > _MAX_HOST_PARAMETERS
    is_complex = any(p.is_complex() for p in task.model.parameters())
    if computation.precision != "float64" and not (is_large or is_complex):
        # Contiguous: every model accepts it, and convolutions in float64 are faster with it.
        host = Computation(torch.device("cpu"), "float64", "contiguous")
        with suppress(Exception):
            return _make_reference(task, batch, host, seed, unit)
    expected = compute_outcome(task, batch, computation, seed)
    changed = compute_outcome(task, batch, computation, seed, unit)
    allowed = tolerances(distances(changed, expected, unit), unit)
    return computation.precision, vars(expected), allowed


def _compare(
    world: World, precision: str, outcome: Any, reference: Any, unit: float
) -> dict[str, Any] | str:
    """Return how an outcome differs from the reference, or why it is not compared."""
    reference_precision, reference_fields, allowed = reference
    expected = ParityResult(**reference_fields)
    if outcome.is_random or expected.is_random:
        return "the loss draws random numbers"
    if not math.isfinite(expected.loss):
        return f"the loss of the first samples is {expected.loss}"
    measured = distances(outcome, expected, unit)
    texts = {
        name: f"{name} {distance:.1e} (allowed {allowed[name]:.1e})"
        for name, distance in measured.items()
    }
    # NaN is not within any tolerance either.
    wrong = [texts[name] for name, distance in measured.items() if not distance <= allowed[name]]
    gradient_distances = {
        name: float((outcome.gradients[name] - gradient).norm().nan_to_num(math.inf))
        for name, gradient in expected.gradients.items()
    }
    by_distance = sorted(gradient_distances, key=lambda name: -gradient_distances[name])
    most = ", ".join(by_distance[:_SHOWN])
    return {
        "rank": world.info.world_rank,
        "kind": world.info.kind,
        "place": f"{world.info}, torch {world.info.torch_version}, {precision}",
        "reference": reference_precision,
        "differences": list(texts.values()),
        "wrong": f"{', '.join(wrong)}, gradients most in {most}" if wrong else "",
    }


def _conclude(
    folder: RunFolder, world: World, source: int, by_rank: Sequence[Any], seconds: float
) -> bool | None:
    """Write parity.json, and report the result.

    Raises:
        AgreedError: a kind differs by more than rounding explains.
    """
    kinds = [result for result in by_rank if result]
    reasons = [result for result in kinds if isinstance(result, str)]
    if reasons:
        print_rank_0(world, f"parity: not compared, because {reasons[0]}")
        return None
    wrong = [
        f"{result['kind']} ({result['place']}): {result['wrong']}"
        for result in kinds
        if result["wrong"]
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
    names = ", ".join(dict.fromkeys(result["kind"] for result in kinds))
    print_rank_0(world, f"parity: {names} agree with {reference} ({seconds:.1f} s)")
    return True


class _WithoutDropout(TorchFunctionMode):
    """Applies no dropout, as devices of different kinds draw different masks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for module in model.modules():
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                module.dropout = 0.0  # a kernel applies it
            elif isinstance(module, _DropoutNd):
                module.p = 0.0  # backward may compute its forward again, outside of this mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else options["input"]
        if name == "scaled_dot_product_attention":
            options |= dict(zip(("dropout_p", "is_causal"), args[4:], strict=False))
            return func(*args[:4], **options | {"dropout_p": 0.0})
        return func(*args, **options)


def compute_outcome(
    task: Task, batch: Any, computation: Computation, seed: int, change: float = 0.0
) -> ParityResult:
    """Return the results of the task's model for a batch, without dropout. Not collective.

    The model itself, its buffers and torch's random numbers stay as they are. If the computation is
    in float64, so are all floating-point numbers. With a `change`, the weights and the batch are
    changed at random, each number by at most that part of it.
    """
    device = computation.device
    dtype = torch.float64 if computation.precision == "float64" else None
    eager = dtype is not None and "torch._dynamo" in sys.modules  # importing it takes a second
    stance = torch.compiler.set_stance("force_eager") if eager else nullcontext()
    with aside(device), stance:
        for scale in _LOSS_SCALES if computation.scaler.is_enabled() else (1.0,):
            torch.manual_seed(seed)
            model = copy.deepcopy(task.model).to(device=device, dtype=dtype).train()
            changed = partial(_changed, dtype=dtype, part=change)
            for parameter in model.parameters() if change else ():
                parameter.data.copy_(changed(parameter.data))
            placed = computation.place(map_tensors(batch, changed))
            before = _random_state(device)
            with _WithoutDropout(model):
                loss = computation.loss(task, model, placed, needs_gradient=False)
            if loss.requires_grad:  # it does not if nothing in the batch counts
                (loss * scale).backward()
            is_random = not torch.equal(before, _random_state(device))
            outcome = replace(_outcome(task.model, model, loss, scale), is_random=is_random)
            if all(bool(gradient.isfinite().all()) for gradient in outcome.gradients.values()):
                break
    return outcome


def _changed(tensor: torch.Tensor, dtype: torch.dtype | None, part: float) -> torch.Tensor:
    """Return floating-point numbers in a dtype, changed at random by at most a part of each."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return tensor
    tensor = tensor.to(dtype or tensor.dtype)
    return tensor * (1 + part * (2 * torch.rand(tensor.shape) - 1)).to(tensor)


def _outcome(before: nn.Module, after: nn.Module, loss: torch.Tensor, scale: float) -> ParityResult:
    stride = -(-sum(p.numel() for p in after.parameters()) // _MAX_NUMBERS)
    gradients = {
        name: numbers_of(torch.zeros_like(p) if p.grad is None else p.grad, stride) / scale
        for name, p in after.named_parameters()
    }
    buffers_after = dict(after.named_buffers())
    buffers = []
    for name, buffer in before.named_buffers():
        buffer_after = buffers_after.get(name)
        if buffer_after is None or buffer_after.shape != buffer.shape:
            continue
        if buffer.is_floating_point():
            buffers.append(torch.stack([numbers_of(buffer), numbers_of(buffer_after)]))
    return ParityResult(loss.item(), gradients, torch.cat([torch.zeros(2, 1), *buffers], dim=1))


def _random_state(device: torch.device) -> torch.Tensor:
    state = device_of(device).random_state(device.index or 0)
    return torch.get_rng_state() if state is None else state


def distances(outcome: ParityResult, reference: ParityResult, unit: float) -> dict[str, float]:
    """Return how much an outcome differs from the reference, by quantity; NaN where it is NaN."""
    names = list(reference.gradients)
    gradient = torch.cat([outcome.gradients[name] for name in names])
    expected = torch.cat([reference.gradients[name] for name in names])
    norm = float(gradient.norm())
    expected_norm = float(expected.norm())
    cosine = 1.0
    if norm or expected_norm:
        cosine = float(gradient @ expected) / (norm * expected_norm or _TINY)
    change = outcome.buffers[1] - outcome.buffers[0]
    expected_change = reference.buffers[1] - reference.buffers[0]
    # Buffers are rounded even if they do not change.
    rounding = unit * float(reference.buffers[1].norm())
    change_norm = max(float(expected_change.norm()), rounding, _TINY)
    return {
        "the loss": abs(outcome.loss - reference.loss) / max(abs(reference.loss), unit),
        "the gradient's norm": abs(norm - expected_norm) / max(expected_norm, _TINY),
        "the gradient's direction": 1 - cosine,
        "the buffers": float((change - expected_change).norm()) / change_norm,
    }


def tolerances(noise: Mapping[str, float], unit: float) -> dict[str, float]:
    """Return the largest differences that rounding may explain.

    These are four times the differences that random changes of the weights and the data by one
    rounding make, which are large if the gradient is ill-conditioned. The loss may differ by at
    least 32 roundings, and all else by 5%.

    Args:
        noise: the differences that such changes make, as `distances` returns them.
        unit: the relative error of one rounding.
    """
    loss, norm, direction, buffers = (_NOISE_FACTOR * distance for distance in noise.values())
    # Noise that turns the gradient by an angle may change its norm by as much.
    angle = (2 * _NOISE_FACTOR * max(0.0, direction)) ** 0.5
    norm = min(max(norm, angle), _MAX_NORM_CHANGE)
    allowed = (
        max(_LOSS_UNITS * unit, loss),
        max(_KINK, norm),
        max(_KINK**2 / 2, direction),
        max(_KINK, buffers),
    )
    return dict(zip(noise, allowed, strict=True))
