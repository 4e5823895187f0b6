"""Give a model on the meta device its weights: each process reads what it holds, and no more.

A model is built without memory (``load.build``), sharded, made real (``materialize``) and loaded (``load_weights``).
Weights come straight out of memory-mapped safetensors, one file at a time: of a sharded parameter only this process's
rows are read, so a process needs memory for its shard and for the pages of one file.

Names on disk need not be the model's: transformers renames and merges them while it loads (experts of a mixture come
one by one and live in one parameter). Its own rules are used here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from posttrain.core.errors import ModelError
from posttrain.core.registry import some
from posttrain.models import lora, shards
from posttrain.models.load import ModelSource, check_unquantized, loading, not_loadable
from posttrain.models.shards import copy_held, held

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def materialize(model: nn.Module, device: torch.device, *, parameters_on: torch.device | None = None) -> None:
    """Give parameters on the meta device memory, unfilled, and move buffers to ``device``. Ties are kept.

    ``parameters_on`` is where parameters go, if that is not ``device``.
    """
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    real = torch.empty_like(parameter, device=parameters_on or device)
                    made[id(parameter)] = nn.Parameter(real, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def load_weights(
    model: PreTrainedModel, source: ModelSource, seed: int, *, leave: frozenset[str] = frozenset()
) -> None:
    """Load the weights of ``source`` into the model's parameters, which may be sharded. A collective where they are.

    Adapters that are trained beside them (``lora.inject``) get their first values.

    Args:
        seed: of a built-in model, which has no weights of its own, and of new adapters.
        leave: names of parameters that ``source`` has nothing for.

    Raises:
        ModelError: a weight is missing, of another shape or not finite, or a file cannot be read.
    """
    parameters = {n: p for n, p in lora.base_names(dict(model.named_parameters())).items() if n not in leave}
    read = shards.reader(source.shards) if source.shards else None
    if source.adapters and any(parameter.dtype != torch.float32 for parameter in parameters.values()):
        # A weight is rounded once, with its adapters, as in ``stream``.
        for chunk in _chunks(parameters.items()):
            exact = {name: torch.empty_like(p, dtype=torch.float32) for name, p in chunk.items()}
            _load(model, exact, source, seed, read)
            for name, parameter in chunk.items():
                held(parameter)[0].copy_(held(exact[name])[0])
    else:
        _load(model, parameters, source, seed, read)
    for parameter, value in lora.initial(model, seed):
        copy_held(parameter, value)


def _chunks(
    parameters: Iterable[tuple[str, Tensor]], itemsize: int = 4, chunk_bytes: int = 256 << 20
) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters in parts of at most so many bytes, ``itemsize`` of them a value, or of one parameter."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, parameter in parameters:
        nbytes = parameter.numel() * itemsize
        if chunk and size + nbytes > chunk_bytes:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = parameter
        size += nbytes
    yield chunk


def stream(
    model: PreTrainedModel,
    source: ModelSource,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    renamed: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole weight on the CPU) of each parameter of a model that stays on the meta device, in its order.

    Args:
        dtype: of the weights; adapters of ``source`` are added to them.
        seed: of a built-in model.
        renamed: parameter of the model -> its name in the source's shards, where the two differ.

    Raises:
        ModelError: as ``load_weights``; or a weight is too large for ``dtype``.
    """
    names = renamed or {}
    read = shards.reader(source.shards) if source.shards else None
    # A weight is rounded once, with its adapters; and what float16 cannot hold is told from what is not finite.
    exact = torch.float32 if source.adapters or dtype == torch.float16 else dtype

    for part in _chunks(model.named_parameters(), exact.itemsize):
        chunk = {name: torch.empty(parameter.shape, dtype=exact) for name, parameter in part.items()}
        _load(model, {names.get(name, name): tensor for name, tensor in chunk.items()}, source, seed, read)
        while chunk:  # each is let go of before the next is asked for
            name = next(iter(chunk))
            weight = chunk.pop(name).to(dtype)
            if exact != dtype and shards.nonfinite({name: weight}):
                kind = str(dtype).removeprefix("torch.")
                raise ModelError(f"{name} has values that are too large for {kind}", hint="take bfloat16 or float32")
            yield name, weight


