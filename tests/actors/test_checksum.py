"""Checksums of sharded tensors: any bit and any place counts, how rows are split does not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexray.actors import checksum as module
from flexray.actors.checksum import checksum

BLOCK = module._ROWS * module._WORDS
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def values(dtype, n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(x):
    return int(checksum(x, 0))


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 3 * BLOCK),
    st.lists(st.integers(0, 3 * BLOCK), max_size=5),
)
def test_shares_add_up_however_it_is_split(dtype, n, cuts):
    x = values(dtype, n)
    ends = sorted({0, n, *(cut for cut in cuts if cut < n)})
    shares = [checksum(x[a:b], a) for a, b in pairwise(ends)]
    assert int(torch.stack(shares).sum()) == whole(x)
    assert int(checksum(x[:0], n)) == 0


@given(st.sampled_from(DTYPES), st.integers(0, 3 * BLOCK - 1), st.data())
def test_any_bit_counts(dtype, place, data):
    x = values(dtype, 3 * BLOCK)
    before = whole(x)
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    bits = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[place] ^= torch.tensor(1, dtype=bits.dtype) << bit
    assert whole(x) != before


@given(st.sampled_from(DTYPES), st.sampled_from([(1.0, 2.0), (0.0, -0.0), (0.0, 2.0)]), st.data())
def test_places_count_for_plain_values_too(dtype, pair, data):
    """Few bits of these are set, so that weights that differ little would not tell them apart."""
    i, j = data.draw(st.lists(st.integers(0, 3 * BLOCK - 1), min_size=2, max_size=2, unique=True))
    x = torch.full((3 * BLOCK,), pair[0], dtype=dtype)
    y = x.clone()
    x[i], y[j] = pair[1], pair[1]
    assert whole(x) != whole(y)


@given(st.sampled_from(DTYPES), st.integers(1, 300), st.data())
def test_rows_that_change_places_count(dtype, width, data):
    rows = 2 * BLOCK // width
    x = values(dtype, rows * width).view(rows, width)
    if data.draw(st.booleans()):  # rows of one value each
        x[:] = 2.0 ** torch.arange(rows).remainder(9)[:, None].to(dtype)
    i, j = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, rows - 1))
    swapped = x.clone()
    swapped[[i, j]] = x[[j, i]]
    assert (whole(swapped.view(-1)) == whole(x.view(-1))) == bool((x[i] == x[j]).all())


def test_all_rows_one_place_further_count():
    x = values(torch.float32, 5000).view(100, 50)
    assert whole(x.roll(1, 0).reshape(-1)) != whole(x.view(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_change_places_count(dtype):
    words = 2 if dtype == torch.float64 else 1
    x = values(dtype, 3 * BLOCK // words).view(3, -1)
    assert whole(x.roll(1, 0).reshape(-1)) != whole(x.view(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_bits(dtype):
    zero, negative = torch.zeros(5, dtype=dtype), torch.zeros(5, dtype=dtype)
    negative[2] = -0.0
    assert (zero == negative).all() and whole(zero) != whole(negative)
    nan = torch.full((5,), torch.nan, dtype=dtype)
    bits = nan.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[3] ^= 1
    assert bits.view(dtype).isnan().all() and whole(nan) != whole(bits.view(dtype))
    assert whole(nan) == whole(nan.clone())


def test_weights_are_odd_and_differ():
    rows, columns = module._weights(torch.device("cpu"))
    places = rows[:, None] + columns
    assert len(places.unique()) == BLOCK and bool((places % 2 == 1).all())
    blocks = [module._block_weight(n) for n in range(10_000)]
    assert len(set(blocks)) == 10_000 and all(n % 2 for n in blocks)
