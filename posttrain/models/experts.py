"""Routers of mixtures of experts: what they choose is counted, balanced, recorded, and replayed.

A hook on each router sees its result before the experts do. Experts that an engine recorded take the place of the
router's own choice, and the router gives them weights as it would: so gradients reach it as ever. The auxiliary loss is
linear in the router's probabilities once the loads of the whole batch are known, and its gradient is added there.

Shape legend: S tokens, L layers with experts, E experts of a layer, k experts that a token goes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.core.errors import ConfigError, RunError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Weigh = Callable[[Any, Tensor, Tensor], Tensor]
"""(router, logits [S, E], experts [S, k]) -> the weights [S, k] that the router gives these experts."""

_ONE_BYTE = 255
"""Most experts of a layer whose numbers, counted from 1, fit into a byte."""


@dataclass(frozen=True)
class RouterKind:
    """A class of routers in transformers: what its ``forward`` returns, and how it weighs experts."""

    weigh: Weigh
    logits: int = 0
    weights: int = 1
    experts: int = 2
    """Positions in the tuple that ``forward`` returns."""


def _softmax_of_all(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = F.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _softmax_of_chosen(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return F.softmax(logits.gather(-1, experts), dim=-1)


def _scaled(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    weights = F.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, experts)
    return weights * float(router.routed_scaling_factor)


KINDS: dict[str, RouterKind] = {
    "Qwen2MoeTopKRouter": RouterKind(_softmax_of_all),
    "Qwen3MoeTopKRouter": RouterKind(_softmax_of_all),
    "Qwen3NextTopKRouter": RouterKind(_softmax_of_all),
    "MixtralTopKRouter": RouterKind(_softmax_of_all),
    "GptOssTopKRouter": RouterKind(_softmax_of_chosen),
    "GraniteMoeHybridTopKRouter": RouterKind(_softmax_of_chosen, logits=2, weights=1, experts=0),
    "DeepseekV2TopkRouter": RouterKind(_scaled),
}
"""By class name. Of each a test shows that ``weigh`` gives the router's own choice the router's own weights."""

TYPES = frozenset({"qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral", "gpt_oss", "granitemoehybrid", "deepseek_v2"})
"""Types of models that have these routers."""


@dataclass(frozen=True)
class RoutedTokens:
    """What routers are told of the tokens of a micro-batch."""

    counted: Tensor
    """[S] float32: how many times a token counts in the loads and in the auxiliary loss. 0 where its sequence carries
    no loss, and for padding; more than 1 where sequences share it."""
    replayed: Tensor | None = None
    """[S, L, k] 1 + the expert that an engine chose; 0: the router chooses. None: it always does."""


class _AddLoss(torch.autograd.Function):
    """``x`` as it is; a loss beside it gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream[0], upstream[0].new_ones((), dtype=torch.float32)


