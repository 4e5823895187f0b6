"""The whole configuration tree. Every default is stated in this package and nowhere else.

The tree is frozen, and a key it does not know is an error. ``posttrain.config.presets`` fills it from TOML and
remembers where each value came from. Imports pydantic only, so that ``posttrain --help`` stays fast.
"""

from posttrain.config.algo import AlgoConfig, CorrectionConfig, CriticConfig, algo_bundle
from posttrain.config.base import Fraction, PositiveInt, Section
from posttrain.config.cluster import (
    CheckpointConfig,
    ClusterConfig,
    EvalConfig,
    GenerateConfig,
    ServerConfig,
    tolerance,
)
from posttrain.config.data import DataConfig, ModelConfig, RunConfig
from posttrain.config.prefer import PreferConfig
from posttrain.config.reward import JudgeConfig, OverlongConfig, RewardConfig, RewardModelConfig, SandboxConfig
from posttrain.config.rollout import EngineName, RolloutConfig, ValConfig
from posttrain.config.train import EarlyStopConfig, LoraConfig, OptimConfig, TrainConfig
from posttrain.config.tree import Command, Config

__all__ = [
    "AlgoConfig", "CheckpointConfig", "ClusterConfig", "Command",
    "Config", "CorrectionConfig", "CriticConfig", "DataConfig", "EarlyStopConfig", "EngineName", "EvalConfig",
    "Fraction", "GenerateConfig", "JudgeConfig", "LoraConfig", "ModelConfig", "OptimConfig", "OverlongConfig",
    "PositiveInt", "PreferConfig", "RewardConfig", "RewardModelConfig", "RolloutConfig", "RunConfig", "SandboxConfig",
    "Section", "ServerConfig", "TrainConfig", "ValConfig", "algo_bundle", "tolerance",
]  # fmt: skip
