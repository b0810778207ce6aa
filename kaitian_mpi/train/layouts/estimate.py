"""Estimates each rank's memory in each layout without a job, for `kaitian-plan --memory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from kaitian_mpi.balance.communication import FREE
from kaitian_mpi.balance.cost_model import RankCost
from kaitian_mpi.balance.experts import Expert, ExpertRank, ExpertsJob
from kaitian_mpi.balance.layouts import EXPERTS, PIPELINE, REPLICATE, SHARD, LayoutJob
from kaitian_mpi.balance.memory import LayoutMemory, layout_memory
from kaitian_mpi.balance.pipeline_cost import Layer, LayerFacts, PipelineJob
from kaitian_mpi.balance.shares import apportion
from kaitian_mpi.config import TrainingConfig
from kaitian_mpi.config.factory import one_line
from kaitian_mpi.distributed.experts import without_experts
from kaitian_mpi.errors import UserError
from kaitian_mpi.mpi.world import World
from kaitian_mpi.train.data.batches import as_batches
from kaitian_mpi.train.layouts.choose import refused_layouts, short_reason, whole_layer
from kaitian_mpi.train.layouts.experts.expert_owners import find_mixtures
from kaitian_mpi.train.layouts.experts.expert_timer import Rows, watched
from kaitian_mpi.train.layouts.fake_forward import activation_bytes
from kaitian_mpi.train.layouts.pipeline.chain import Piece, chain_of
from kaitian_mpi.train.layouts.pipeline.layer_timer import LayerBytes, layers_of
from kaitian_mpi.train.layouts.shard.memory_budget import (
    possible_needs,
    steps_at_once,
    usual_states,
)
from kaitian_mpi.train.measure.plan import min_batch_by_layers
from kaitian_mpi.train.measure.rank_timer import SAFE_FRACTION
from kaitian_mpi.train.task import Computation, Task

_SAMPLES = 8  # of which the activations are found
_UNTIMED = 1e-9  # seconds a byte: all ranks count as equally fast, and a layer by its size


@dataclass(frozen=True)
class DeviceMemory:
    """A rank's device, of which only the memory has to be known."""

    kind: str
    memory_bytes: float
    """Of the device, or this rank's part of it."""
    is_on_host: bool
    """Whether the rank computes on a CPU."""


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of a task's training, by layout."""

    model: str
    parameters: int
    """The number of values in the parameters."""
    parameter_bytes: int
    sample_bytes: float
    """Kept of a sample from forward to backward, with temporary tensors."""
    fault: str
    """The reason why that is not known, and counts as nothing; empty if it is."""
    others: tuple[str, ...]
    """The optimizers of other classes than SGD and Adam, whose state is counted as Adam's."""
    layouts: tuple[LayoutMemory, ...]


def estimate_memory(
    task: Task, config: TrainingConfig, devices: Sequence[DeviceMemory], world: World
) -> MemoryEstimate:
    """Return the memory of each rank in each layout. Not collective.

    Args:
        task: whose model may have no values.
        config: of the training.
        devices: of the ranks.
        world: this process, whose own memory is taken for that of each rank on a CPU.
    """
    model = task.model
    optimizers = task.make_optimizers(model)
    job, fault = _layout_job(task, optimizers, config, devices, world)
    layouts = [REPLICATE, SHARD, PIPELINE]
    if job.experts is not None or EXPERTS in job.refused:
        layouts.append(EXPERTS)
    return MemoryEstimate(
        task.name,
        sum(parameter.numel() for parameter in model.parameters()),
        sum(parameter.nbytes for parameter in model.parameters()),
        job.sample_bytes,
        fault,
        tuple(
            type(optimizer).__name__ for optimizer in optimizers if not _has_usual_state(optimizer)
        ),
        tuple(layout_memory(job, layout) for layout in layouts),
    )


def _layout_job(
    task: Task,
    optimizers: Sequence[Optimizer],
    config: TrainingConfig,
    devices: Sequence[DeviceMemory],
    world: World,
) -> tuple[LayoutJob, str]:
    """Return what layouts are compared by, and why activations are not known; "" if they are."""
    model = task.model
    min_batch = min_batch_by_layers(model)
    refused = refused_layouts(config, task)
    chain = [model]
    if PIPELINE not in refused:
        try:
            chain = chain_of(task)
        except UserError as error:
            refused[PIPELINE] = short_reason(error)
    fault = ""
    layer_bytes = [LayerBytes()] * len(chain)
    try:
        layer_bytes = _bytes_of_a_sample(task, config, chain, min_batch, world)
    except Exception as error:  # of the model's own code, which may need values
        fault = one_line(error)
    layers = tuple(layers_of(chain, optimizers, layer_bytes))
    whole = whole_layer(model, optimizers, layers)
    used = float(world.device_kind.memory_peak_bytes(world.device_index))
    ranks = tuple(_facts(device, layers, whole, optimizers, used) for device in devices)
    experts = None
    if find_mixtures(model) and EXPERTS not in refused and not fault:
        experts = _experts_job(task, config, optimizers, whole, ranks, min_batch, world)
    job = LayoutJob(
        PipelineJob(layers, ranks, config.global_batch_size, min_batch, config.micro_batch_size),
        whole,
        possible_needs(config, model, optimizers),
        allreduce_cost=FREE,
        scatter_cost=FREE,
        gather_cost=FREE,
        on_host=any(device.is_on_host for device in devices),
        experts=experts,
        refused=refused,
    )
    return job, fault


