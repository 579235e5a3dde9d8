"""A model factory and a loss of one's own: as exact as what is built in, as strictly checked."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from flexray.actors.loss import LossModel, check_token_loss, cross_entropy
from flexray.actors.model import ModelRefused, check_model
from flexray.actors.timing import Stopwatch
from tests.actors.models import VOCAB, config
from tests.actors.test_gradients import check
from tests.actors.test_sharding import values
from tests.worlds import run_world


class Gated(nn.Module):
    """A block that no architecture has: y = x + gate * tanh(x W)."""

    def __init__(self, mlp: nn.Module, size: int) -> None:
        super().__init__()
        self.mlp, self.mix = mlp, nn.Linear(size, size, bias=False)
        self.gate = nn.Parameter(torch.empty(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + self.gate * torch.tanh(self.mix(x))


class GatedLlama(LlamaForCausalLM):
    """A Llama with a block more in every layer, and an initialiser that knows it."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Gated(layer.mlp, config.hidden_size)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Gated):
            nn.init.normal_(module.gate, std=0.5)


class Forgetful(GatedLlama):
    def _init_weights(self, module):
        LlamaForCausalLM._init_weights(self, module)


def deeper(config):
    """A factory that changes the configuration that it is given."""
    config.num_hidden_layers += 1
    return GatedLlama(config)


def focal(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Lin et al., ICCV 2017, arXiv 1708.02002."""
    entropy = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-entropy)) ** 2 * entropy


def test_an_own_model_has_the_gradients_of_one_process():
    check(
        [
            (config(), {"dtype": "float64", "model_factory": factory, **keys})
            for factory, keys in (
                (GatedLlama, {}),
                (deeper, {"activation_checkpointing": True}),
            )
        ]
    )


def test_an_own_loss_has_the_gradients_of_one_process():
    check([(config(), {"dtype": dtype, "token_loss": focal}) for dtype in ("float64", "float32")])


def test_ignored_labels_do_not_count_in_an_own_loss():
    """A loss that is huge for label 0, which stands for ignored ones."""
    logits = torch.zeros(3, 5, dtype=torch.float64, requires_grad=True)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.float64)
    model.lm_head = nn.Identity()
    wrapped = LossModel(
        model, 2, Stopwatch(), lambda x, y: cross_entropy(x, y) * (1 + 1e9 * (y == 0))
    )
    loss = wrapped.summed_loss(logits[None], torch.tensor([-100, 3, -100]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(5))
    assert logits.grad[[0, 2]].eq(0).all()
    assert logits.grad[1].sum().abs() < 1e-12


def test_an_own_model_is_filled_from_files(tmp_path):
    torch.manual_seed(3)
    saved = GatedLlama(config())
    for parameter in saved.parameters():  # gates were added after the initialiser: any memory
        nn.init.normal_(parameter)
    saved.save_pretrained(tmp_path)
    settings = {"model_factory": GatedLlama, "weights": tmp_path}
    for whole, _ in run_world(3, values, [(config(), settings)])[1]:
        for name, parameter in saved.named_parameters():
            assert (whole[name] == parameter.detach().numpy()).all(), name


def test_the_configuration_is_the_built_models():
    given = config()
    for _ in range(2):  # and the one that is given stays
        assert check_model(given, deeper).config.num_hidden_layers == 3


FACTORIES = {
    "no transformers model": (lambda c: nn.Linear(3, 3), "returned Linear: return a transformers"),
    "weights of its own": (
        lambda c: LlamaForCausalLM(c).to_empty(device="cpu"),
        "model.embed_tokens.weight is on cpu: make the model without",
    ),
    "no head": (lambda c: LlamaForCausalLM(c).model, "no stack of layers with an output head"),
    "dropout": (
        lambda c: _with(LlamaForCausalLM(c), nn.Dropout(0.1)),
        "model.layers.0.mlp.1 has dropout 0.1: set it to 0",
    ),
    "another attention": (
        lambda c: _with(LlamaForCausalLM(c), nn.Conv1d(1, 1, 1)),
        "its forward takes no packed sequences",
    ),
    "a configuration of its own": (
        lambda c: LlamaForCausalLM(config(attention_dropout=0.1)),
        "attention_dropout=0.1",
    ),
    "an error": (lambda c: LlamaForCausalLM(None), "it cannot be built"),
}


def _with(model, module):
    layer = model.model.layers[0]
    layer.mlp = nn.Sequential(layer.mlp, module)
    return model


@pytest.mark.parametrize("case", FACTORIES)
def test_a_factory_that_cannot_be_trained_exactly_is_one_line(case):
    factory, words = FACTORIES[case]
    with pytest.raises(ModelRefused) as refusal:
        check_model(config(), factory)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_factory_with_a_configuration_of_its_own_is_admitted():
    built = check_model(config(), lambda _: AutoModelForCausalLM.from_config(config("qwen3")))
    assert built.config.model_type == "qwen3"
    assert built.config._attn_implementation == "flexray"


def test_parameters_that_its_initialiser_forgets_are_refused():
    with pytest.raises(AssertionError, match=r"mlp\.gate"):
        run_world(1, values, [(config(), {"model_factory": Forgetful})])


LOSSES = {
    "a mean": (lambda x, y: F.cross_entropy(x, y), "shape () for 4 tokens"),
    "a centred one": (
        lambda x, y: (e := F.cross_entropy(x, y, reduction="none")) - e.mean(),
        "depends on the tokens beside it",
    ),
    "no gradient": (lambda x, y: cross_entropy(x, y).detach(), "no gradient"),
    "random": (lambda x, y: cross_entropy(x, y) * torch.rand(()), "draws random numbers"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_depends_on_the_plan_is_one_line(case):
    loss, words = LOSSES[case]
    with pytest.raises(ModelRefused, match=r"^loss: ") as refusal:
        check_token_loss(loss, VOCAB)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_losses_that_are_a_tokens_own_are_admitted():
    for loss in (
        cross_entropy,
        focal,
        lambda x, y: F.cross_entropy(x, y, reduction="none", label_smoothing=0.1),
    ):
        check_token_loss(loss, VOCAB)
