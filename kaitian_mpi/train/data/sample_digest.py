"""Digests of a few samples, to check that all hosts have the same data."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from kaitian_mpi.train.data.batches import Batches, Stream

_MAX_SAMPLES = 16
_MAX_SEC = 2.0
_FEW = 4  # whole numbers that are shown: a class, a length


def digest_samples(data: Any, count: int = _MAX_SAMPLES) -> list[tuple[str, str]]:
    """Return a description and a digest of each of a few samples, spread over the dataset.

    The description holds structure, shapes, dtypes, and numbers such as classes, which must be
    equal wherever the data is the same. The digest is of all values' bits; random augmentation is
    seeded for it, as far as it draws from torch, numpy or Python. Takes at most about 2 s: if
    reading is slow, the list is a shorter prefix of the same samples.
    """
    length, count = len(data), min(len(data), count)
    # Both ends first: if hosts list files in a different order or number, these likely differ.
    spread = [number * (length - 1) // max(count - 1, 1) for number in range(count)]
    order = [*spread[-1:], *spread[:-1]]
    if isinstance(getattr(data, "data", None), Stream):
        order = [0]
    began = time.monotonic()
    digests: list[tuple[str, str]] = []
    for index in order:
        if digests and time.monotonic() - began > _MAX_SEC:
            break
        digests.append(_digest(data, index))
    return digests


def _digest(data: Any, index: int) -> tuple[str, str]:
    with _fixed_random_numbers():
        try:
            # Not by `__getitems__`: a user's dataset may count the samples it is asked for.
            is_wrapped = isinstance(data, Batches)
            sample = data.collate([data.data[index]]) if is_wrapped else data[[index]]
        except Exception as error:  # user code may raise anything; training will raise it too
            return f"sample {index} raises {type(error).__name__}", ""
    texts, bits = [], hashlib.sha256()
    for leaf in _leaves(sample):
        text = str(leaf) if isinstance(leaf, str | int) else type(leaf).__name__
        if isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
            tensor = torch.as_tensor(leaf).detach().cpu().contiguous()
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            text = f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
            if tensor.numel() <= _FEW and not (tensor.is_floating_point() or tensor.is_complex()):
                text += f" {tensor.flatten().tolist()}"
            bits.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, float):
            bits.update(repr(leaf).encode())
        texts.append(text)
    return f"sample {index}: {', '.join(texts)}", bits.hexdigest()[:16]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a batch of any structure, in an order that is the same everywhere."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        value = [part for key in sorted(value, key=str) for part in (str(key), value[key])]
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


@contextmanager
def _fixed_random_numbers() -> Iterator[None]:
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
