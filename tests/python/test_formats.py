"""Storage formats in torch equal MLX's own quantization bit by bit: codes, scales and decoded rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etkv.errors import StatusError
from etkv.reference import formats
from etkv.reference.formats import E2M1, format_of

mx = pytest.importorskip("mlx.core")

AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = ["f32", "f16", "bf16", *(f"affine{bits}g{group}" for bits, group in AFFINE)]
FORMATS += ["mxfp8", "mxfp4", "nvfp4", "row-int4", "row-fp4"]


def rows() -> torch.Tensor:
    """Return rows of many magnitudes, and special rows: all zeros, equal elements, one sign, one large element."""
    random = torch.Generator().manual_seed(0)
    made = torch.randn(64, 256, generator=random) * torch.logspace(-4, 3, 64).unsqueeze(1)
    made[0], made[1], made[2] = 0.0, 1.0, -3.0
    made[3], made[4] = made[3].abs(), -made[4].abs()
    made[5, 7] = 1e4
    made[6, ::2] = 0.0
    return made


def from_mlx(array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


@pytest.mark.parametrize(("bits", "group"), AFFINE)
def test_affine(bits, group):
    raw = rows()
    planes = formats.affine_planes(raw, bits, group)
    packed, scales, offsets = mx.quantize(mx.array(raw.numpy()), group_size=group, bits=bits)
    ones, zeros = mx.ones(scales.shape), mx.zeros(scales.shape)
    codes = mx.dequantize(packed, ones, zeros, group_size=group, bits=bits)
    np.testing.assert_array_equal(planes.codes, from_mlx(codes))
    # MLX computes codes with unrounded scales and offsets. It rounds scales and offsets to float16 afterwards.
    scales, offsets = scales.astype(mx.float16), offsets.astype(mx.float16)
    np.testing.assert_array_equal(planes.scales, np.array(scales))
    np.testing.assert_array_equal(planes.offsets, np.array(offsets))
    read = mx.dequantize(packed, scales.astype(mx.float32), offsets.astype(mx.float32), group_size=group, bits=bits)
    np.testing.assert_array_equal(format_of(f"affine{bits}g{group}").stored(raw), from_mlx(read))


def test_affine_beyond_float16_is_the_nearest_that_it_holds():
    raw = rows()
    raw[5, 7], raw[7, 3] = 1e6, -torch.inf
    for bits, group in AFFINE:
        read = format_of(f"affine{bits}g{group}").stored(raw)
        assert torch.isfinite(read).all()
        assert (read[5, 7], read[7, 3]) == (65504.0, -65504.0)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_floats(name):
    raw = rows()
    raw[5, 7] = 1e6
    dtype = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}[name]
    np.testing.assert_array_equal(format_of(name).stored(raw), from_mlx(mx.array(raw.numpy()).astype(dtype)))


def test_eight_bit_floats():
    """All float16 values in the range of eight-bit floats are rounded like in MLX, including all ties."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    values = halves[halves.abs() <= formats.E4M3_MAX]
    assert len(values) > 40_000
    read = mx.from_fp8(mx.to_fp8(mx.array(values.numpy())), mx.float32)
    np.testing.assert_array_equal(formats.to_e4m3(values), np.array(read))


def test_four_bit_floats():
    """In blocks whose largest element is 6, MLX's nvfp4 has scale 1 and the nearest elements. At a tie MLX's CPU code
    chooses the smaller element. This package chooses the even code, like the native caches.
    """
    values = (torch.arange(-768, 762) / 128).reshape(-1, 15)
    blocks = torch.cat([values, torch.full((len(values), 1), 6.0)], dim=1).reshape(-1, 32)
    packed = mx.quantize(mx.array(blocks.numpy()), group_size=16, bits=4, mode="nvfp4")
    read = mx.dequantize(*packed, group_size=16, bits=4, mode="nvfp4")
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    plain = ~torch.isin(blocks.abs(), ties)
    assert torch.equal(formats.to_e2m1(blocks)[plain], torch.from_numpy(from_mlx(read))[plain])
    assert formats.to_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert formats.to_e2m1(-ties).tolist() == [0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0]
    assert formats.to_e2m1(torch.tensor([7.5, -100.0])).tolist() == [6.0, -6.0]


@pytest.mark.parametrize(("name", "group", "bits"), [("mxfp8", 32, 8), ("nvfp4", 16, 4)])
def test_block_floats_that_are_mlxs_own(name, group, bits):
    raw = rows()
    packed = mx.quantize(mx.array(raw.numpy()), group_size=group, bits=bits, mode=name)
    read = mx.dequantize(*packed, group_size=group, bits=bits, mode=name)
    np.testing.assert_array_equal(format_of(name).stored(raw), from_mlx(read))


