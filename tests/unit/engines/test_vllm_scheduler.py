"""``ChunkScheduler`` beside vLLM's own, with vLLM's reader of outputs: the model is a table of tokens."""

import numpy as np
import pytest

from tests.helpers.vllm_table import config_of, play, scheduler_of

pytestmark = pytest.mark.vllm
PROMPTS, LONGEST, BLOCKS = [10 + 7 * number for number in range(12)], 150, 1000


@pytest.fixture(scope="module", params=[True, False], ids=["asynchronous", "synchronous"])
def config(request, tmp_path_factory):
    """vLLM schedules a step while the one before runs, but not on a CPU."""
    config = config_of(tmp_path_factory.mktemp("model"), requests=8, step_tokens=64)
    config.scheduler_config.async_scheduling = request.param
    return config


def test_the_outputs_are_those_of_vllms_scheduler(config):
    from posttrain.engines.vllm_scheduler import CHUNK, ChunkScheduler

    vllms = config.scheduler_config.get_scheduler_cls()
    theirs, ours = (play(scheduler_of(cls, config, BLOCKS), PROMPTS, LONGEST) for cls in (vllms, ChunkScheduler))
    assert ours.outputs == theirs.outputs
    lengths = [len(tokens) for tokens, *_ in ours.outputs.values()]
    assert min(lengths) < CHUNK < 2 * CHUNK < max(lengths)
    assert {reason for *_, reason in ours.outputs.values()} == {"stop", "length"}
    assert theirs.handed_on == sum(lengths)
    assert ours.handed_on == sum(-(-length // CHUNK) for length in lengths)


def test_requests_that_were_preempted_have_all_their_tokens(config):
    from posttrain.engines.vllm_scheduler import ChunkScheduler

    plenty = play(scheduler_of(ChunkScheduler, config, BLOCKS), PROMPTS, LONGEST)
    few = scheduler_of(ChunkScheduler, config, 40)
    preempted = set()

    def watch(step):
        preempted.update(request.request_id for request in few.requests.values() if request.num_preemptions)

    assert play(few, PROMPTS, LONGEST, at=watch).outputs == plenty.outputs
    assert preempted


@pytest.mark.parametrize("blocks", [BLOCKS, 40], ids=["plenty", "few"])
def test_each_step_has_the_tokens_and_blocks_that_vllms_scheduler_gives_it(blocks, config, tmp_path):
    from posttrain.engines.vllm_scheduler import ChunkScheduler

    sharing = config_of(tmp_path, requests=8, step_tokens=64, share=True)
    sharing.scheduler_config.async_scheduling = config.scheduler_config.async_scheduling
    played, asked = [], []
    for cls in (config.scheduler_config.get_scheduler_cls(), ChunkScheduler):
        scheduler = scheduler_of(cls, sharing, blocks)
        coordinator, calls = scheduler.kv_cache_manager.coordinator, []

        def counted(*args, inner=coordinator.get_num_blocks_to_allocate, calls=calls, **kwargs):
            calls.append(None)
            return inner(*args, **kwargs)

        coordinator.get_num_blocks_to_allocate = counted
        played.append(play(scheduler, PROMPTS, LONGEST))
        asked.append(len(calls))
    theirs, ours = played
    assert ours.scheduled == theirs.scheduled
    first = {name: count for step in reversed(ours.scheduled) for name, (count, _) in step.items()}
    assert first["r11"] < PROMPTS[11]  # its prompt begins with full blocks of others
    assert asked[1] < asked[0] / 4


def test_a_pause_returns_all_that_was_sampled(config):
    from vllm.v1.core.sched.interface import PauseState

    from posttrain.engines.vllm_scheduler import CHUNK, ChunkScheduler

    scheduler = scheduler_of(ChunkScheduler, config, BLOCKS)

    def pause(step):
        if step == CHUNK + 20:
            scheduler.set_pause_state(PauseState.PAUSED_NEW)

    played = play(scheduler, PROMPTS, LONGEST, at=pause)
    cut = {name for name, (*_, reason) in played.outputs.items() if reason == "abort"}
    assert any(len(played.outputs[name][0]) % CHUNK for name in cut)
    assert len(played.outputs) == len(PROMPTS)
    for name, (tokens, logprobs, _, _) in played.outputs.items():
        assert tokens == played.sampled.get(name, [])
        assert len(logprobs) == len(tokens)
    assert not scheduler._held


def test_a_request_that_is_given_up_leaves_nothing(config):
    from vllm.v1.request import RequestStatus

    from posttrain.engines.vllm_scheduler import ChunkScheduler

    scheduler = scheduler_of(ChunkScheduler, config, BLOCKS)

    def give_up(step):
        if step == 5:
            assert "r0" in scheduler._held
            scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
            assert "r0" not in scheduler._held
            assert scheduler._held

    played = play(scheduler, PROMPTS, LONGEST, at=give_up)
    assert played.outputs.keys() == {f"r{number}" for number in range(1, len(PROMPTS))}
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


def test_experts_of_a_step_outlive_the_buffer_that_they_came_in(config):
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from posttrain.engines.vllm_scheduler import ChunkScheduler

    scheduler, buffer = scheduler_of(ChunkScheduler, config, BLOCKS), np.zeros((1, 2, 2), np.int16)
    for step in range(5):
        buffer[:] = step
        reason = FinishReason.LENGTH if step == 4 else None
        chunk = scheduler._chunk(EngineCoreOutput("a", [step], finish_reason=reason, routed_experts=buffer[:]))
        assert (chunk is None) == (step < 4)
    assert chunk.new_token_ids == chunk.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4]
