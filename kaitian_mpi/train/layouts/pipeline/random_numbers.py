"""Random numbers that all stages draw alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from kaitian_mpi.devices import device_of
from kaitian_mpi.errors import UserError


@contextmanager
def same_random_numbers(seed: int, device: torch.device, is_mixed: bool = False) -> Iterator[None]:
    """Draw, in the block, the random numbers of a seed, on the host and on `device`.

    So a loss that draws some before it calls the model, such as the noise of a diffusion model,
    draws the same in the first stage, which gets its input, and in the last, which gets its target.
    The training's own random numbers are not used up. Not collective.

    Raises:
        UserError: some were drawn on a device, and the stages' devices, which are `is_mixed`, do
            not draw the same.
    """
    python = random.getstate()
    legacy = np.random.get_state()
    kind = device_of(device)
    with torch.random.fork_rng([] if kind.is_host else [device], device_type=device.type):
        if kind.is_host:
            torch.default_generator.manual_seed(seed)  # takes a hundredth of torch.manual_seed
        else:
            torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        before = None if kind.is_host or not is_mixed else kind.random_state(device.index or 0)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)
        if before is not None and not torch.equal(before, kind.random_state(device.index or 0)):  # type: ignore[arg-type]
            raise UserError(
                "--layout pipeline: the loss draws random numbers on its device before it calls "
                "the model, and different kinds of devices draw different ones; draw them on the "
                "host"
            )
