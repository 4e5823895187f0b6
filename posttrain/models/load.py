"""Find and load a model: a Hugging Face folder or hub id, ``builtin:NAME``, or a checkpoint of ours.

The driver calls ``locate`` and ``load_tokenizer`` before any worker starts, so a model that cannot be found is one
clear message and not a traceback out of a worker.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from posttrain.core.errors import ModelError, PosttrainError
from posttrain.models.config_json import read_config_file
from posttrain.models.hub import is_repository

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_INCOMPLETE = "is the folder complete?"
_UNKNOWN = "is its config.json right, and does the installed transformers know such a model?"


@dataclass(frozen=True)
class ModelSource:
    """Where a model's parts come from."""

    path: str
    """What `model.path` resolved to: a folder, a hub id, or ``builtin:NAME``."""
    shards: str | None = None
    """Folder of shards that hold the weights, see ``models.shards``; None: the weights are beside the config."""
    trust_remote_code: bool = False
    adapters: tuple[str, ...] = ()
    """Folders of LoRA adapters that are merged into the weights, one after the other."""
    seed: int | None = None
    """Seed of a built-in model's weights; None: the run's seed."""

    @property
    def builtin(self) -> str | None:
        return self.path.removeprefix("builtin:") if self.path.startswith("builtin:") else None

    @property
    def manifests(self) -> list[Path]:
        """``COMPLETE`` of each checkpoint of ours that the weights come from, the last one's last: it has the digests
        of all files."""
        parts = [part for part in (self.shards, *self.adapters) if part is not None]
        files = (Path(part).parent.parent / "COMPLETE" for part in parts)
        return [file for file in files if file.is_file()]


def locate(path: str, *, trust_remote_code: bool = False) -> ModelSource:
    """Turn a model path into a ``ModelSource``, checking that it exists as far as the disk can tell.

    Raises:
        ModelError: a local folder that is neither a Hugging Face model nor a checkpoint of ours, or no such built-in.
    """
    if path.startswith("builtin:"):
        from posttrain.models.builtin import check_builtin

        check_builtin(path)
        return ModelSource(path)
    folder = Path(path)
    if folder.is_dir():
        actor = folder / "actor" if (folder / "actor").is_dir() else folder
        for adapter in (actor / "adapter", folder):
            if (adapter / "base.json").is_file():
                return _with_adapter(adapter, trust_remote_code)
        if (verl := find_verl(folder)) is not None and (verl / "huggingface" / "config.json").is_file():
            return ModelSource(str(verl / "huggingface"), shards=str(verl), trust_remote_code=trust_remote_code)
        if (actor / "model").is_dir() and (actor / "huggingface" / "config.json").is_file():
            return ModelSource(
                str(actor / "huggingface"), shards=str(actor / "model"), trust_remote_code=trust_remote_code
            )
        if (folder / "config.json").is_file():
            return ModelSource(str(folder), trust_remote_code=trust_remote_code)
        raise ModelError(
            f"no model in {path}", hint="a model folder holds config.json; a checkpoint of ours holds actor/model"
        )
    if folder.is_file():
        raise ModelError(
            f"{path} is a file, and a model is a folder", hint="give the folder that holds its config.json"
        )
    if path.startswith(("/", ".", "~")) or path.count("/") > 1 or not is_repository(path):
        raise ModelError(
            f"model folder not found: {path}", hint="give an existing folder, a hub id (org/name) or builtin:tiny"
        )
    return ModelSource(path, trust_remote_code=trust_remote_code)


def is_verl(folder: Path) -> bool:
    """Return whether verl's FSDP shards lie in ``folder``."""
    return any(folder.glob("model_world_size_*_rank_*.pt"))


def find_verl(folder: Path) -> Path | None:
    """The folder with verl's shards that ``folder`` stands for: itself, its ``actor``, or that of a run's last step."""
    latest = folder / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        folder = folder / f"global_step_{latest.read_text().strip()}"
    return next((place for place in (folder, folder / "actor") if is_verl(place)), None)


def _with_adapter(folder: Path, trust_remote_code: bool) -> ModelSource:
    """An adapter that ``posttrain.models.lora`` wrote, on the weights it belongs to. Raises ``ModelError``."""
    try:
        base = dict(json.loads((folder / "base.json").read_text()))
        manifests = dict(base.pop("manifests"))
        adapters = (*base.pop("adapters"), str(folder))
        source = ModelSource(**base, adapters=adapters, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / 'base.json'} cannot be read: {error}", hint="use an earlier checkpoint") from error
    for part in (source.path, source.shards, *adapters):
        if part is not None and part.startswith("/") and not Path(part).exists():
            raise ModelError(
                f"the adapter in {folder} belongs to weights that are gone: {part}",
                hint="put them back there; an adapter is of no use without its base",
            )
    for file, expected in manifests.items():
        if not Path(file).is_file() or digest(Path(file)) != expected:
            raise ModelError(
                f"the adapter in {folder} belongs to other weights than those that are now in {Path(file).parent}",
                hint="was that run started again? An adapter is of no use without its base",
            )
    return source


