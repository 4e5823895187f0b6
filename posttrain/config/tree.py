"""The config tree, and the checks across its sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pydantic import model_validator

from posttrain.algos import ADVANTAGES, POLICY_LOSSES
from posttrain.config.algo import AlgoConfig, CorrectionConfig, CriticConfig
from posttrain.config.base import Section
from posttrain.config.cluster import CheckpointConfig, ClusterConfig, EvalConfig, GenerateConfig
from posttrain.config.data import DataConfig, ModelConfig, RunConfig
from posttrain.config.prefer import PreferConfig
from posttrain.config.reward import RewardConfig, SandboxConfig
from posttrain.config.rollout import RolloutConfig, ValConfig
from posttrain.config.train import LoraConfig, TrainConfig
from posttrain.core.text import has_login

Command = Literal["sft", "prefer", "rl", "generate", "eval"]


def _with_login(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys whose text has a URL with a user or a password."""
    if isinstance(value, str):
        if has_login(value):
            yield key
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _with_login(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _with_login(inner, key)


class Config(Section):
    """One run of one command."""

    command: Command
    """Command that the preset is for."""
    description: str = ""
    """One-line description for `posttrain presets`."""
    plugins: list[str] = []
    """Python files or modules to import in every process before names are looked up."""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    prefer: PreferConfig = PreferConfig()
    algo: AlgoConfig = AlgoConfig()
    critic: CriticConfig = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    tools: dict[str, dict[str, Any]] = {}
    """Tools by name, as `[tools.NAME]`: one tool with its options, `{type = "search", url = ...}`, or a set of several,
    `{use = [...]}`; see tools.md."""
    val: ValConfig = ValConfig()
    reward: RewardConfig = RewardConfig()
    sandbox: SandboxConfig = SandboxConfig()
    cluster: ClusterConfig = ClusterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    generate: GenerateConfig = GenerateConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        """Reject combinations that make no sense before anything starts."""
        if named := sorted(_with_login(self.model_dump())):
            # It would be in config.toml, in the report and on boards.
            raise ValueError(f"{', '.join(named)}: a URL holds a user or a password, and a run's config is stored")
        if self.cluster.workers % self.train.sequence_parallel:
            raise ValueError(
                f"train.sequence_parallel = {self.train.sequence_parallel} does not divide "
                f"cluster.workers = {self.cluster.workers}"
            )
        if self.cluster.workers % self.train.expert_parallel:
            raise ValueError(
                f"train.expert_parallel = {self.train.expert_parallel} does not divide "
                f"cluster.workers = {self.cluster.workers}"
            )
        if self.train.shard_size is not None and self.cluster.workers % self.train.shard_size:
            raise ValueError(
                f"train.shard_size = {self.train.shard_size} does not divide cluster.workers = {self.cluster.workers}"
            )
        self._check_turns()
        if self.rollout.env or self.rollout.has_agent:
            self._check_env()
        if self.command == "rl":
            self._check_rl()
        elif self.data.keep:
            raise ValueError(
                f"data.keep selects prompts of rl, and {self.command} has none: select its rows beforehand"
            )
        if self.train.share_prompts and self.rollout.batch_invariant:
            raise ValueError(
                "train.share_prompts changes the last bits of log-probabilities, and rollout.batch_invariant keeps "
                "them; set one of the two"
            )
        if self.train.share_prompts and self.rollout.router_replay != "off":
            raise ValueError(
                "train.share_prompts with rollout.router_replay: a prompt that episodes share is computed once, and "
                "each of them recorded experts of its own for it; set one of the two"
            )
        if self.trains_reward_model:
            self._check_reward_model()
        if self.train.early_stop.patience is not None:
            self._check_early_stop()
        if self.trains and not self.rollout.replay:
            ranks = self.cluster.workers // self.train.sequence_parallel
            factor, what = {
                "sft": (1, "data.batch_size"),
                "prefer": (2, "2 * data.batch_size"),
                "rl": (self.rollout.n, "data.batch_size * rollout.n"),
            }[self.command]
            rows = self.data.batch_size * factor
            if rows % ranks:
                raise ValueError(
                    f"{what} = {rows} is not divisible by {ranks} data-parallel workers "
                    "(cluster.workers / train.sequence_parallel)"
                )
        return self

    @property
    def trains(self) -> bool:
        """Return whether the command takes optimizer steps."""
        return self.command in ("sft", "prefer") or (self.command == "rl" and not self.rollout.only)

    @property
    def samples(self) -> bool:
        """Return whether the command has engines."""
        return self.command not in ("sft", "prefer") and not self.rollout.replay

    @property
    def episodes_of_engine(self) -> int:
        """Return the most episodes of a training step on one engine; 0: any number, as in `generate`."""
        if self.command != "rl":
            return 0
        batches = 1 + self.rollout.over_sample_rate + self.rollout.staleness
        return math.ceil(self.data.batch_size * self.rollout.n * batches / self.rollout.replicas)

    @property
    def correction(self) -> CorrectionConfig:
        """Return `algo.correction` with its weight decided."""
        correction = self.algo.correction
        if correction.weight != "auto":
            return correction
        apart = self.rollout.staleness or self.rollout.rounds
        return correction.model_copy(update={"weight": "token" if apart else "none"})

    @property
    def scores_before_updates(self) -> bool:
        """Return whether every step of `rl` asks for the actor's own log-probabilities before its first update
        (``rl.learner.Learner``)."""
        algo = self.algo
        moves = algo.updates_per_step > 1 and not self.rollout.replay
        corrects = self.correction.active and not self.correction.of_tokens
        return moves or corrects or POLICY_LOSSES.get(algo.policy_loss).reads_current or self.advantages_read_policy

    @property
    def advantages_read_policy(self) -> bool:
        """Return whether advantages depend on the actor's own log-probabilities, which are then computed first."""
        return ADVANTAGES.get(self.algo.advantage).teacher or self.algo.kl_in == "reward"

    @property
    def critic_train(self) -> TrainConfig:
        """Return how the critic is trained: as the actor, with an optimizer of its own and without an adapter."""
        return self.train.model_copy(update={"optim": self.critic.optim, "lora": LoraConfig()})

    @property
    def skips_zero_advantages(self) -> bool:
        """Return whether `train.skip_zero_advantages` leaves something out."""
        return self.train.skip_zero_advantages and not self.trained_without_advantage

    @property
    def trained_without_advantage(self) -> list[str]:
        """Return the settings by which an episode whose advantages are all 0 has a part in an update of the actor, or
        of a critic."""
        algo = self.algo
        loss, advantage = POLICY_LOSSES.get(algo.policy_loss), ADVANTAGES.get(algo.advantage)
        found = {
            f"algo.policy_loss = {algo.policy_loss!r}": not loss.nothing_without_advantage,
            f"algo.advantage = {algo.advantage!r}": advantage.critic,
            "algo.kl_coef": algo.kl_coef > 0 and algo.kl_in == "loss",
            "algo.entropy_coef": algo.entropy_coef != 0,
            "train.router_aux_loss_coef": self.train.router_aux_loss_coef > 0,
        }
        return [name for name, has_part in found.items() if has_part]

    @property
    def trains_reward_model(self) -> bool:
        """Return whether a reward model is trained instead of a policy."""
        return self.command == "prefer" and self.prefer.method == "reward_model"

    @property
    def needs_first_weights(self) -> bool:
        """Return whether a run needs the weights that it began with up to its end: under adapters, or as reference."""
        dpo = self.command == "prefer" and not self.trains_reward_model
        return self.train.lora.rank is not None or dpo or (self.command == "rl" and self.algo.kl_coef > 0)

    def _check_reward_model(self) -> None:
        what = "prefer.method = 'reward_model'"
        if self.train.lora.rank is not None:
            raise ValueError(f"train.lora has no effect with {what}: its new head is trained, and so are all weights")
        if self.data.chat_kwargs:
            raise ValueError(
                f"data.template_kwargs and data.enable_thinking with {what}: a reward model is used without them"
            )

    def _check_early_stop(self) -> None:
        if self.command == "rl":
            raise ValueError("train.early_stop is of sft and prefer only: rl has no val/loss")
        if self.trains and not self.data.val:
            raise ValueError("train.early_stop.patience needs data.val")
        if self.trains and self.train.val_every is None:
            raise ValueError("train.early_stop.patience needs train.val_every: else the last step alone is validated")

    def _check_env(self) -> None:
        if self.command == "rl" and ADVANTAGES.get(self.algo.advantage).greedy:
            raise ValueError(
                f"algo.advantage = {self.algo.advantage!r} with rollout.env or an agent: greedy episodes of them are "
                "not played"
            )
        if self.command not in ("rl", "generate"):
            raise ValueError(
                f"rollout.env and rollout.agent: {self.command} plays none of them; `posttrain rl` and `posttrain "
                "generate` do"
            )
        if self.rollout.replay:
            raise ValueError(
                "rollout.env and rollout.agent have no effect with rollout.replay: rollout files hold what was played"
            )

    def _check_rl(self) -> None:
        if self.data.truncation in ("left", "right"):
            raise ValueError(
                f"data.truncation = {self.data.truncation!r}: rl cuts no prompt; a longer one is an error, or left "
                "out (drop)"
            )
        if self.rollout.only:
            self._check_rollout_only()
            return
        self._check_algo()
        if self.rollout.temperature == 0.0:
            raise ValueError("rollout.temperature = 0 samples the same episode every time: nothing to learn from")
        if self.rollout.top_p < 1.0 or self.rollout.top_k:
            raise ValueError(
                "rollout.top_p < 1 or rollout.top_k > 0 while training: the trainer's log-probabilities would be of "
                "another distribution than the one sampled from"
            )
        if self.data.batch_size % self.algo.updates_per_step and not self.rollout.replay:
            raise ValueError(
                f"algo.updates_per_step = {self.algo.updates_per_step} does not divide "
                f"data.batch_size = {self.data.batch_size} prompts"
            )

    def _check_algo(self) -> None:
        estimator, what = ADVANTAGES.get(self.algo.advantage), f"algo.advantage = {self.algo.advantage!r}"
        if estimator.group and self.rollout.n < 2 and not self.rollout.replay:
            raise ValueError(f"rollout.n must be at least 2: {what} compares the episodes of one prompt")
        if estimator.parts and len(self.reward.weights) < 2:
            raise ValueError(f"{what} normalises each part of the reward, and reward.weights names one: use 'grpo'")
        if estimator.greedy and self.rollout.replay:
            raise ValueError(
                f"{what} needs the reward of a greedy episode of each prompt, which rollout files do not have"
            )
        episodes = self.data.batch_size * self.rollout.n
        if self.algo.kl_target is not None and not self.rollout.replay and episodes >= 5 * self.algo.kl_horizon:
            raise ValueError(
                f"algo.kl_horizon = {self.algo.kl_horizon} with {episodes} episodes a step (data.batch_size * "
                "rollout.n): a step below algo.kl_target would take the coefficient to 0 or below; raise "
                f"algo.kl_horizon above {episodes // 5}"
            )
        correction = self.correction
        if correction.weight == "none" and (unused := correction.changed & {"upper", "lower"}):
            raise ValueError(f"algo.correction.{min(unused)} has no effect without algo.correction.weight")
        if correction.active and self.rollout.replay:
            raise ValueError(
                "algo.correction with rollout.replay: ratios are taken to the recorded log-probabilities already"
            )
        if estimator.critic:
            self.train.check_optimizer(self.critic.optim, "critic.optim")
        if not estimator.critic and self.critic != CriticConfig():
            raise ValueError(f"[critic] has no effect with {what}: it is of 'gae'")

    def _check_turns(self) -> None:
        if self.rollout.sleep and self.cluster.placement == "separate":
            raise ValueError("rollout.sleep has no effect with cluster.placement = 'separate': engines share no GPU")
        if self.cluster.weight_transfer == "broadcast" and self.cluster.placement == "colocated":
            raise ValueError(
                "cluster.weight_transfer = 'broadcast' needs cluster.placement = 'separate': NCCL wants a GPU for each"
            )
        if self.train.offload and self.rollout.staleness:
            raise ValueError("train.offload with rollout.staleness: trainers work while engines sample")
        if self.train.offload and self.train.cpu_offload:
            raise ValueError("train.offload has no effect with train.cpu_offload: all is in host memory as it is")

    def _check_rollout_only(self) -> None:
        if self.rollout.replay:
            raise ValueError("rollout.only and rollout.replay exclude each other: one samples, the other does not")
        if self.run.profile:
            raise ValueError("run.profile has no effect with rollout.only: there are no updates to trace")
        if not self.run.rollouts or self.run.rollouts_every > 1:
            raise ValueError(
                "rollout.only without the rollout files of every step (run.rollouts, run.rollouts_every) would leave "
                "nothing behind"
            )
