import pytest
import torch

from posttrain.models import logprobs as module
from posttrain.models.logprobs import likelier_half, token_logprobs, tokenwise_loss

VOCABULARY, HIDDEN = 37, 8


def inputs(count=11, scale=3.0):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, HIDDEN, generator=generator) * scale
    head = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    return hidden, head, targets


def objective(logprobs, entropies, part=slice(None)):
    """Curved in both, and different for every token."""
    weights = torch.arange(1.0, 1000.0)[: part.stop][part] if part.stop else torch.arange(1.0, len(logprobs) + 1)
    return (weights * (logprobs.exp() + 0.3 * logprobs)).sum() + (weights * (0.1 * entropies.square())).sum()


def reference(hidden, head, targets, temperature, softcap=None):
    """A full softmax in float64: values, entropies, the objective and its gradients."""
    hidden, head = hidden.double().requires_grad_(), head.double().requires_grad_()
    logits = hidden @ head.t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    chosen = logprobs[torch.arange(len(targets)), targets]
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    total = objective(chosen, entropies)
    total.backward()
    return [x.detach().float() for x in (chosen, entropies, total, hidden.grad, head.grad)]


def small_chunks(monkeypatch, rows):
    monkeypatch.setattr(module, "BUFFER_BYTES", rows * VOCABULARY * 4)


def close(actual, expected, tolerance=2e-5):
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.detach(), other, rtol=tolerance, atol=tolerance)


CUTS = [1000, 11, 4, 3, 2, 1]
"""Tokens of a chunk of 11: all, exactly all, 4 + 4 + 3, 3 * 3 + 2, five pairs and a rest, one by one."""


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("rows", CUTS)
def test_values_entropies_and_gradients(monkeypatch, rows, temperature):
    small_chunks(monkeypatch, rows)
    plain_hidden, plain_head, targets = inputs()
    hidden, head = plain_hidden.clone().requires_grad_(), plain_head.clone().requires_grad_()
    values, entropies = token_logprobs(hidden, head, targets, temperature)
    total = objective(values, entropies)
    total.backward()
    close((values, entropies, total, hidden.grad, head.grad), reference(plain_hidden, plain_head, targets, temperature))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", CUTS)
def test_a_loss_of_tokens_takes_its_gradient_chunk_by_chunk(monkeypatch, rows, temperature):
    small_chunks(monkeypatch, rows)
    plain_hidden, plain_head, targets = inputs()
    hidden, head = plain_hidden.clone().requires_grad_(), plain_head.clone().requires_grad_()
    parts = []

    def loss(logprobs, entropies, part):
        parts.append(part)
        return objective(logprobs, entropies, part)

    total, values, entropies = tokenwise_loss(hidden, head, targets, temperature, loss)
    assert (parts[0].start, parts[-1].stop) == (0, len(targets))
    assert not values.requires_grad
    assert not entropies.requires_grad
    (3.0 * total).backward()
    grads = hidden.grad / 3, head.grad / 3
    close((values, entropies, total, *grads), reference(plain_hidden, plain_head, targets, temperature))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("rows", CUTS[1:3])
def test_a_cap_of_logits_comes_before_the_temperature(monkeypatch, rows, fused):
    small_chunks(monkeypatch, rows)
    plain_hidden, plain_head, targets = inputs()
    hidden, head = plain_hidden.clone().requires_grad_(), plain_head.clone().requires_grad_()
    if fused:
        total, values, entropies = tokenwise_loss(hidden, head, targets, 0.7, objective, softcap=4.0)
    else:
        values, entropies = token_logprobs(hidden, head, targets, 0.7, softcap=4.0)
        total = objective(values, entropies)
    total.backward()
    expected = reference(plain_hidden, plain_head, targets, 0.7, softcap=4.0)
    close((values, entropies, total, hidden.grad, head.grad), expected)


def test_only_the_gradients_that_are_asked_for():
    plain_hidden, plain_head, targets = inputs()
    *_, grad_hidden, grad_head = reference(plain_hidden, plain_head, targets, 1.0)
    for trained in ("hidden", "head"):
        hidden = plain_hidden.clone().requires_grad_(trained == "hidden")
        head = plain_head.clone().requires_grad_(trained == "head")
        objective(*token_logprobs(hidden, head, targets)).backward()
        wanted = grad_hidden if trained == "hidden" else grad_head
        close([hidden.grad if trained == "hidden" else head.grad], [wanted])
        assert (head.grad if trained == "hidden" else hidden.grad) is None
    with torch.no_grad():
        total, *_ = tokenwise_loss(plain_hidden, plain_head, targets, 1.0, objective)
    assert not total.requires_grad


