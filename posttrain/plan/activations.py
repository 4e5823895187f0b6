"""What the backward pass needs of the forward pass, in bytes a token.

The terms follow what autograd saves, operator by operator; a test counts that on the real code. Shape legend as in
``shape``, and b bytes of an element of the compute type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.plan.shape import ModelShape

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Policy:
    """What of a layer is kept for the backward pass, and how it is computed."""

    checkpointing: Checkpointing = "none"
    compiled: bool = True
    repeats_heads: bool = False
    """The attention kernel has as many key heads as query heads (core torch's in torch 2.11)."""
    itemsize: int = 2
    """b"""
    lora_rank: int = 0
    shared_out: bool = False
    """Experts are on other workers (`train.expert_parallel`)."""


def of_layer(shape: ModelShape, policy: Policy) -> float:
    """Bytes that one decoder layer saves for each token."""
    b = policy.itemsize
    if policy.checkpointing == "full":
        return b * shape.hidden  # its input
    if policy.checkpointing == "selective":
        return _selective(shape, policy) + _adapters(shape, policy)
    layer = _compiled(shape, policy) if policy.compiled else _eager(shape, policy)
    return layer + _experts(shape, policy) + _adapters(shape, policy)


def _attention(shape: ModelShape, policy: Policy) -> float:
    """Queries, keys and values as they go in, the result, and a float32 for each head."""
    kv = shape.q if policy.repeats_heads else shape.kv
    return policy.itemsize * (2 * shape.q + 2 * kv) + 4 * shape.heads


def _compiled(shape: ModelShape, policy: Policy) -> float:
    """The partitioner keeps inputs of matrix products and of attention, and fuses what lies between."""
    b, h = policy.itemsize, shape.hidden
    # Twice: the sum that enters a norm, the normalised, a float32 of its scale. The MLP: gate, up, their product.
    saved = b * 4 * h + 8 + _attention(shape, policy) + b * 3 * shape.intermediate
    if shape.qk_norm:
        saved += b * (shape.q + shape.kv) + 4 * (shape.heads + shape.kv_heads)
    return saved


def _eager(shape: ModelShape, policy: Policy) -> float:
    """Every operator keeps its own: a norm its input and the normalised in float32 and, if its weight is trained, in b;
    SwiGLU four tensors."""
    b, h = policy.itemsize, shape.hidden
    normalised = 0 if policy.lora_rank else b
    saved = 2 * ((4 + b + normalised) * h + 4) + _attention(shape, policy) + b * 4 * shape.intermediate
    if shape.qk_norm:
        saved += (4 + normalised) * (shape.q + shape.kv) + 4 * (shape.heads + shape.kv_heads)
    return saved


def _selective(shape: ModelShape, policy: Policy) -> float:
    """The layer's input, results of matrix products, attention's result with a float32 for each head."""
    b, h = policy.itemsize, shape.hidden
    kv = 2 * shape.kv
    saved = b * (h + shape.q + kv + shape.q + h + 2 * shape.intermediate) + 4 * shape.heads
    saved += b * shape.experts  # logits of the router
    last = h * (shape.experts_per_token or 1)
    return saved if policy.compiled else saved + b * last  # the last product too, which nothing needs


def _experts(shape: ModelShape, policy: Policy) -> float:
    """A token's rows as they go into its k experts, what goes into the last product before it is weighted, what the
    router gives all experts, and for each row three indices, its weight and that before it was divided by their sum;
    where a token's rows begin. The compiler makes some of it again. Where experts are on other workers, rows are
    weighted when they come back: also these, with three indices and a weight."""
    if not shape.experts:
        return 0.0
    b, k, h = policy.itemsize, shape.experts_per_token, shape.hidden
    saved = k * (b * h + 3 * 8 + 4 + b)
    saved += 0 if policy.compiled or policy.shared_out else b * shape.intermediate
    # The partitioner keeps the router's logits, and computes their softmax again; of less than 64 experts it may not.
    saved += b * shape.experts + 8 if policy.compiled else 4 * shape.experts + 4 + 8
    return saved + k * (b * h + 3 * 8 + b) * policy.shared_out


def _adapters(shape: ModelShape, policy: Policy) -> float:
    """What goes between the two factors of each adapter."""
    return policy.itemsize * policy.lora_rank * sum(m.count for m in shape.matrices)


def outside(shape: ModelShape, policy: Policy) -> float:
    """Bytes a token that the rest of the model saves: the last norm with its input, and rotary embeddings."""
    b = policy.itemsize
    norm = (4 + b) * shape.hidden + 4  # eager also where layers are compiled
    return norm + 2 * b * shape.head_dim + 8


def in_flight(shape: ModelShape, policy: Policy) -> float:
    """Bytes a token of the most that the backward pass of one layer holds beside what was saved: gradients of the MLP,
    and what a checkpointed layer computes again."""
    b = policy.itemsize
    gradients = b * (3 * shape.intermediate + (2 + 2 * shape.experts_per_token) * shape.hidden)
    if policy.checkpointing == "none":
        return gradients
    again = (_compiled(shape, policy) if policy.compiled else _eager(shape, policy)) + _experts(shape, policy)
    kept = of_layer(shape, policy)
    if policy.checkpointing == "selective":  # what is saved is not computed again
        return gradients + max(0.0, again - kept)
    return gradients + again - kept


def forward_only(shape: ModelShape, policy: Policy) -> float:
    """Bytes a token of the most that a layer holds without a backward pass: its input, the normalised, and the MLP, or
    rows that go into experts and what these make of them."""
    b = policy.itemsize
    mlp = 3 * shape.intermediate + shape.experts_per_token * shape.hidden
    return b * (2 * shape.hidden + max(mlp, 2 * shape.q + 2 * shape.kv))
