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

_MAX_SAMPLES = 16
_MAX_SEC = 2.0
_FEW = 4  # whole numbers that are shown: a class, a length


def digest_samples(data: Any) -> list[tuple[str, str]]:
    """Return a description and a digest of each of a few samples, spread over the dataset.

    The description holds structure, shapes, dtypes, and numbers such as classes, which must be
    equal wherever the data is the same. The digest is of all values' bits; random augmentation is
    seeded for it, as far as it draws from torch, numpy or Python. Takes at most about 2 s: if
    reading is slow, the list is a shorter prefix of the same samples.

    Args:
        data: returns a batch when indexed by a list of sample indices.
    """
    length = len(data)
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


def describe_sample(data: Any) -> str:
    """Return the structure, shapes and dtypes of a dataset's first sample."""
    with _fixed_random_numbers():
        leaves = list(_leaves(_sample(data, 0)))
    return ", ".join(_kind(leaf) for leaf in leaves)


def _digest(data: Any, index: int) -> tuple[str, str]:
    with _fixed_random_numbers():
        try:
            sample = _sample(data, index)
        except Exception as error:  # user code may raise anything; training will raise it too
            return f"sample {index} raises {type(error).__name__}", ""
    texts, bits = [], hashlib.sha256()
    for leaf in _leaves(sample):
        text, content = _describe(leaf)
        texts.append(text)
        bits.update(content)
    return f"sample {index}: {', '.join(texts)}", bits.hexdigest()[:16]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of a batch of any structure, in an order that is the same everywhere."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return f"{'x'.join(map(str, leaf.shape))} {leaf.dtype}"
    return type(leaf).__name__


def _describe(leaf: Any) -> tuple[str, bytes]:
    """Return a text that must be equal on all hosts, and bits that need not be."""
    if isinstance(leaf, np.ndarray | np.generic):
        leaf = torch.as_tensor(leaf)
    if isinstance(leaf, torch.Tensor):
        plain = leaf.detach().cpu().contiguous()
        shape = "x".join(map(str, plain.shape)) or "scalar"
        text = f"{shape} {str(plain.dtype)[6:]}"
        whole = not plain.is_floating_point() and not plain.is_complex()
        if whole and plain.numel() <= _FEW:
            return f"{text} {plain.flatten().tolist()}", b""
        return text, plain.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(leaf, str | int | bool):
        return repr(leaf), b""
    return type(leaf).__name__, repr(leaf).encode() if isinstance(leaf, float) else b""


def _sample(data: Any, index: int) -> Any:
    # A user's dataset may count the samples that it is asked for in batches.
    single = getattr(data, "one", None)
    return single(index) if single is not None else data[[index]]


@contextmanager
def _fixed_random_numbers() -> Iterator[None]:
    """Seed torch, numpy and Python inside the block, and restore their state afterwards.

    Of torch's generators, only the CPU's: data is made there.
    """
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
