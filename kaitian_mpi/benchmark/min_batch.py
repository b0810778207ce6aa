"""Finds the smallest batch that a model can train on."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.data import Dataset

from kaitian_mpi.config import TrainConfig
from kaitian_mpi.engine.computation import Computation
from kaitian_mpi.errors import AgreedError
from kaitian_mpi.mpi.exchange import gather_values
from kaitian_mpi.mpi.world import World
from kaitian_mpi.output.console import print_rank_0
from kaitian_mpi.runtime.watchdog import enter_phase

_WITH_STATISTICS = 2  # required by batch norm over a single value per sample and channel


def find_min_batch(config: TrainConfig, world: World, model: nn.Module, data: Dataset) -> int:
    """Return the fewest samples that every rank can train the model on, 1 or 2. Collective.

    Batch norm over a single value per sample and channel raises for one sample, and similar layers
    return NaN. This is tested with forward passes of a copy of the model.

    Args:
        config: the precision, and sizes that must not be smaller.
        world: the ranks.
        model: this rank's model; it is not changed.
        data: the training data, of which only an input's shape and dtype are used.

    Raises:
        AgreedError: the dataset or `--micro-batch-size` is smaller.
    """
    precision = "fp32" if config.precision == "auto" else config.precision
    computation = Computation(world.device, precision, "contiguous", 0.0)
    enter_phase("a trial of the model")
    own = min_batch_of(model, data, computation)
    enter_phase("waiting for the other ranks' trial of the model", waits=True, limited=False)
    found = max(gather_values(world.comm, own))
    samples = len(data)  # type: ignore[arg-type]
    if samples < found:
        raise AgreedError(
            f"--dataset: found {samples} sample for training, needed at least {found}: the model "
            "cannot train on a single sample (it may have batch norm)"
        )
    if 0 < config.micro_batch_size < found:
        raise AgreedError(
            f"--micro-batch-size: found {config.micro_batch_size}, needed at least {found}: the "
            "model cannot train on a single sample (it may have batch norm)"
        )
    if found > 1:
        print_rank_0(
            world, f"the model cannot train on a single sample: no rank takes fewer than {found}"
        )
    return found


def min_batch_of(model: nn.Module, data: Dataset, computation: Computation) -> int:
    """Return the fewest samples that this rank can train the model on, 1 or 2.

    Returns 1 for a model that fails with two samples as well: training will report its error.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            inputs = data[[]][0]
            trial = copy.deepcopy(model).to(computation.device).train()
        except Exception:  # user code may raise anything
            return 1
        if _works(trial, inputs, 1, computation) or not _works(
            trial, inputs, _WITH_STATISTICS, computation
        ):
            return 1
        return _WITH_STATISTICS


def _works(model: nn.Module, none: torch.Tensor, samples: int, computation: Computation) -> bool:
    inputs = none.new_zeros((samples, *none.shape[1:]))
    try:
        outputs = computation.logits(model, computation.place(inputs, torch.empty(0))[0])
    except Exception:  # as above
        return False
    return bool(outputs.isfinite().all())
