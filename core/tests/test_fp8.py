"""States in eight bits: how far they are off, and that nothing finite becomes anything else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith import fp8

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def coded(states):
    return fp8.decode(*fp8.encode(states), states.dtype)


@st.composite
def states(draw):
    """[T, ids, H] of any dtype, rows of very different sizes, with zeros and the extremes of the dtype among them."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 17)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    info = torch.finfo(dtype)
    lowest, highest = torch.tensor([info.tiny, info.max], dtype=torch.float64).log10().tolist()
    exponents = draw(
        st.lists(st.floats(lowest - 2, highest), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1])
    )
    sizes = torch.pow(10.0, torch.tensor(exponents, dtype=torch.float64)).view(*shape[:2], 1)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * sizes
    odd = torch.tensor([0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal], dtype=torch.float64)
    pick = torch.randint(0, 12, shape, generator=generator)
    values = torch.where(pick < len(odd), odd[pick.clamp(max=len(odd) - 1)], values)
    if draw(st.booleans()):
        values[0, 0] = 0
    return values.clamp(-info.max, info.max).to(dtype)


@settings(max_examples=300, deadline=None)
@given(states())
def test_the_error_is_bounded_by_the_value_and_the_largest_of_its_row(given_states):
    values, scales = fp8.encode(given_states)
    assert values.dtype == torch.float8_e4m3fn
    assert values.shape == given_states.shape
    assert scales.dtype == torch.float32
    assert scales.shape == given_states.shape[:2]
    assert (scales > 0).all()
    back = fp8.decode(values, scales, given_states.dtype)
    assert back.dtype == given_states.dtype
    assert torch.isfinite(back.float()).all()
    exact, largest = given_states.double(), given_states.double().abs().amax(-1, keepdim=True)
    # Where the scale ends, rows of such values are as good as zero.
    bound = torch.maximum(exact.abs() / 16, largest / 229376).clamp(min=2.0**-135)
    # The rounding of float16 below its normal numbers comes on top.
    bound = bound + (2.0**-25 if given_states.dtype == torch.float16 else 0)
    assert ((back.double() - exact).abs() <= bound * (1 + 1e-6)).all()


@settings(max_examples=200, deadline=None)
@given(states())
def test_coding_again_changes_nothing(given_states):
    once = coded(given_states)
    assert torch.equal(coded(once), once)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_numbers_of_few_bits_survive(dtype):
    numbers = torch.tensor([[[0.0, 1.0, -1.5, 0.875, 12.0, 0.25, -448.0]], [[0, 2.0**-14, 2.0**-10, 0, 0, 0, 0]]])
    numbers = numbers.to(DTYPES[dtype])
    assert torch.equal(coded(numbers), numbers)


def test_a_row_of_zeros_and_the_sign_of_zero():
    zeros = torch.tensor([[[0.0, -0.0]]])
    values, scales = fp8.encode(zeros)
    assert scales.tolist() == [[1.0]]
    assert torch.equal(torch.signbit(fp8.decode(values, scales, torch.float32)), torch.signbit(zeros))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_largest_number_of_a_dtype_does_not_overflow(dtype):
    limit = torch.finfo(DTYPES[dtype]).max
    largest = torch.full((1, 1, 3), limit, dtype=DTYPES[dtype])
    assert ((coded(largest).double() / limit - 1).abs() <= 1 / 16).all()


def test_rows_have_scales_of_their_own():
    """A massive activation of one token leaves the others as precise as they were."""
    plain = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0))
    alone = coded(plain)
    plain[1, 0, 5] = 1e6
    assert torch.equal(coded(plain)[[0, 2, 3]], alone[[0, 2, 3]])
    assert torch.equal(coded(plain)[1, 1], alone[1, 1])


def test_long_samples_and_views_are_coded_alike():
    whole = torch.randn(1000, 3, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    twisted = whole.transpose(0, 1).contiguous().transpose(0, 1)
    values, scales = fp8.encode(twisted)
    assert values.is_contiguous()
    assert scales.is_contiguous()
    assert values.nbytes + scales.nbytes == fp8.stored_bytes(1000, 3, 16)
    by_token = torch.cat([coded(token[None]) for token in whole])
    assert torch.equal(fp8.decode(values, scales, torch.bfloat16), by_token)
    assert torch.equal(
        fp8.decode(values.transpose(0, 1), scales.transpose(0, 1), torch.bfloat16).transpose(0, 1), by_token
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_one_run_of_bytes_holds_all(dtype):
    plain = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    packed = fp8.pack(plain)
    assert packed.dtype == torch.uint8
    assert packed.shape == (fp8.stored_bytes(7, 3, 5),)
    assert torch.equal(fp8.unpack(packed, (7, 3, 5), plain.dtype), coded(plain))
