"""Sections of rewards, and of the sandbox that graders and tools share."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from posttrain.config.base import NaturalInt, PositiveFactor, PositiveInt, Seconds, Section, SignedFactor, Temperature


class OverlongConfig(Section):
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): the reward part `overlong`."""

    buffer_tokens: PositiveInt | None = None
    """Length of the interval before `rollout.max_response_tokens`, in tokens, in which the penalty grows linearly;
    none: no such part."""


class RewardModelConfig(Section):
    """A sequence-classification model that scores conversations: the reward part `model`."""

    path: str = ""
    """Hugging Face folder or hub id of a model with one label; empty: no reward model."""
    max_length: PositiveInt = 4096
    """Maximum length of a conversation, in tokens; a longer one is an error of its episode (`reward.on_error`)."""
    tokens_per_batch: PositiveInt = 16384
    """Maximum tokens per forward pass, including padding."""

    @model_validator(mode="after")
    def _longest_fits(self) -> RewardModelConfig:
        if self.tokens_per_batch < self.max_length:
            raise ValueError(
                f"reward.model.tokens_per_batch = {self.tokens_per_batch} holds no conversation of "
                f"reward.model.max_length = {self.max_length} tokens"
            )
        return self


class JudgeConfig(Section):
    """A model behind an OpenAI-compatible endpoint that scores conversations: the reward part `judge`."""

    url: str = ""
    """Base URL, for example `http://127.0.0.1:8000/v1`; empty: no judge."""
    model: str = ""
    """Name of the model on the endpoint."""
    api_key_env: str = ""
    """Environment variable that holds the API key; empty: no key is sent."""
    prompt: str = (
        "Judge the last answer of this conversation.\n\n<conversation>\n{conversation}\n</conversation>\n\n"
        "<reference>\n{ground_truth}\n</reference>\n\n"
        "Think briefly, then end with one line: Score: N, where N is a whole number from 0 (wrong or useless) to 10."
    )
    """Prompt of the judge; `{conversation}`, `{response}`, `{question}` and `{ground_truth}` are replaced."""
    pattern: str = r"Score:[\s*]*(-?\d+(?:\.\d+)?)"
    """Regular expression for the score; the first group of its last match is the number."""
    scale: PositiveFactor = 10.0
    """Divisor of the number."""
    temperature: Temperature = 0.0
    """Sampling temperature of the judge."""
    max_tokens: PositiveInt = 512
    """Maximum tokens of the judge's answer."""
    concurrency: PositiveInt = 32
    """Maximum concurrent requests."""
    retries: NaturalInt = 4
    """Maximum retries after a refused connection, a timeout, HTTP 408, 429 or 5xx, with exponential backoff;
    `Retry-After` is respected."""
    deadline_s: Seconds = 60.0
    """Longest wait for one answer."""
    cache: bool = True
    """Cache answers by prompt; the cache of a run is in its folder and survives a resume."""


class RewardConfig(Section):
    """The reward of an episode: a weighted sum of named parts."""

    function: str = ""
    """`my_file.py:name` (or `package.module:name`) of a function that grades every row instead of its data source's
    grader: `(data_source, solution_str, ground_truth, extra_info)` to a float, a dict with `score`, or a `Score`."""
    function_kwargs: dict[str, Any] = {}
    """Additional keyword arguments of `function`."""
    weights: dict[str, SignedFactor] = {"score": 1.0}
    """Weight of each part; the reward is the sum of weight x part. Parts: `score` (the grader's), `correct` and
    `format` (1 or 0), any part that the grader names, `tool/NAME`, `length` (share of `rollout.max_response_tokens`,
    negative), `overlong`, `model`, `judge`."""
    on_error: Literal["drop", "zero", "raise"] = "drop"
    """Treatment of an episode whose grader failed: leave it out (drop), reward 0 (zero), or end the run (raise)."""
    deadline_s: Seconds = 30.0
    """Longest grading of one response; after it the grader process is replaced."""
    memory_mb: PositiveInt = 2048
    """Memory limit of a grader process. Exceeding it counts as a failure of the grader."""
    workers: PositiveInt = 2
    """Number of grader processes."""
    examine: NaturalInt = 0
    """Number of graded conversations to print per step, with their reward parts."""
    overlong: OverlongConfig = OverlongConfig()
    model: RewardModelConfig = RewardModelConfig()
    judge: JudgeConfig = JudgeConfig()

    @model_validator(mode="after")
    def _weights_match(self) -> RewardConfig:
        """Require a weight for each computed part, and a part for each weight, so that none is ignored."""
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
    """Sandbox of generated code, for graders and tools. Limits apply to one execution."""

    mode: Literal["local", "remote"] = "local"
    """local: processes on this machine, in namespaces without network. remote: a SandboxFusion-compatible service."""
    url: str = ""
    """remote: base URL of the service; `/run_code` is appended."""
    api_key_env: str = ""
    """remote: environment variable that holds a bearer token for the service; empty: no token is sent."""
    deadline_s: Seconds = 10.0
    """Maximum wall time, and maximum CPU time of each process."""
    memory_mb: PositiveInt = 1024
    """Maximum address space of each process, and maximum memory of all processes and their files together."""
    processes: PositiveInt = 64
    """Maximum number of processes and threads."""
    file_mb: PositiveInt = 16
    """Maximum size of one file."""
    disk_mb: PositiveInt = 64
    """Maximum size of the private temporary folder, the only writable folder."""
    output_kb: PositiveInt = 1024
    """Maximum size of stdout and of stderr; a program that writes more is killed."""
    allow_unisolated: bool = False
    """Run code with resource limits only if the kernel allows no namespaces. The code then has network access and your
    file permissions."""

    @model_validator(mode="after")
    def _remote_has_url(self) -> SandboxConfig:
        if (self.mode == "remote") != bool(self.url):
            raise ValueError("sandbox.url goes with sandbox.mode = 'remote', and that mode needs it")
        if self.api_key_env and self.mode != "remote":
            raise ValueError("sandbox.api_key_env has no effect without sandbox.mode = 'remote'")
        return self
