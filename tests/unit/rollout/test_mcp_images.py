"""Images of MCP servers, from a real server to the tokens that the model reads."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.config import RolloutConfig
from posttrain.core.types import Prompt, Sample
from posttrain.data.chat import ChatDeltas
from posttrain.models.builtin import builtin_tokenizer
from posttrain.models.load import ModelSource
from posttrain.models.processors import load_vision
from posttrain.rl.batch import pack
from posttrain.rollout.context import EpisodeContext
from posttrain.tools.formats import PARSERS
from posttrain.tools.mcp import mcp_tools
from tests.helpers.scripted import run_episode
from tests.helpers.seeing import SMOLVLM_TEMPLATE, load_tokenizer, picture, save_text_side
from tests.unit.data.test_images import BAD

pytest.importorskip("mcp", reason="the optional package mcp is not installed")

SERVER = (sys.executable, str(Path(__file__).parents[2] / "helpers" / "mcp_server.py"))


@pytest.fixture(scope="module")
def look():
    (tool,) = mcp_tools(command=SERVER, tools=("look",), start_deadline_s=60.0)
    return tool


class Scripted:
    """Samples one text after another."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts, self.asked = tokenizer, list(texts), []

    async def generate(self, prompt_ids, params, images=()):
        self.asked.append((prompt_ids.tolist(), tuple(images)))
        pieces = self.texts.pop(0)
        ids = [*self.tokenizer(pieces, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        return Sample(ids, [-0.5] * len(ids), "stop", 0)


def play(tool, files, source=None, template=None, **more):
    """Play episodes, one for each file, whose model looks at it; over one connection."""
    source = source or ModelSource("builtin:tiny-vision")
    tokenizer = load_tokenizer(source)
    if template is not None:
        tokenizer.chat_template = template
    env = EpisodeContext(
        tokenizer=tokenizer,
        stop_token_ids=frozenset({tokenizer.eos_token_id}),
        tools={"look": tool},
        parser=PARSERS.get("hermes"),
        deltas=ChatDeltas(tokenizer) if template else ChatDeltas(tokenizer, [tool.schema]),
        cfg=RolloutConfig(max_turns=4, max_response_tokens=4096),
        vision=load_vision(source),
    )
    env = replace(env, **more)

    async def run():
        played = []
        try:
            for file in files:
                call = json.dumps({"name": "look", "arguments": {"file": str(file)}})
                writer = Scripted(tokenizer, [f"<tool_call>\n{call}\n</tool_call>", "It is 5."])
                prompt = Prompt(0, [{"role": "user", "content": "Look."}], "", "")
                played.append((await run_episode(prompt, writer, env), writer.asked))
        finally:
            await tool.close()
        return played

    return asyncio.run(run()), env


def test_an_image_of_a_server_is_read_in_the_next_turn(look, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(picture(40, 64))
    [(episode, asked)], env = play(look, [file])
    assert (episode.error, episode.tool_errors) == (None, [])
    assert episode.messages[-2]["content"] == "before < image>\n<image>\nafter"
    assert episode.tool_images == [{"bytes": picture(40, 64)}]
    _, [seen] = asked[1]
    assert seen.raw.data == picture(40, 64)
    batch = pack([episode], env.vision)
    assert batch.images.grids.tolist() == [list(seen.grid)]
    assert int(batch.image_tokens.sum()) == seen.tokens


def test_bad_images_of_a_server_are_errors_that_the_model_reads(look, tmp_path):
    """Each kind; the connection and the run go on."""
    files = [tmp_path / f"{number}.png" for number in range(len(BAD) + 1)]
    for file, (data, _) in zip(files, BAD.values(), strict=False):
        file.write_bytes(data)
    files[-1].write_bytes(picture(48, 48))
    played, _ = play(look, files)
    for (episode, asked), name in zip(played, BAD, strict=False):
        assert episode.error is None, name
        [error] = episode.tool_errors
        assert error.startswith("error: look failed: "), name
        assert (episode.tool_images, asked[1][1], episode.turns) == ([], (), 2), name
    assert len(played[-1][0].tool_images) == 1


def test_a_model_that_does_not_see_reads_that_there_is_an_image(look, tmp_path):
    """It goes on with a server's words, as before with what is no text: a model of text, and a template that shows no
    images in what tools say."""
    file = tmp_path / "a.png"
    file.write_bytes(picture(40, 64))
    [(episode, _)], _ = play(look, [file], ModelSource("builtin:tiny"))
    assert (episode.error, episode.tool_errors, episode.tool_images) == (None, [], [])
    assert episode.messages[-2]["content"] == "before < image>\n[image]\nafter"
    save_text_side("smolvlm", tmp_path / "m")
    hides = SMOLVLM_TEMPLATE.replace("line['type'] == 'image'", "line['type'] == 'image' and message['role'] == 'user'")
    [(episode, _)], _ = play(look, [file], ModelSource(str(tmp_path / "m")), hides)
    assert (episode.error, episode.tool_errors, episode.tool_images) == (None, [], [])
    assert "[image]" in builtin_tokenizer("tiny").decode(episode.tokens.tolist())
