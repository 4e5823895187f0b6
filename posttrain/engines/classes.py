"""Which models SGLang and vLLM have code for, as recorded from a release of each, and what they take otherwise."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from posttrain.core.errors import ConfigError
from posttrain.engines.choice import installed_version
from posttrain.models.recurrent import recurrent_layers

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from posttrain.config import EngineName

FILE = Path(__file__).with_name("classes.json")
"""For each engine: the release, where in it the list is, and the model classes that it has code for."""


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """The content of ``FILE``. Do not change it."""
    engines: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return engines


def has_class(name: str, engine: EngineName) -> bool:
    """Return whether the recorded release of an engine has code of its own for models of this class."""
    return name in recorded()[engine]["classes"]


def check_model_class(model: PreTrainedModel, engine: EngineName) -> None:
    """Check that an engine loads what the trainer sends of a model on the meta device: the tensors of its published
    checkpoints, each made of one parameter, for a class that the engine knows. Any other class an engine runs with
    transformers' code, in which it has no place for states of layers. An installed release that is newer than the
    recorded one judges for itself.

    Raises:
        ConfigError: it does not.
    """
    name = type(model).__name__
    if joined(model):
        raise ConfigError(
            f"rollout.engine = {engine}: checkpoints of {name} hold several weights joined in one, and updates send "
            "weights one by one",
            hint="--set rollout.engine=hf",
        )
    version = installed_version(engine)
    newer = version is not None and Version(version) > Version(recorded()[engine]["version"])
    if has_class(name, engine) or newer:
        return
    for _, layer in recurrent_layers(model):
        raise ConfigError(
            f"rollout.engine = {engine}: {recorded()[engine]['version']} has no class for {name}, and with "
            f"transformers' code an engine has no place for the state of {type(layer).__name__}",
            hint=f"--set rollout.engine={'vllm' if engine == 'sglang' else 'sglang'}",
        )


def joined(model: PreTrainedModel) -> list[str]:
    """Return the names of tensors in checkpoints that are made of several parameters of the model."""
    from transformers.core_model_loading import revert_weight_conversion

    from posttrain.models.weights import as_stored

    weights: dict[str, Tensor] = dict(model.named_parameters())
    pieces = {(name, piece.shape) for name, piece in as_stored(model, weights.items())}
    whole = revert_weight_conversion(model, weights)
    return sorted(name for name, tensor in whole.items() if (name, tensor.shape) not in pieces)
