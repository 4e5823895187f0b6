"""Sections of the run folder, the model and the data."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from posttrain.config.base import NaturalInt, PositiveInt, Seconds, Section
from posttrain.core.text import printable


class RunConfig(Section):
    """The run folder, and how a run starts."""

    name: Annotated[str, Field(max_length=200)] = ""
    """Name of the run's folder in `run.dir`; empty: the preset's name."""
    dir: str = "runs"
    """Folder that contains the runs."""
    seed: NaturalInt = 0
    """Seed of data order, sampling and model initialisation."""
    resume: str = "auto"
    """auto: resume an unfinished run of the same name and config from its last checkpoint. never: such a run is an
    error. A path: start from that checkpoint (from a run's last one), including optimizer state and position in the
    data."""
    restarts: NaturalInt = 0
    """Maximum automatic restarts of the workers, from the last checkpoint, after one has died or hung."""
    overwrite: bool = False
    """Delete an existing run of the same name before the start. `eval`: also replace the files of `--out` and
    `--failures`."""
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb", "mlflow"]] = ["console", "jsonl"]
    """Destinations of metrics; see metrics.md. The last three need the extras of the same names."""
    console: Literal["auto", "panel", "plain", "json", "quiet"] = "auto"
    """Output of the console logger, on stderr. auto: a live panel on a terminal, else one plain line per step. json:
    one JSON object per line. quiet: warnings and errors only."""
    report: bool = True
    """Write `report.html` to the run's folder at each checkpoint and at the end (report.md)."""
    rollouts: bool = True
    """`rl`: write rollout files with every trajectory to `rollouts/` in the run's folder, about 6 bytes per token
    (docs/rollout-files.md)."""
    rollouts_every: PositiveInt = 1
    """Steps between two rollout files."""
    profile: str = ""
    """Steps to profile, as `FIRST:LAST`: torch.profiler writes a Chrome trace and a table of the most expensive kernels
    of each rank to `profile/` in the run's folder. Empty: none."""

    @field_validator("name", "dir")
    @classmethod
    def _path(cls, value: str, info: ValidationInfo) -> str:
        """Reject unprintable characters: both values are shown in paths, in titles and on terminals."""
        if printable(value, "") != value:
            raise ValueError(f"run.{info.field_name} = {value!a} has characters that a terminal does not show")
        if info.field_name == "name" and (value in (".", "..") or "/" in value):
            raise ValueError(f"run.name = {value!r} is not a folder name (run.dir is the folder that holds runs)")
        return value

    @property
    def profiled_steps(self) -> range:
        """Return the steps of `profile`."""
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
    """Hugging Face folder or hub id, `builtin:tiny`, or the newest checkpoint of a run, `run:NAME` (`run:latest`: of
    the newest run; `run:NAME/best`: the best one by `checkpoint.best`)."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model."""


_RENDERING_ARGUMENTS = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip
"""Arguments of transformers' ``apply_chat_template`` that are not template variables."""


class DataConfig(Section):
    """Training and validation data, and batches."""

    train: str | list[str] = ""
    """Parquet file of SFT, preference or RLHF rows. For SFT and preference rows also a folder, a glob, or a list of
    these."""
    val: str | list[str] = ""
    """Held-out data, in the same form as `train`; empty: no validation."""
    batch_size: PositiveInt = 32
    """Rows per optimizer step (`sft`), pairs (`prefer`), or prompts per step (`rl`), over all workers."""
    max_length: PositiveInt = 2048
    """`sft`, `prefer`: maximum length of a conversation, in tokens."""
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """`sft`, `prefer`: treatment of longer conversations; drop removes a pair if either conversation is too long. `rl`:
    a prompt longer than `rollout.max_prompt_tokens` is an error, or with drop is left out; prompts are never cut."""
    keep: dict[str, Annotated[list[str | int | float], Field(min_length=1)]] = {}
    """`rl`: allowed values by `extra_info` field, as `{level = ["Level 1", "Level 2"]}`; rows of `data.train` with
    other values are not used. Empty: all rows are used."""
    enable_thinking: bool | None = None
    """Value passed to the chat template in training and in sampling; none: the template's own default."""
    template_kwargs: dict[str, Any] = {}
    """Additional variables of the chat template."""
    shuffle: bool = True
    """Shuffle the rows anew every epoch, seeded by `run.seed`."""
    stream_above: NaturalInt = 20_000
    """`sft`, `prefer`: maximum number of rows that are read, checked and tokenized before the run starts. Larger data
    is streamed from its files during training; `train.epochs` then counts all rows, including those that `truncation`
    drops."""
    shuffle_rows: PositiveInt = 32_768
    """`sft`, `prefer`: size of the shuffle buffer when streaming, in rows. Rows enter it from several positions of the
    files, and the next row is drawn from it; data that fits into it is shuffled as a whole."""
    workers: NaturalInt = 2
    """`sft`, `prefer`: processes that tokenize streamed data ahead of the trainer; 0: a thread of the driver."""
    prefetch: PositiveInt = 4
    """`sft`, `prefer`: batches of streamed data to prepare ahead of the trainer."""
    deadline_s: Seconds = 300.0
    """`sft`, `prefer`: longest wait for the next batch of streamed data, including the start of the processes."""

    @property
    def chat_kwargs(self) -> dict[str, Any]:
        """Return all keyword arguments of the chat template."""
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
