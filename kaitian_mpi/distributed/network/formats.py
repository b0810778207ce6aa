"""The formats in which gradients may cross a slow link: float32 values as fewer bits.

`int8` and `int4` divide a tensor into blocks and send each block's values as whole numbers, in
units of the block's largest magnitude over 127 or 7, which is sent along in float32. A block with a
NaN or an infinity arrives as NaN throughout, so that the ranks see that the step is bad.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

BLOCK = 256
"""Values that share a scale. A tensor is cut for the ranks at multiples of it."""


class BFloat16:
    """Half the bytes: 8 bits of precision, the range of float32."""

    def size(self, count: int) -> int:
        """Return the bytes of so many values."""
        return 2 * count

    def encode(self, values: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        """Return flat float32 values as bytes, and replace them by what `decode` will return.

        `lost`, as long, becomes what the format rounds off.
        """
        encoded = values.to(torch.bfloat16)
        torch.sub(values, encoded, out=lost)
        values.copy_(encoded)
        return encoded.view(torch.uint8)

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        """Write what was encoded to a flat float32 tensor."""
        values.copy_(encoded.view(torch.bfloat16))


class Blocks:
    """Whole numbers of 8 or 4 bits, with a float32 scale for each block; called likewise."""

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._largest = (1 << (bits - 1)) - 1

    def size(self, count: int) -> int:
        blocks = -(-count // BLOCK)
        return blocks * (BLOCK * self._bits // 8 + 4)

    def encode(self, values: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        encoded = values.new_empty(self.size(values.numel()), dtype=torch.uint8)
        self._in_blocks(self._encode, encoded, values, lost)
        return encoded

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        self._in_blocks(self._decode, encoded, values)

    def _in_blocks(
        self, work: Callable[..., None], encoded: torch.Tensor, *flat: torch.Tensor
    ) -> None:
        """Call `work` with scales, numbers and values, in rows of a block; a shorter one apart."""
        whole, rest = divmod(flat[0].numel(), BLOCK)
        blocks = whole + bool(rest)
        scales = encoded[: 4 * blocks].view(torch.float32).view(-1, 1)
        numbers = encoded[4 * blocks :].view(torch.int8).view(blocks, BLOCK * self._bits // 8)
        rows = (tensor[: whole * BLOCK].view(-1, BLOCK) for tensor in flat)
        if whole:
            work(scales[:whole], numbers[:whole], *rows)
        if rest:
            ends = [tensor[whole * BLOCK :] for tensor in flat]
            padded = [functional.pad(end, (0, BLOCK - rest)) for end in ends]
            work(scales[whole:], numbers[whole:], *(tensor.view(1, BLOCK) for tensor in padded))
            for end, longer in zip(ends, padded, strict=True):
                end.copy_(longer[:rest])

    def _encode(
        self, scales: torch.Tensor, numbers: torch.Tensor, blocks: torch.Tensor, lost: torch.Tensor
    ) -> None:
        largest = blocks.abs().amax(dim=1, keepdim=True)  # vector_norm takes 7 times as long
        # Infinity less itself is a NaN.
        torch.add(largest - largest, largest, alpha=1 / self._largest, out=scales)
        # A block of zeros, or of values too small for a scale, is sent as zeros.
        rounded = (blocks * scales.reciprocal().nan_to_num_(0.0, 0.0)).round_()
        rounded += 0.0  # there is no -0.0 among whole numbers
        if self._bits == 4:
            small = rounded.to(torch.int8)
            half = BLOCK // 2
            torch.add(small[:, :half], small[:, half:], alpha=16, out=numbers)
        else:
            numbers.copy_(rounded)
        torch.addcmul(blocks, rounded, scales, value=-1, out=lost)
        torch.mul(rounded, scales, out=blocks)

    def _decode(self, scales: torch.Tensor, numbers: torch.Tensor, blocks: torch.Tensor) -> None:
        if self._bits == 4:
            half = BLOCK // 2
            upper = (numbers + 8) >> 4  # from -7 to 7, as is what it leaves
            torch.mul(torch.sub(numbers, upper, alpha=16), scales, out=blocks[:, :half])
            torch.mul(upper, scales, out=blocks[:, half:])
        else:
            torch.mul(numbers, scales, out=blocks)


WireFormat = BFloat16 | Blocks

FORMATS: dict[str, WireFormat] = {"bf16": BFloat16(), "int8": Blocks(8), "int4": Blocks(4)}
"""The formats by name, besides fp32, which sends the values as they are."""
