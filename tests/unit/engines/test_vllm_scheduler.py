"""``ChunkScheduler`` beside vLLM's own, with vLLM's reader of outputs: the model is a table of tokens."""

import zlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.vllm
REQUESTS, STOP, LONGEST = 12, 7, 150


@dataclass
class Played:
    """What came of the requests of one scheduler."""

    outputs: dict = field(default_factory=dict)
    """Tokens, log-probabilities, ranks and finish reason of each."""
    sampled: dict = field(default_factory=dict)
    """Tokens that the model gave of each."""
    handed_on: int = 0
    """Outputs of requests that went to the other process."""
    held: dict = field(default_factory=dict)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    from transformers import LlamaConfig
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig

    folder = tmp_path_factory.mktemp("model")
    LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        max_position_embeddings=1024, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=1024)
    requests = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=1024, is_encoder_decoder=False, async_scheduling=True,
        enable_chunked_prefill=True,
    )  # fmt: skip
    cache = CacheConfig(block_size=16, enable_prefix_caching=False)
    cache.num_gpu_blocks = 1000
    return VllmConfig(
        model_config=model, scheduler_config=requests, cache_config=cache, parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip


def scheduler_of(cls, config, blocks=1000):
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    layer = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)])
    return cls(
        vllm_config=config, kv_cache_config=cache, block_size=16, log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


def play(scheduler, at=lambda step, scheduler: None):
    """Run requests of different prompts until the scheduler has none; ``at`` is called before each step."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    reader, played, got = OutputProcessor(None, log_stats=False), Played(), {}
    params = SamplingParams(
        max_tokens=LONGEST, logprobs=0, flat_logprobs=True, detokenize=False, stop_token_ids=[STOP],
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    for number in range(REQUESTS):
        request = EngineCoreRequest(
            request_id=f"r{number}", prompt_token_ids=list(range(10 + 7 * number)), mm_features=None,
            sampling_params=params.clone(), pooling_params=None, arrival_time=0.0, lora_request=None, cache_salt=None,
            data_parallel_rank=None,
        )  # fmt: skip
        request.external_req_id = request.request_id
        got[request.request_id] = []
        reader.add_request(request, None, queue=SimpleNamespace(put=got[request.request_id].append))
        scheduler.add_request(Request.from_engine_core_request(request, None))
    encoder, decoder, step = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), 0
    while scheduler.has_requests():
        at(step, scheduler)
        step += 1
        scheduled = scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        tokens, values = [], []
        for name in names:
            request = scheduler.requests[name]
            given = played.sampled.setdefault(name, [])
            new = [] if request.is_prefill_chunk else [zlib.crc32(f"{name} {len(given)}".encode()) % 64]
            given += new
            tokens.append(new)
            values.append(float(np.float32(-1 / (1 + len(given)))))
        logprobs = LogprobsLists(
            np.array([[sum(t)] for t in tokens], np.int32),
            np.array(values, np.float32)[:, None],
            np.array([sum(t) % 5 for t in tokens], np.int32),
        )
        result = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens,
            logprobs=logprobs, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        for outputs in scheduler.update_from_output(scheduled, result).values():
            assert outputs.outputs, "an empty message"
            played.handed_on += len(outputs.outputs)
            read = decoder.decode(encoder.encode(outputs))
            reader.process_outputs(read.outputs, read.timestamp, None)
    for name, outputs in got.items():
        [output] = outputs or [None]
        if output is not None:
            [done] = output.outputs
            found = done.logprobs
            played.outputs[name] = (list(done.token_ids), list(found.logprobs), list(found.ranks), done.finish_reason)
    return played


def test_the_outputs_are_those_of_vllms_scheduler(config):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from posttrain.engines.vllm_scheduler import CHUNK, ChunkScheduler

    theirs, ours = play(scheduler_of(AsyncScheduler, config)), play(scheduler_of(ChunkScheduler, config))
    assert ours.outputs == theirs.outputs
    lengths = [len(tokens) for tokens, *_ in ours.outputs.values()]
    assert min(lengths) < CHUNK < 2 * CHUNK < max(lengths)
    assert {reason for *_, reason in ours.outputs.values()} == {"stop", "length"}
    assert theirs.handed_on == sum(lengths)
    assert ours.handed_on == sum(-(-length // CHUNK) for length in lengths)


def test_requests_that_were_preempted_have_all_their_tokens(config):
    from posttrain.engines.vllm_scheduler import ChunkScheduler

    plenty = play(scheduler_of(ChunkScheduler, config))
    preempted = set()

    def watch(step, scheduler):
        preempted.update(r.request_id for r in scheduler.requests.values() if r.num_preemptions)

    few = play(scheduler_of(ChunkScheduler, config, blocks=40), watch)
    assert preempted
    assert few.outputs == plenty.outputs


def test_a_pause_returns_all_that_was_sampled(config):
    from vllm.v1.core.sched.interface import PauseState

    from posttrain.engines.vllm_scheduler import CHUNK, ChunkScheduler

    def pause(step, scheduler):
        if step == CHUNK + 20:
            scheduler.set_pause_state(PauseState.PAUSED_NEW)

    scheduler = scheduler_of(ChunkScheduler, config)
    played = play(scheduler, pause)
    cut = {name for name, (*_, reason) in played.outputs.items() if reason == "abort"}
    assert cut
    assert any(len(played.outputs[name][0]) % CHUNK for name in cut)
    assert played.outputs.keys() == {f"r{number}" for number in range(REQUESTS)}
    for name, (tokens, logprobs, _, _) in played.outputs.items():
        assert tokens == played.sampled.get(name, [])
        assert len(logprobs) == len(tokens)
    assert not scheduler._held


def test_a_request_that_is_given_up_leaves_nothing(config):
    from vllm.v1.request import RequestStatus

    from posttrain.engines.vllm_scheduler import ChunkScheduler

    def give_up(step, scheduler):
        if step == 5:
            assert "r0" in scheduler._held
            scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
            assert "r0" not in scheduler._held
            assert scheduler._held

    scheduler = scheduler_of(ChunkScheduler, config)
    played = play(scheduler, give_up)
    assert played.outputs.keys() == {f"r{number}" for number in range(1, REQUESTS)}
    assert not scheduler._held


def test_experts_and_what_belongs_to_the_prompt_are_kept():
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from posttrain.engines.vllm_scheduler import joined

    prompt, token = np.arange(12).reshape(3, 2, 2), np.arange(4).reshape(1, 2, 2)
    first = EngineCoreOutput("a", [1], prefill_stats="stats", new_prompt_logprobs_tensors="of the prompt")
    first.routed_experts = prompt
    last = EngineCoreOutput("a", [2], finish_reason=FinishReason.STOP, stop_reason=2, routed_experts=token)
    whole = joined([first, last])
    assert (whole.new_token_ids, whole.finish_reason, whole.stop_reason) == ([1, 2], FinishReason.STOP, 2)
    assert (whole.prefill_stats, whole.new_prompt_logprobs_tensors) == ("stats", "of the prompt")
    assert whole.routed_experts.tolist() == [*prompt.tolist(), *token.tolist()]
    assert whole.new_logprobs is None
