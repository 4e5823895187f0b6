"""What a command that trains on samples of files (`sft`, `prefer`) brings to the loop that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from posttrain.cluster.cluster import Cluster
from posttrain.config import Config
from posttrain.data.pack import PackedBatch
from posttrain.data.prefetch import Render, Rendered
from posttrain.data.shards import Shards
from posttrain.data.stream import TokenRow
from posttrain.runs.training_run import TrainingRun

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.cluster.trainers import TrainerGroup
    from posttrain.data.vision import VisionProcessor
    from posttrain.models.load import ModelSource

Samples = Sequence[TokenRow] | Sequence[Rendered]


class SampleLearner(Protocol):
    """The models of a run, and what a step does with its samples."""

    @property
    def actor(self) -> TrainerGroup: ...

    async def weigh(self, batch: PackedBatch) -> dict[str, float]:
        """Give a batch its loss weights. Returns metrics of the step; they replace those of the update."""
        ...

    async def validate(self, done: Callable[[int], None]) -> dict[str, float]:
        """Return metrics over the whole validation set; ``loss`` is one of them. ``done`` is called with the number of
        samples that are done since the call before."""
        ...


class Objective(ABC):
    """A kind of samples, and what a model learns from them."""

    vision: VisionProcessor | None = None
    """What reads the images of rows; None: the model reads text alone. Set before anything is rendered."""
    one: ClassVar[str]
    """Name of a sample in messages; ``many`` is its plural."""
    many: ClassVar[str]
    nothing: ClassVar[str] = "no assistant token to train on"
    """Why there may be nothing to learn from a sample, for messages."""

    @abstractmethod
    def shards(self, paths: str | Sequence[str]) -> Shards:
        """Return the rows of the files that ``paths`` names. Raises ``DataError``."""

    @abstractmethod
    def renderer(self, cfg: Config, tokenizer: PreTrainedTokenizerBase) -> Render:
        """Return what turns a row into a sample under this config."""

    @abstractmethod
    async def start(self, cluster: Cluster, run: TrainingRun, val: Sequence[Rendered]) -> SampleLearner:
        """Start the models. ``val``: the samples that ``SampleLearner.validate`` is to use."""

    @abstractmethod
    def pack(self, samples: Samples) -> PackedBatch:
        """Pack samples into a batch."""

    def check(self, cfg: Config, source: ModelSource) -> None:
        """Check that this model can be trained so. Raises ``ConfigError``."""
        return
