"""Log-probabilities and entropies of given tokens, straight from hidden states, and losses made of them.

The [tokens, vocabulary] matrix of logits never exists: a few hundred tokens at a time go through the output head,
forward and backward, in a buffer of ``BUFFER_BYTES``. ``token_logprobs`` serves any loss and computes the logits
again in the backward pass. ``tokenwise_loss`` serves losses that are sums over tokens, which all of SFT and most of RL
is: the gradient is taken while the logits are there, so they are computed once (as Liger Kernel, arXiv:2410.10989, does
for cross-entropy), which saves a quarter of the head's work.

Matrix products run in the type of the hidden states. Logits are float32 whatever that is; on a GPU they are never
rounded to it (``float32_logits``).

Shape legend: N tokens, D hidden size, V vocabulary, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from posttrain.core.sizes import LOGITS_BYTES, logits_rows

BUFFER_BYTES = LOGITS_BYTES
"""Room for logits, which their gradients then overwrite (on a GPU)."""

TokenLoss = Callable[[Tensor, Tensor, slice], Tensor]
"""(logprobs [n], entropies [n], which of the N tokens they belong to) -> a scalar, to be summed over all tokens."""


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target token and entropy of its distribution, at a sampling temperature.

    Args:
        hidden: [N, D].
        head: [V, D] output weights, of the same type.
        targets: [N] int64.
        temperature: logits are divided by it, as the engine does before it samples.
        softcap: before that they become ``softcap * tanh(logit / softcap)``.

    Returns:
        logprobs [N] float32, entropies [N] float32, both with gradient to ``hidden`` and ``head``.
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(hidden, head, targets, temperature, softcap)  # type: ignore[no-untyped-call]
    return result


def likelier_half(logprobs: Tensor) -> Tensor:
    """Return the indices [ceil(T / 2)] of the likelier half of tokens, from their log-probabilities [T].

    Two programs with the same weights are compared by these. Of unlikely tokens rounding alone changes the
    log-probability by several times as much, and by different amounts from model to model.
    """
    return logprobs.argsort(descending=True)[: (len(logprobs) + 1) // 2]


def tokenwise_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    loss: TokenLoss,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of ``loss`` over all tokens, with gradient, and what it was computed from, without.

    Args:
        hidden, head, targets, temperature, softcap: as in ``token_logprobs``.
        loss: called once for each chunk of tokens, in order, in the forward pass.

    Returns:
        loss [] float32, logprobs [N] float32, entropies [N] float32.
    """
    # torch leaves ``Function.apply`` without types.
    result: tuple[Tensor, Tensor, Tensor] = _TokenwiseLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, temperature, loss, softcap
    )
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        rows = _Rows(len(targets), hidden.device)
        for part in _chunks(hidden, head):
            rows.fill(part, _logits(hidden[part], head, temperature, softcap), targets[part])
        ctx.save_for_backward(hidden, head, targets, rows.normaliser, rows.entropies)
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.set_materialize_grads(False)
        return rows.logprobs, rows.entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, normaliser, entropies = ctx.saved_tensors
        by_logprob, by_entropy = upstream
        grads = _Gradients(hidden, head, ctx.temperature, ctx.softcap, ctx.needs_input_grad)
        for part in _chunks(hidden, head):
            grads.add(
                part,
                _logits(hidden[part], head, ctx.temperature, ctx.softcap),
                targets[part],
                normaliser[part],
                entropies[part],
                None if by_logprob is None else by_logprob[part],
                None if by_entropy is None else by_entropy[part],
            )
        return *grads.finish(), None, None, None


class _TokenwiseLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        loss: TokenLoss,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _Rows(len(targets), hidden.device)
        total = torch.zeros((), device=hidden.device)
        needed = any(ctx.needs_input_grad)
        grads = _Gradients(hidden, head, temperature, softcap, ctx.needs_input_grad) if needed else None
        for part in _chunks(hidden, head):
            logits = _logits(hidden[part], head, temperature, softcap)
            rows.fill(part, logits, targets[part])
            with torch.enable_grad():
                logprobs = rows.logprobs[part].detach().requires_grad_(needed)
                entropies = rows.entropies[part].detach().requires_grad_(needed)
                value = loss(logprobs, entropies, part)
            total += value.detach()
            if grads is not None:
                by = torch.autograd.grad(value, (logprobs, entropies), allow_unused=True)
                grads.add(part, logits, targets[part], rows.normaliser[part], rows.entropies[part], *by)
            del logits  # else two chunks' would exist at once
        ctx.save_for_backward(*(grads.finish() if grads is not None else (None, None)))
        ctx.mark_non_differentiable(rows.logprobs, rows.entropies)
        return total, rows.logprobs, rows.entropies

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad.mul_(upstream[0].to(grad.dtype)) for grad in ctx.saved_tensors]
        return *grads, None, None, None, None