def mark_of(source: ModelSource) -> str | None:
    """Tells whether a model's files are still those of before, without reading its weights: by the digests of a
    checkpoint of ours, else by names, sizes and times. None where nothing of it lies in a folder."""
    seen = hashlib.sha256()
    folders = [Path(folder) for folder in (source.shards or source.path, *source.adapters) if Path(folder).is_dir()]
    for manifest in source.manifests:
        seen.update(manifest.read_bytes())
    vouched = {manifest.parent for manifest in source.manifests}
    for folder in folders:
        if folder.parent.parent not in vouched:
            for file in sorted(file for file in folder.iterdir() if file.is_file()):
                stat = file.stat()
                seen.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return seen.hexdigest()[:16] if folders else None


def digest(file: Path) -> str:
    """sha256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def read_config(source: ModelSource) -> dict[str, Any]:
    """What the model's config.json says, read without transformers and without the network.

    Raises:
        ModelError: there is no such file here, or it is no JSON object.
    """
    if source.builtin:
        from posttrain.models.builtin import builtin_sizes

        return builtin_sizes(source.builtin)
    file = Path(source.path) / "config.json"
    if not file.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(source.path, "config.json")
        if not isinstance(cached, str):
            raise ModelError(
                f"{source.path!r} is not in the local cache of the Hugging Face hub",
                hint=f"`hf download {source.path} config.json`, or give a folder or a config.json: --model PATH",
            )
        file = Path(cached)
    return read_config_file(file)


def load_config(source: ModelSource) -> PreTrainedConfig:
    """The model's configuration. Raises ``ModelError`` when the hub has no answer, or a config.json contradicts
    itself."""
    from transformers import AutoConfig

    if source.builtin:
        from posttrain.models.builtin import builtin_config

        return builtin_config(source.builtin)
    if Path(source.path).is_dir():
        read_config_file(Path(source.path) / "config.json")
    _check_reachable(source)
    with loading(source, hint=_UNKNOWN):
        config: PreTrainedConfig = AutoConfig.from_pretrained(source.path, trust_remote_code=source.trust_remote_code)
    return config


def check_unquantized(source: ModelSource, config: PreTrainedConfig) -> None:
    """Check that the files of ``source``, a model of this config, hold its weights themselves. Raises ``ModelError``
    where they hold codes whose scales, under names of their own, nothing here reads."""
    settings: Any = getattr(config, "quantization_config", None)
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    raise ModelError(
        f"the weights of {source.path} are quantized ({getattr(method, 'value', method) or 'by an unknown method'}), "
        "and trainers and the embedded engine do not read such",
        hint="take the weights in bfloat16 that they were made from; vllm and sglang sample from quantized ones, in "
        "commands that do not train",
    )


def dropout_settings(config: PreTrainedConfig) -> dict[str, float]:
    """What a model's config asks for that is random and active in training only: dropout by any of its names, and noise
    in routers. Settings of heads that a causal LM does not have are left out."""
    found = config.get_text_config().to_dict()
    named = re.compile(r"drop|jitter")
    of_other_heads = re.compile(r"classifier|summary")
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, float) and value > 0 and named.search(name) and not of_other_heads.search(name)
    }


def load_generation_config(source: ModelSource) -> GenerationConfig | None:
    """What the model's makers say about sampling, above all which tokens end a turn; None: nothing.

    Raises:
        ModelError: the file cannot be read.
    """
    from transformers import GenerationConfig

    if source.builtin:
        return None
    with loading(source):
        try:
            return GenerationConfig.from_pretrained(source.path)
        except OSError:
            if (Path(source.path) / "generation_config.json").is_file():
                raise
            return None


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a chat template and an end-of-sequence token. Raises ``ModelError``."""
    if source.builtin:
        from posttrain.models.builtin import builtin_tokenizer

        return builtin_tokenizer(source.builtin)
    tokenizer = read_tokenizer(source)
    if tokenizer.chat_template is None:
        raise ModelError(
            f"the tokenizer of {source.path} has no chat template", hint="use the Instruct variant of the model"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {source.path} has no end-of-sequence token",
            hint="name it as eos_token in tokenizer_config.json",
        )
    return tokenizer


