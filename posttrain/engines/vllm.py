"""vLLM as an ``Engine``."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.core.errors import RunError, WeightSyncError, WorkerError
from posttrain.core.types import FinishReason, Ids, Sample, SamplingParams
from posttrain.data.images import PlacedImage
from posttrain.engines.base import EngineSpec
from posttrain.engines.choice import concurrent_requests, vllm_executor
from posttrain.engines.external import (
    arguments,
    cache_bytes,
    cache_tokens,
    context_length,
    fp8_of,
    frozen,
    load_initial_weights,
    readable_model,
    routing_format,
    shapes,
    starts_empty,
    stored_routing,
    takes_deep_gemm,
)
from posttrain.engines.external_images import EngineImages
from posttrain.models.fp8_layers import BLOCKS
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.guard import UpdateGuard

_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # The scheduler looks for a worker's answer that it was not told of as often as it would log that it waits.
    "VLLM_RINGBUFFER_WARNING_INTERVAL": "5",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the run's other processes use these cores too
    # DeepGEMM's kernels are compiled as sizes come. Where it is installed vLLM spends minutes at its start on all that
    # might come, even if it computes by others.
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    # Scales stay as they are sent. Else vLLM would round those that it has at its start, and not those of updates.
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
}
"""Variables that vLLM reads when it is imported. Those that the user has set stay."""
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

_GRAPHS_TO, _GRAPH_STEP = 512, 16
"""The largest batch that vLLM captures a CUDA graph of by itself, and the step between large ones: it takes the next
smaller multiple of it as the largest."""

_DEEP_GEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Where vLLM looks for DeepGEMM."""

_SPARE = 1
"""Tokens of the context beyond the longest request: vLLM refuses a prompt, also one to score, that leaves none to
sample."""


async def open_engine(spec: EngineSpec) -> VLLMEngine:
    """Start vLLM with the weights of ``spec.source`` as version 0. Raises ``RunError``, ``ModelError``."""
    if spec.rollout.batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if spec.threads:
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    engine = VLLMEngine(spec)
    await load_initial_weights(engine, spec)
    gc.collect()
    gc.freeze()  # else Python looks through all that was imported, many times a second: 35 of 50 us of a token's answer
    return engine


