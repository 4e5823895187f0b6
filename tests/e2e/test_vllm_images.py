"""vLLM with images, on the CPU: it reads what trainers read, also after new weights. See scripts/test_vllm."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.config import RolloutConfig
from posttrain.core.errors import RunError, WeightSyncError
from posttrain.core.types import SamplingParams
from posttrain.data.chat import ChatDeltas
from posttrain.data.parquet import write_rows
from posttrain.engines.base import EngineSpec
from posttrain.engines.vllm import open_engine
from posttrain.models import vision
from posttrain.models.load import load_model, load_tokenizer
from posttrain.models.processors import load_vision
from posttrain.models.weights import as_stored
from posttrain.prep.datasets.shapes import Shapes
from posttrain.rl.batch import pack
from posttrain.rollout.context import EpisodeContext
from posttrain.tools.formats import PARSERS, ParsedCall, ParsedTurn, ToolParser
from posttrain.tools.zoom import Zoom
from posttrain.weight_sync.sender import WeightSender
from tests.e2e.run_commands import run_commands
from tests.helpers.scripted import run_episode
from tests.helpers.seeing import prompts, save_model, trainer_logprobs

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
pytest.importorskip("vllm")

STOP = 0
ROLLOUT = RolloutConfig(engine="vllm", kv_tokens=4096, max_prompt_tokens=256, max_response_tokens=160, max_turns=4)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def source(request, tmp_path_factory):
    return save_model(request.param, tmp_path_factory.mktemp(request.param), wide=True)


def context(source, **more):
    tokenizer = load_tokenizer(source)
    env = EpisodeContext(
        tokenizer, frozenset({STOP}), {}, PARSERS.get("hermes"), ChatDeltas(tokenizer), ROLLOUT,
        vision=load_vision(source),
    )  # fmt: skip
    return replace(env, **more)


class AlwaysZooms(ToolParser):
    """Reads a call in whatever the model writes."""

    def parse(self, text, tools=None):
        return ParsedTurn(text, [ParsedCall("zoom", {"box": [0, 0, 500, 400 + len(text) % 7 * 100]})])

    def render(self, turn):
        return turn.content


async def send(engine, version, weights, check=()):
    sender = WeightSender(weights, torch.float32, "host", bucket_bytes=1 << 18)
    try:
        while (bucket := sender.next(0)) is not None:
            await engine.load_bucket(bucket)
    finally:
        sender.close()
    return await engine.finish_update(version, check)


def moved(source, what):
    """The model with other weights in its tower, or elsewhere."""
    model = load_model(source, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if what == "all" or name.startswith(vision.TOWER) == (what == "tower"):
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return model


def of_trainer(model, *, tower=True):
    named = [(n, p.data) for n, p in model.named_parameters() if tower or not n.startswith(vision.TOWER)]
    return as_stored(model, named)


async def play(engine, env, asked):
    return await asyncio.gather(*(run_episode(prompt, engine, env) for prompt in asked))


def agree(source, env, played, model=None):
    assert [t.error for t in played] == [None] * len(played)
    batch = pack(played, env.vision)
    found = batch.rollout_logprobs[batch.loss_mask]
    torch.testing.assert_close(found, trainer_logprobs(source, batch, model), rtol=0, atol=1e-4)
    sampled = torch.cat([torch.from_numpy(t.tokens[t.loss_mask]) for t in played])
    assert not torch.isin(sampled, torch.tensor(env.vision.never_sampled)).any()
    return batch


def test_vllm_reads_images_as_trainers_do(source):
    """Prompts with no image, one and several, images that tools give, and the same images after each kind of update."""
    plain, tool = context(source), Zoom()
    zooms = context(
        source, tools={"zoom": tool}, parser=AlwaysZooms(), stop_token_ids=frozenset(range(300)),
        deltas=ChatDeltas(load_tokenizer(source), [tool.schema]),
    )  # fmt: skip

    async def run():
        engine = await open_engine(
            EngineSpec(source, "cpu", "float32", 0, ROLLOUT, list(range(300)), threads=1, frozen_tower=True)
        )
        try:
            played = await play(engine, plain, prompts() * 2)
            # vLLM expands by itself, and each request compares: here, that it was given one token for each image.
            given = [engine.images.prompt(*plain.opened(prompt)) for prompt in prompts()]
            for prompt, (ids, pictures) in zip(prompts(), await asyncio.gather(*given), strict=True):
                assert ids.count(plain.vision.image_id) == len(pictures) == len(prompt.images)
            assert agree(source, plain, played).images is not None
            zoomed = await play(engine, zooms, prompts() * 2)
            assert sum(len(t.tool_images) >= 2 for t in zoomed) >= 4
            agree(source, zooms, zoomed)
            # An engine that expands otherwise is found out.
            ids, images = plain.opened(prompts()[0])
            with pytest.raises(RunError, match=r"vLLM makes \d+ tokens of a prompt with images"):
                await engine.generate(np.append(ids[:-1], 3)[1:], SamplingParams(2), images)

            # All weights, then all but the tower's, which are frozen; an update that lacks others is refused.
            first, second = moved(source, "all"), moved(source, "language")
            texts = [list(range(4, 30)), [*range(5, 20), *[plain.vision.image_id] * 3, 9]]
            with pytest.raises(WeightSyncError, match="were not sent"):
                await send(engine, 1, of_trainer(first, tower=False))
            scores = await send(engine, 1, of_trainer(first), texts)
            for text, score in zip(texts, scores, strict=True):
                assert score == pytest.approx(scored(first, text), abs=1e-4)
            agree(source, plain, await play(engine, plain, prompts()), first)
            for (name, p), q in zip(second.named_parameters(), first.parameters(), strict=True):
                if name.startswith(vision.TOWER):
                    p.data.copy_(q.data)
            await send(engine, 2, of_trainer(second, tower=False))
            agree(source, plain, await play(engine, plain, prompts()), second)
            # A tower that is trained: features of the same images are computed again.
            third = moved(source, "tower")
            await send(engine, 3, of_trainer(third))
            agree(source, plain, await play(engine, plain, prompts()), third)
            await engine.sleep()
            await engine.wake()
            with pytest.raises(WeightSyncError, match="were not sent"):
                await send(engine, 4, of_trainer(third, tower=False))
            await send(engine, 5, of_trainer(third))
            agree(source, plain, await play(engine, plain, prompts()), third)
        finally:
            await engine.close()

    asyncio.run(run())


def test_a_run_samples_with_images_and_sends_a_frozen_tower_once(tmp_path):
    """GRPO from a built-in model, which vLLM cannot read by itself: two updates, and the check after each."""
    dataset = Shapes()
    rows = [dataset.to_rlhf(row, i, "train") for i, row in enumerate(dataset.rows("train", None, n=6))]
    write_rows(tmp_path / "prompts.parquet", rows)
    values = {
        "cluster.device": "cpu", "model.path": "builtin:tiny-vision", "data.train": "prompts.parquet", "data.val": "",
        "data.batch_size": 2, "rollout.n": 2, "rollout.engine": "vllm", "rollout.kv_tokens": 4096,
        "rollout.max_prompt_tokens": 128, "rollout.max_response_tokens": 12, "train.steps": 2, "run.name": "seen",
        "train.vision_tower": "frozen", "cluster.start_deadline_s": 600.0,
    }  # fmt: skip
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value!r}")]
    run_commands(tmp_path, [["rl", "--preset", "tiny-vision", *words]])
    steps = [json.loads(line) for line in (tmp_path / "runs" / "seen" / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in steps if "rollout_gap/mean_abs" in row]
    assert [row["step"] for row in trained] == [1, 2]
    # The engine's log-probabilities are without tokens of images, whose probability is about theirs of the vocabulary.
    assert all(row["rollout_gap/mean_abs"] < 0.01 and row["sync/check_gap"] < 1e-4 for row in trained)


def scored(model, ids):
    model.set_attn_implementation(vision.attention_of(model.config, "eager"))
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    model.set_attn_implementation(vision.attention_of(model.config, "posttrain"))
    return [0.0, *rows[:-1].gather(1, torch.tensor(ids)[1:, None]).flatten().tolist()]
