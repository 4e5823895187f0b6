"""The trajectories that the page shows whole: their words in JSON, their tokens in columns of bytes.

Shape legend: K sampled tokens of all trajectories shown, in their order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from posttrain.core.errors import DataError
from posttrain.data.turns import IMAGE
from posttrain.rollout.advantage_files import advantages_file, read_advantages
from posttrain.rollout.files import COLUMNS, TRAJECTORY, split_lists
from posttrain.tracking.report.episodes import FileNumbers, Place
from posttrain.tracking.report.pieces import Splitter
from posttrain.tracking.report.thumbnails import Thumbnails

_LIGHT = {"kind", "step", "temperature", "extra_info", "images", "routing"}
HEAVY = [name for name in COLUMNS if name not in _LIGHT]
"""Columns that are read of the trajectories shown."""
_PROMPT_IMAGES = "images"
"""Column that is read of the first row of their groups."""
_PLACED = {
    "tokens", "loss_mask", "logprobs", "weight_version", "messages", "turns", "user_turns", "tool_calls", "stop_reason",
    "seconds", "tool_seconds", "reward", "correct", "extracted", "reward_parts", "error", "prompt_length", "branch",
    "turn_rewards", "tool_images", "tool_errors",
}  # fmt: skip
"""Columns of a trajectory that the page shows in a way of their own; the others it lists by name and value."""
MOST_CHARACTERS = 20_000
"""Longest text of one message; a longer one is cut in the middle."""
LOGPROB_SCALE = 48.0
"""A log-probability l is stored as round(48 sqrt(-l)): 0.0004 apart near 0, and down to -28."""


@dataclass
class Tokens:
    """Columns over the K tokens."""

    piece: list[npt.NDArray[np.uint32]] = field(default_factory=list)
    """Number in the table of pieces."""
    logprob: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    """See ``LOGPROB_SCALE``."""
    advantage: list[npt.NDArray[np.int8]] = field(default_factory=list)
    """By its trajectory's largest one, times 127."""
    count: int = 0

    def add(self, piece: Sequence[int], logprobs: npt.NDArray[Any], advantage: npt.NDArray[Any], scale: float) -> None:
        self.piece.append(np.asarray(piece, dtype=np.uint32))
        quantized = LOGPROB_SCALE * np.sqrt(np.clip(-np.nan_to_num(logprobs), 0.0, None))
        self.logprob.append(np.clip(quantized.round(), 0, 255).astype(np.uint8))
        self.advantage.append((advantage / (scale or 1.0) * 127.0).round().astype(np.int8))
        self.count += len(piece)

    def planes(self) -> bytes:
        """Return three bytes of the piece, then log-probability, then advantage: K bytes each, equal bytes side by
        side."""
        piece = np.concatenate([*self.piece, np.empty(0, np.uint32)])
        planes = [((piece >> shift) & 255).astype(np.uint8) for shift in (0, 8, 16)]
        planes.append(np.concatenate([*self.logprob, np.empty(0, np.uint8)]))
        planes.append(np.concatenate([*self.advantage, np.empty(0, np.int8)]).view(np.uint8))
        return b"".join(plane.tobytes() for plane in planes)


