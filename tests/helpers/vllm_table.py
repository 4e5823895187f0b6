"""vLLM's schedulers and its reader of outputs, around a table of tokens in place of the model."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

STOP, WORDS = 7, 64
"""The token that ends an answer, and how many tokens there are."""


@dataclass
class Played:
    """What came of the requests of one scheduler."""

    outputs: dict[str, tuple[list[int], list[float], list[int], str]] = field(default_factory=dict)
    """Tokens, log-probabilities, ranks and finish reason of each request."""
    sampled: dict[str, list[int]] = field(default_factory=dict)
    """Tokens that the table gave for each."""
    scheduled: list[dict[str, Any]] = field(default_factory=list)
    """Of each step, tokens and new blocks of each request that it had."""
    handed_on: int = 0
    """Outputs of requests that went to the other process."""
    schedule_s: float = 0.0
    update_s: float = 0.0
    write_s: float = 0.0
    read_s: float = 0.0
    """Time of the scheduler's choice and its update, and of writing and reading messages."""


def config_of(folder: Path, requests: int, step_tokens: int, share: bool = False) -> Any:
    """Return vLLM's config of a model with a table for up to ``requests`` at a time, ``step_tokens`` a step. With
    ``share`` requests share full blocks of their KV cache."""
    from transformers import LlamaConfig
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

    LlamaConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        max_position_embeddings=1024, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    scheduler = SchedulerConfig(
        max_num_seqs=requests, max_num_batched_tokens=step_tokens, max_model_len=1024, is_encoder_decoder=False,
        async_scheduling=True, enable_chunked_prefill=True,
    )  # fmt: skip
    return VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=1024),
        scheduler_config=scheduler, cache_config=CacheConfig(block_size=16, enable_prefix_caching=share),
        parallel_config=ParallelConfig(), device_config=DeviceConfig("cpu"),
    )  # fmt: skip


def scheduler_of(cls: Callable[..., Any], config: Any, blocks: int) -> Any:
    """Return a scheduler with a KV cache of ``blocks`` of 16 tokens."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = blocks
    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])
    return cls(
        vllm_config=config, kv_cache_config=cache, block_size=16, log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


def play(
    scheduler: Any, prompts: list[int], longest: int, stop: bool = True, at: Callable[[int], None] = lambda step: None
) -> Played:
    """Run requests with ``prompts`` of so many tokens until the scheduler has none. ``at`` is called before each step.
    Without ``stop`` all answers have the ``longest`` length."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256) if scheduler.kv_cache_manager.enable_caching else None
    reader, played = OutputProcessor(None, log_stats=False), Played()
    got: dict[str, list[Any]] = {}
    params = SamplingParams(
        max_tokens=longest, logprobs=0, flat_logprobs=True, detokenize=False, stop_token_ids=[STOP] if stop else [],
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    for number, length in enumerate(prompts):
        request = EngineCoreRequest(
            request_id=f"r{number}", prompt_token_ids=[1] * length, mm_features=None, sampling_params=params.clone(),
            pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None,
        )  # fmt: skip
        request.external_req_id = request.request_id
        got[request.request_id] = []
        reader.add_request(request, None, queue=SimpleNamespace(put=got[request.request_id].append))
        scheduler.add_request(Request.from_engine_core_request(request, hasher))
    encoder, decoder, step = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), 0
    while scheduler.has_requests():
        at(step)
        step += 1
        began = time.perf_counter()
        scheduled = scheduler.schedule()
        played.schedule_s += time.perf_counter() - began
        blocks = {new.req_id: new.block_ids for new in scheduled.scheduled_new_reqs}
        more = scheduled.scheduled_cached_reqs
        blocks |= dict(zip(more.req_ids, more.new_block_ids, strict=True))
        counts = scheduled.num_scheduled_tokens
        played.scheduled.append({name: (count, blocks[name]) for name, count in counts.items()})
        names = list(counts)
        tokens, values = [], []
        for name in names:
            given = played.sampled.setdefault(name, [])
            prefills = scheduler.requests[name].is_prefill_chunk
            new = [] if prefills else [zlib.crc32(f"{name} {len(given)}".encode()) % WORDS]
            given += new
            tokens.append(new)
            values.append(-1 / (1 + len(given)))
        logprobs = LogprobsLists(
            np.array([[sum(new)] for new in tokens], np.int32),
            np.array(values, np.float32)[:, None],
            np.array([sum(new) % 5 for new in tokens], np.int32),
        )
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens,
            logprobs=logprobs, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        began = time.perf_counter()
        found = scheduler.update_from_output(scheduled, result)
        played.update_s += time.perf_counter() - began
        for outputs in found.values():
            assert outputs.outputs, "an empty message"
            played.handed_on += len(outputs.outputs)
            began = time.perf_counter()
            message = encoder.encode(outputs)
            written = time.perf_counter()
            read = decoder.decode(message)
            reader.process_outputs(read.outputs, read.timestamp, None)
            played.write_s += written - began
            played.read_s += time.perf_counter() - written
    for name, outputs in got.items():
        for output in outputs:
            assert name not in played.outputs, "two outputs of one request"
            [done] = output.outputs
            found = done.logprobs
            played.outputs[name] = (list(done.token_ids), list(found.logprobs), list(found.ranks), done.finish_reason)
    return played
