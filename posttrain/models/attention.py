"""Exact causal attention over ragged sequences, for the trainer and for the embedded sampler alike.

Registered with transformers under ``posttrain`` (packed training rows) and ``paged|posttrain`` (continuous batching),
so that any model whose attention goes through ``AttentionInterface`` runs on it unchanged. A kernel over ragged rows
computes it where there is one (``attention_kernels``); elsewhere the sequences are padded, within groups of similar
length, into scaled dot-product attention. No token sees one of another sequence.

Layers may limit attention to a sliding window, cap scores (softcap) and have sinks (a learned score for each head that
takes part in the softmax and has no value).

Sequences that begin with the same prompt may share it (``SharedPrefixes``): its tokens are computed once, and the keys
and values that come out of that are laid out once for each sequence. A sequence's own queries then attend to the
prompt and to what came before them, and never to another sequence.

Shape legend: T tokens of all sequences, C of them computed (all, where nothing is shared), B sequences, L longest
sequence, H query heads, K key/value heads, D head size, E size of values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.core.quiet import hidden
from posttrain.models.attention_kernels import HALF, Kernel, Varlen, torch_varlen
from posttrain.models.prefixes import SharedPrefixes

if TYPE_CHECKING:
    from posttrain.models.ulysses import SequenceParallel

NAME = "posttrain"


@dataclass(frozen=True)
class Scoring:
    """How a layer weighs keys."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: Tensor | None = None
    """[H] score of each head's sink."""

    @property
    def plain(self) -> bool:
        """Return True where scaled dot-product attention can do it, with a mask."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences of similar length, and where their tokens go in a padded [B, L] layout."""

    tokens: Tensor | None
    """[n] which packed tokens belong to the group; None: all of them, in order."""
    slots: Tensor
    """[n] the padded slot of each of those tokens."""
    rows: int
    length: int