def read_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or on the hub, whatever it has. Raises ``ModelError`` where there is none."""
    from transformers import AutoTokenizer

    with loading(source, "the tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=source.trust_remote_code
        )
        ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    # Of a folder without vocabulary files the library makes a tokenizer that knows its special tokens alone.
    if set(ids) <= {tokenizer.unk_token_id}:
        raise ModelError(
            f"the tokenizer of {source.path} has no vocabulary: it knows {len(tokenizer)} tokens, and no text",
            hint="copy the tokenizer's files there, above all tokenizer.json",
        )
    return tokenizer


def build(source: ModelSource, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without weights, on the meta device; buffers are real. See ``load_weights``.

    Raises:
        ModelError: there is no such model, or buffers are part of its weights.
    """
    from accelerate import init_empty_weights

    from posttrain.models import attention, recurrent, vision

    config = load_config(source)
    with loading(source, hint=_UNKNOWN), init_empty_weights(include_buffers=False):
        model: PreTrainedModel = auto_class(config).from_config(
            config,
            dtype=dtype,
            **implementations(config),
            trust_remote_code=source.trust_remote_code,
        )
    model.tie_weights()  # moving each parameter to the meta device parted them
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if state := sorted(set(model.state_dict()) - parameters):
        # They would keep their first values: only parameters are read, saved and sent to engines.
        raise ModelError(
            f"{source.path}: models of type {config.model_type} store more than parameters, for example {state[0]}, "
            "and this version does not read that",
            hint="docs/models.md lists the architectures that work",
        )
    recurrent.separate_sequences(model)
    if vision.sees(config):
        model.set_attn_implementation(vision.attention_of(config, attention.NAME))
    return model


def implementations(config: PreTrainedConfig) -> dict[str, Any]:
    """Make attention and experts of this package known to transformers. Returns the arguments that ask for them."""
    from posttrain.models import attention, grouped_experts, tower_attention, vision

    attention.register()
    tower_attention.register()
    grouped_experts.register()
    return {
        "attn_implementation": vision.attention_of(config, attention.NAME, built=False),
        "experts_implementation": grouped_experts.NAME,
    }


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that opens such a model: a causal LM, or one that sees."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from posttrain.models import vision

    return AutoModelForImageTextToText if vision.sees(config) else AutoModelForCausalLM


def load_model(source: ModelSource, *, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """The model with its weights, on the CPU, with packed attention installed.

    ``seed`` initialises a built-in model, which has no weights of its own. Raises ``ModelError`` as
    ``load_weights`` does.
    """
    import torch

    from posttrain.models.weights import load_weights, materialize

    model = build(source, dtype=dtype)
    materialize(model, torch.device("cpu"))
    load_weights(model, source, seed)
    model.eval()
    return model


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> list[int]:
    """Ids that end a turn: the chat template's, the tokenizer's and the model's generation config's, which differ in
    some releases. Without a generation config the config's, as in transformers, where they are control tokens: its
    class may state another model's."""
    from posttrain.data.chat import end_of_turn

    generation = load_generation_config(source)
    ends = getattr(load_config(source).get_text_config() if generation is None else generation, "eos_token_id", None)
    declared = ends if isinstance(ends, list) else [ends]
    if generation is None:
        control = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        declared = [i for i in declared if i in control]
    return sorted({end_of_turn(tokenizer), int(tokenizer.eos_token_id), *(i for i in declared if i is not None)})


def _check_reachable(source: ModelSource) -> None:
    """Say at once that the hub cannot be reached, where the hub's client would retry for half a minute."""
    from huggingface_hub import constants, try_to_load_from_cache

    offline = constants.HF_HUB_OFFLINE or source.builtin or Path(source.path).is_dir()
    if offline or getproxies() or isinstance(try_to_load_from_cache(source.path, "config.json"), str):
        return
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        raise not_loadable(source, OSError(f"{host} cannot be reached ({error.strerror})")) from error


@contextmanager
def loading(source: ModelSource, what: str = "the model", hint: str = _INCOMPLETE) -> Iterator[None]:
    """Turn what a library raises over the files of ``source`` into a ``ModelError`` that says what. ``hint`` is about
    those in a folder."""
    try:
        yield
    except PosttrainError:
        raise
    except Exception as error:  # libraries do not check files of others, and fail over them in any way
        raise not_loadable(source, error, what, hint) from error


def not_loadable(source: ModelSource, error: Exception, what: str = "the model", hint: str = _INCOMPLETE) -> ModelError:
    """What a person is told of an error of a library; see ``loading``."""
    reason = _reason(error)
    if Path(source.path).is_dir():
        return ModelError(f"cannot load {what} in {source.path}: {reason}", hint=hint)
    return ModelError(
        f"cannot load {source.path!r} from the Hugging Face hub: {reason}",
        hint="check the name and the network, or give a local folder, or builtin:tiny, which needs neither",
    )


def _reason(error: BaseException) -> str:
    """The first line of what an error says. Validators of configs wrap the error that does, and a ``KeyError`` is a
    bare word."""
    if isinstance(error.__cause__, ValueError | TypeError) and "alidation error" in str(error):
        error = error.__cause__
    said = (str(error).strip().splitlines() or [""])[0]
    return said if isinstance(error, OSError | ValueError) and said else f"{type(error).__name__}: {said}"