def memory_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments for the memory of weights and KV cache. vLLM measures what the cache may take while others
    start on the GPU: engines that share one are given its size."""
    if spec.device == "cpu":
        # No chunked prefill: after a chunk that is not the last, vLLM rewinds the request's own generator, and a CPU's
        # generator cannot be rewound.
        return {
            "kv_cache_memory_bytes": cache_bytes(spec),
            "enforce_eager": True,
            "enable_chunked_prefill": False,
        }
    size = {"kv_cache_memory_bytes": cache_bytes(spec)} if spec.shares_gpu else {}
    return size | {
        "gpu_memory_utilization": spec.rollout.memory_fraction,
        "enable_sleep_mode": spec.rollout.sleep,
    }


def graph_arguments(spec: EngineSpec, requests: int) -> dict[str, Any]:
    """Return the size of the largest CUDA graph where an engine may run more ``requests`` than vLLM has graphs for: a
    larger batch runs without one. Empty where the user says which graphs there are."""
    options = spec.rollout.engine_options
    compilation = options.get("compilation_config")
    given = options.keys() | (compilation.keys() if isinstance(compilation, dict) else ())
    chosen = given & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    if spec.device == "cpu" or chosen or requests <= _GRAPHS_TO:
        return {}
    return {"max_cudagraph_capture_size": -(-requests // _GRAPH_STEP) * _GRAPH_STEP}


class VLLMEngine:
    """An ``Engine`` over one ``AsyncLLM``, which adds processes of its own. Create it in the process whose event
    loop will use it."""

    def __init__(self, spec: EngineSpec) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self.spec = spec
        self.max_concurrent = concurrent_requests("vllm", spec.rollout, cache_tokens(spec), spec.episodes)
        self.request_ids = itertools.count()
        self.asleep = False
        self.keeps = spec.rollout.keep_kv
        self.guard = UpdateGuard(
            "vLLM", shapes(spec), self._pause, keeps=self.keeps, frozen=frozen(spec), empty=starts_empty(spec)
        )
        self.images = EngineImages.of(spec, "vLLM")
        self.salt: dict[str, str] = {}
        """Part of every prompt: prefixes of prompts with different salts are not shared."""
        self.routing = routing_format(spec)
        with readable_model(spec) as (path, load_format):
            ours = dict(
                model=path,
                load_format=load_format,
                trust_remote_code=spec.source.trust_remote_code,
                skip_tokenizer_init=self.images.reader is None,  # it expands images by names of tokens
                generation_config="vllm",  # not the model's: each request states its own sampling
                dtype=spec.dtype,
                seed=spec.stream,
                max_model_len=context_length(spec, spare=_SPARE),
                max_num_seqs=self.max_concurrent,
                tensor_parallel_size=spec.rollout.tensor_parallel,
                logprobs_mode="processed_logprobs",  # of the distribution that it samples from
                worker_extension_cls="posttrain.weight_sync.vllm_worker.BucketLoader",
                disable_log_stats=True,
                **memory_arguments(spec),
            )
            defaults = _fp8_kernels(spec) | graph_arguments(spec, self.max_concurrent)
            defaults |= {"distributed_executor_backend": vllm_executor(spec.rollout)}
            if not self.keeps:  # with kept requests vLLM notes which weights sampled what it hands on at each step
                ours |= {"scheduler_cls": f"{__package__}.vllm_scheduler.ChunkScheduler"}
            if self.images.reader is not None:
                ours |= {"limit_mm_per_prompt": {"video": 0}}
                if spec.device == "cpu":
                    # The largest image that the model may read is too much for it, and memory of one is not counted.
                    ours |= {"skip_mm_profiling": True}
            if self.routing is not None:
                ours |= {"enable_return_routed_experts": True}
            if spec.rollout.kv_cache_dtype == "fp8":
                ours |= {"kv_cache_dtype": "fp8"}
            try:
                args = AsyncEngineArgs(**arguments(spec, ours, defaults))
                # Steps as large as vLLM takes for work in bulk, 8 or 16 k tokens by the GPU. Told nothing it takes 2 k,
                # of which 1,024 running requests leave half to the prompts of others, for dozens of steps that no CUDA
                # graph has.
                self.llm = AsyncLLM.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)
            except (RuntimeError, ValueError, TypeError) as error:
                hint = "its own messages are in the worker's log"
                if self.routing is not None and "Model Runner V2" in str(error):  # it needs Triton, also on a CPU
                    hint = "on a CPU vllm-cpu 0.30.0 returns experts; or --set rollout.router_replay=off"
                raise RunError(f"vLLM does not start: {error}", hint=hint) from error

    async def _pause(self) -> None:
        if self.keeps:
            await self.llm.pause_generation(mode="keep", clear_cache=False)
        else:
            await self.llm.pause_generation(mode="wait", clear_cache=False)  # returns what runs: see ChunkScheduler
            await self.llm.pause_generation(mode="abort")  # what has not begun

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        ids_given, pictures = await self.images.prompt(prompt_ids, images)
        async with self.guard.request() as version:
            output = await self._run(
                ids_given,
                pictures,
                max_tokens=params.max_new_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                seed=params.seed,
                stop_token_ids=self.spec.stop_token_ids,
                logprobs=0,  # only the sampled token's
                logit_bias=self.images.bias or None,
            )
        if pictures:
            self.images.check(prompt_ids, output.prompt_token_ids)
        [done] = output.outputs
        ids = list(done.token_ids)
        logprobs = _of_each(done.logprobs, len(ids))
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
        routing = None
        if self.routing is not None and ids:
            if done.routed_experts is None:
                raise RunError("vLLM gave no experts of a request", hint="--set rollout.router_replay=off")
            routing = stored_routing(done.routed_experts, self.routing, len(prompt_ids) + len(ids))
        updates: tuple[tuple[int, int], ...] = ()
        if self.keeps:
            spans = [(span.start, int(span.version)) for span in done.weight_versions or ()]
            updates = tuple(span for span in spans if span != (0, version))
        return Sample(ids, logprobs, reasons[done.finish_reason], version, routing, updates)

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        async with self.guard.request():
            return await self._score(sequences)

    async def _score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        outputs = await asyncio.gather(
            *(self._run(ids, [], max_tokens=1, temperature=1.0, prompt_logprobs=0) for ids in sequences)
        )
        return [
            [0.0, *_of_each(output.prompt_logprobs, len(ids) - 1)]
            for ids, output in zip(sequences, outputs, strict=True)
        ]

    async def _run(self, ids: Ids, images: Sequence[Any], **params: Any) -> Any:
        """Return the output of a request, whose ``ids`` have one token for each of the ``images``. Raises
        ``WorkerError`` when the engine has died, ``RunError`` when it refuses."""
        from vllm import SamplingParams as Params
        from vllm import TokensPrompt, exceptions
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError

        request = Params(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=True, **params)
        seen: Any = {"multi_modal_data": {"image": list(images)}} if images else {}
        prompt = TokensPrompt(prompt_token_ids=np.asarray(ids).tolist(), **self.salt, **seen)
        try:
            outputs = [output async for output in self.llm.generate(prompt, request, f"r{next(self.request_ids)}")]
        except EngineDeadError as error:
            raise WorkerError(f"vLLM's engine has died: {error}") from error
        except (ValueError, getattr(exceptions, "VLLMValidationError", ValueError)) as error:
            raise RunError(f"vLLM refuses a request of {len(ids)} tokens: {error}") from error
        if not outputs:
            raise WorkerError("vLLM ended a request without an answer")
        return outputs[-1]

    async def sleep(self) -> None:
        await self.guard.close()
        self.guard.lost_weights()
        if self.asleep:
            return
        self.asleep = True
        if self.spec.device == "cuda":
            await self.llm.sleep(level=2)  # without a copy of the weights: an update follows
        else:
            await self.llm.collective_rpc("drop_weights")

    async def wake(self) -> None:
        if not self.asleep:
            return
        if self.spec.device == "cuda":
            await self.llm.wake_up(tags=["weights"])
        else:
            await self.llm.collective_rpc("allocate_weights")

    async def load_bucket(self, bucket: Bucket) -> None:
        async with self.guard.loading(bucket):
            try:
                await self.llm.collective_rpc("load_bucket", args=(pickle.dumps(bucket),))
            except Exception as error:  # vLLM passes on only the text of what its workers raise
                if RankLost.__name__ in str(error):
                    raise RankLost(str(error)) from error
                raise

    async def finish_update(self, version: int, check: Sequence[Ids] = ()) -> list[list[float]]:
        async with self.guard.finish(version):
            if self.spec.rollout.quantization == "fp8":
                await self.llm.collective_rpc("check_quantized")
            if self.asleep and self.spec.device == "cuda":
                await self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
            # vLLM drops no block of its cache while requests hold some: other prompts are told apart by their salt.
            if self.keeps:
                self.salt = {"cache_salt": f"weights {version}"}
                await self.llm.update_weight_version(str(version))
            elif not await self.llm.reset_prefix_cache():
                raise WeightSyncError("vLLM did not drop the prefixes that it computed with the old weights")
            if self.images.reader is not None:  # features of images, which a tower with other weights computed
                await self.llm.reset_encoder_cache()
            await self.llm.resume_generation()  # requests that were kept go on beside the check
            return await self._score(check)

    async def close(self) -> None:
        await asyncio.to_thread(self.llm.shutdown)


def _of_each(found: Any, tokens: int) -> list[float]:
    """Return the log-probability of each token of a request, of which vLLM was asked for no alternatives. ``found`` has
    them in flat lists: an object for each token costs its process 6 us of a token, and garbage collection more."""
    logprobs = [] if found is None else [float(value) for value in found.logprobs]
    if len(logprobs) != tokens:
        raise RunError(f"vLLM gave {len(logprobs)} log-probabilities of {tokens} tokens")
    return logprobs


def _fp8_kernels(spec: EngineSpec) -> dict[str, Any]:
    """Return the kernels for weights in FP8, unless the user names others: those that read weights and scales as they
    are sent. Kernels that lay them out otherwise, Marlin's and on Blackwell DeepGEMM's, cannot take new ones."""
    quantized = fp8_of(spec)
    if quantized is None or spec.device == "cpu":
        return {}
    from vllm.platforms import current_platform  # it asks the driver: torch would take memory of the GPU to know

    if takes_deep_gemm(quantized, current_platform.get_device_capability(), *_DEEP_GEMM):
        linear = "deep_gemm"
    else:  # CUTLASS' products take blocks of one size alone
        linear = "cutlass" if quantized.block == BLOCKS[0] else "triton"
    return {"linear_backend": linear, "moe_backend": "triton"}