@dataclass(frozen=True)
class Ragged:
    """How packed tokens divide into sequences. Built once a micro-batch and passed to every layer as ``ragged=``."""

    cu_seqlens: Tensor
    """[B + 1] int32 offsets of the sequences among their T tokens, on the model's device."""
    max_length: int
    kernel: Kernel
    groups: tuple[PaddedGroup, ...]
    """Used where attention is padded; empty where the kernel takes ragged rows."""
    parallel: SequenceParallel | None = None
    """Workers that hold the other tokens of these sequences; None: all of them are here."""
    prefixes: SharedPrefixes | None = None
    """What sequences share; None: all T tokens are computed."""

    @cached_property
    def length_groups(self) -> tuple[PaddedGroup, ...]:
        """The sequences as padded groups, whatever the kernel takes. Waits for a GPU once."""
        offsets = self.cu_seqlens.cpu()
        return self.groups or tuple(_group(offsets, offsets.diff(), self.cu_seqlens.device))

    @staticmethod
    def build(
        cu_seqlens: Tensor,
        device: torch.device,
        kernel: Kernel,
        parallel: SequenceParallel | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> Ragged:
        if parallel is not None and prefixes is not None:
            raise ValueError("workers that share sequences cannot share prompts")
        lengths = cu_seqlens.diff().cpu()
        groups = () if kernel.varlen else tuple(_group(cu_seqlens.cpu(), lengths, device))
        prefixes = None if prefixes is None else prefixes.to(device)
        return Ragged(cu_seqlens.to(device, torch.int32), int(lengths.max()), kernel, groups, parallel, prefixes)


def _group(cu_seqlens: Tensor, lengths: Tensor, device: torch.device) -> list[PaddedGroup]:
    """Group sequences by the power of two their length rounds up to: padding is then under half of any group."""
    buckets = (lengths - 1).clamp(min=0).to(torch.float64).add(1).log2().ceil().to(torch.int64)
    groups = []
    distinct = torch.unique(buckets).tolist()
    for bucket in distinct:
        members = (buckets == bucket).nonzero().flatten()
        member_lengths = lengths[members]
        longest = int(member_lengths.max())
        row = torch.repeat_interleave(torch.arange(len(members)), member_lengths)
        starts = torch.repeat_interleave(member_lengths.cumsum(0) - member_lengths, member_lengths)
        column = torch.arange(len(row)) - starts
        tokens = None
        if len(distinct) > 1:
            tokens = (torch.repeat_interleave(cu_seqlens[members].long(), member_lengths) + column).to(device)
        groups.append(PaddedGroup(tokens, (row * longest + column).to(device), len(members), longest))
    return groups


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers.

    Args:
        query: [1, H, T, D]; key and value: [1, K, T, D].
        kwargs: the layer's ``sliding_window``, ``softcap`` and ``s_aux``; ``ragged`` (a ``Ragged``) for packed rows, or
            what continuous batching passes (``cache``, ``read_index``, ``write_index``, ``cu_seq_lens_q``,
            ``cu_seq_lens_k``, ``max_seqlen_q``, ``max_seqlen_k``).

    Returns:
        [1, T, H, D], and None for the attention weights.
    """
    if attention_mask is not None or dropout:
        raise ValueError("packed attention takes neither a mask nor dropout")
    scoring = Scoring(scaling, kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
    if kwargs.get("cache") is not None:
        return _paged(module, query, key, value, scoring, kwargs), None
    ragged: Ragged | None = kwargs.get("ragged")
    if ragged is None:
        raise ValueError("packed attention needs `ragged=`: without it sequences would attend to each other")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if ragged.parallel is None:
        return _ragged(q, k, v, ragged, scoring).unsqueeze(0), None
    if scoring.sinks is not None:
        scoring = replace(scoring, sinks=scoring.sinks[ragged.parallel.stretch(len(scoring.sinks))])
    q, k, v = ragged.parallel.all_tokens_of_some_heads(q, k, v)
    out = _ragged(q, k, v, ragged, scoring)
    return ragged.parallel.some_tokens_of_all_heads(out).unsqueeze(0), None


def _ragged(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> Tensor:
    """Causal self-attention of packed sequences: q [C, H, D], k [C, K, D], v [C, K, E] -> [C, H, E]."""
    prefixes = ragged.prefixes
    if prefixes is not None:
        k, v = prefixes.spread(k), prefixes.spread(v)
    if ragged.kernel.varlen is not None:
        return _in_kernel(q, k, v, ragged, ragged.kernel.varlen, scoring)
    if prefixes is None:
        return _in_groups(q, k, v, ragged, scoring)
    # Queries as well: with a causal mask alone half of the padded products are left out, and with any other mask none.
    return _in_groups(prefixes.spread(q), k, v, ragged, scoring).index_select(0, prefixes.own)


def _in_kernel(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, varlen: Varlen, scoring: Scoring) -> Tensor:
    """Causal self-attention by a kernel over ragged rows: q [C, H, D], k [T, K, D], v [T, K, E] -> [C, H, E]."""
    asked = {"window": scoring.window, "softcap": scoring.softcap}
    extra = {name: value for name, value in asked.items() if value is not None}
    width = v.shape[-1]
    if width != q.shape[-1]:  # kernels want values as wide as queries
        v = F.pad(v, (0, q.shape[-1] - width))
    cu_q = ragged.cu_seqlens if ragged.prefixes is None else ragged.prefixes.offsets
    out = varlen(q, k, v, cu_q, ragged.cu_seqlens, ragged.max_length, scoring.scale, **extra)
    return out if width == out.shape[-1] else out[..., :width]


def _in_groups(q: Tensor, k: Tensor, v: Tensor, ragged: Ragged, scoring: Scoring) -> Tensor:
    """Causal self-attention of whole sequences, padded in groups: q [T, H, D] -> [T, H, E]."""
    if len(ragged.groups) == 1:
        return _padded(q, k, v, ragged.groups[0], scoring)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    for group in ragged.groups:
        tokens = group.tokens
        assert tokens is not None  # only a group that is alone has all tokens
        part_q, part_k, part_v = (x.index_select(0, tokens) for x in (q, k, v))
        out = out.index_copy(0, tokens, _padded(part_q, part_k, part_v, group, scoring))
    return out


def pad_rows(x: Tensor, group: PaddedGroup) -> Tensor:
    """Put the tokens of a group into padded rows: [n, ...] -> [B, L, ...]. Padding is zeros, right of each sequence."""
    padded = x.new_zeros(group.rows * group.length, *x.shape[1:]).index_copy(0, group.slots, x)
    return padded.view(group.rows, group.length, *x.shape[1:])


def _padded(q: Tensor, k: Tensor, v: Tensor, group: PaddedGroup, scoring: Scoring) -> Tensor:
    """Causal self-attention of one group: [n, H, D] -> [n, H, D]. Padding sits right of every sequence, where a causal
    mask already hides it from the real tokens."""
    q, k, v = (pad_rows(x, group).transpose(1, 2) for x in (q, k, v))
    mask = None
    if not scoring.plain or (scoring.window is not None and scoring.window < group.length):
        position = torch.arange(group.length, device=q.device)
        mask = _visible(position[:, None], position[None, :], scoring.window)
    return _attend(q, k, v, mask, scoring).transpose(1, 2).flatten(0, 1).index_select(0, group.slots)


def _visible(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Return where a query of one position sees a key of another."""
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention over padded rows: q [B, H, Q, D], k [B, K, L, D], v [B, K, L, E] -> [B, H, Q, E].

    Args:
        mask: true where a query sees a key, broadcast to [B, H, Q, L]; None: causal.
    """
    if scoring.plain:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scoring.scale, enable_gqa=True
        )
    assert mask is not None
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if scoring.sinks is not None:
        sinks = scoring.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return weights.to(v.dtype) @ v


def _paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, kwargs: dict[str, Any]
) -> Tensor:
    """One step of continuous batching: write the new keys and values, attend to each request's own cache."""
    k, v = kwargs["cache"].update(
        key_states=key,
        value_states=value,
        layer_idx=module.layer_idx,
        read_index=kwargs["read_index"],
        write_index=kwargs["write_index"],
    )
    q = query.squeeze(0).transpose(0, 1)
    cu_q, cu_k, longest_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
    if isinstance(cu_k, dict):  # layers with a window keep fewer keys than those without
        kind = "full_attention" if scoring.window is None else "sliding_attention"
        cu_k, longest_k = cu_k[kind], longest_k[kind]
    if q.is_cuda and q.dtype in HALF and scoring.plain:
        longest = kwargs["max_seqlen_q"], longest_k
        return torch_varlen(q, k, v, cu_q.int(), cu_k.int(), longest, scoring.scale, scoring.window).unsqueeze(0)
    # Padded together, all requests would cost as much as the longest, and each token that is sampled as much as the
    # prompt of a request that is new in this step.
    kinds = 2 * (cu_k.diff().log2().ceil().to(torch.int32)) + (cu_q.diff() > 1)
    distinct = torch.unique(kinds).tolist()
    if len(distinct) == 1:
        return _paged_padded(q, k, v, cu_q, cu_k, slice(None), scoring)[0].unsqueeze(0)
    out = torch.empty_like(q)
    for kind in distinct:
        part, tokens = _paged_padded(q, k, v, cu_q, cu_k, (kinds == kind).nonzero().flatten(), scoring)
        out[tokens] = part
    return out.unsqueeze(0)


def _paged_padded(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, requests: Tensor | slice, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention of some requests, padded to the longest of them: out [n, H, D], and which of the T tokens these are."""
    start_q, start_k = cu_q[:-1][requests], cu_k[:-1][requests]
    length_q, length_k = cu_q.diff()[requests], cu_k.diff()[requests]
    column_q = torch.arange(int(length_q.max()), device=q.device)
    column_k = torch.arange(int(length_k.max()), device=q.device)
    slots_k = (start_k[:, None] + column_k).clamp_(max=len(k) - 1)
    slots_q = (start_q[:, None] + column_q).clamp_(max=len(q) - 1)
    # A request's queries are its last tokens: query i sees keys up to i + (keys - queries).
    last = column_q[None, :] + (length_k - length_q)[:, None]
    mask = _visible(last[:, :, None], column_k[None, None, :], scoring.window)[:, None]
    rows = (q[slots_q].transpose(1, 2), k[slots_k].transpose(1, 2), v[slots_k].transpose(1, 2))
    out = _attend(*rows, mask, scoring)
    real = column_q < length_q[:, None]
    return out.transpose(1, 2)[real], slots_q[real]


def register() -> None:
    """Make ``attn_implementation="posttrain"`` known to transformers in this process.

    No mask function is registered with it: transformers then makes no mask, and does not look for packed sequences in
    the position ids, for which the GPU would have to be waited for in every forward pass.
    """
    # It imports torchao where that is installed, for weights of kinds that are not opened here: half a second.
    with hidden("torchao"):
        from transformers import AttentionInterface

    AttentionInterface.register(NAME, ragged_attention)
    AttentionInterface.register(f"paged|{NAME}", ragged_attention)
