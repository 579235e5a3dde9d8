"""The chunked loss: exact, and the logits of a whole shard never exist."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from flexray.actors.attention.ulysses import IMPLEMENTATION, SequenceParallel
from flexray.actors.gang import Gang
from flexray.actors.loss import LossModel
from flexray.actors.pack import make_shard
from flexray.actors.timing import Stopwatch
from tests.actors.models import VOCAB, config, gradients, sequences, worst_difference

LENGTHS = (23, 1, 30, 9)
CHUNK = 7


class WidestLogits(TorchDispatchMode):
    """The most rows of any tensor as wide as the vocabulary, weights and gradients apart."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCAB:
                rows = tensor.numel() // VOCAB
                if rows != 64:  # a weight or its gradient, transposed: hidden size by vocabulary
                    self.rows = max(self.rows, rows)
        return out


def loss_and_gradients(model, chunk, shard, recorder=None):
    model = copy.deepcopy(model)
    wrapped = LossModel(model, chunk, Stopwatch())
    sp = SequenceParallel(Gang((0,), 0, None, Stopwatch()), shard.borders, "sdpa")
    with recorder or torch.enable_grad():
        loss = wrapped(shard.input_ids, shard.position_ids, shard.labels, sp)
        loss.backward()
    return loss, gradients(model)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config(tie_word_embeddings=request.param),
        dtype=torch.float64,
        attn_implementation=IMPLEMENTATION,
    )


@pytest.mark.parametrize("chunk", [1, CHUNK, 10_000])
def test_any_chunk_gives_the_loss_and_gradients_of_whole_logits(model, chunk):
    shard = make_shard(sequences(LENGTHS), 1, 0)
    loss, grads = loss_and_gradients(model, chunk, shard)
    plain = copy.deepcopy(model)
    sp = SequenceParallel(Gang((0,), 0, None, Stopwatch()), shard.borders, "sdpa")
    logits = plain(
        input_ids=shard.input_ids, position_ids=shard.position_ids, use_cache=False, sp=sp
    ).logits[0]
    right = F.cross_entropy(logits, shard.labels, reduction="sum", ignore_index=-100)
    right.backward()
    assert abs(loss - right) <= 1e-12 * right
    assert worst_difference(grads, gradients(plain)) <= 1e-12


def test_no_more_logits_than_a_chunk_exist_in_forward_or_backward(model):
    shard = make_shard(sequences(LENGTHS), 1, 0)
    assert shard.labels.numel() == 63
    recorder = WidestLogits()
    loss_and_gradients(model, CHUNK, shard, recorder)
    assert recorder.rows == CHUNK
    # The recorder does see whole logits where there are some.
    recorder = WidestLogits()
    loss_and_gradients(model, 63, shard, recorder)
    assert recorder.rows == 63


def test_logits_are_not_kept_for_the_backward(model):
    shard = make_shard(sequences(LENGTHS), 1, 0)
    kept = []
    sp = SequenceParallel(Gang((0,), 0, None, Stopwatch()), shard.borders, "sdpa")
    wrapped = LossModel(copy.deepcopy(model), CHUNK, Stopwatch())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        wrapped(shard.input_ids, shard.position_ids, shard.labels, sp)
    assert kept
    assert [shape for shape in kept if shape and shape[-1] == VOCAB and shape[0] != 64] == []


def test_a_shard_without_labels_has_zero_gradients_for_every_parameter(model):
    tokens, _ = sequences([12])[0]
    shard = make_shard([(tokens, torch.full((12,), -100).numpy())], 1, 0)
    loss, grads = loss_and_gradients(model, CHUNK, shard)
    assert loss == 0
    assert all(g is not None and not g.any() for g in grads.values())


def test_the_sum_is_float32_for_a_bfloat16_model(model):
    shard = make_shard(sequences(LENGTHS), 1, 0)
    loss, _ = loss_and_gradients(copy.deepcopy(model).bfloat16(), CHUNK, shard)
    assert loss.dtype == torch.float32
    right, _ = loss_and_gradients(model, CHUNK, shard)
    assert abs(loss - right) < 1e-2 * right
