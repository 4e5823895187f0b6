import pytest
import torch

from posttrain.models import logprobs as module
from posttrain.models.logprobs import token_logprobs

VOCABULARY, HIDDEN = 37, 8


def inputs(count=11, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, HIDDEN, generator=generator) * scale
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    return hidden, head, targets


def reference(hidden, head, targets, temperature):
    """A full softmax in float64, with gradients of a weighted sum."""
    hidden, head = hidden.double().requires_grad_(), head.double().requires_grad_()
    logprobs = ((hidden @ head.t()) / temperature).log_softmax(-1)
    chosen = logprobs[torch.arange(len(targets)), targets]
    (chosen * torch.arange(1.0, len(targets) + 1)).sum().backward()
    return chosen.detach(), -(logprobs.exp() * logprobs).sum(-1).detach(), hidden.grad, head.grad


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("rows", [1000, 11, 4, 3, 1])  # whole, exactly whole, 4 + 4 + 3, 3 * 3 + 2, one by one
def test_values_entropies_and_gradients(monkeypatch, rows, temperature):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", rows * VOCABULARY)
    plain_hidden, plain_head, targets = inputs()
    expected, entropies, grad_hidden, grad_head = reference(plain_hidden, plain_head, targets, temperature)
    hidden, head = plain_hidden.clone().requires_grad_(), plain_head.clone().requires_grad_()
    values, entropy = token_logprobs(hidden, head, targets, temperature)
    assert values.dtype == entropy.dtype == torch.float32
    assert not entropy.requires_grad
    (values * torch.arange(1.0, len(targets) + 1)).sum().backward()
    for actual, wanted in (
        (values.detach(), expected),
        (entropy, entropies),
        (hidden.grad, grad_hidden),
        (head.grad, grad_head),
    ):
        torch.testing.assert_close(actual, wanted.float(), rtol=2e-5, atol=2e-5)


def test_the_logits_never_exist_at_once(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 4 * VOCABULARY)
    sizes = []
    original = torch.log_softmax

    def spy(logits, dim):
        sizes.append(logits.numel())
        return original(logits, dim)

    monkeypatch.setattr(torch, "log_softmax", spy)
    hidden, head, targets = inputs()
    values, _ = token_logprobs(hidden.requires_grad_(), head.requires_grad_(), targets)
    assert sizes == [4 * VOCABULARY, 4 * VOCABULARY, 3 * VOCABULARY]
    values.sum().backward()
    assert sizes[3:] == sizes[:3][::-1]  # computed again, chunk by chunk, in the backward pass


def test_a_vocabulary_above_the_chunk_still_goes_row_by_row(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 5)
    hidden, head, targets = inputs(3)
    expected = (hidden @ head.t()).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(token_logprobs(hidden, head, targets)[0], expected)


def test_extreme_logits_give_no_nan():
    hidden, head, targets = inputs(scale=1e4)
    values, entropy = token_logprobs(hidden.requires_grad_(), head, targets, 1e-6)
    values.sum().backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(hidden.grad).all()
    assert (entropy >= 0).all()


def test_half_precision_hidden_states_give_float32():
    hidden, head, targets = inputs(scale=1.0)
    values, entropy = token_logprobs(hidden.bfloat16(), head.bfloat16(), targets)
    expected, entropies, *_ = reference(hidden, head, targets, 1.0)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected.float(), rtol=0.05, atol=0.1)
    torch.testing.assert_close(entropy, entropies.float(), rtol=0.05, atol=0.1)
