"""Tiny random models that see, one of each family, and conversations with pictures for them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from PIL import Image
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast

from posttrain.config import TrainConfig
from posttrain.core.types import Message, Prompt, ToolCall
from posttrain.data.images import PlacedImage
from posttrain.data.pack import PackedBatch, Placement
from posttrain.data.parquet import Conversation
from posttrain.data.prefetch import Rendered, Row
from posttrain.data.samples import RenderConversations
from posttrain.models.attention_kernels import choose
from posttrain.models.builtin import builtin_processor, builtin_sizes, builtin_tokenizer
from posttrain.models.gather import whole
from posttrain.models.load import ModelSource, load_model, load_tokenizer
from posttrain.models.processors import load_vision
from posttrain.models.vision import last_hidden
from posttrain.sft.command import pack
from posttrain.tools.zoom import SCHEMA
from posttrain.train.microbatch import MicroBatch
from posttrain.train.model import PackedLM
from posttrain.train.spec import LossSpec, WorkerSpec
from posttrain.train.worker import TrainWorker

SDPA = choose("sdpa", torch.device("cpu"), torch.float32)
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
TILED = ("smolvlm", "idefics3")
"""Families that read images in tiles."""
TILE_TOKENS = (
    "<fake_token_around_image>", "<image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As SmolVLM's releases have it, but for the end of a turn. It shows texts as parts of lists only, and no tools."""


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Return the tiny tokenizer with the image tokens of a family, and a template that shows images and tools."""
    from transformers import AddedToken

    if family not in TILED:
        return builtin_tokenizer("tiny-vision")
    tokenizer, template = builtin_tokenizer("tiny"), builtin_tokenizer("tiny-vision").chat_template
    added = [AddedToken(token, special=True, normalized=False) for token in TILE_TOKENS]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")
    assert "vision" not in tokenizer.chat_template
    return tokenizer


def processor_of(family: str) -> dict[str, Any]:
    """Return the settings of a tiny model's image processor."""
    if family not in TILED:
        return builtin_processor("tiny-vision")
    return {"image_processor_type": "Any", "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 36}}


def config_of(family: str, *, wide: bool = False) -> Any:
    """Return the config of a tiny model of a family, with the tokens of the built-in one; ``wide``: with heads as large
    as vLLM needs them on a CPU."""
    from transformers import AutoConfig

    if family in TILED:
        tokenizer = tokenizer_of(family)
        text = {k: v for k, v in builtin_sizes("tiny").items() if k not in ("model_type", "tie_word_embeddings")}
        text |= {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        text |= {"vocab_size": -(-len(tokenizer) // 64) * 64, "bos_token_id": None, "eos_token_id": 0}
        seeing = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
        return AutoConfig.for_model(
            family,
            text_config={**text, "pad_token_id": 0},
            vision_config={**seeing, "image_size": 36, "patch_size": 8},  # four pixels of a side are left over
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=2,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    sizes = builtin_sizes("tiny-vision")
    sizes["text_config"] |= {"hidden_size": 32, "intermediate_size": 48, "bos_token_id": None, "eos_token_id": 0}
    sizes["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 2]
    sizes["vision_config"] |= {"hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 32}
    if wide:
        sizes["text_config"] |= {"hidden_size": 128}
        sizes["text_config"]["rope_parameters"]["mrope_section"] = [4, 6, 6]
        sizes["vision_config"] |= {"out_hidden_size": 128}
    if family == "qwen3_vl":
        sizes["model_type"] = family
        sizes["text_config"] |= {"model_type": "qwen3_vl_text", "head_dim": 32 if wide else 8}
        sizes["text_config"]["rope_parameters"]["mrope_interleaved"] = True
        sizes["vision_config"] |= {
            "model_type": "qwen3_vl_vision", "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
        }  # fmt: skip
        for key in ("window_size", "fullatt_block_indexes"):
            del sizes["vision_config"][key]
    return AutoConfig.for_model(**sizes)


def save_model(family: str, folder: Path, *, wide: bool = False) -> ModelSource:
    """Write a random model of a family into ``folder``, with its tokenizer and its image processor's settings."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config_of(family, wide=wide), attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # far from uniform, so that nothing wrong can hide
        spread = 0.15 if parameter.ndim > 1 else 0.05
        parameter.data += torch.randn(parameter.shape, generator=generator) * spread
    model.save_pretrained(folder)
    save_text_side(family, folder)
    return ModelSource(str(folder))


def save_text_side(family: str, folder: Path) -> None:
    """Write all of a model of a family but its weights."""
    if not (folder / "config.json").exists():
        config_of(family).save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_of(family)))


def text_source(family: str, folder: Path) -> ModelSource:
    """Return a model of a family without weights, written into ``folder``."""
    save_text_side(family, folder)
    return ModelSource(str(folder))


def picture(height: int, width: int, seed: int = 0) -> bytes:
    """Return a PNG of noise."""
    return png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG of [height, width, 3] pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def conversation(text: str, *images: bytes, answer: str = "It is 7 and 3.") -> Conversation:
    """Return a question with images, and its answer."""
    asked: Message = {"role": "user", "content": text}
    return Conversation([asked, {"role": "assistant", "content": answer}], images=[{"bytes": data} for data in images])


ZOOMED: ToolCall = {"type": "function", "function": {"name": "zoom", "arguments": {"box": [0, 0, 500, 500]}}}
MIXED = (
    conversation("<image>How many?", picture(48, 48)),
    conversation("No picture. How many?", answer="None at all, 12."),
    conversation(
        "One <image> and <image>: which? And <image>", picture(40, 90, 1), picture(32, 32, 2), picture(70, 33, 3)
    ),
    Conversation(
        [
            {"role": "user", "content": "<image>\nHow many?"},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "And here?<image>"},
            {"role": "assistant", "content": "It is 6."},
        ],
        images=[{"bytes": picture(64, 64, 4)}, {"bytes": picture(33, 64, 5)}],
    ),
    conversation("Hi", answer="Hello."),
    Conversation(
        [
            {"role": "user", "content": "<image>Which digit?"},
            {"role": "assistant", "content": "", "tool_calls": [ZOOMED]},
            {"role": "tool", "name": "zoom", "content": "here: <image>"},
            {"role": "assistant", "content": "A 7."},
        ],
        [SCHEMA],
        images=[{"bytes": picture(40, 40, 6)}, {"bytes": picture(32, 48, 7)}],
    ),
)
"""Rows with no image, one, and several, of different sizes; in the last a tool gives one."""


def rendered(source: ModelSource, conversations: Sequence[Conversation] = MIXED, **how: Any) -> list[Rendered]:
    """Return conversations as `sft` renders them."""
    vision = load_vision(source)
    render = RenderConversations(load_tokenizer(source), 4096, "error", vision=vision, **how)
    return render.render(conversations, [Row("f", i, {}) for i in range(len(conversations))])


def as_transformers_reads(source: ModelSource, images: Sequence[PlacedImage]) -> dict[str, torch.Tensor]:
    """Return pixels, and grids or masks of pixels, as transformers' own processor gives them."""
    vision = load_vision(source)
    assert vision is not None
    if not images:
        return {}
    found = vision.processor([image.raw.decode() for image in images], return_tensors="pt")
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def prompts() -> list[Prompt]:
    """Of the mixed rows the questions, and one that differs from another in its image alone."""
    asked = [Prompt(i, chat.messages[:1], "", "", images=chat.images) for i, chat in enumerate(MIXED)]
    asked = [replace(p, images=p.images[: p.messages[0]["content"].count("<image>")]) for p in asked]
    return [*asked, replace(asked[0], index=len(asked), images=[{"bytes": picture(48, 48, 99)}])]


def trainer_logprobs(source: ModelSource, batch: PackedBatch, model: Any = None) -> torch.Tensor:
    """Return log-probabilities of sampled tokens under the trainer's model, or another, without tokens of images."""
    reader = load_vision(source)
    assert reader is not None
    micro = MicroBatch.build(batch, torch.device("cpu"), SDPA, vision=reader)
    model = load_model(source, dtype=torch.float32) if model is None else model
    with torch.no_grad():
        hidden = last_hidden(model, micro.input_ids, micro.position_ids, micro.ragged, micro.images)[micro.rows]
        logits = model.get_output_embeddings()(hidden)
    logits[:, reader.never_sampled] = -torch.inf
    return logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]


# ---------------------------------------------------------------------- two workers

CASES: dict[str, dict[str, Any]] = {
    "trained": {"vision_tower": "trained"},
    "frozen": {},
    "summed once a step": {"vision_tower": "trained", "reduce_gradients": "step", "gather_weights": "step"},
    "shared sequences": {"vision_tower": "trained", "sequence_parallel": 2},
    "no image": {"vision_tower": "trained"},
}
"""What two workers do, and the `train` section for it."""
PARTS = {
    "summed once a step": [[[0], [1]], [[2, 3], [4, 5]]],
    "shared sequences": [[[0, 1, 2, 3, 4, 5]]],
}
"""Sequences by worker and micro-batch."""
ONE_SEES = [[[1, 4], [0]], [[2, 3, 5], []]]
"""In the first micro-batch one worker has images and the other has none; in the second the other way round."""


def packed_batch(source: ModelSource, case: str) -> tuple[PackedBatch, list[list[PackedBatch]]]:
    """Return the batch of a case, and each worker's micro-batches."""
    batch = pack(rendered(source), load_vision(source))
    batch.loss_weights = batch.loss_mask.float()
    if case == "no image":
        batch = batch.select([1, 4])
        return batch, Placement([[[0]], [[1]]]).shards(batch)
    return batch, Placement(PARTS.get(case, ONE_SEES)).shards(batch)


def gradients(lm: PackedLM, micro: MicroBatch) -> dict[str, torch.Tensor]:
    """Return the gradients of minus the sum of log-probabilities, and under "" these."""
    logprobs = lm(
        micro.input_ids, micro.position_ids, micro.rows, micro.targets, micro.ragged, 1.0, images=micro.images
    )[0]
    (-logprobs.sum()).backward()
    grads = {name: p.grad for name, p in lm.model.named_parameters() if p.grad is not None}
    return grads | {"": logprobs.detach()}


class Doubled(TorchFunctionMode):
    """Computes in float64 what models cast to float32: norms, rotary embeddings."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        named = {key: torch.float64 if v is torch.float32 else v for key, v in (kwargs or {}).items()}
        return func(*args, **named)


def exact_gradients(source: ModelSource, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Return what ``gradients`` does, all of it in float64. The output head, whose code adds up in float32, is replaced
    by torch's own functions."""
    model = load_model(source, dtype=torch.float32).double()
    micro = MicroBatch.build(batch, torch.device("cpu"), SDPA, vision=load_vision(source))
    with Doubled():
        hidden = last_hidden(model, micro.input_ids, micro.position_ids, micro.ragged, micro.images)[micro.rows]
        every = model.get_output_embeddings()(hidden).log_softmax(-1)
        logprobs = every.gather(1, micro.targets[:, None])[:, 0]
    (-logprobs.sum()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert {grad.dtype for grad in grads.values()} == {torch.float64}
    return grads | {"": logprobs.detach()}


def work(rank: int, jobs: Sequence[tuple[str, str, str, int]]) -> None:
    """Body of one of two workers: compute each (model, case, file to write, port)."""
    for folder, case, file, port in jobs:
        source, train = ModelSource(folder), TrainConfig.model_validate(CASES[case])
        worker = TrainWorker(WorkerSpec(source, "cpu", "float32", 0, 1.0, train, threads=1), rank, 2)
        worker.setup("127.0.0.1", port, 60.0)
        shards = packed_batch(source, case)[1]
        shard = shards[0 if train.sequence_parallel > 1 else rank]
        columns = worker.logprobs(shard)
        for number, micro in enumerate(shard):
            if train.reduce_gradients == "step":
                cast(FSDPModule, worker.lm).set_requires_gradient_sync(number == len(shard) - 1)
            worker._backward(worker._micro_batch(micro), LossSpec())
        grads = {name: whole(p.grad).contiguous() for name, p in worker.parameters.items() if p.grad is not None}
        said = torch.cat([column[micro.loss_mask] for column, micro in zip(columns, shard, strict=True)])
        save_file(grads | {"": said}, f"{file}.{rank}")
        dist.barrier()
        dist.destroy_process_group()
