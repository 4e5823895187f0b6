"""LoRA (arXiv:2106.09685): adapters beside frozen weights, put into a model through peft, and merged out of it again.

A linear layer of weight W [out, in] becomes W + s B A, with A [rank, in] and B [out, rank] trained and
s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (arXiv:2312.03732). B starts as zeros, so the model starts as its
base. In the model the layer's weight is called ``q_proj.base_layer.weight``; outside of it nothing knows that name.

An adapter's folder is one that peft reads, with ``base.json`` in it: the weights that it belongs to.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from posttrain.core.errors import ConfigError, ModelError, first_line
from posttrain.models import recurrent, vision
from posttrain.models.gather import whole, whole_many
from posttrain.models.load import ModelSource, digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posttrain.config import LoraConfig

NAME = "default"
"""peft's name for the only adapter of a model. It does not stand in the files."""
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"


# ---------------------------------------------------------------------- into the model


def inject(model: PreTrainedModel, cfg: LoraConfig, *, dtype: torch.dtype, tower: bool = False) -> None:
    """Freeze ``model``, which is on the meta device, and put adapters of ``dtype`` beside its target modules.

    Args:
        tower: those of a vision tower are among them (`train.vision_tower`).

    Raises:
        ConfigError: `train.lora.target_modules` names something that is not there, or that cannot be adapted.
    """
    import peft

    assert cfg.rank is not None
    given = cfg.target_modules
    linear, bypassed = _linear_layers(model), recurrent.bypassed(model)
    left_out = None
    if not tower:
        linear = {name for name in linear if not name.startswith(vision.TOWER)}
        left_out = f"(?:{'|'.join(map(re.escape, vision.TOWER))}).*"
    hint = f"what can be adapted in this model: {', '.join(sorted({_last(name) for name in linear}))}"
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    config = peft.LoraConfig(
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        use_rslora=cfg.rslora,
        target_modules=_short(linear, model) if given == "all-linear" else given,
        exclude_modules=left_out if vision.sees(model.config) else None,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied embeddings, which are refused below
            peft.inject_adapter_in_model(config, model, adapter_name=NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"train.lora.target_modules = {given!r}: {first_line(error)}", hint=hint) from error
    adapted = dict(_adapted(model))
    for name, layer in adapted.items():
        base = layer.get_base_layer()
        if id(base) in ends:
            raise ConfigError(
                f"train.lora.target_modules = {given!r}: {name} is an embedding or the output head, and these cannot "
                "be adapted",
                hint=hint,
            )
        if name in bypassed:
            raise ConfigError(
                f"train.lora.target_modules = {given!r}: Mamba's kernels take the weight of {name} as it is, and would "
                "not see an adapter beside it",
                hint=hint,
            )
        if type(layer) is not peft.tuners.lora.Linear or not isinstance(base, nn.Linear):
            raise ConfigError(
                f"train.lora.target_modules = {given!r}: {name} is a {type(base).__name__}; linear layers alone can "
                "be adapted",
                hint=hint,
            )
    unused = [t for t in given if not any(_names(t, name) for name in adapted)] if isinstance(given, list) else []
    if unused:
        raise ConfigError(f"train.lora.target_modules: the model has no layer {', '.join(unused)}", hint=hint)
    for name, parameter in model.named_parameters():
        if base_name(name) is None:
            parameter.data = parameter.data.to(dtype)


def _linear_layers(model: PreTrainedModel) -> set[str]:
    """Names of all linear layers but the output head, and those whose adapters a kernel would not see.

    Experts of a mixture are none in transformers: peft would adapt them too for ``all-linear``, as parameters. It also
    does where a name ends as those of experts in checkpoints do, so that the MLPs beside experts are left out.
    """
    head, left_out = model.get_output_embeddings(), recurrent.bypassed(model)
    modules = dict(model.named_modules())
    linear = {name for name, m in modules.items() if isinstance(m, nn.Linear) and m is not head} - left_out
    mixture = any(_last(name) == "experts" for name in modules)
    return {name for name in linear if not (mixture and _last(name) in _OF_EXPERTS)}


def _short(names: set[str], model: nn.Module) -> list[str]:
    """The last parts of these names, where no other module ends so; else the whole names."""
    last = {_last(name) for name in names}
    others = {_last(name) for name, _ in model.named_modules() if name not in names}
    return sorted(names if last & others else last)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _names(target: str, module: str) -> bool:
    """Return whether an entry of a list of target modules means this one: it is the name or the end of it."""
    return module == target or module.endswith(f".{target}")


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, peft's layer) of each layer with an adapter."""
    if (peft := sys.modules.get("peft.tuners.tuners_utils")) is None:  # nobody has made an adapter in this process
        return
    for name, module in model.named_modules():
        if isinstance(module, peft.BaseTunerLayer):
            yield name, module


def base_name(name: str) -> str | None:
    """What a parameter is called in the model without adapters; None for a parameter of an adapter."""
    if ".lora_A." in name or ".lora_B." in name:
        return None
    return name.replace(".base_layer.", ".")


def base_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """The entries of a state dict that are the base model's, by their names in it."""
    names = ((base_name(name), tensor) for name, tensor in tensors.items())
    return {name: tensor for name, tensor in names if name is not None}


def initial(model: nn.Module, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """(parameter, its whole first value in float32) of every adapter, as peft initialises them: A uniform within
    1 / sqrt(in), B zeros. Drawn on the CPU, so that each process has the same values whatever it keeps of them."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in _adapted(model):
        down, up = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        bound = 1 / math.sqrt(down.shape[1])  # of kaiming_uniform_(a=sqrt(5)), which is nn.Linear's own
        yield down, torch.empty(down.shape).uniform_(-bound, bound, generator=generator)
        yield up, torch.zeros(up.shape)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes as its base does."""
    layers = [layer for _, layer in _adapted(model)]
    if not layers:
        raise ModelError("the model has no adapter that could be switched off")
    try:
        # Not `enable_adapters`: that also changes which parameters have gradients, behind FSDP's back.
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ---------------------------------------------------------------------- merging


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one weight: ``scale * up @ down``."""

    down: Tensor
    """A, [rank, in]"""
    up: Tensor
    """B, [out, rank]"""
    scale: float

    def added_to(self, weight: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """The merged weight in the type of ``weight``, summed in float32; ``weight`` is this part of it."""
        up, down = self.up[rows].to(weight.device).float(), self.down[:, columns].to(weight.device).float()
        return torch.addmm(weight.float(), up, down, alpha=self.scale).to(weight.dtype)


def whole_weights(
    model: nn.Module, dtype: torch.dtype | None = None, leave_out: tuple[str, ...] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(name in the base model, whole weight) of all that the base model has, adapters merged into it.

    A collective where the model is sharded. Nothing of it changes. ``dtype`` as in ``whole_many``; names that begin
    with one of ``leave_out`` are left out.
    """
    parameters = [(name, p) for name, p in model.named_parameters() if not name.startswith(leave_out)]
    adapted = {f"{name}.base_layer.weight": layer for name, layer in _adapted(model)}
    if not adapted:
        yield from whole_many(parameters, dtype)
        return
    layers = [layer for name, _ in parameters if (layer := adapted.get(name)) is not None]
    factors = whole_many(("", m[NAME].weight) for layer in layers for m in (layer.lora_A, layer.lora_B))
    base = [(name, parameter) for name, parameter in parameters if base_name(name) is not None]
    for name, weight in whole_many(base):
        if (layer := adapted.get(name)) is not None:
            (_, down), (_, up) = next(factors), next(factors)
            weight = LowRank(down, up, layer.scaling[NAME]).added_to(weight)
        yield cast("str", base_name(name)), weight


# ---------------------------------------------------------------------- files


def save(model: PreTrainedModel, folder: Path, source: ModelSource, seed: int, *, write: bool) -> None:
    """Write the adapter as peft does, and ``base.json``. A collective where the model is sharded.

    Args:
        source: the model's weights without the adapter.
        seed: of these, if they are a built-in model's.
        write: whether this process is the one that writes.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if base_name(name) is None:
            tensors[f"base_model.model.{name.replace(f'.{NAME}.', '.')}"] = whole(parameter).cpu().contiguous()
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config: Any = copy.copy(model.peft_config[NAME])
    config.base_model_name_or_path = source.path
    config.inference_mode = True
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))
    base = _absolute(replace(source, seed=seed if source.seed is None else source.seed))
    fields = {key: value for key, value in asdict(base).items() if key != "trust_remote_code"}
    manifests = {str(file): digest(file) for file in base.manifests}
    (folder / "base.json").write_text(json.dumps(fields | {"manifests": manifests}, indent=1) + "\n")


def read(folder: str) -> Iterator[tuple[str, LowRank]]:
    """(name of a weight in the base model, what is added to it) of an adapter that ``save`` wrote.

    Raises:
        ModelError: the folder cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((Path(folder) / _CONFIG).read_text())
        tensors = load_file(Path(folder) / _WEIGHTS)
        root = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
        for name, down in tensors.items():
            if found := re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", name):
                up = tensors[name.replace(".lora_A.", ".lora_B.")]
                yield f"{found[1]}.weight", LowRank(down, up, config["lora_alpha"] / root)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"cannot read the adapter in {folder}: {error}", hint="use an earlier checkpoint") from error


def _absolute(source: ModelSource) -> ModelSource:
    """The same model, seen from any folder."""

    def resolved(path: str) -> str:
        return str(Path(path).resolve()) if Path(path).exists() else path

    return replace(
        source,
        path=resolved(source.path),
        shards=None if source.shards is None else resolved(source.shards),
        adapters=tuple(map(resolved, source.adapters)),
    )
