"""Routers of mixtures: their own weights, the auxiliary loss, stored choices."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from posttrain.core.errors import ConfigError, RunError
from posttrain.models.builtin import create_builtin
from posttrain.models.experts import KINDS, TYPES, Mixture, RoutedTokens, RoutingFormat, check_routers, routers
from posttrain.models.load import ModelSource, build, load_config
from tests.helpers.architectures import ARCHITECTURES

MIXTURES = [name for name, found in ARCHITECTURES.items() if "expert" in found.about and name != "DeepSeek-V3"]


def architecture(name, folder):
    ARCHITECTURES[name].save(folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_router_gives_its_own_choice_its_own_weights(tmp_path, name):
    """Of every mixture of docs/models.md that is not refused, in float32 and bfloat16, to the bit."""
    model = architecture(name, tmp_path)
    check_routers(model.config)
    found = routers(model)
    assert found
    for dtype in (torch.float32, torch.bfloat16):
        router = found[0].to(dtype)
        kind = KINDS[type(router).__name__]
        torch.manual_seed(0)
        with torch.no_grad():
            router.weight.normal_()
            output = router(torch.randn(50, router.weight.shape[1], dtype=dtype))
            logits, weights, experts = (output[i] for i in (kind.logits, kind.weights, kind.experts))
            assert experts.shape == weights.shape == (50, router.top_k)
            assert torch.equal(kind.weigh(router, logits, experts).to(weights.dtype), weights)


def test_every_kind_of_router_and_type_of_model_is_tested(tmp_path):
    models = [architecture(name, tmp_path / name) for name in MIXTURES]
    assert {type(router).__name__ for model in models for router in routers(model)} == set(KINDS)
    assert {model.config.model_type for model in models} == set(TYPES)


def test_a_dense_model_has_no_routers():
    with pytest.raises(ConfigError, match="models of type qwen2 have no routers of a known kind") as error:
        check_routers(load_config(ModelSource("builtin:tiny")))
    assert "leave both out" in error.value.hint
    with pytest.raises(ConfigError, match="no routers"):
        Mixture(create_builtin("tiny", 0))


IDS = torch.arange(60)[None] * 7 % 1000


def test_the_auxiliary_loss_is_transformers_own_of_each_layer():
    """Value and gradient, on one batch: the mean of transformers' function over the layers."""
    expected = create_builtin("tiny-moe", 1)
    logits = expected(IDS, output_router_logits=True).router_logits
    loss = torch.stack([load_balancing_loss_func((of_layer,), 8, 2) for of_layer in logits]).mean()
    loss.backward()

    model = create_builtin("tiny-moe", 1)
    mixture, tokens = Mixture(model), RoutedTokens(torch.ones(60))
    with torch.no_grad():
        mixture.begin(tokens)
        model(IDS)
    seen = mixture.seen()
    assert seen.metrics()["moe/aux_loss"] == pytest.approx(loss.item(), rel=1e-6)
    mixture.begin(tokens, seen.pull())
    (0.0 * model(IDS).logits.sum()).backward()
    for name, parameter in expected.named_parameters():
        grad = dict(model.named_parameters())[name].grad
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-7)
    assert any(router.weight.grad.abs().max() > 1e-4 for router in routers(model))


def test_load_metrics_of_a_hand_worked_case():
    """Two experts of four get all of three tokens; the router is undecided."""
    model = create_builtin("tiny-moe", 1)
    mixture = Mixture(model)
    with torch.no_grad():
        for router in routers(model):
            router.weight.zero_()
        replayed = torch.tensor([1, 2]).expand(3, 2, 2)
        mixture.begin(RoutedTokens(torch.tensor([1.0, 1.0, 0.0]), replayed))
        model(IDS[:, :3])
    found = mixture.seen().metrics()
    agreement = found.pop("moe/replay_agreement")
    assert found == pytest.approx(
        {
            "moe/aux_loss": 2.0,  # 8 experts x 2 of them with all tokens x a probability of 1/8
            "moe/busiest_expert": 1.0,
            "moe/max_violation": 3.0,  # 2 tokens, where 4 choices / 8 experts are the mean
            "moe/load_entropy": 1 / 3,  # log 2 of log 8
            "moe/router_entropy": 1.0,
            "moe/unused_experts": 12.0,
        },
        abs=1e-6,
    )
    assert 0.0 <= agreement <= 1.0


def test_replayed_experts_get_weights_and_gradients_from_the_router():
    """Against the layer written out: weights are the router's probabilities of the given experts, normalised, and the
    gradient of its matrix is that of these weights."""
    torch.manual_seed(3)
    model = create_builtin("tiny-moe", 2)
    block = model.model.layers[0].mlp
    hidden = torch.randn(1, 3, 128)
    given = torch.tensor([[5, 0], [7, 2], [1, 6]])
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.1)
    mixture = Mixture(model)
    replayed = torch.stack([given, given], 1) + 1
    replayed[2] = 0  # the last token goes where the router sends it
    mixture.begin(RoutedTokens(torch.ones(3), replayed))
    out = block(hidden)
    out.square().sum().backward()
    grad = block.gate.weight.grad.clone()

    weight = block.gate.weight.detach().clone().requires_grad_(True)
    probabilities = (hidden[0] @ weight.T).softmax(-1)
    rows = []
    for token in range(3):
        chosen = given[token] if token < 2 else probabilities[token].topk(2).indices
        share = probabilities[token, chosen] / probabilities[token, chosen].sum()
        x = hidden[0, token]
        experts = []
        for expert in chosen.tolist():
            gate, up = (block.experts.gate_up_proj[expert].detach() @ x).chunk(2)
            experts.append(block.experts.down_proj[expert].detach() @ (torch.nn.functional.silu(gate) * up))
        rows.append((share[:, None] * torch.stack(experts)).sum(0))
    expected = torch.stack(rows)
    expected.square().sum().backward()
    torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad, weight.grad, rtol=1e-4, atol=1e-6)
    assert float(grad.abs().max()) > 1e-2


@pytest.mark.parametrize(("experts", "width"), [(8, 4), (255, 4), (256, 8), (512, 8)])
def test_stored_choices_come_back(experts, width):
    form = RoutingFormat((1, 3), 4, 2, experts)
    assert form.width == width
    chosen = np.array([[[0, experts - 1], [1, 2]], [[experts - 1, 5], [3, 0]]])
    rows = form.stored(chosen)
    assert rows.shape == (2, width)
    assert rows.dtype == np.uint8
    assert np.array_equal(form.loaded(torch.from_numpy(rows)).numpy() - 1, chosen)
    assert not form.loaded(torch.zeros(3, width, dtype=torch.uint8)).any()
    with pytest.raises(RunError, match=f"take {width + 1} bytes a token, and those of this model {width}"):
        form.loaded(torch.zeros(3, width + 1, dtype=torch.uint8))


def test_the_format_of_a_model_on_the_meta_device():
    model = build(ModelSource("builtin:tiny-moe"), dtype=torch.float32)
    assert RoutingFormat.of(model) == RoutingFormat((0, 1), 2, 2, 8)
