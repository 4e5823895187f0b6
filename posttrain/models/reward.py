"""A reward model: a sequence classifier with one label that maps a conversation to a number.

Trained on preferences as in Ouyang et al. 2022 (arXiv:2203.02155) and stored as transformers'
``AutoModelForSequenceClassification`` with ``num_labels = 1``, the form in which they are published.

Shape legend: B conversations of a batch, L tokens of the longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from posttrain.core.errors import ConfigError, ModelError
from posttrain.core.registry import some
from posttrain.core.text import encodable
from posttrain.core.types import Message, Score
from posttrain.models.check import check_vocabulary, check_weights
from posttrain.models.classifier import build_classifier
from posttrain.models.load import ModelSource, load_config, loading, locate, read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class RewardModel:
    """Scores conversations with a sequence classifier, in its own tokens and chat template.

    Args:
        path: a Hugging Face folder or hub id.
        device: cpu or cuda.
        dtype: of the weights and the computation; a linear head runs in float32 all the same.
        max_length: longest conversation, in the reward model's tokens.
        tokens_per_batch: most tokens at once, padding included.
        trust_remote_code: run Python code that ships with the model.

    Raises:
        ModelError: there is no such model, it has not one label, no weights for its head, or no chat template.
        ConfigError: ``tokens_per_batch`` has no room for one conversation of ``max_length``.
    """

    def __init__(
        self,
        path: str,
        device: str,
        dtype: torch.dtype,
        max_length: int,
        tokens_per_batch: int,
        trust_remote_code: bool = False,
    ) -> None:
        if tokens_per_batch < max_length:
            raise ConfigError(
                f"reward.model.tokens_per_batch = {tokens_per_batch} has no room for a conversation of "
                f"reward.model.max_length = {max_length} tokens",
                hint="raise the one or lower the other",
            )
        source, self.tokenizer = open_reward_model(path, trust_remote_code=trust_remote_code)
        self.device = torch.device(device)
        # Any: transformers annotates `to` wrongly.
        model = cast(Any, _load(source, dtype)).to(self.device).eval()
        self.model: PreTrainedModel = model.requires_grad_(False)
        self.config = self.model.config.get_text_config()
        self.max_length = max_length
        self.positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.tokens_per_batch = tokens_per_batch
        self.pad_id = _declared_pad_id(self.config)

    def score(self, conversations: Sequence[Sequence[Message]]) -> list[Score]:
        """The model's number for each conversation, in order.

        ``Score.error`` is set for one that the chat template refuses, that is too long, or whose number is not finite.
        ``Score.correct`` is always false. Batching does not change a number beyond rounding.
        """
        scores: dict[int, Score] = {}
        rows: dict[int, list[int]] = {}
        for i, conversation in enumerate(conversations):
            row = self._tokens(conversation)
            if isinstance(row, Score):
                scores[i] = row
            else:
                rows[i] = row
        for members in self._batches(rows):
            for i, value in zip(members, self._forward([rows[i] for i in members]).tolist(), strict=True):
                scores[i] = (
                    Score(value, correct=False) if math.isfinite(value) else _failed(f"the reward model gave {value}")
                )
        return [scores[i] for i in range(len(conversations))]

    def _tokens(self, conversation: Sequence[Message]) -> list[int] | Score:
        """A conversation in tokens, or why it has none."""
        messages: Any = [{k: v for k, v in m.items() if k != "train"} for m in conversation]
        try:
            text: Any = self.tokenizer.apply_chat_template(messages, tokenize=False)
            # Templates write the special tokens that belong there.
            ids: list[int] = self.tokenizer(encodable(text), add_special_tokens=False)["input_ids"]
        except Exception as error:  # a template is a program of its author's, and raises what it likes
            return _failed(
                f"the reward model's chat template refuses the conversation: {type(error).__name__}: {error}"
            )
        if not ids:
            return _failed("the conversation has no tokens")
        if len(ids) > self.max_length:
            return _failed(f"the conversation has {len(ids)} tokens, reward.model.max_length is {self.max_length}")
        if self.positions is not None and len(ids) > self.positions:
            return _failed(f"the conversation has {len(ids)} tokens, and the model {self.positions} positions")
        return ids

    def _batches(self, rows: dict[int, list[int]]) -> Iterator[list[int]]:
        """Rows of similar length together, the longest first, each batch within the token budget."""
        batch: list[int] = []
        for i in sorted(rows, key=lambda i: len(rows[i]), reverse=True):
            if batch and (len(batch) + 1) * len(rows[batch[0]]) > self.tokens_per_batch:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _forward(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B] float32 on the CPU: one number for each row of a batch, padded on the right to [B, L]."""
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.full(mask.shape, self._pad_id(rows), dtype=torch.int64)
        ids[mask] = torch.tensor([token for row in rows for token in row])
        with torch.inference_mode():
            out = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device, torch.int64))
        logits: Tensor = out.logits
        return logits[:, 0].float().cpu()

    def _pad_id(self, rows: Sequence[Sequence[int]]) -> int:
        """What to pad a batch with.

        Decoder classifiers of transformers read the last token that is not the config's pad token, whatever the mask
        says, so that is what must stand there. A config without one means the very last token; then any id does that no
        row ends with, and the model is told which.
        """
        if self.pad_id is not None:
            return self.pad_id
        ends = {row[-1] for row in rows}
        free = next(i for i in range(len(ends) + 1) if i not in ends)
        self.config.pad_token_id = free
        return free