def as_stored(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights under the names, and in the pieces, that files on the hub have: experts of a mixture one by
    one."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    # Kept where transformers keeps those of a model that it has loaded: it would look them up for each weight, and pass
    # through all modules each time, which takes 5 ms with adapters at 3B.
    keeper: Any = model
    if getattr(keeper, "_weight_conversions", None) is None:
        rules = get_model_conversion_mapping(model, add_legacy=False)
        keeper._weight_conversions = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    if not keeper._weight_conversions:
        yield from weights
        return
    for name, tensor in weights:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def _load(
    model: PreTrainedModel,
    parameters: Mapping[str, Tensor],
    source: ModelSource,
    seed: int,
    read: shards.Reader | None,
) -> None:
    """Overwrite some of the model's parameters, or tensors in their place. ``read``: of the source's shards."""
    if source.builtin:
        from posttrain.models.builtin import create_builtin

        whole = create_builtin(source.builtin, seed if source.seed is None else source.seed).state_dict()
        for name, parameter in parameters.items():
            copy_held(parameter, whole[name])
    elif read is not None:
        read(parameters)
    else:
        check_unquantized(source, model.config)
        try:
            _load_files(model, parameters, _Files(_safetensors(source)), source)
        except (OSError, ValueError) as error:
            raise not_loadable(source, error) from error
    _merge_adapters(model, parameters, source)
    check_finite(parameters, source)


def check_finite(parameters: Mapping[str, Tensor], source: ModelSource) -> None:
    """Check that what was read of ``source`` is finite. Raises ``ModelError``."""
    if bad := shards.nonfinite(parameters):
        raise ModelError(
            f"weights of {source.shards or source.path} are not finite: {some(bad)}",
            hint="take an earlier checkpoint, or weights that were trained with a lower learning rate",
        )


def check_files(model: PreTrainedModel, source: ModelSource, *, leave: frozenset[str] = frozenset()) -> None:
    """Check that files hold every parameter of a model on the meta device in its shape, without reading weights. Those
    of the hub, which checks what it sends, may not be here yet: they are not looked at.

    Args:
        leave: names of parameters that ``source`` has nothing for.

    Raises:
        ModelError: as ``load_weights``, but for weights that are not finite.
    """
    parameters = {name: p for name, p in model.named_parameters() if name not in leave}
    if source.shards:
        stored = shards.stored_shapes(source.shards)
        _check_missing([name for name in parameters if name not in stored], source.shards)
        for name, parameter in parameters.items():
            _check_shape(name, parameter, stored[name], source.shards)
    elif Path(source.path).is_dir():
        with loading(source):
            _load_files(model, parameters, _Headers(_safetensors(source)), source)
    _merge_adapters(model, {}, source)


def _merge_adapters(model: nn.Module, parameters: Mapping[str, Tensor], source: ModelSource) -> None:
    """Check that the adapters of ``source`` fit the model, and add them to the weights in ``parameters``, which may be
    sharded.

    Raises:
        ModelError: an adapter cannot be read, or is of another model.
    """
    known = lora.base_names(dict(model.named_parameters())) if source.adapters else {}
    for folder in source.adapters:
        for name, update in lora.read(folder):
            if name not in known or known[name].shape != (len(update.up), update.down.shape[1]):
                raise ModelError(
                    f"the adapter in {folder} is of another model: {name} does not fit",
                    hint="put the model that it was trained on back in its place",
                )
            if name in parameters:
                part, (rows, columns) = held(parameters[name])
                part.copy_(update.added_to(part, rows, columns))


def _safetensors(source: ModelSource) -> list[Path]:
    """The model's weight files; from the hub's cache or the hub itself where it is no folder. Raises ``ModelError``."""
    folder = Path(source.path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(source.path, allow_patterns=["*.safetensors", "*.safetensors.index.json"]))
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]  # as in transformers: an index beside it is of the files that it replaced
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"cannot read {index}: {error}", hint="is the download complete?") from error
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{source.path} lacks {some(missing)}, which model.safetensors.index.json names",
                hint="is the download complete?",
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        hint = "is the folder complete? weights are read from *.safetensors"
        if any(folder.glob("*.bin")):
            hint = "save it in that format once: AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
        raise ModelError(f"no safetensors in {source.path}", hint=hint)
    return files


_Place = tuple[slice, ...]
"""Where a part of a tensor is in the whole"""


