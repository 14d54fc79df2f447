"""Unpacks numbers of few bits from words and bytes, and applies scales of blocks."""

from __future__ import annotations

import torch

from etkv.packed_weights import DOUBLED, looked_up

FP4 = torch.tensor([sign * (double / 2) for sign in (1, -1) for double in DOUBLED])
"""The values of E2M1, 4-bit floats, in float32."""


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return ``count`` unsigned numbers of ``bits`` bits, in uint8, from each row of int32 ``words`` [rows, n].

    A row is a stream of bits, which begins with the lowest bit of its first word. A number may begin in one word and
    end in the next.
    """
    if bits in (2, 4, 8):
        # A number is within a byte, and words are little-endian.
        in_bytes = words.contiguous().view(torch.uint8)
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        numbers = (in_bytes.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
        return numbers.flatten(1)[:, :count]
    starts = torch.arange(count) * bits
    low = words.long()[:, starts // 32] & 0xFFFFFFFF
    # Pad with a word of zeros after the last word.
    high = torch.nn.functional.pad(words, (0, 1)).long()[:, starts // 32 + 1] & 0xFFFFFFFF
    numbers = ((low | high << 32) >> starts % 32) & ((1 << bits) - 1)
    return numbers.to(torch.uint8)


def words_of(count: int, bits: int) -> int:
    """Return the number of int32 words for ``count`` numbers of ``bits`` bits."""
    return -(-count * bits // 32)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the two floats in each byte of ``packed`` [.., n], the lower half first: float32 [.., 2 * n]."""
    return looked_up(FP4, torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2))


def power_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return the powers of two, in float32, for uint8 exponents with a bias of 127. 255 is NaN."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()


def scale_blocks(values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiply blocks of ``values`` [.., rows, columns] by their ``scales`` [.., blocks, blocks] in place.

    ``block`` counts the rows and the columns of a block. Blocks at the ends may be smaller.
    """
    rows, columns = block
    for start in range(0, values.shape[-2], rows):
        of_columns = scales[..., start // rows, :].repeat_interleave(columns, dim=-1)[..., : values.shape[-1]]
        values[..., start : start + rows, :] *= of_columns.unsqueeze(-2)
    return values
