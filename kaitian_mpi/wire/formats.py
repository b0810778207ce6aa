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

_BLOCKS_AT_ONCE = 256  # so many values stay in a core's cache


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
        encoded = values.new_empty(self.size(values.numel()), dtype=torch.uint8)
        scales, numbers = self._parts(encoded, values.numel())
        for piece, scale, number in zip(
            values.split(BLOCK * _BLOCKS_AT_ONCE),
            scales.split(_BLOCKS_AT_ONCE),
            numbers.split(_BLOCKS_AT_ONCE),
            strict=True,
        ):
            self._encode(piece, scale, number)
        return encoded

    def decode(self, encoded: torch.Tensor, count: int) -> torch.Tensor:
        """Return the values as a new float32 tensor."""
        scales, numbers = self._parts(encoded, count)
        values = encoded.new_empty((len(scales), BLOCK), dtype=torch.float32)
        for value, scale, number in zip(
            *(part.split(_BLOCKS_AT_ONCE) for part in (values, scales, numbers)), strict=True
        ):
            if self._bits == 4:
                half = BLOCK // 2
                # An arithmetic shift keeps the sign.
                torch.mul((number << 4) >> 4, scale, out=value[:, :half])
                torch.mul(number >> 4, scale, out=value[:, half:])
            else:
                torch.mul(number, scale, out=value)
        return values.view(-1)[:count]

    def _parts(self, encoded: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scales and the numbers of so many values, a row for each block."""
        blocks = -(-count // BLOCK)
        scales = encoded[: 4 * blocks].view(torch.float32).view(-1, 1)
        return scales, encoded[4 * blocks :].view(torch.int8).view(blocks, BLOCK * self._bits // 8)

    def _encode(self, values: torch.Tensor, scale: torch.Tensor, numbers: torch.Tensor) -> None:
        """Write the scales and numbers of some whole blocks, of which the last may be shorter."""
        blocks = functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(dim=1, keepdim=True)  # vector_norm takes 7 times as long
        torch.div(largest, self._largest, out=scale).masked_fill_(~largest.isfinite(), torch.nan)
        # A block of zeros, or of values too small for a scale, is sent as zeros.
        inverse = scale.reciprocal().nan_to_num_(0.0, 0.0)
        rounded = (blocks * inverse).round_()
        if self._bits == 4:
            small, half = rounded.to(torch.int8), BLOCK // 2
            torch.bitwise_or(small[:, :half] & 15, small[:, half:] << 4, out=numbers)
        else:
            numbers.copy_(rounded)


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
