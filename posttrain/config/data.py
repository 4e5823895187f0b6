"""Runs, models, data."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from posttrain.config.base import NaturalInt, PositiveInt, Seconds, Section
from posttrain.core.text import printable


class RunConfig(Section):
    """Where a run lives and how it starts."""

    name: Annotated[str, Field(max_length=200)] = ""
    """Folder under `run.dir`; empty: the preset's name."""
    dir: str = "runs"
    """Folder that holds runs."""
    seed: NaturalInt = 0
    """Seeds data order, sampling and model initialisation."""
    resume: str = "auto"
    """auto: an unfinished run of this name and config goes on from its last checkpoint. never: it is an error. A path:
    begin with that checkpoint (of a run, its last one), optimizer, order of the data and all."""
    restarts: NaturalInt = 0
    """How often the run starts its workers again by itself, from its last checkpoint, after one died or hung."""
    overwrite: bool = False
    """Delete an existing run of this name first."""
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]] = ["console", "jsonl"]
    """Where metrics go; see metrics.md. The last three need extras of the same name."""
    console: Literal["auto", "panel", "plain", "json", "quiet"] = "auto"
    """What the console among the loggers shows. auto: a live panel on a terminal, else one plain line a step. json: one
    JSON object a line, on stderr as all of them. quiet: warnings and errors only."""
    report: bool = True
    """Keep `report.html` in the run's folder: made anew at each checkpoint and at the end (report.md)."""
    traces: bool = True
    """rl: write every trajectory to `rollouts/` in the run's folder, about 6 bytes a token (docs/rollout-files.md)."""
    trace_every: PositiveInt = 1
    """Steps between two that are written there."""
    profile: str = ""
    """`FIRST:LAST`: trace the updates of these steps with torch.profiler, into `profile/` of the run's folder: a Chrome
    trace and a table of the costliest kernels for each rank. Empty: none."""

    @field_validator("name", "dir")
    @classmethod
    def _path(cls, value: str, info: ValidationInfo) -> str:
        """Refuse what cannot be shown: the two are parts of paths, of titles and of lines on a terminal."""
        if printable(value, "") != value:
            raise ValueError(f"run.{info.field_name} = {value!a} has characters that a terminal does not show")
        if info.field_name == "name" and (value in (".", "..") or "/" in value):
            raise ValueError(f"run.name = {value!r} is not a folder name (run.dir is the folder that holds runs)")
        return value

    @property
    def profiled_steps(self) -> range:
        """The steps of `profile`."""
        if not self.profile:
            return range(0)
        first, last = map(int, self.profile.split(":"))
        return range(first, last + 1)

    @field_validator("profile")
    @classmethod
    def _steps(cls, value: str) -> str:
        found = re.fullmatch(r"(\d+):(\d+)", value)
        if value and (found is None or not 1 <= int(found[1]) <= int(found[2])):
            raise ValueError(f"{value!r} is not FIRST:LAST with 1 <= FIRST <= LAST, for example 10:12")
        return value


class ModelConfig(Section):
    """The model to start from."""

    path: str = "builtin:tiny"
    """A Hugging Face folder or hub id, `builtin:tiny`, or `run:NAME` (the newest checkpoint of a run; `run:latest`;
    `run:NAME/best`: the best one, by `checkpoint.best`)."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off unless asked."""


_RENDERING_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that are no variables of a template."""


class DataConfig(Section):
    """What is trained on, and in which batches."""

    train: str | list[str] = ""
    """Parquet of SFT, preference or RLHF rows. The first two: also a folder, a glob, or a list of these."""
    val: str | list[str] = ""
    """Held-out parquet, as `train`; empty: no validation."""
    batch_size: PositiveInt = 32
    """Rows per optimizer step (`sft`), pairs (`prefer`), or prompts per step (`rl`), over all workers."""
    max_length: PositiveInt = 2048
    """`sft`, `prefer`: longest conversation, in tokens."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """`sft`, `prefer`: what happens to a longer conversation. A pair is dropped with either of its two. `rl`: a prompt
    of more than `rollout.max_prompt_tokens` is an error, or with drop left out; none is cut."""
    enable_thinking: bool | None = None
    """Passed to the chat template, in training and in sampling; none: as the template does without it."""
    template_kwargs: dict[str, Any] = {}
    """Further variables of the chat template."""
    shuffle: bool = True
    """A new order every epoch, from `run.seed`."""
    stream_above: NaturalInt = 20_000
    """`sft`, `prefer`: data of at most so many rows is read, checked and tokenized before the run starts. More is
    streamed from its files while it trains, and `train.epochs` then counts all rows, also those that `truncation`
    drops."""
    shuffle_rows: PositiveInt = 32_768
    """`sft`, `prefer`: rows in memory at once when streaming. The next row is drawn from these, and they come from
    several places of the files; data of no more rows is shuffled as a whole."""
    workers: NaturalInt = 2
    """`sft`, `prefer`: processes that tokenize streamed data ahead of the trainer; 0: a thread of the driver does."""
    prefetch: PositiveInt = 4
    """`sft`, `prefer`: batches of streamed data that are ready ahead of the trainer."""
    deadline_s: Seconds = 300.0
    """`sft`, `prefer`: longest wait for the next batch of streamed data, the start of the processes included."""

    @property
    def chat_kwargs(self) -> dict[str, Any]:
        """All keyword arguments of the chat template."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**self.template_kwargs, **thinking}

    @field_validator("template_kwargs")
    @classmethod
    def _free_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "enable_thinking" in value:
            raise ValueError("enable_thinking has a key of its own: data.enable_thinking")
        if taken := sorted(_RENDERING_ARGUMENTS & value.keys()):
            raise ValueError(f"{', '.join(taken)}: not variables of a template, posttrain sets them")
        return value
