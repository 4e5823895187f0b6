"""What `sft`, `rl` and `generate` settle before any process starts, so that bad input is one clear message."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from posttrain.cluster.address import check_address
from posttrain.config import Config
from posttrain.data.parquet import refuse_images
from posttrain.errors import ConfigError, DataError
from posttrain.models.load import ModelSource, load_config, load_tokenizer, locate
from posttrain.presets import has_gpu
from posttrain.rollout.hf import BLOCK
from posttrain.runs import find_run
from posttrain.train import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.rollout.episode import Environment
    from posttrain.tools.formats import ToolParser
    from posttrain.types import Prompt, ToolSchema


def check_supported(cfg: Config) -> None:
    """Refuse settings that the config knows and this version does not do: none is ever ignored in silence.

    Raises:
        ConfigError: naming every such key.
    """
    refused = {
        f"rollout.engine = {cfg.rollout.engine!r}": cfg.rollout.engine != "hf",
        f"rollout.tensor_parallel = {cfg.rollout.tensor_parallel}": cfg.rollout.tensor_parallel > 1,
        f"rollout.top_p = {cfg.rollout.top_p:g}": cfg.rollout.top_p < 1,
        f"rollout.top_k = {cfg.rollout.top_k}": cfg.rollout.top_k > 0,
        f"val.top_p = {cfg.val.top_p:g}": cfg.val.top_p < 1,
    }
    samples = cfg.command != "sft" and not cfg.rollout.replay
    trains = cfg.command in ("sft", "rl") and not cfg.rollout.only
    relevant = ("rollout.",) * samples + ("val.",) * (samples and trains)
    found = [text for text, used in refused.items() if used and text.startswith(relevant)]
    if found:
        raise ConfigError(
            f"not supported by this version: {'; '.join(found)}",
            hint="override them with --set, for example --set rollout.engine=hf",
        )


def check_machine(cfg: Config) -> None:
    """What the run needs of this machine is there: packages, the GPU or Ray cluster that it names, room for an episode.

    Raises:
        ConfigError: one of these is not so.
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
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    samples = cfg.command != "sft" and not rollout.replay
    if not samples or rollout.engine != "hf" or longest <= rollout.kv_tokens - BLOCK:
        return
    # Only on a CPU has the embedded engine a cache of a fixed size. Which machine another cluster samples on is known
    # later; the engine then refuses by itself.
    if cluster.device == "cpu" or (cluster.device == "auto" and cluster.address is None and not has_gpu()):
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} do not fit into "
            f"rollout.kv_tokens = {rollout.kv_tokens}, of which the engine keeps a block of {BLOCK} free",
            hint="raise rollout.kv_tokens",
        )


def check_packages(cfg: Config) -> None:
    """Optional packages that the config asks for are installed. Raises ``ConfigError`` with how to install them."""
    optim = cfg.train.optim
    trains = cfg.command in ("sft", "rl") and not cfg.rollout.only
    loggers = cfg.run.logger if cfg.command in ("sft", "rl") else []
    wanted = {
        "run.logger = tensorboard": ("tensorboard", "tensorboard" in loggers),
        "run.logger = wandb": ("wandb", "wandb" in loggers),
        "train.optim.name = adamw_8bit": ("torchao", trains and optim.name == "adamw_8bit"),
        "train.optim.stochastic_rounding": ("torchao", trains and optim.stochastic_rounding),
    }
    for key, (package, used) in wanted.items():
        if used and find_spec(package) is None:
            raise ConfigError(
                f"{key} needs the package {package}, which is not installed",
                hint=f"pip install 'posttrain[{package}]'",
            )


def open_model(cfg: Config) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    """Find the model that `model.path` names and load its tokenizer.

    Raises:
        ModelError, ConfigError: it cannot be found, or `train.lora` does not fit it.
    """
    path = cfg.model.path
    if path.startswith("run:"):
        try:
            run = find_run(cfg.run.dir, path.removeprefix("run:"))
        except ConfigError as error:
            raise ConfigError(
                f"model.path = {path!r}: {error.message}",
                hint=f"{error.hint}; train it first, or give --model PATH (builtin:tiny is the untrained tiny model)",
            ) from error
        path = str(checkpoint.find(run).path)
    source = locate(path, trust_remote_code=cfg.model.trust_remote_code)
    load_config(source)
    tokenizer = load_tokenizer(source)
    if cfg.command in ("sft", "rl") and not cfg.rollout.only and cfg.train.lora.rank is not None:
        from posttrain.models import lora

        lora.check(source, cfg.train.lora)
    return source, tokenizer


