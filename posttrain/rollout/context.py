"""What all episodes of a run share, and how it turns messages into the token ids that a model reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.config import RolloutConfig
from posttrain.core.errors import DataError
from posttrain.core.types import Ids, Prompt
from posttrain.data.chat import ChatDeltas, render_prompt
from posttrain.data.images import ImageError, PlacedImage
from posttrain.data.turns import IMAGE, with_image_parts
from posttrain.rollout.tool_calls import Reply
from posttrain.tools.base import Tool
from posttrain.tools.formats import ToolParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.data.vision import VisionProcessor
    from posttrain.envs.opening import World
    from posttrain.rollout.agents import AgentHost
    from posttrain.rollout.interaction import Interaction


Opened = tuple[Ids, Sequence[PlacedImage]]
"""Token ids of a prompt, and the images among them."""


@dataclass(frozen=True)
class EpisodeContext:
    """What all episodes of a run share."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    tools: Mapping[str, Tool]
    """By the name that the model calls."""
    parser: ToolParser
    deltas: ChatDeltas
    cfg: RolloutConfig
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as ``enable_thinking``; the same as in ``deltas``."""
    interaction: Interaction | None = None
    """The simulated user."""
    world: World | None = None
    """What makes each episode's environment (`rollout.env`)."""
    agents: AgentHost | None = None
    """The agent that plays the episodes (`rollout.agent`)."""
    vision: VisionProcessor | None = None
    """What reads the images of prompts; None: the model reads text alone."""

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """Return what the model may call: tools of the run, or of the environment."""
        return [*(tool.schema for tool in self.tools.values()), *(self.world.tools if self.world else ())] or None

    @property
    def stateless(self) -> bool:
        """Return true if an episode is no more than its tokens and messages, so that another process can go on with
        it: nothing is made for it but what tools do in calls."""
        others = (self.interaction, self.world, self.agents)
        made = any(getattr(type(tool), "create", None) is not Tool.create for tool in self.tools.values())
        return not made and not any(others)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """Return token ids of a prompt, ending where the assistant starts to write. Raises ``DataError``."""
        return self.opened(prompt)[0]

    def opened(self, prompt: Prompt) -> Opened:
        """Return ``prompt_ids`` and the images among them, each of which they hold as often as it has features. Raises
        ``DataError``."""
        messages = prompt.messages if self.vision is None else with_image_parts(prompt.messages, len(prompt.images))
        ids = render_prompt(messages, self.tokenizer, self.schemas, **self.template_kwargs)
        if self.vision is None:
            return ids, ()
        try:
            found = self.vision.read(ids, [False] * len(ids), prompt.images)
        except ImageError as error:
            where = f"column {error.column!r}: " if error.column else ""
            raise DataError(f"{where}{error.message}", hint=error.hint) from error
        return found.ids, found.images

    def delta(self, reply: Reply) -> Opened:
        """Return token ids of what the model reads after a turn, and the images among them, as ``opened`` does."""
        if self.vision is None:
            return self.deltas.ids(reply.messages), ()
        ids = self.deltas.ids(with_image_parts(reply.messages, len(reply.images)))
        try:
            found = self.vision.expand(ids, [False] * len(ids), reply.images)
        except ImageError as error:
            raise DataError(f"the answer to a turn: {error.message}", hint=error.hint) from error
        return found.ids, found.images

    def harmless(self, text: str, images: Sequence[Any] = ()) -> str:
        """Return what tools or users say without what would become a control token, and where they bring no ``images``
        without the name of one."""
        pieces = text.split(IMAGE) if self.vision is not None else [text]
        between = IMAGE if images else f"{IMAGE[0]} {IMAGE[1:]}"
        return between.join(map(self.deltas.without_control_tokens, pieces))
