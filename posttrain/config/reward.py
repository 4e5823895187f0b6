"""Rewards, and the sandbox that graders and tools share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from posttrain.config.base import NaturalInt, PositiveFactor, PositiveInt, Seconds, Section, SignedFactor, Temperature


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): the part `overlong` of a reward."""

    buffer_tokens: PositiveInt | None = None
    """The last so many tokens before `rollout.max_response_tokens` cost linearly more; none: no such part."""


class RewardModelConfig(Section):
    """A sequence-classification model that scores conversations: the part `model` of a reward."""

    path: str = ""
    """A Hugging Face folder or hub id with one label; empty: no reward model."""
    max_length: PositiveInt = 4096
    """A longer conversation is an error of that episode (`reward.on_error`)."""
    tokens_per_batch: PositiveInt = 16384
    """Most tokens, padding included, that it runs through at once."""

    @model_validator(mode="after")
    def _longest_fits(self) -> RewardModelConfig:
        if self.tokens_per_batch < self.max_length:
            raise ValueError(
                f"reward.model.tokens_per_batch = {self.tokens_per_batch} holds no conversation of "
                f"reward.model.max_length = {self.max_length} tokens"
            )
        return self


class JudgeConfig(Section):
    """A model behind an OpenAI-compatible endpoint that scores conversations: the part `judge` of a reward."""

    url: str = ""
    """Base URL, for example `http://127.0.0.1:8000/v1`; empty: no judge."""
    model: str = ""
    """Name of the model at the endpoint."""
    api_key_env: str = ""
    """Environment variable that holds the key; empty: none is sent."""
    prompt: str = (
        "Judge the last answer of this conversation.\n\n<conversation>\n{conversation}\n</conversation>\n\n"
        "<reference>\n{ground_truth}\n</reference>\n\n"
        "Think briefly, then end with one line: Score: N, where N is a whole number from 0 (wrong or useless) to 10."
    )
    """What the judge reads; `{conversation}`, `{response}`, `{question}` and `{ground_truth}` are filled in."""
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression; the last match's first group is the number."""
    scale: PositiveFactor = 10.0
    """The number is divided by this."""
    temperature: Temperature = 0.0
    """Of the judge's sampling."""
    max_tokens: PositiveInt = 512
    """Of the judge's answer."""
    concurrency: PositiveInt = 32
    """Most requests at once."""
    retries: NaturalInt = 4
    """After a refused connection, a timeout, HTTP 408, 429 or 5xx: exponential backoff, `Retry-After` respected."""
    deadline_s: Seconds = 60.0
    """Longest wait for one answer."""
    cache: bool = True
    """Ask for the same text once; in a run, answers are kept in its folder and survive a resume."""


class RewardConfig(Section):
    """What an episode earns: a weighted sum of named parts."""

    function: str = ""
    """`my_file.py:name` (or `package.module:name`) of a function that grades every row instead of its data source's
    grader: `(data_source, solution_str, ground_truth, extra_info)` to a float, a dict with `score`, or a `Score`."""
    function_kwargs: dict[str, Any] = {}
    """More keyword arguments for `function`."""
    weights: dict[str, SignedFactor] = {"score": 1.0}
    """The reward is the sum of weight x part. Parts: `score` (the grader's), `correct` and `format` (1 or 0), whatever
    parts the grader names, `tool/NAME`, `length` (share of `rollout.max_response_tokens`, negative), `overlong`,
    `model`, `judge`."""
    on_error: Literal["drop", "zero", "raise"] = "drop"
    """What an episode whose grader failed counts as: it is left out, it earns 0, or the run ends."""
    deadline_s: Seconds = 30.0
    """Longest wait for the verdict on one response; then its grader process is replaced."""
    memory_mb: PositiveInt = 2048
    """Memory of a grader process. A response whose grading takes more is a failure of its grader."""
    workers: PositiveInt = 2
    """Grader processes."""
    examine: NaturalInt = 0
    """Print so many graded conversations of every step, with their parts."""
    overlong: OverlongConfig = OverlongConfig()
    model: RewardModelConfig = RewardModelConfig()
    judge: JudgeConfig = JudgeConfig()

    @model_validator(mode="after")
    def _weights_match(self) -> RewardConfig:
        """A part that is computed has a weight, and a weight has its part: neither is ever ignored in silence."""
        computed = {
            "overlong": ("reward.overlong.buffer_tokens", self.overlong.buffer_tokens is not None),
            "model": ("reward.model.path", bool(self.model.path)),
            "judge": ("reward.judge.url", bool(self.judge.url)),
        }
        for part, (key, on) in computed.items():
            if on and part not in self.weights:
                raise ValueError(f"{key} is set, and reward.weights gives {part!r} no weight")
            if not on and part in self.weights:
                raise ValueError(f"reward.weights names {part!r}, and {key} is not set")
        if not self.weights:
            raise ValueError("reward.weights is empty: every episode would earn 0")
        return self


class SandboxConfig(Section):
    """Where generated code runs, for graders and tools. Limits are of one run."""

    mode: Literal["local", "remote"] = "local"
    """local: processes of this machine without network, in namespaces. remote: a SandboxFusion-compatible service."""
    url: str = ""
    """remote: base URL of the service; `/run_code` is appended."""
    api_key_env: str = ""
    """remote: environment variable that holds a bearer token for the service; empty: none is sent."""
    deadline_s: Seconds = 10.0
    """Longest wall time, and CPU time of each process."""
    memory_mb: PositiveInt = 1024
    """Address space of each process, and memory of all together with their files."""
    processes: PositiveInt = 32
    """Processes and threads."""
    file_mb: PositiveInt = 16
    """Size of one file."""
    disk_mb: PositiveInt = 64
    """Size of the private temporary folder, which is the only place it can write to."""
    output_kb: PositiveInt = 1024
    """Of stdout and of stderr; a program that writes more is killed."""
    allow_unisolated: bool = False
    """Run code with the resource limits alone where the kernel allows no namespaces. It then has your network, and can
    read and write whatever you can."""

    @model_validator(mode="after")
    def _remote_has_url(self) -> SandboxConfig:
        if (self.mode == "remote") != bool(self.url):
            raise ValueError("sandbox.url goes with sandbox.mode = 'remote', and that mode needs it")
        if self.api_key_env and self.mode != "remote":
            raise ValueError("sandbox.api_key_env has no effect without sandbox.mode = 'remote'")
        return self
