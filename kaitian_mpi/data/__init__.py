"""Data sets, and which samples each rank takes at each step."""

from __future__ import annotations

from kaitian_mpi.data.loader import evaluation_indices, make_loader, steps_ahead
from kaitian_mpi.data.sampler import LoadAdaptiveSampler
from kaitian_mpi.data.sources import DataSource, load_data

__all__ = [
    "DataSource",
    "LoadAdaptiveSampler",
    "evaluation_indices",
    "load_data",
    "make_loader",
    "steps_ahead",
]