def test_mxfp4_rounds_its_scale_to_the_nearest():
    """For some blocks MLX's scale is twice as large. If scales are equal, the elements are equal."""
    raw = rows()
    packed, theirs = mx.quantize(mx.array(raw.numpy()), group_size=32, bits=4, mode="mxfp4")
    read = torch.from_numpy(from_mlx(mx.dequantize(packed, theirs, group_size=32, bits=4, mode="mxfp4")))
    ours, stored = formats.mx_planes(raw, 2, formats.to_e2m1).scales, format_of("mxfp4").stored(raw)
    apart = ours.int() - torch.from_numpy(np.array(theirs)).int()
    occupied = raw.unflatten(-1, (-1, 32)).abs().amax(-1) > 0
    assert set(apart[occupied].tolist()) <= {-1, 0, 1}
    same = (apart == 0).repeat_interleave(32, dim=-1)
    assert 0.5 < same.float().mean() < 1.0
    assert torch.equal(stored[same], read[same])
    error, their_error = ((other - raw).square().sum(-1) for other in (stored, read))
    assert error.sum() < their_error.sum()


@pytest.mark.parametrize(("name", "top"), [("mxfp8", 8), ("mxfp4", 2)])
def test_power_of_two_scales(name, top):
    """The scale is the smallest power of two with which the largest element of a block is at most 448, or 7."""
    most = 1.75 * 2.0**top
    for peak in (most, most * 1.001, most / 2, 1.0, 3e-5, 1e30, -most, 1.75, 1.7501):
        block = torch.zeros(1, 32)
        block[0, 5] = peak
        scale = 2.0 ** (int(formats.mx_planes(block, top, lambda elements: elements).scales) - 127)
        assert abs(peak) <= most * scale and abs(peak) > most * scale / 2


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_block_floats_are_read_back_by_mlx(name):
    """Stored blocks have MLX's packed layouts, so MLX unpacks them to the same numbers."""
    raw = rows()
    fmt = format_of(name)
    planes = fmt.encode(raw)
    if name == "mxfp8":
        words = planes.codes.to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(np.uint32)
    else:
        codes = (planes.codes.abs().unsqueeze(-1) == E2M1).int().argmax(-1) | (planes.codes.signbit().int() << 3)
        words = packed_nibbles(codes)
    bits = 8 if name == "mxfp8" else 4
    scales = mx.array(planes.scales.numpy())
    read = mx.dequantize(mx.array(words), scales, group_size=32, bits=bits, mode=name)
    occupied = (planes.scales > 0).repeat_interleave(32, dim=-1)
    assert torch.equal(fmt.stored(raw)[occupied], torch.from_numpy(from_mlx(read))[occupied])
    assert not fmt.stored(raw)[~occupied].any()


@pytest.mark.parametrize(("name", "most"), [("row-int4", 7.0), ("row-fp4", 6.0)])
def test_rows_with_one_scale(name, most):
    """Each element is the nearest of sixteen values, and the integers fit MLX's affine layout."""
    raw = rows()
    fmt = format_of(name)
    planes, stored = fmt.encode(raw), fmt.stored(raw)
    np.testing.assert_array_equal(planes.scales, (raw.abs().amax(-1, keepdim=True) / most).half())
    scales = planes.scales.float()
    levels = torch.arange(-8.0, 8.0) if name == "row-int4" else torch.cat([-E2M1, E2M1])
    errors = (raw.unsqueeze(-1) - scales.unsqueeze(-1) * levels).abs().amin(-1)
    torch.testing.assert_close((stored - raw).abs(), errors, rtol=1e-5, atol=1e-7 * float(raw.abs().max()))
    if name == "row-int4":
        words = packed_nibbles(planes.codes.int() + 8)
        groups = scales.expand(-1, 2).contiguous().numpy()
        read = mx.dequantize(mx.array(words), mx.array(groups), mx.array(-8.0 * groups), group_size=128, bits=4)
        np.testing.assert_allclose(stored, from_mlx(read), rtol=1e-6)


def packed_nibbles(codes: torch.Tensor) -> np.ndarray:
    """Return four-bit codes packed into words of eight codes, the first in the lowest bits."""
    apart = codes.numpy().astype(np.uint32).reshape(codes.shape[0], -1, 8)
    return (apart << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_stored_independently(name):
    """A stored row depends neither on other rows nor on the dtype of its input."""
    raw, fmt = rows().half(), format_of(name)
    assert fmt.name == name
    stored = fmt.stored(raw)
    assert stored.dtype == torch.float32
    assert torch.equal(stored[10:20], fmt.stored(raw[10:20].clone()))
    assert torch.equal(stored, fmt.stored(raw.float()))
    assert torch.equal(stored, fmt.stored(raw.reshape(4, 2, 8, 256)).reshape(64, 256))
    assert not stored[0].any()


def test_names():
    assert format_of("affine4").name == "affine4g32"
    for name in ("", "affine", "affine7", "affine4g16", "f64", "affine4g", "affine4g64 "):
        with pytest.raises(StatusError, match=f"unknown storage format `{name}`"):
            format_of(name)
    with pytest.raises(StatusError, match="nvfp4 needs a head_dim that is a multiple of 16, got head_dim 40"):
        format_of("nvfp4").check(40)
