"""The token contract on every template: what is trained is exactly what was sampled, in the words of the template."""

import asyncio
import itertools
import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.config import RolloutConfig
from posttrain.core.types import Prompt, Sample
from posttrain.data.chat import ChatDeltas
from posttrain.rollout.context import EpisodeContext
from posttrain.rollout.interaction import Interaction, UserTurn
from posttrain.tools.base import Tool, ToolResult
from posttrain.tools.formats import PARSERS
from tests.helpers.scripted import run_episode

KEEP = (
    "llamacpp_Qwen-Qwen2.5-7B-Instruct",
    "qwen2_5",
    "qwen2_5_training",
    "qwen2_5_vl",
    "qwen2_5_vl_training",
    "qwen3_instruct_2507",
    "qwen3_instruct_2507_training",
    "qwen3_vl",
)
"""Templates that write each turn as it was."""
REWRITE = ("llamacpp_Qwen-QwQ-32B", "llamacpp_Qwen-Qwen3-0.6B", "qwen3", "qwen3_training")
"""Templates that leave out the thoughts of earlier answers, add empty ones to the last, and strip line breaks."""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "say",
        "description": "Say it.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


class Say(Tool):
    """A tool that says what it is told to say."""

    name, schema = "say", SCHEMA

    async def call(self, state, arguments):
        return ToolResult(arguments["text"])


class User(Interaction):
    """A user who says what a script says."""

    def __init__(self, lines):
        self.lines = list(lines)

    async def create(self, prompt):
        return None

    async def respond(self, state, messages):
        return UserTurn(self.lines.pop(0) if self.lines else None)


class Writer:
    """Samples the tokens of a script, cut into words at places of its own: mostly not as a tokenizer would."""

    def __init__(self, tokenizer, texts, cuts):
        self.tokenizer, self.texts, self.cuts = tokenizer, list(texts), cuts
        self.prompts, self.samples = [], []

    async def generate(self, prompt_ids, params, images=()):
        self.prompts.append(prompt_ids.tolist())
        text = self.texts.pop(0)
        places = sorted({min(c, len(text)) for c in self.cuts} | {0, len(text)})
        pieces = [text[a:b] for a, b in itertools.pairwise(places)]
        ids = [i for piece in pieces for i in self.tokenizer(piece, add_special_tokens=False)["input_ids"]]
        ids = [*ids, self.tokenizer.eos_token_id]
        self.samples.append(ids)
        return Sample(ids, [-0.5] * len(ids), "stop", 3)


# Words that templates look for, and that tokenizers merge with what stands beside them.
WORDS = st.sampled_from(
    [
        "\n",
        "\n\n",
        " ",
        "7",
        "é",
        "漢",
        "The answer",
        "<tool_response>",
        "</tool_response>",
        "{",
        "}",
        "'",
        '"',
        "\\n",
        "🙂",
        "user",
    ]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=6).map("".join)
SAFE = TEXTS.filter(lambda text: not text[0].isspace() and not text[-1].isspace())
THOUGHTS = st.one_of(st.just(""), SAFE.map(lambda text: f"<think>\n{text}\n</think>\n\n"))


def _call(text):
    body = json.dumps({"name": "say", "arguments": {"text": text}}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


@st.composite
def conversations(draw):
    """What the assistant writes, turn by turn, and what users say to turns without a call."""
    turns, says = [], []
    for _ in range(draw(st.integers(1, 5))):
        calls = [_call(draw(TEXTS)) for _ in range(draw(st.integers(0, 3)))]
        if not calls:
            says.append(draw(TEXTS))
        turns.append("\n".join([draw(THOUGHTS) + draw(SAFE), *calls]))
    turns.append(draw(THOUGHTS) + draw(SAFE))
    return turns, says, draw(st.lists(st.integers(1, 60), max_size=6))


@pytest.mark.parametrize("template", [*KEEP, *REWRITE])
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations(), st.booleans())
def test_tokens_are_prompt_samples_and_deltas(qwen, template, conversation, system):
    turns, says, cuts = conversation
    tokenizer = qwen(template)
    env = EpisodeContext(
        tokenizer=tokenizer,
        stop_token_ids=frozenset({tokenizer.eos_token_id}),
        tools={"say": Say()},
        parser=PARSERS.get("hermes"),
        deltas=ChatDeltas(tokenizer, [SCHEMA]),
        cfg=RolloutConfig(max_turns=20, max_user_turns=20, max_response_tokens=100_000),
        interaction=User(says),
    )
    question = [{"role": "user", "content": "Say something."}]
    prompt = Prompt(0, [{"role": "system", "content": "Be kind."}, *question] if system else question, "x", "1")
    writer = Writer(tokenizer, turns, cuts)
    episode = asyncio.run(run_episode(prompt, writer, env))
    assert (episode.error, episode.stop_reason, writer.texts) == (None, "stop", [])

    # Tokens: the prompt, and then by turns what was sampled and what the template adds for the answer to it.
    expected, mask = list(env.prompt_ids(prompt)), []
    mask = [False] * len(expected)
    answers = _answers(episode.messages[len(prompt.messages) :])
    for number, ids in enumerate(writer.samples):
        assert writer.prompts[number] == expected
        expected += ids
        mask += [True] * len(ids)
        if number < len(answers):
            delta = env.deltas.ids(answers[number])
            expected += delta
            mask += [False] * len(delta)
    assert episode.tokens.tolist() == expected
    assert episode.loss_mask.tolist() == mask

    # Text: that of the whole conversation, where the template does not rewrite history.
    text = tokenizer.decode(episode.tokens.tolist())
    whole = tokenizer.apply_chat_template(episode.messages, tools=[SCHEMA], tokenize=False)
    if template in REWRITE:
        text, whole = _without_thoughts(text), _without_thoughts(whole)
    assert whole == text + "\n"


def _answers(messages):
    """The messages between assistant turns."""
    groups, current = [], []
    for message in messages[1:]:
        if message["role"] == "assistant":
            groups.append(current)
            current = []
        else:
            current.append(message)
    return groups


def _without_thoughts(text):
    return re.sub(r"<think>.*?</think>\n*", "", text, flags=re.DOTALL)


def test_every_template_is_tested(test_data):
    there = {path.stem for path in (test_data / "tokenizer" / "templates").glob("*.jinja")}
    assert there == {*KEEP, *REWRITE}