def _experts_job(
    task: Task,
    config: TrainingConfig,
    optimizers: Sequence[Optimizer],
    whole: Layer,
    ranks: Sequence[LayerFacts],
    min_batch: int,
    world: World,
) -> ExpertsJob:
    """Return what experts are placed by if all ranks are equally fast, and all tokens spread."""
    with without_experts(), watched(task.model) as rows:
        (dense,) = _bytes_of_a_sample(task, config, [task.model], min_batch, world)
    samples = _samples(config, min_batch, len(as_batches(task.data, task.collate)))
    states = usual_states(optimizers)
    experts, tokens = _experts_and_tokens(task.model, rows(), samples, states)
    # What the experts keep of a sample, by token.
    kept = max(0.0, whole.kept_bytes - dense.kept) / max(1.0, sum(tokens))
    experts = [replace(expert, kept_bytes=kept) for expert in experts]
    return ExpertsJob(
        tuple(experts),
        tuple(_expert_rank(rank, whole, experts, dense, states) for rank in ranks),
        tuple(tokens),
        config.global_batch_size,
        min_batch,
        config.micro_batch_size,
        tuple(apportion(config.global_batch_size, [1] * len(ranks))),
    )


def _experts_and_tokens(
    model: nn.Module, rows: Sequence[Rows], samples: int, states: int
) -> tuple[list[Expert], list[float]]:
    """Return a model's experts, and each one's tokens of a sample, of all rows of so many.

    Optimizers keep so many `states` of a parameter.
    """
    experts, tokens = [], []
    mixtures = find_mixtures(model).values()
    for number, (mixture, mixture_rows) in enumerate(zip(mixtures, rows, strict=True)):
        for expert in mixture.experts:
            size = sum(tensor.nbytes for tensor in (*expert.parameters(), *expert.buffers()))
            trained = sum(p.nbytes for p in expert.parameters() if p.requires_grad)
            held = size + trained * (1 + states)
            experts.append(Expert(number, held, 0.0, mixture_rows.row_bytes, trained, size))
            tokens.append(sum(mixture_rows.counts) / samples / len(mixture.experts))
    return experts, tokens


def _expert_rank(
    facts: LayerFacts, whole: Layer, experts: Sequence[Expert], dense: LayerBytes, states: int
) -> ExpertRank:
    """Return a rank as fast as all others, which has the model besides its experts."""
    trained = whole.trained_bytes - sum(expert.trained_bytes for expert in experts)
    state = whole.state_bytes - sum(e.trained_bytes + e.state_bytes for e in experts)
    weights = whole.weight_bytes - sum(expert.weight_bytes for expert in experts)
    base = facts.base_bytes + weights + state + trained * facts.steps_at_once
    free = max(0.0, facts.memory_bytes - base) / (1 + facts.steps_at_once / (2 + states))
    seconds = (_UNTIMED,) * len(experts)
    return ExpertRank(
        facts.kind,
        0,
        RankCost(0.0, _UNTIMED),
        seconds,
        seconds,
        seconds,
        free,
        dense.kept + dense.temporary,
        base,
    )


def _has_usual_state(optimizer: Optimizer) -> bool:
    has_more = any(group.get("amsgrad") for group in optimizer.param_groups)
    return type(optimizer) in (SGD, Adam, AdamW) and not has_more


def _bytes_of_a_sample(
    task: Task, config: TrainingConfig, chain: Sequence[nn.Module], min_batch: int, world: World
) -> list[LayerBytes]:
    data = as_batches(task.data, task.collate)
    samples = _samples(config, min_batch, len(data))
    computation = Computation(world.device, config.precision.replace("auto", "fp32"), "contiguous")
    modules = [_called_modules(layer) for layer in chain]
    batch_bytes = activation_bytes(task, computation, data[list(range(samples))], modules)
    return [
        LayerBytes(
            layer.kept / samples, layer.casts, layer.temporary / samples, layer.output / samples
        )
        for layer in batch_bytes
    ]


def _samples(config: TrainingConfig, min_batch: int, length: int) -> int:
    """Return the samples of which the activations are found."""
    return max(min_batch, min(_SAMPLES, config.global_batch_size, length))


def _called_modules(layer: nn.Module) -> list[nn.Module]:
    """Return the modules of a layer that the model calls, in order."""
    if not isinstance(layer, Piece):
        return [layer]
    modules = [parent._modules[name] for parent, name in layer.places[layer.number]]
    return [module for module in modules if module is not None]


def _facts(
    device: DeviceMemory,
    layers: Sequence[Layer],
    whole: Layer,
    optimizers: Sequence[Optimizer],
    used: float,
) -> LayerFacts:
    seconds = tuple(_UNTIMED * (layer.weight_bytes + layer.output_bytes + 1) for layer in layers)
    base = used if device.is_on_host else 0.0
    return LayerFacts(
        device.kind,
        SAFE_FRACTION * device.memory_bytes,
        tuple(2 * sec for sec in seconds),
        seconds,
        base_bytes=base,
        start_bytes=base + whole.weight_bytes * device.is_on_host,
        steps_at_once=steps_at_once(optimizers, device.is_on_host),
        is_on_host=device.is_on_host,
    )
