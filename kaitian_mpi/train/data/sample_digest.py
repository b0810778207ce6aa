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
    length = len(data)
    count = min(len(data), count)
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
    texts = []
    bits = hashlib.sha256()
    for leaf in _leaves(sample):
        text, content = _described(leaf)
        texts.append(text)
        bits.update(content)
    return f"sample {index}: {', '.join(texts)}", bits.hexdigest()[:16]


def _described(leaf: Any) -> tuple[str, bytes]:
    """Return what is said of a leaf of a batch, and its bits; none of one that has no plain ones.

    A DataLoader takes any object, so whatever cannot be read here is left out of the comparison.
    """
    text = str(leaf) if isinstance(leaf, str | int) else type(leaf).__name__
    if isinstance(leaf, float) and not isinstance(leaf, np.generic):
        return text, repr(leaf).encode()
    if isinstance(leaf, str) or not isinstance(leaf, torch.Tensor | np.ndarray | np.generic):
        return text, b""
    try:
        array = _array_of(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
        kind = str(leaf.dtype).removeprefix("torch.") if array.dtype.kind not in "US" else "text"
        text = f"{'x'.join(map(str, leaf.shape)) or 'scalar'} {kind}"
        # Python's objects, records that may hold such, and long doubles, which have unused bits.
        if array.dtype.kind in "OV" or array.dtype.char in "gG":
            return text, b""
        if array.size <= _FEW and array.dtype.kind in "iub":
            text += f" {array.flatten().tolist()}"
        return text, array.astype(array.dtype.newbyteorder("=")).tobytes()
    except Exception:  # of a tensor that is sparse, nested, without memory, or of the user's class
        return text, b""


def _array_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a dense tensor's values as an array; as bytes, if numpy does not have its dtype."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    try:
        return dense.numpy()
    except TypeError:
        return dense.flatten().view(torch.uint8).numpy()


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
    python = random.getstate()
    legacy = np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