def test_a_gradient_through_one_output_only():
    hidden, head, targets = inputs()
    for which in (0, 1):
        ours, plain = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
        token_logprobs(ours, head, targets)[which].square().sum().backward()
        logprobs = (plain @ head.double().t()).log_softmax(-1)
        exact = (logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(-1))
        exact[which].square().sum().backward()
        close([ours.grad], [plain.grad.float()], 1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_the_logits_never_exist_at_once(monkeypatch, fused):
    small_chunks(monkeypatch, 2)
    sizes = []
    original = module._logits

    def spy(hidden, head, *args):
        sizes.append(len(hidden))
        return original(hidden, head, *args)

    monkeypatch.setattr(module, "_logits", spy)
    hidden, head, targets = inputs()
    hidden.requires_grad_()
    if fused:
        tokenwise_loss(hidden, head, targets, 1.0, objective)[0].backward()
    else:
        token_logprobs(hidden, head, targets)[0].sum().backward()
    forward = [2, 2, 2, 2, 2, 1]
    assert sizes == (forward if fused else forward * 2)  # a loss of tokens computes them once


def test_a_vocabulary_above_the_buffer_still_goes_row_by_row(monkeypatch):
    monkeypatch.setattr(module, "BUFFER_BYTES", 5)
    hidden, head, targets = inputs(3)
    expected = (hidden @ head.t()).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(token_logprobs(hidden, head, targets)[0], expected)


def test_the_buffer_stays_within_its_size(monkeypatch):
    monkeypatch.setattr(module, "BUFFER_BYTES", 500 * VOCABULARY * 4)
    for count, sizes in ((1000, [384, 384, 232]), (500, [256, 244]), (768, [384, 384]), (384, [384]), (5, [5])):
        hidden, head, _ = inputs(count)
        parts = list(module._chunks(hidden, head))
        assert [part.stop - part.start for part in parts] == sizes  # multiples of 128, of equal size


def test_no_tokens():
    hidden, head, targets = (x[:0] if i != 1 else x for i, x in enumerate(inputs()))
    hidden.requires_grad_(), head.requires_grad_()
    values, entropies = token_logprobs(hidden, head, targets)
    (values.sum() + entropies.sum()).backward()
    assert values.shape == entropies.shape == (0,)
    assert hidden.grad.shape == (0, HIDDEN)
    assert not head.grad.any()


def test_extreme_logits_give_no_nan():
    hidden, head, targets = inputs(scale=1e4)
    values, entropy = token_logprobs(hidden.requires_grad_(), head, targets, 1e-6)
    (values.sum() + entropy.sum()).backward()
    assert torch.isfinite(values).all()
    assert torch.isfinite(entropy).all()
    assert torch.isfinite(hidden.grad).all()
    assert (entropy >= 0).all()


def test_half_precision_hidden_states_give_float32():
    hidden, head, targets = inputs(scale=1.0)
    values, entropy = token_logprobs(hidden.bfloat16(), head.bfloat16(), targets)
    expected, entropies, *_ = reference(hidden, head, targets, 1.0)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, rtol=0.05, atol=0.1)
    torch.testing.assert_close(entropy, entropies, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("fused", [False, True])
def test_the_heads_gradient_in_bfloat16_is_as_exact_over_many_chunks_as_over_one(monkeypatch, fused):
    """Every token pushes the same way, so that a sum in bfloat16 would stand still while it grows."""
    generator = torch.Generator().manual_seed(0)
    plain_hidden = (1.0 + 0.1 * torch.randn(512, HIDDEN, generator=generator)).bfloat16()
    plain_head = torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16()
    targets = torch.randint(3, (512,), generator=generator)
    exact = plain_head.double().requires_grad_()
    (plain_hidden.double() @ exact.t()).log_softmax(-1).gather(-1, targets[:, None]).sum().backward()
    for chunks in (1, 4, 64, 256):
        small_chunks(monkeypatch, 512 // chunks)
        head = plain_head.clone().requires_grad_()
        if fused:
            tokenwise_loss(plain_hidden, head, targets, 1.0, lambda values, _, part: values.sum())[0].backward()
        else:
            token_logprobs(plain_hidden, head, targets)[0].sum().backward()
        assert head.grad.dtype == torch.bfloat16
        assert float((head.grad.double() - exact.grad).norm() / exact.grad.norm()) < 0.003, chunks


@pytest.mark.parametrize(
    ("logprobs", "half"), [([-3.0, -1.0, -2.0, -9.0], {1, 2}), ([-3.0, -1.0, -2.0], {1, 2}), ([-1.0], {0})]
)
def test_the_likelier_half(logprobs, half):
    assert set(likelier_half(torch.tensor(logprobs)).tolist()) == half