def open_reward_model(path: str, *, trust_remote_code: bool = False) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """Find a reward model and load its tokenizer, without its weights: all that is known to be wrong before a run.

    Raises:
        ModelError: there is no such model, it is incomplete or damaged, it has not one label, or its tokenizer has no
            chat template.
    """
    source = locate(path, trust_remote_code=trust_remote_code)
    if source.builtin or source.shards or source.adapters:
        raise ModelError(
            f"{path} is no reward model but a language model",
            hint="reward.model.path is a folder or hub id of a sequence-classification model with one label",
        )
    config = load_config(source)
    if config.num_labels != 1:
        kind = ", ".join(config.architectures or []) or config.model_type
        raise ModelError(
            f"{path} is no reward model: {kind} with {config.num_labels} labels",
            hint="reward.model.path needs a sequence-classification model with num_labels = 1",
        )
    tokenizer = read_tokenizer(source)
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer of the reward model {path} has no chat template",
            hint="put the template that it was trained with into its folder, as chat_template.jinja",
        )
    check_vocabulary(source, tokenizer)
    with loading(source):
        model = build_classifier(source, dtype=torch.float32)
    check_weights(source, model)
    return source, tokenizer


def _load(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """The model with its weights, on the CPU. Raises ``ModelError``, also for weights that the files do not hold."""
    from transformers import AutoModelForSequenceClassification

    from posttrain.models.weights import check_finite  # the driver, which imports this module, is spared it

    with loading(source):
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            source.path, dtype=dtype, trust_remote_code=source.trust_remote_code, output_loading_info=True
        )
    model, info = loaded
    if missing := sorted(info["missing_keys"]):  # the library would make them up
        raise ModelError(
            f"the reward model {source.path} has no weights for {some(missing)}",
            hint="a language model is no reward model before a head has been trained on it",
        )
    check_finite(dict(model.named_parameters()), source)
    head = getattr(model, "score", None)
    if isinstance(head, nn.Linear) and dtype != torch.float32:
        # In bfloat16 scores near 10 would come in steps of 0.06, and good answers to one prompt would tie.
        head.float().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    return cast("PreTrainedModel", model)


def _declared_pad_id(config: Any) -> int | None:
    """The config's pad token; None where it has none, or one that is no token (some say -1)."""
    pad_id = getattr(config, "pad_token_id", None)
    return pad_id if pad_id is not None and 0 <= pad_id < config.vocab_size else None


def _failed(why: str) -> Score:
    return Score(0.0, correct=False, error=why)
