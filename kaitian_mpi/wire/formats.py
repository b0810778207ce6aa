"""The formats in which gradients may cross a slow link: float32 values as fewer bits.

`int8` and `int4` divide a tensor into blocks and send each block's values as whole numbers, in
units of the block's largest magnitude over 127 or 7, which is sent along in float32. A block with a
NaN or an infinity arrives as NaN throughout, so that the ranks see that the step is bad.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from kaitian_mpi.errors import UserError

BLOCK = 256
"""Values that share a scale. A tensor is cut for the ranks at multiples of it."""


class WireFormat(Protocol):
    """A way to write float32 values as bytes."""

    def size(self, count: int) -> int:
        """Return the bytes of so many values."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return flat float32 values as a flat uint8 tensor of `size` bytes."""
        ...

    def decode(self, encoded: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values as a new float32 tensor."""
        ...


class BFloat16:
    """Half the bytes: 8 bits of precision, the range of float32."""

    def size(self, count: int) -> int:
        """Return the bytes of so many values."""
        return 2 * count

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return flat float32 values as a flat uint8 tensor of `size` bytes."""
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, encoded: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values as a new float32 tensor."""
        return encoded.view(torch.bfloat16).float()


class Blocks:
    """Whole numbers of 8 or 4 bits, with a float32 scale for each block."""

    def __init__(self, bits: int) -> None:
        """Use numbers of so many bits, 8 or 4."""
        self._bits = bits
        self._largest = (1 << (bits - 1)) - 1

    def size(self, count: int) -> int:
        """Return the bytes of so many values."""
        blocks = -(-count // BLOCK)
        return blocks * (BLOCK * self._bits // 8 + 4)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return flat float32 values as a flat uint8 tensor of `size` bytes."""
        if not values.numel():
            return values.new_empty(0, dtype=torch.uint8)
        missing = -values.numel() % BLOCK
        blocks = functional.pad(values, (0, missing)).view(-1, BLOCK)
        largest = blocks.abs().amax(dim=1, keepdim=True)  # vector_norm takes 7 times as long
        scale = (largest / self._largest).masked_fill_(~largest.isfinite(), torch.nan)
        # A block of zeros, or of values too small for a scale, is sent as zeros.
        inverse = scale.reciprocal().nan_to_num_(0.0, 0.0)
        numbers = (blocks * inverse).round_().to(torch.int8)
        if self._bits == 4:
            half = BLOCK // 2
            numbers = (numbers[:, :half] & 15) | (numbers[:, half:] << 4)
        return torch.cat([part.reshape(-1).view(torch.uint8) for part in (scale, numbers)])

    def decode(self, encoded: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values as a new float32 tensor."""
        blocks = -(-count // BLOCK)
        scale = encoded[: 4 * blocks].view(torch.float32).view(-1, 1)
        numbers = encoded[4 * blocks :].view(torch.int8).view(blocks, BLOCK * self._bits // 8)
        if self._bits == 4:
            low = (numbers << 4) >> 4  # an arithmetic shift keeps the sign
            numbers = torch.cat([low, numbers >> 4], dim=1)
        return (numbers * scale).view(-1)[:count]


FORMATS: dict[str, WireFormat] = {"bf16": BFloat16(), "int8": Blocks(8), "int4": Blocks(4)}
"""The formats by name, besides fp32, which sends the values as they are."""


def check_wire(name: str) -> None:
    """Check the name of a format.

    Raises:
        UserError: there is none of this name.
    """
    names = ["fp32", *FORMATS]
    if name not in names:
        raise UserError(f"wire: found {name!r}, needed one of {', '.join(names)}")