class _Files:
    """Safetensors files, of which one is open at a time: pages of a mapped file count as the process's memory."""

    def __init__(self, files: list[Path]) -> None:
        self._open: tuple[Path, Any] | None = None
        self.file_of: dict[str, Path] = {}
        """name of each tensor -> its file"""
        for file in files:
            self.file_of |= dict.fromkeys(self._reader(file).keys(), file)

    def slice(self, name: str) -> Any:
        """A lazy slice, to be read before another tensor is asked for."""
        return self._reader(self.file_of[name]).get_slice(name)

    def holds(self, name: str, part: Tensor, place: _Place) -> bool:
        """Return whether a tensor has the values of ``part`` in this place."""
        return torch.equal(part, self.slice(name)[place].to(part))

    def _reader(self, file: Path) -> Any:
        """An open file, of which the header has been read: its length must be what the header says."""
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != file:
            self._open = None  # lets go of the one before
            try:
                self._open = file, safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"cannot read {file}: {error}", hint="is the download complete?") from error
        return self._open[1]


class _Headers(_Files):
    """The same files of which nothing but the headers is read: tensors are on the meta device."""

    def slice(self, name: str) -> Tensor:
        return torch.empty(super().slice(name).get_shape(), device="meta")

    def holds(self, name: str, part: Tensor, place: _Place) -> bool:
        return True


@dataclass
class _Target:
    """One parameter of the model, and what on disk it is made of."""

    converter: Any = None
    """The transformers rule that makes it of several tensors; None: it is one tensor as it is."""
    sources: list[tuple[str, str]] = field(default_factory=list)
    """(name on disk, pattern of the rule it matched)"""

    @property
    def alone(self) -> bool:
        """Return whether no other parameter is made of the same tensors."""
        return self.converter is None or len(self.converter.target_patterns) == 1


def _load_files(model: PreTrainedModel, parameters: Mapping[str, Tensor], reader: _Files, source: ModelSource) -> None:
    targets = _targets(model, reader.file_of)
    loaded: set[str] = set()
    for name in sorted(targets, key=lambda name: reader.file_of[targets[name].sources[-1][0]]):
        if name not in parameters and targets[name].alone:
            continue
        for full, tensor in _tensors(model, name, targets[name], reader):
            if full in parameters:
                shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
                _check_shape(full, parameters[full], shape, source.path)
                copy_held(parameters[full], tensor)
                loaded.add(full)
    _check_missing([name for name in parameters if name not in loaded], source.path)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := names[id(parameter)]) != name and first in parameters and {first, name} <= targets.keys():
            _check_tied(name, targets[name].sources[-1][0], first, parameters[first], reader, source.path)


def _check_tied(name: str, stored: str, first: str, parameter: Tensor, reader: _Files, place: str) -> None:
    """Check that what is ``stored`` of ``name`` is the ``parameter`` with which the config ties it."""
    part, where = held(parameter)
    if not reader.holds(stored, part, where):
        raise ModelError(
            f"{place}: the config ties {name} to {first}, and the files hold other values of it",
            hint="set tie_word_embeddings to false in config.json, as transformers reads these files",
        )


def _check_missing(names: list[str], place: str) -> None:
    """Raise ``ModelError`` where ``place`` lacks weights of these names."""
    if names:
        raise ModelError(
            f"{place} has no weights for {some(names)}",
            hint="is the folder complete, and its config.json that of these weights?",
        )


def _targets(model: PreTrainedModel, names: Iterable[str]) -> dict[str, _Target]:
    """Which tensors on disk make which parameter, by transformers' rules for this kind of model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = lora.base_names(model.state_dict())
    targets: dict[str, _Target] = {}
    for key in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, known)
        if name not in known:
            continue  # a weight of a part that this model does not have
        target = targets.setdefault(name, _Target())
        if pattern is not None and target.converter is None:
            target.converter = deepcopy(by_pattern[pattern])
        target.sources.append((key, pattern or key))
    return targets


def _tensors(model: PreTrainedModel, name: str, target: _Target, files: _Files) -> Iterator[tuple[str, Any]]:
    """(parameter, its tensor or a lazy slice of it) of a target."""
    if target.converter is None:
        yield name, files.slice(target.sources[-1][0])
        return
    for key, pattern in target.sources:
        target.converter.add_tensor(name, key, pattern, lambda key=key: files.slice(key)[...])
    for full, tensor in target.converter.convert(name, model=model, config=model.config).items():
        yield full, tensor[0] if isinstance(tensor, list) else tensor


def _check_shape(name: str, parameter: Tensor, found: Sequence[int], place: str) -> None:
    if tuple(found) != tuple(parameter.shape):
        raise ModelError(
            f"{place}: {name} is {tuple(found)}, and the config makes it {tuple(parameter.shape)}",
            hint="is config.json that of these weights?",
        )
