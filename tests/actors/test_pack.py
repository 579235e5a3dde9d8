"""Packs: where sequences begin and end, what is predicted where, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flexray.actors.attention.backends import sdpa
from flexray.actors.attention.ulysses import SequenceParallel, attend, key_value_heads
from flexray.actors.gang import Gang
from flexray.actors.pack import EMPTY_PACK, INT32_MAX, Borders, make_shard, shift
from flexray.actors.timing import Stopwatch


def whole(sequences, degree):
    """The shards of all ranks, put together again: ids, positions, labels."""
    shards = [make_shard(sequences, degree, rank) for rank in range(degree)]
    assert len({s.input_ids.shape for s in shards}) == 1
    assert len({s.borders.cu_seqlens for s in shards}) == 1
    return (
        torch.cat([s.input_ids[0] for s in shards]).tolist(),
        torch.cat([s.position_ids[0] for s in shards]).tolist(),
        torch.cat([s.labels for s in shards]).tolist(),
        [s.label_tokens for s in shards],
    )


ABC = [(np.array([1, 2, 3, 4, 5]), None), (np.array([6]), None), (np.array([7, 8, 9]), None)]


@pytest.mark.parametrize("degree", [1, 3, 9])
def test_labels_are_shifted_and_positions_restart_in_every_sequence_whatever_the_degree(degree):
    ids, positions, labels, counts = whole(ABC, degree)
    assert ids == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert positions == [0, 1, 2, 3, 4, 0, 0, 1, 2]
    assert labels == [2, 3, 4, 5, -100, -100, 8, 9, -100]
    assert sum(counts) == 6


def test_a_label_on_the_other_side_of_a_cut_is_there():
    # The last token of rank 0's shard predicts the first of rank 1's.
    first, second = (make_shard([(np.arange(8), None)], 2, rank) for rank in range(2))
    assert first.labels.tolist() == [1, 2, 3, 4]
    assert second.labels.tolist() == [5, 6, 7, -100]
    assert second.position_ids.tolist() == [[4, 5, 6, 7]]


@pytest.mark.parametrize("degree, padding", [(2, 1), (4, 3), (8, 7), (5, 1)])
def test_padding_is_a_sequence_of_its_own_without_labels(degree, padding):
    shard = make_shard(ABC, degree, 0)
    assert shard.borders.cu_seqlens == (0, 5, 6, 9, 9 + padding)
    ids, positions, labels, _ = whole(ABC, degree)
    assert ids[9:] == [0] * padding
    assert positions[9:] == [0] * padding
    assert labels[9:] == [-100] * padding


def test_own_labels_are_kept_and_shifted():
    tokens, labels = np.array([1, 2, 3, 4]), np.array([-100, -100, 3, 4])
    shard = make_shard([(tokens, labels)], 1, 0)
    assert shard.labels.tolist() == [-100, 3, 4, -100]
    assert shard.label_tokens == 2


def test_small_token_types_do_not_wrap():
    # uint16 ids as they are in a corpus: -100 must not become 65436.
    shard = make_shard([(np.array([65535, 1], np.uint16), None)], 1, 0)
    assert shard.input_ids.tolist() == [[65535, 1]]
    assert shard.labels.tolist() == [1, -100]
    assert shift(np.array([5], np.uint8)).tolist() == [-100]


def test_labels_of_another_length_are_refused():
    with pytest.raises(ValueError, match="4 tokens has 3 labels"):
        make_shard([(np.arange(4), np.arange(3))], 1, 0)


def test_the_empty_pack_is_one_token_without_label():
    shard = make_shard(EMPTY_PACK, 1, 0)
    assert shard.labels.tolist() == [-100]
    assert shard.label_tokens == 0
    assert shard.borders.cu_seqlens == (0, 1)


def test_borders():
    borders = Borders([3, 1, 4])
    assert borders.cu_seqlens == (0, 3, 4, 8)
    assert borders.spans == ((0, 3), (3, 4), (4, 8))
    assert (borders.tokens, borders.longest) == (8, 4)
    tensor = borders.on(torch.device("cpu"))
    assert tensor.dtype == torch.int32
    assert tensor.tolist() == [0, 3, 4, 8]
    assert borders.on(torch.device("cpu")) is tensor


@pytest.mark.parametrize("lengths", [[0], [3, 0, 2], [4, -1]])
def test_a_sequence_without_tokens_is_refused(lengths):
    with pytest.raises(ValueError, match="filter zero-length rows"):
        Borders(lengths)


def test_a_pack_over_int32_is_refused_before_anything_is_built():
    assert Borders([INT32_MAX]).tokens == INT32_MAX
    with pytest.raises(ValueError, match="over 2147483647"):
        Borders([INT32_MAX, 1])

    class Long:
        """Tokens that say how many they are and cannot be read."""

        def __len__(self):
            return 2**30

        def __getattr__(self, name):
            raise AssertionError(f"the tokens were touched: {name}")

    with pytest.raises(ValueError, match="lower the capacity"):
        make_shard([(Long(), None), (Long(), None)], 2, 0)


def test_more_tokens_than_borders_are_refused():
    x = torch.randn(9, 4, 8)
    sp = SequenceParallel(Gang((0,), 0, None, Stopwatch()), Borders([5, 3]), "sdpa")
    with pytest.raises(ValueError, match="cu_seqlens ends at 8"):
        attend(x, x, x, sp, 1.0)


@pytest.mark.parametrize(
    "heads, kv, degree, expected",
    [
        (8, 8, 4, (2, [0, 1, 2, 3, 4, 5, 6, 7])),
        (8, 2, 2, (1, [0, 1])),
        (8, 2, 4, (1, [0, 0, 1, 1])),
        (8, 2, 8, (1, [0, 0, 0, 0, 1, 1, 1, 1])),
        (8, 1, 4, (1, [0, 0, 0, 0])),
        (12, 4, 2, (2, [0, 1, 2, 3])),
    ],
)
def test_each_rank_gets_the_key_value_heads_of_its_query_heads(heads, kv, degree, expected):
    assert key_value_heads(heads, kv, degree) == expected
    per_rank, indices = expected
    local = heads // degree
    for head in range(heads):
        rank, own = divmod(head, local)
        assert indices[rank * per_rank + own // (local // per_rank)] == head // (heads // kv)


@pytest.mark.parametrize("heads, kv, degree", [(8, 8, 3), (12, 4, 6), (12, 6, 4)])
def test_an_illegal_degree_is_refused(heads, kv, degree):
    with pytest.raises(ValueError, match="not legal"):
        key_value_heads(heads, kv, degree)


def test_attention_stays_inside_borders():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 9, 4, 8, dtype=torch.float64)
    whole_pack = sdpa(q, k[:, :2], v[:, :2], Borders([4, 1, 4]), 0.3)
    for start, stop in [(0, 4), (4, 5), (5, 9)]:
        scores = 0.3 * torch.einsum(
            "qhd,khd->hqk", q[start:stop], k[start:stop, [0, 0, 1, 1]]
        ).masked_fill(torch.ones(stop - start, stop - start).triu(1).bool(), -torch.inf)
        alone = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start:stop, [0, 0, 1, 1]])
        torch.testing.assert_close(whole_pack[start:stop], alone, atol=1e-14, rtol=0)
