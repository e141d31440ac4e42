"""The wire: a flat change as bytes and back, at four precisions, with error feedback; and QSGD's stochastic rounding.

A `Codec` works on the last dimension, so one call encodes a vector or a (workers, d) stack. int8 and int4 store one
float32 scale per block, the block's largest magnitude m, and each number as the nearest of 2s + 1 levels k m / s. With
a generator the rounding is stochastic instead, up with probability equal to the fraction, so that E[decode] is the
number itself: that is QSGD (Alistarh et al., arXiv 1610.02132, section 3.1) with buckets, and scaled by the
bucket's largest magnitude as in its experiments, in place of the 2-norm, which keeps more of the values.

Error feedback: what a message rounded away is added to the next one. The residuals telescope, so the sum of all decoded
messages equals the sum of all true vectors up to the last residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hemiola.errors import InputError

# Numbers are encoded and decoded this many at a time, so that what lies between stays in the processor's cache.
CHUNK = 1 << 17


@dataclass(frozen=True)
class Codec:
    """A number format on the wire.

    Attributes:
        name: As in the experiment file.
        bits: Per number.
        block: Numbers that share a scale; 0 for a floating-point format, which needs none.
        stochastic: Whether ``encode`` needs a generator, for unbiased rounding.
    """

    name: str
    bits: int
    block: int = 0
    stochastic: bool = False

    @property
    def levels(self) -> int:
        """Positive levels s; one bit is the sign."""
        return (1 << (self.bits - 1)) - 1

    def size(self, numbers: int) -> int:
        """Exact bytes of ``numbers`` encoded numbers."""
        scales = 4 * -(-numbers // self.block) if self.block else 0
        return -(-numbers * self.bits // 8) + scales

    def encode(self, vector: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return ``(..., d)`` float32 numbers as ``(..., size(d))`` bytes.

        Raises:
            FloatingPointError: A number is not finite; nothing of it could be decoded at the other end.
        """
        if self.stochastic and generator is None:
            raise ValueError(f"{self.name} rounds at random and needs a generator")
        vector = vector.contiguous().float()
        if self.block:
            return self._encode_blocks(vector, generator if self.stochastic else None)
        self.check_finite(vector)
        return (vector if self.bits == 32 else vector.bfloat16()).view(torch.uint8)

    def decode(self, payload: Tensor, numbers: int) -> Tensor:
        """Return the ``(..., numbers)`` float32 numbers of ``encode``'s bytes."""
        if payload.shape[-1] != self.size(numbers):
            raise ValueError(f"{numbers} {self.name} numbers take {self.size(numbers)} bytes, got {payload.shape[-1]}")
        if self.block:
            return self._decode_blocks(payload, numbers)
        return payload.contiguous().view(torch.float32 if self.bits == 32 else torch.bfloat16).float()

    def check_finite(self, numbers: Tensor) -> None:
        """Raise FloatingPointError if a number is not finite; the extremes tell, in one fast pass."""
        if numbers.numel() and not all(bool(extreme.isfinite()) for extreme in torch.aminmax(numbers)):
            raise FloatingPointError(f"cannot send numbers that are not finite on the {self.name} wire")

    # ------------------------------------------------------------------------- block-scaled integers, scales at the end

    def _encode_blocks(self, vector: Tensor, generator: torch.Generator | None) -> Tensor:
        payload = vector.new_empty((*vector.shape[:-1], self.size(vector.shape[-1])), dtype=torch.uint8)
        scales = []
        for start in range(0, vector.shape[-1], CHUNK):
            codes, chunk_scales = self._encode_chunk(vector[..., start : start + CHUNK], generator)
            scales.append(chunk_scales)
            first = start * self.bits // 8
            payload[..., first : first + codes.shape[-1]] = codes
        if scales:
            tail = torch.cat(scales, -1).view(torch.uint8)
            payload[..., payload.shape[-1] - tail.shape[-1] :] = tail
        return payload

    def _encode_chunk(self, vector: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        numbers = vector.shape[-1]
        blocks = self._blocks(vector)
        scales = blocks.abs().amax(-1)
        self.check_finite(scales)
        # below 1e-30 the inverse would overflow; such a block is sent as zero and stays in the residual
        inverse = torch.where(scales > 1e-30, self.levels / scales, 0.0)
        scaled = blocks * inverse.unsqueeze(-1)
        if generator is None:
            scaled.round_()
        else:
            scaled.add_(torch.rand(scaled.shape, generator=generator)).floor_().clamp_max_(self.levels)
        codes = scaled.to(torch.int8).flatten(-2)[..., :numbers]
        if self.bits == 4:
            codes = torch.nn.functional.pad(codes, (0, numbers % 2)) + 8
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return codes.contiguous().view(torch.uint8), scales

    def _decode_blocks(self, payload: Tensor, numbers: int) -> Tensor:
        cut = -(-numbers * self.bits // 8)
        scales = payload[..., cut:].clone(memory_format=torch.contiguous_format).view(torch.float32) / self.levels
        values = payload.new_empty((*payload.shape[:-1], numbers), dtype=torch.float32)
        for start in range(0, numbers, CHUNK):
            stop = min(start + CHUNK, numbers)
            codes = payload[..., start * self.bits // 8 : -(-stop * self.bits // 8)]
            if self.bits == 4:
                codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., : stop - start].to(torch.int8) - 8
            blocks = self._blocks(codes.contiguous().view(torch.int8).float())
            blocks = blocks * scales[..., start // self.block : -(-stop // self.block)].unsqueeze(-1)
            values[..., start:stop] = blocks.flatten(-2)[..., : stop - start]
        return values

    def _blocks(self, vector: Tensor) -> Tensor:
        missing = -vector.shape[-1] % self.block
        if missing:
            vector = torch.nn.functional.pad(vector, (0, missing))
        return vector.reshape(*vector.shape[:-1], -1, self.block)


# Short blocks fit the scale to the numbers, long ones save bytes: a scale is 0.8 % of an int8 block, 6 % of an int4.
WIRES: dict[str, Codec] = {
    "fp32": Codec("fp32", 32),
    "bf16": Codec("bf16", 16),
    "int8": Codec("int8", 8, block=512),
    "int4": Codec("int4", 4, block=128),
}


def quantiser(bits: int) -> Codec:
    """QSGD's gradient quantiser with this many bits a number, sign included, and buckets of 512."""
    if bits not in (4, 8):
        raise InputError(f"quantise must be 4 or 8 bits, got {bits!r}")
    return Codec(f"qsgd{bits}", bits, block=512, stochastic=True)


def round_trip(
    codec: Codec, vector: Tensor, residual: Tensor | None = None, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor | None, int]:
    """What arrives when ``vector`` is sent: a ``(d,)`` vector or a ``(workers, d)`` stack, each row by itself.

    Args:
        codec: The number format.
        vector: What should arrive.
        residual: What earlier messages of the same senders rounded away, zeros at first; None for no error feedback.
        generator: For stochastic codecs.

    Returns:
        What is decoded, the new residual (None if none was given), and the bytes of one row.
    """
    numbers = vector.shape[-1]
    wanted = vector if residual is None else vector + residual
    if codec.bits == 32:
        codec.check_finite(wanted)
        decoded = wanted
    else:
        decoded = codec.decode(codec.encode(wanted, generator), numbers)
    return decoded, None if residual is None else wanted - decoded, codec.size(numbers)
