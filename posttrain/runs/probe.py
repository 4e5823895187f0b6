"""The check that a merged folder is the trained model, by the log-probabilities of two fixed texts.

The trainer computes them when it saves a checkpoint, which holds them as ``probe.json``:

    {"ids": [[...], [...]], "logprobs": [[...], [...]], "dtype": "bfloat16"}

The entries are the texts' first tokens, the log-probability of each token but the first (temperature 1), and the dtype
that the trainer computed in. A reward model has ``"scores": [..]`` instead of ``logprobs``, one for each text.

The ids are texts and not random, because texts have small log-probabilities: on SmolLM2-135M computing in bfloat16
moves those of texts by 0.05 on average and of random tokens by 0.08, while a single wrong matrix moves either by 0.5 or
more. The tolerances are ``config.tolerance``, as when an engine is compared with the trainer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config import tolerance
from posttrain.core.errors import ConfigError, ModelError, RunError, diverged, first_line
from posttrain.models.load import ModelSource, load_tokenizer
from posttrain.train.checkpoint import PROBE, all_finite

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from posttrain.cluster.trainers import TrainerGroup

_TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May? In May she sold 48 / 2 = 24 clips. Altogether she sold 48 + 24 = 72 "
    "clips in April and May.",
    "def is_prime(n):\n    if n < 2:\n        return False\n    for d in range(2, int(n ** 0.5) + 1):\n"
    "        if n % d == 0:\n            return False\n    return True\n\nprint(sum(map(is_prime, range(99))))\n",
)
_TOKENS = 64


# ---------------------------------------------------------------------- when it is saved


async def take(actor: TrainerGroup, source: ModelSource, *, scores: bool, consequence: str) -> dict[str, Any]:
    """Return the content of ``probe.json``, which ``actor`` computes with its current weights.

    Args:
        source: the model whose tokenizer it uses.
        scores: the actor is a reward model.
        consequence: what is not done where the result is not finite, for the message.

    Raises:
        RunError: it is not finite. Weights may be finite, and so large that nothing else is.
    """
    ids, end = _tokens(source)
    # A value is of what precedes its token: a score of the whole text needs one more behind it.
    given = [[*text, end] for text in ids] if scores else ids
    column = await actor.score(given)
    parts = [part.tolist() for part in column.split([len(text) for text in given])]
    said = {"scores": [part[-1] for part in parts]} if scores else {"logprobs": [part[1:] for part in parts]}
    if not all_finite(said):
        raise diverged(f"the {actor.role} gives {next(iter(said))} of plain text that are not finite", consequence)
    return {"ids": ids, **said, "dtype": actor.metadata["dtype"]}


@lru_cache(maxsize=4)
def _tokens(source: ModelSource) -> tuple[list[list[int]], int]:
    """Return the texts' token ids, and the id that ends a turn."""
    tokenizer: Any = load_tokenizer(source)
    return [tokenizer(text, add_special_tokens=False)["input_ids"][:_TOKENS] for text in _TEXTS], tokenizer.eos_token_id


# ---------------------------------------------------------------------- when it is merged


@dataclass(frozen=True)
class Probe:
    """The content of a checkpoint's ``probe.json``."""

    ids: list[list[int]]
    expected: list[list[float]]
    """For each text the log-probabilities of its tokens but the first; for a reward model its one score"""
    scores: bool
    dtype: str

    def prove(self, load: Callable[[], PreTrainedModel], *, dtype: str) -> None:
        """Compare a model, computing in float32 on the CPU, with the trainer's values, and print the differences.

        Args:
            load: opens the model in float32.
            dtype: the type in which its weights are stored.

        Raises:
            RunError: it cannot be opened, or differs by more than the tolerance.
        """
        import torch

        from posttrain.models.logprobs import likelier_half

        try:
            model = load()
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise RunError(f"the merged model cannot be loaded: {first_line(error)}") from error
        with torch.no_grad():
            found = torch.cat([self._said(model.eval(), torch.tensor(text)) for text in self.ids])
        expected = torch.tensor([x for values in self.expected for x in values])
        gaps = (found - expected).abs()
        if not self.scores:
            gaps = gaps[likelier_half(expected)]
        exact = dtype == self.dtype == "float32"
        allowed = tolerance("float32" if exact else "bfloat16")
        mean, largest = gaps.mean().item(), gaps.max().item()
        what = "scores" if self.scores else "likelier log-probabilities"
        difference = f"mean |difference| {mean:.2g}, largest {largest:.2g}"
        if not mean <= allowed:  # nor if it is not a number
            raise RunError(
                f"the merged model is not the one that was trained: of {len(gaps)} {what}, {difference}; allowed "
                f"is a mean of {allowed:g}",
                hint="nothing was written; try an earlier checkpoint",
            )
        print(f"checked: {len(gaps)} {what} of the trainer ({self.dtype}), {difference}", file=sys.stderr)

    def _said(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities [L - 1] of a text [L], or its score [1]."""
        logits: torch.Tensor = model(input_ids=ids[None]).logits[0].float()
        if self.scores:
            return logits
        return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def read(checkpoint: Path) -> Probe:
    """Read the probe of a checkpoint folder.

    Raises:
        ConfigError: it has none.
        ModelError: it cannot be read.
    """
    file = checkpoint / PROBE
    if not file.is_file():
        raise ConfigError(
            f"--check: {checkpoint} has no {PROBE}, which says what the trainer computed",
            hint="verl's checkpoints have none: merge without --check",
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        scores = "scores" in content
        expected = [[score] for score in content["scores"]] if scores else content["logprobs"]
        return Probe(content["ids"], expected, scores, content["dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{file} cannot be read: {error}", hint="use an earlier checkpoint") from error
