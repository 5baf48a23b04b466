"""MXFP4 and MXFP8 by hand: scales, ties, saturation, signs, byte order."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from k3.ops.mx import E2M1, pack_mxfp4, quantize_mxfp4, quantize_mxfp8, unpack_mxfp4


def group(*values):
    return torch.tensor([*values, *[0.0] * (32 - len(values))])


def scale_byte(amax):
    return int(pack_mxfp4(group(amax))[1][0])


@pytest.mark.parametrize(
    ("amax", "exponent"),
    [
        (4.0, 0),
        (6.0, 0),
        (6.99, 0),
        (7.0, 1),
        (7.99, 1),
        (8.0, 1),
        (1.0, -2),
        (1.75, -1),
        (0.4, -4),
    ],
)
def test_scale_rounds_up_from_a_mantissa_of_seven_quarters(amax, exponent):
    assert scale_byte(amax) == 127 + exponent


def test_bump_is_decided_in_fp32():
    below = torch.nextafter(torch.tensor(7.0), torch.tensor(0.0)).item()
    assert scale_byte(below) == 127 and scale_byte(7.0) == 128


def test_values_ties_and_saturation():
    x = group(6.9, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, -0.25, -1.3, -6.9)
    expected = group(6.0, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, -0.0, -1.5, -6)
    assert torch.equal(quantize_mxfp4(x), expected)


def test_bytes():
    x = group(4.0, 0.5, -1.0, 6.0, -0.1)
    packed, scale = pack_mxfp4(x)
    assert packed.dtype == scale.dtype == torch.uint8
    assert packed.shape == (16,) and scale.tolist() == [127]
    # low nibble = even column; -0.1 rounds to a zero that keeps its sign
    assert packed[:3].tolist() == [0x16, 0x7A, 0x08]
    swapped = ((packed & 0xF) << 4) | (packed >> 4)
    assert not torch.equal(unpack_mxfp4(swapped, scale, torch.float32), quantize_mxfp4(x))


def test_zeros_and_signed_zeros():
    packed, scale = pack_mxfp4(torch.tensor([0.0, -0.0] * 32))
    assert (packed == 0).all() and (scale == 0).all()
    for quantize in (quantize_mxfp4, quantize_mxfp8):
        assert (quantize(torch.zeros(2, 64)) == 0).all()


def test_every_value_of_the_format_survives():
    grid = torch.tensor([*E2M1, *(-v for v in E2M1)]).repeat(2)
    for exponent in (-100, -3, 0, 5, 100):
        x = grid * 2.0**exponent
        assert torch.equal(quantize_mxfp4(x), x)
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(unpack_mxfp4(*pack_mxfp4(x), dtype).float(), x)


def test_extreme_exponents():
    tiny = group(1e-40, -3e-39)
    assert quantize_mxfp4(tiny).isfinite().all() and int(pack_mxfp4(tiny)[1][0]) == 0
    huge = group(2.9e38, -1e38)
    q = quantize_mxfp4(huge)
    assert q.isfinite().all() and (q[0] / huge[0] - 1).abs() < 0.2


rows = st.lists(st.floats(-1e6, 1e6, width=32), min_size=64, max_size=64)


@given(rows)
def test_packing_is_the_fake_quantiser_and_idempotent(values):
    w = torch.tensor(values).view(2, 32)
    q = quantize_mxfp4(w)
    packed, scale = pack_mxfp4(w)
    assert torch.equal(unpack_mxfp4(packed, scale, torch.float32), q)
    assert torch.equal(quantize_mxfp4(q), q)
    again = pack_mxfp4(q)
    assert torch.equal(unpack_mxfp4(*again, torch.float32), q)


@given(rows)
def test_error_is_at_most_half_a_step_of_the_largest(values):
    w = torch.tensor(values).view(2, 32)
    amax = w.abs().amax(1, keepdim=True)
    # E2M1 misses by half of its top step, 1 of 4; E4M3 by half of 32 in 256
    assert ((quantize_mxfp4(w) - w).abs() <= amax / 4 + 1e-38).all()
    assert ((quantize_mxfp8(w) - w).abs() <= amax / 16 + 1e-38).all()


def test_mxfp8_points():
    # amax 1.5 * 2^8 has scale 1: three mantissa bits, ties to even, smallest step 2^-9
    x = group(384.0, 17.0, 17.1, 19.0, 0.003, 0.0009, -300.0)
    expected = group(384.0, 16.0, 18.0, 20.0, 2 * 2**-9, 0.0, -288.0)
    assert torch.equal(quantize_mxfp8(x), expected)
    assert torch.equal(quantize_mxfp8(group(447.0)), group(448.0))
    # from a mantissa of 1.75 the scale is 2, so that nothing saturates
    assert torch.equal(quantize_mxfp8(group(500.0, 17.0)), group(512.0, 16.0))


def test_shapes_types_and_batches():
    w = torch.randn(3, 5, 64).bfloat16()
    packed, scale = pack_mxfp4(w)
    assert packed.shape == (3, 5, 32) and scale.shape == (3, 5, 2)
    assert quantize_mxfp4(w).dtype == quantize_mxfp8(w).dtype == torch.bfloat16
    for i, j in itertools.product(range(3), range(5)):
        assert torch.equal(pack_mxfp4(w[i, j])[0], packed[i, j])
    assert torch.equal(unpack_mxfp4(packed, scale), quantize_mxfp4(w))
    # not a number is refused on disk and visible in training
    w[0, 0, 0] = torch.nan
    assert quantize_mxfp4(w)[0, 0, 0].isnan() and quantize_mxfp8(w)[0, 0, 0].isnan()
    with pytest.raises(ValueError, match="not finite"):
        pack_mxfp4(w)
    with pytest.raises(ValueError, match="33 columns"):
        quantize_mxfp4(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="do not fit"):
        unpack_mxfp4(packed, scale[..., :1])
