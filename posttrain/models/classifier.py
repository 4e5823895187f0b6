"""A trained model of values as the sequence classifier that transformers and ``models.reward`` know.

While it is trained it is a causal LM whose output head gives one value (``train.model.PackedValues``), and so are the
shards of its checkpoints. Beside them lies the config of a classifier with one label, by which they are told from those
of a language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.core.errors import ModelError
from posttrain.models.load import ModelSource, is_verl, load_config, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VALUE_HEAD = "lm_head.weight"
"""The head's weight while the model is trained."""
NAMES_IN_SHARDS = {"score.weight": VALUE_HEAD}


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return whether a config is of a sequence classifier, such as a reward model."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def is_critic_of_verl(config: PreTrainedConfig) -> bool:
    """Return whether a config is of a token classifier, as which verl trains and stores a critic."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or ())


def classifier_config(source: ModelSource) -> PreTrainedConfig:
    """The config of the reward model that is trained from ``source``.

    Raises:
        ModelError: transformers has no classifier for this kind of model.
    """
    from transformers import AutoModelForSequenceClassification

    config = load_config(source)
    known: Any = AutoModelForSequenceClassification._model_mapping
    if type(config) not in known:
        raise ModelError(
            f"transformers has no sequence classifier for models of type {config.model_type}",
            hint="a reward model is stored as one; start from a model of another type",
        )
    config.architectures = [known[type(config)].__name__]
    config.num_labels = 1
    config.tie_word_embeddings = False
    # Classifiers read the last token that is no padding, and a conversation may end with the end of a turn.
    ends = {load_tokenizer(source).eos_token_id, *_as_list(config.eos_token_id)}
    if config.pad_token_id in ends:
        config.pad_token_id = None
    return config


def build_classifier(source: ModelSource, *, dtype: Any) -> PreTrainedModel:
    """The classifier, of sequences or of tokens, without weights, on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    config = load_config(source)
    kind: Any = AutoModelForTokenClassification if is_critic_of_verl(config) else AutoModelForSequenceClassification
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
    return model


def names_in_shards(source: ModelSource) -> Mapping[str, str]:
    """Parameter of a classifier -> its name in the source's shards, where the two differ."""
    return {} if source.shards is not None and is_verl(Path(source.shards)) else NAMES_IN_SHARDS


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
