"""Digests of a few samples, to check that all hosts have the same data."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

_MAX_SAMPLES = 16
_MAX_SEC = 2.0


def digest_samples(data: Dataset) -> list[tuple[str, str]]:
    """Return a description and a digest of each of a few samples, spread over the dataset.

    The description holds class, shape and dtype, which must be equal wherever the data is the
    same. The digest is of the input's bits; random augmentation is seeded for it, as far as it
    draws from torch, numpy or Python. Takes at most about 2 s: if reading is slow, the list is a
    shorter prefix of the same samples.

    Args:
        data: indexed by lists of sample indices.
    """
    length = len(data)  # type: ignore[arg-type]
    count = min(length, _MAX_SAMPLES)
    # Both ends first: if hosts list files in a different order or number, these likely differ.
    spread = [number * (length - 1) // max(count - 1, 1) for number in range(count)]
    began = time.monotonic()
    digests: list[tuple[str, str]] = []
    for index in [*spread[-1:], *spread[:-1]]:
        if digests and time.monotonic() - began > _MAX_SEC:
            break
        digests.append(_digest(data, index))
    return digests


def _digest(data: Dataset, index: int) -> tuple[str, str]:
    with _fixed_random_numbers():
        try:
            inputs, labels = _sample(data, index)
        except Exception as error:  # user code may raise anything; training will raise it too
            return f"sample {index} raises {type(error).__name__}", ""
    bits = inputs.contiguous().cpu().flatten().view(torch.uint8).numpy()
    shape = "x".join(map(str, inputs.shape[1:]))
    text = f"sample {index} of class {labels.item()}, {shape} {str(inputs.dtype)[6:]}"
    return text, hashlib.sha256(bits.tobytes()).hexdigest()[:16]


def _sample(data: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    # A user's dataset may count what is fetched in batches for training.
    single = getattr(data, "one", None)
    return single(index) if single is not None else data[[index]]


@contextmanager
def _fixed_random_numbers() -> Iterator[None]:
    """Seed torch, numpy and Python inside the block, and restore their state afterwards."""
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