def build_environment(cfg: Config, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Environment:
    """The tools, parser and chat deltas of a run's episodes.

    Raises:
        ConfigError: a tool or call format is unknown, the chat template does not tell the format, or a tool cannot
            work in this run.
    """
    from posttrain.data.chat import ChatDeltas
    from posttrain.models.load import stop_token_ids
    from posttrain.rollout.episode import Environment
    from posttrain.rollout.interaction import open_interaction
    from posttrain.sandbox import configure
    from posttrain.tools.sets import open_tools

    interaction = None
    if cfg.rollout.interaction:
        interaction = open_interaction(cfg.rollout.interaction, cfg.rollout.interaction_options)
    configure(cfg.sandbox)
    tools = open_tools(cfg.rollout.tools, cfg.tools, cfg.sandbox)
    for tool in tools.values():
        tool.check()
    schemas = [tool.schema for tool in tools.values()] or None
    template_kwargs = cfg.data.chat_kwargs
    parser = tool_parser(cfg.rollout.tool_format, tokenizer, schemas)
    stops = set(stop_token_ids(tokenizer, source))
    if tools:
        vocabulary = tokenizer.get_vocab()
        stops |= {vocabulary[token] for token in parser.stop_tokens if token in vocabulary}
    return Environment(
        tokenizer=tokenizer,
        stop_token_ids=frozenset(stops),
        tools=tools,
        parser=parser,
        deltas=ChatDeltas(tokenizer, schemas, **template_kwargs),
        cfg=cfg.rollout,
        template_kwargs=template_kwargs,
        interaction=interaction,
    )


def tool_parser(name: str, tokenizer: PreTrainedTokenizerBase, schemas: list[ToolSchema] | None) -> ToolParser:
    """The parser of `rollout.tool_format`; ``auto`` looks at the chat template that shows these tools.

    Raises:
        ConfigError: there is no such format, or the template does not tell which one it is.
    """
    from posttrain.tools.formats import PARSERS, detect

    if name != "auto":
        return PARSERS.get(name)
    if not schemas:
        return PARSERS.get("hermes")  # nothing asks it: without tools no turn is parsed
    found = detect(str(tokenizer.get_chat_template(None, schemas)))
    if found is None:
        raise ConfigError(
            "the chat template does not tell in which format the model calls tools",
            hint=f"set rollout.tool_format to one of {', '.join(PARSERS.names())}",
        )
    return PARSERS.get(found)


def check_prompts(prompts: Sequence[Prompt], env: Environment, file: str) -> None:
    """Render every prompt once: one that is longer than `rollout.max_prompt_tokens` is an error now, not at step 900.

    Raises:
        DataError: naming the file and the row, also of one with images.
    """
    limit = env.cfg.max_prompt_tokens
    for prompt in prompts:
        refuse_images(prompt, file, prompt.index)
        length = len(env.prompt_ids(prompt))
        if length > limit:
            raise DataError(
                f"{file}, row {prompt.index}: the prompt has {length} tokens, rollout.max_prompt_tokens is {limit}",
                hint="raise rollout.max_prompt_tokens, or remove the row",
            )


def check_reward(prompts: Sequence[Prompt], cfg: Config, env: Environment) -> None:
    """Every row has a grader, the user's function, the reward model and the judge can be used, programs can be run if a
    grader needs that, and weights of tools are of tools that the run has.

    Raises:
        ConfigError, ModelError: one of these is not so.
    """
    from posttrain.models.reward import open_reward_model
    from posttrain.rewards import needs_sandbox
    from posttrain.rewards.custom import load_function
    from posttrain.rewards.judge import check_judge
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
    if cfg.reward.function:
        load_function(cfg.reward.function)
        return
    # Every source is looked up, so that one without a grader is found now.
    if sum(needs_sandbox(source) for source in {p.data_source for p in prompts}):
        check_sandbox(cfg.sandbox)