class _Tap:
    """The hook on one router. What it is told, and what it has seen, are of one forward pass: computed again in a
    backward pass, it sees the same."""

    def __init__(self, kind: RouterKind) -> None:
        self.kind = kind
        self.counted: Tensor | None = None
        self.replayed: Tensor | None = None
        self.pull: Tensor | None = None
        self.recording = False
        self.seen: Tensor | None = None
        """[2 E + 3]: loads, sums of probabilities, of entropies, of replayed choices that are the router's own, and of
        replayed choices"""
        self.chosen: Tensor | None = None
        """[S, k]"""

    def __call__(self, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kind = self.kind
        logits, weights, own = output[kind.logits], output[kind.weights], output[kind.experts]
        experts = own
        if self.replayed is not None:
            given = self.replayed.to(own.dtype)
            known = given > 0
            experts = torch.where(known, given - 1, own)
            weights = torch.where(known, kind.weigh(router, logits, experts).to(weights.dtype), weights)
        if self.counted is not None:
            probabilities = F.softmax(logits, dim=-1, dtype=torch.float32)
            if self.pull is not None and weights.requires_grad:
                loss = ((probabilities @ self.pull) * self.counted).sum()
                weights = _AddLoss.apply(weights, loss)  # type: ignore[no-untyped-call]
            self.seen = _seen(probabilities.detach(), experts, own, self.counted, self.replayed)
        if self.recording:
            self.chosen = experts
        changed = {kind.logits: logits, kind.weights: weights, kind.experts: experts}
        return tuple(changed[i] for i in range(3))


def _seen(probabilities: Tensor, experts: Tensor, own: Tensor, counted: Tensor, replayed: Tensor | None) -> Tensor:
    """Return ``_Tap.seen`` of probabilities [S, E], experts and own [S, k], counted [S] and replayed [S, k]."""
    each = counted[:, None].expand(experts.shape)
    loads = probabilities.new_zeros(probabilities.shape[1]).index_add(0, experts.flatten(), each.flatten())
    columns = [probabilities, -torch.xlogy(probabilities, probabilities).sum(-1, keepdim=True)]
    if replayed is None:
        columns.append(counted.new_zeros(len(counted), 2))
    else:
        known = replayed > 0
        agreed = (experts[:, :, None] == own[:, None, :]).any(-1) & known
        columns += [choices.sum(-1, keepdim=True).to(counted.dtype) for choices in (agreed, known)]
    # All tokens are added up by one matrix product, which is compiled as it is. With sums over tokens and choices in
    # its place a kernel of the layer was not ready after six minutes (torch 2.11, H100).
    sums = counted[None] @ torch.cat(columns, 1)
    return torch.cat([loads, sums[0]])


@dataclass(frozen=True)
class RoutingFormat:
    """How the choices of a model's routers are stored: 1 + the expert, in as few bytes as the model allows."""

    layers: tuple[int, ...]
    """Which decoder layers have routers"""
    decoder_layers: int
    top_k: int
    experts: int

    @staticmethod
    def of(model: PreTrainedModel) -> RoutingFormat:
        """Return the format for a model, which may be on the meta device. Raises ``ConfigError``: it has no routers of
        a known kind."""
        found = {
            next(int(part) for part in name.split(".") if part.isdigit()): module
            for name, module in model.named_modules()
            if type(module).__name__ in KINDS
        }
        if not found:
            raise no_routers(model.config)
        router: Any = next(iter(found.values()))
        decoder_layers = int(model.config.get_text_config().num_hidden_layers)
        return RoutingFormat(tuple(found), decoder_layers, int(router.top_k), int(router.num_experts))

    @property
    def itemsize(self) -> int:
        """Return the bytes of a choice."""
        return 1 if self.experts <= _ONE_BYTE else 2

    @property
    def width(self) -> int:
        """Return the bytes of a token."""
        return len(self.layers) * self.top_k * self.itemsize

    def stored(self, experts: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return experts [S, L, k] as they are stored, [S, bytes of a token]."""
        # 32 bits first: 256 experts come in a byte, which 1 + 255 does not fit into.
        counted = experts.astype(np.int32) + 1
        return counted.astype(np.uint8 if self.itemsize == 1 else np.uint16).reshape(len(experts), -1).view(np.uint8)

    def loaded(self, rows: Tensor) -> Tensor:
        """Return stored choices [S, bytes of a token] as [S, L, k]. Raises ``RunError`` where they are no choices of
        this model."""
        if rows.shape[1] != self.width:
            raise RunError(
                f"the recorded experts take {rows.shape[1]} bytes a token, and those of this model {self.width}",
                hint="train the model that sampled these rollouts",
            )
        return (rows if self.itemsize == 1 else rows.view(torch.int16)).view(-1, len(self.layers), self.top_k)


class Mixture:
    """The routers of a model, by layer.

    Raises:
        ConfigError: the model has none that are known.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.format = RoutingFormat.of(model)
        self.top_k = self.format.top_k
        self._taps = []
        for router in routers(model):
            tap = _Tap(KINDS[type(router).__name__])
            router.register_forward_hook(tap)
            self._taps.append(tap)

    def begin(self, tokens: RoutedTokens | None, pull: Tensor | None = None) -> None:
        """Tell the routers about the next forward pass.

        Args:
            tokens: None: nothing is counted or replayed.
            pull: [L, E] gradient of the auxiliary loss by each probability of a token; None: there is no such loss.
        """
        replayed = None if tokens is None or tokens.replayed is None else tokens.replayed.unbind(1)
        for layer, tap in enumerate(self._taps):
            tap.counted = None if tokens is None else tokens.counted
            tap.replayed = None if replayed is None else replayed[layer]
            tap.pull = None if pull is None else pull[layer]

    def seen(self) -> Seen:
        """Return what the routers saw in the last forward pass."""
        return Seen(torch.stack([tap.seen for tap in self._taps if tap.seen is not None]), self.top_k)

    def record(self) -> None:
        """Keep the choices of each forward pass from now on, for ``recorded``."""
        for tap in self._taps:
            tap.recording = True

    def recorded(self) -> npt.NDArray[np.uint8]:
        """Return the choices of the last forward pass as they are stored, [S, bytes of a token]."""
        chosen = torch.stack([tap.chosen for tap in self._taps if tap.chosen is not None], 1)
        return self.format.stored(chosen.cpu().numpy())


@dataclass(frozen=True)
class Seen:
    """What the routers of all layers saw of some tokens. That of several micro-batches is the sum."""

    rows: Tensor
    """[L, 2 E + 3], see ``_Tap.seen``"""
    top_k: int

    @property
    def _experts(self) -> int:
        return (self.rows.shape[1] - 3) // 2

    @property
    def loads(self) -> Tensor:
        """Return [L, E]: tokens that went to each expert."""
        return self.rows[:, : self._experts]

    @property
    def tokens(self) -> Tensor:
        """Return [L, 1]: tokens that were routed."""
        return self.loads.sum(1, keepdim=True) / self.top_k

    def pull(self) -> Tensor:
        """Return [L, E]: the derivative of the auxiliary loss of all these tokens by one token's probabilities."""
        return self._experts * self.loads / self.tokens.square() / len(self.rows)

    def metrics(self) -> dict[str, float]:
        """Return the metrics `moe/...` (docs/metrics.md)."""
        experts, tokens = self._experts, self.tokens
        shares = self.loads / self.loads.sum(1, keepdim=True)
        probabilities = self.rows[:, experts : 2 * experts] / tokens
        entropies, agreed, replayed = self.rows[:, -3:].unbind(1)
        busiest = shares.amax(1)
        found = {
            "aux_loss": experts * (self.loads / tokens * probabilities).sum(1).mean(),
            "busiest_expert": (busiest * self.top_k).mean(),
            "max_violation": (busiest * experts - 1).max(),
            "load_entropy": -torch.xlogy(shares, shares).sum(1).mean() / math.log(experts),
            "router_entropy": (entropies / tokens[:, 0]).mean() / math.log(experts),
            "unused_experts": (self.loads == 0).sum(),
        }
        if float(replayed.sum()):
            found["replay_agreement"] = agreed.sum() / replayed.sum()
        return {f"moe/{name}": float(value) for name, value in found.items()}


def routers(model: nn.Module) -> list[Any]:
    """Return the routers of known kinds, in the order of their layers."""
    return [module for module in model.modules() if type(module).__name__ in KINDS]


def no_routers(config: PreTrainedConfig) -> ConfigError:
    """Return what is said where a run asks for something of experts that the model does not have."""
    return ConfigError(
        f"models of type {config.model_type} have no routers of a known kind, and train.router_aux_loss_coef and "
        "rollout.router_replay are about these",
        hint="leave both out, or take a mixture of experts of docs/experts.md",
    )


def check_routers(config: PreTrainedConfig) -> None:
    """Check that a model of this config has routers of a known kind. Raises ``ConfigError``."""
    if config.get_text_config().model_type not in TYPES:
        raise no_routers(config)