class _Rows:
    """What is kept of each token's distribution: [N] float32 each."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.logprobs, self.entropies, self.normaliser = torch.empty((3, count), device=device).unbind()

    def fill(self, part: slice, logits: Tensor, targets: Tensor) -> None:
        """From the logits [n, V] of the tokens ``part``."""
        if logits.is_cuda:
            from posttrain.models import logprobs_triton as kernels

            kernels.statistics(logits, targets, self.normaliser[part], self.logprobs[part], self.entropies[part])
            return
        normaliser = logits.logsumexp(-1)
        self.normaliser[part] = normaliser
        self.logprobs[part] = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
        logprobs = logits - normaliser[:, None]
        self.entropies[part] = -(logprobs.exp() * logprobs).sum(-1)


class _Gradients:
    """Gradients of hidden states and head, from the logits' of one chunk after another."""

    def __init__(
        self, hidden: Tensor, head: Tensor, temperature: float, softcap: float | None, needed: tuple[bool, ...]
    ) -> None:
        self._hidden, self._head, self._scale = hidden, head, 1.0 / temperature
        self._cap = None if softcap is None else softcap / temperature
        self._of_hidden = torch.empty_like(hidden) if needed[0] else None
        # In float32: each chunk adds to the same sum, and in bfloat16 what it adds is lost as the sum grows.
        self._of_head = torch.zeros_like(head, dtype=torch.float32) if needed[1] else None

    def add(
        self,
        part: slice,
        logits: Tensor,
        targets: Tensor,
        normaliser: Tensor,
        entropies: Tensor,
        by_logprob: Tensor | None,
        by_entropy: Tensor | None,
    ) -> None:
        """Chain the derivatives [n] by log-probability and entropy to the logits [n, V], which are overwritten, and
        those to the hidden states and the head.

        With p the softmax of z, d logprob / d z_j = [j = target] - p_j, and d H / d z_j = -p_j (log p_j + H). A cap c
        adds the factor 1 - (z / c)^2, the derivative of c tanh(x / c).
        """
        upstream = (by_logprob, by_entropy)
        if logits.is_cuda and self._cap is None:
            from posttrain.models import logprobs_triton as kernels

            grad = kernels.gradient(logits, targets, normaliser, entropies, *upstream, self._scale, self._hidden.dtype)
        else:
            slope = self._scale if self._cap is None else (1 - (logits / self._cap) ** 2).mul_(self._scale)
            grad = _gradient(logits, targets, normaliser, entropies, *upstream).mul_(slope)
            grad = grad.to(self._hidden.dtype)
        if self._of_hidden is not None:
            torch.mm(grad, self._head, out=self._of_hidden[part])
        if self._of_head is not None:
            _add_product(self._of_head, grad.t(), self._hidden[part])

    def finish(self) -> tuple[Tensor | None, Tensor | None]:
        """Both gradients, in the types of the hidden states and of the head."""
        return self._of_hidden, None if self._of_head is None else self._of_head.to(self._head.dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``total``, which is float32. On a GPU the product is not rounded to their type before."""
    if left.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.dtype != total.dtype:
        total += left @ right
    else:
        total.addmm_(left, right)


def _gradient(
    logits: Tensor,
    targets: Tensor,
    normaliser: Tensor,
    entropies: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
) -> Tensor:
    logprobs = logits.sub_(normaliser[:, None])
    probabilities = logprobs.exp()
    grad = torch.zeros_like(logprobs)
    if by_entropy is not None:
        grad -= by_entropy[:, None] * probabilities * (logprobs + entropies[:, None])
    if by_logprob is not None:
        grad -= by_logprob[:, None] * probabilities
        grad.scatter_add_(-1, targets[:, None], by_logprob[:, None].to(grad.dtype))
    return grad


def _chunks(hidden: Tensor, head: Tensor) -> Iterator[slice]:
    """Yield slices of as many rows as ``logits_rows`` says."""
    count = len(hidden)
    size = logits_rows(count, head.shape[0], BUFFER_BYTES)
    return (slice(start, min(start + size, count)) for start in range(0, count, size or 1))


def float32_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """[n, V] float32 of hidden states [n, D] and a head [V, D] of the same type. On a GPU they are never rounded to it,
    as what adds them up is float32 anyway."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, head.t(), out_dtype=torch.float32)
    return (hidden @ head.t()).float()


def _logits(hidden: Tensor, head: Tensor, temperature: float, softcap: float | None) -> Tensor:
    logits = float32_logits(hidden, head)
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)