def read_shown(
    files: Sequence[FileNumbers],
    places: Sequence[Place],
    run: int,
    splitters: Mapping[str, Splitter],
    tokens: Tokens,
    thumbnails: Thumbnails,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the chosen trajectories as JSON, and what was wrong with files that are left out.

    Args:
        splitters: by fingerprint; a file of another tokenizer is shown as text, without colours.
    """
    episodes: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, places_of_file in groupby(places, key=lambda place: place[0]):
        file = files[number]
        try:
            rows = _read_rows(file, [row for _, row in places_of_file])
            advantages = read_advantages(advantages_file(file.path))
        except (OSError, DataError) as error:
            problems.append(str(error))
            continue
        for episode, of_episode in groupby(rows, key=lambda item: int(file.episode[item[0]])):
            branches = list(of_episode)
            for at, row in branches:
                splitter = splitters.get(file.tokenizer)
                origin = {"run": run, "kind": file.kind, "step": file.step, "at": at, "episode": episode}
                origin |= _place_of_branch(row, [other for _, other in branches])
                made = _episode(row, advantages.get(at), splitter, tokens)
                _show_images(row, made, thumbnails)
                episodes.append(origin | made)
    return episodes, problems


def _place_of_branch(row: Mapping[str, Any], branches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of a branch, how many its episode has, and where it forks off: the number of the other branch,
    and how many messages and tokens of it were given to this one; None: it begins with a prompt of its own.

    It forks off the branch with which it shares most tokens, some of them sampled there and given to it.
    """
    forks = []
    for other in branches:
        if other is row:
            continue
        tokens = _shared(row["tokens"], other["tokens"])
        if (other["loss_mask"][:tokens] & ~row["loss_mask"][:tokens]).any():
            messages = _shared(_messages(row["messages"]), _messages(other["messages"]))
            forks.append((tokens, messages, other["branch"]))
    tokens, messages, number = max(forks, default=(0, 0, None))
    fork = None if number is None else [number, messages, tokens]
    return {"branch": row.get("branch", 0), "branches": len(branches), "fork": fork}


def _shared(one: Sequence[Any] | npt.NDArray[Any], other: Sequence[Any] | npt.NDArray[Any]) -> int:
    """Return the number of first elements that two sequences have in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (mine, its) in enumerate(pairs) if mine != its), min(len(one), len(other)))


def _read_rows(file: FileNumbers, wanted: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
    try:
        stored = pq.read_schema(file.path).names
        found = [name for name in (*HEAVY, _PROMPT_IMAGES) if COLUMNS[name].required or name in stored]
        table = pq.read_table(file.path, columns=found)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file.path}: unreadable: {error}", hint="the file is damaged") from error
    columns: dict[str, Sequence[Any]] = {}
    for name in found:
        # Images of a prompt stand in the first row of its group.
        rows = [int(np.argmax(file.group == file.group[at])) for at in wanted] if name == _PROMPT_IMAGES else wanted
        column = table[name].take(pa.array(rows, pa.int64())).combine_chunks()
        if pa.types.is_list(column.type) and not pa.types.is_struct(column.type.value_type):
            columns[name] = split_lists(column, np.asarray(column.flatten()))
        else:
            columns[name] = column.to_pylist()
    return [(at, {name: columns[name][i] for name in found}) for i, at in enumerate(wanted)]


def _episode(
    row: Mapping[str, Any], advantages: npt.NDArray[np.float32] | None, splitter: Splitter | None, tokens: Tokens
) -> dict[str, Any]:
    messages = _messages(row["messages"])
    asked = len(_messages(row["prompt"]))
    turns = _turns(row["loss_mask"])
    own = [i for i, message in enumerate(messages) if i >= asked and message.get("role") == "assistant"]
    metadata = {name: row[name] for name in ("group", "row", "stop_reason", "extracted", "error", "correct")}
    metadata |= {
        "source": row["data_source"],
        "truth": _cut(row["ground_truth"]),
        "reward": _number(row["reward"]),
        "parts": {name: _number(value) for name, value in row["reward_parts"] or ()},
        "seconds": round(row["seconds"], 3),
        "tool_seconds": round(row["tool_seconds"], 3),
        "prompt_tokens": row["prompt_length"],
        "tokens": len(row["tokens"]) - row["prompt_length"],
        "sampled": int(row["loss_mask"].sum()),
        "tool_calls": row["tool_calls"],
        "more": {name: _cut(_text(row[name])) for name in TRAJECTORY if name in row and name not in _PLACED},
    }
    shown = [_shown(message) for message in messages]
    coloured = splitter is not None and len(own) == len(turns)
    for message, reward in zip(own, row.get("turn_rewards", ()), strict=False):
        shown[message]["reward"] = _number(reward)
    scale = 0.0 if advantages is None else float(np.abs(np.nan_to_num(advantages)).max(initial=0.0))
    if splitter is not None and coloured:
        split = [splitter.split(row["tokens"][first:last].tolist()) for first, last in turns]
        for message, (first, last), numbers in zip(own, turns, split, strict=True):
            shown[message].pop("text", None)
            shown[message] |= {"first": tokens.count, "count": last - first, "versions": _versions(row, first, last)}
            weighed = np.zeros(last - first) if advantages is None else np.nan_to_num(advantages[first:last])
            tokens.add(numbers, row["logprobs"][first:last], weighed, scale)
    return metadata | {"messages": shown, "prompt": asked, "scale": None if advantages is None else scale}


def _number(value: float) -> float | str:
    """Return a number to six decimals; one that is not finite, which a tool or an environment gave, is text: JSON has
    none."""
    number = float(value)
    return round(number, 6) if math.isfinite(number) else str(number)


def _show_images(row: Mapping[str, Any], episode: dict[str, Any], thumbnails: Thumbnails) -> None:
    """Give the messages of an episode the numbers of their images' thumbnails."""
    texts = [str(message.get("content") or "") for message in _messages(row["messages"])]
    left = {True: list(row.get(_PROMPT_IMAGES) or ()), False: list(row.get("tool_images") or ())}
    for at, (message, text) in enumerate(zip(episode["messages"], texts, strict=True)):
        if message["role"] in ("user", "tool"):
            images = left[at < episode["prompt"]]
            shown = [thumbnails.add(images.pop(0)) for _ in range(min(text.count(IMAGE), len(images)))]
            message |= {"images": shown} if shown else {}


def _versions(row: Mapping[str, Any], first: int, last: int) -> list[int]:
    """Return the versions of the weights that sampled a turn."""
    found: list[int] = np.unique(row["weight_version"][first:last]).tolist()
    return found


def _turns(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the first token of each run of sampled tokens, and the one after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _messages(text: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(text)
    except ValueError:
        return [{"role": "?", "content": text}]
    return [m for m in found if isinstance(m, dict)] if isinstance(found, list) else []


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"role": str(message.get("role", "?")), "text": _cut(_text(message.get("content") or ""))}
    if isinstance(name := message.get("name"), str):
        shown["name"] = name
    for key in ("reasoning_content", "tool_calls"):
        if value := message.get(key):
            shown[key] = _cut(_text(value))
    return shown


def _text(value: Any) -> str:
    """Return text as it is, and any other value as JSON text; Arrow's lists and pairs are JSON lists."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str) -> str:
    half = MOST_CHARACTERS // 2
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
