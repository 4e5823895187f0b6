"""vLLM's scheduler, which hands on the tokens of a request some at a time and asks for blocks of its KV cache when it
needs some.

vLLM's process with the model sends every token to the process that asked for it as soon as it is sampled, with three
arrays about its log-probability, also where nobody reads an answer before its end. Reading these takes that process
40 to 50 us a token (vLLM 0.24): more than a step of a 7B model takes where 1,024 requests run. In chunks it takes 6
(scripts/bench_vllm_outputs.py). With that, what bounds small models is the scheduler's own work in the process with the
model, a quarter of which asked for blocks at each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus

from posttrain.core.stacks import write_stacks_at_signal

CHUNK = 64
"""Steps of a request that are handed on together."""


class ChunkScheduler(AsyncScheduler):  # type: ignore[misc]  # of unknown type: mypy runs without vLLM
    """Hands on what ``CHUNK`` steps of a request sampled, or fewer at its end. Outputs are the same, later.

    A pause of mode "wait" ends all requests at the next step, as aborted, with all their tokens: one of mode "abort"
    drops what was not handed on. An answer that is cut at the last chunk would be sampled anew from there unless it
    had ended since, which would make short answers more likely.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        write_stacks_at_signal()  # of the process with the scheduler
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        if [type(spec) for spec in specs] == [FullAttentionSpec]:
            self.kv_cache_manager.allocate_slots = _within_blocks(self.kv_cache_manager, specs[0].block_size)
        self._held: dict[str, list[EngineCoreOutput]] = {}
        """Outputs of each request since its last chunk."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        found: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in found.values():
            outputs.outputs = [chunk for output in outputs.outputs if (chunk := self._chunk(output)) is not None]
        if self.pause_state == PauseState.PAUSED_NEW:
            self._end_all(found)
        return {
            client: outputs
            for client, outputs in found.items()
            if outputs.outputs or outputs.finished_requests or outputs.scheduler_stats
        }

    def _chunk(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        held = self._held.setdefault(output.request_id, [])
        held.append(output)
        if output.finish_reason is None and len(held) < CHUNK:
            if output.routed_experts is not None:  # of a synchronous step: a view of what the next one overwrites
                output.routed_experts = output.routed_experts.copy()
            return None
        del self._held[output.request_id]
        return joined(held)

    def _end_all(self, found: dict[int, EngineCoreOutputs]) -> None:
        """Abort all requests, and add to ``found`` what was held of them."""
        unfinished = [request for request in self.requests.values() if not request.is_finished()]
        for request in unfinished:
            end = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
            outputs = found.setdefault(request.client_index, EngineCoreOutputs(outputs=[])).outputs
            outputs.append(joined([*self._held.get(request.request_id, ()), end]))
        self.finish_requests([request.request_id for request in unfinished], RequestStatus.FINISHED_ABORTED)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        ended = super().finish_requests(request_ids, finished_status)
        goes_on = {request.request_id for request in self.requests.values() if not request.is_finished()}
        self._held = {request: held for request, held in self._held.items() if request in goes_on}
        return ended


def _within_blocks(manager: Any, size: int) -> Callable[..., Any]:
    """Return ``manager.allocate_slots`` for blocks of ``size`` tokens, but one that says at once that a decoding step
    amid a block needs none: a step of 1,024 requests asks it 1,024 times. vLLM's own notes which blocks are full, too,
    and does so at the borders of blocks as before."""
    allocate, none = manager.allocate_slots, manager.empty_kv_cache_blocks

    def allocate_slots(request: Request, tokens: int, *args: Any, num_lookahead_tokens: int = 0, **more: Any) -> Any:
        amid = request.num_computed_tokens % size > 0
        if tokens == 1 and amid and not (args or more or num_lookahead_tokens):  # vLLM gives more for a prefill
            return none
        return allocate(request, tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **more)

    return allocate_slots


def joined(parts: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last of one request's outputs, with the tokens of all. What comes with a prompt is in the first."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return last
    logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    experts = [part.routed_experts for part in parts if part.routed_experts is not None]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    if logprobs:
        ids, values, ranks = (np.concatenate([each[i] for each in logprobs]) for i in range(3))
        last.new_logprobs = LogprobsLists(ids, values, ranks)
    last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
    last.prefill_stats = first.prefill_stats
    last.routed_experts = np.concatenate(experts) if experts else None
    return last
