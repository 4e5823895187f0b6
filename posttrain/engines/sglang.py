"""SGLang as an ``Engine``."""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from posttrain.core.errors import RunError, WeightSyncError, WorkerError
from posttrain.core.types import FinishReason, Ids, Sample, SamplingParams
from posttrain.data.images import PlacedImage
from posttrain.engines.base import EngineSpec
from posttrain.engines.choice import concurrent_requests
from posttrain.engines.external import (
    arguments,
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
from posttrain.models.experts import RoutingFormat
from posttrain.weight_sync.broadcast import RankLost
from posttrain.weight_sync.buckets import Bucket
from posttrain.weight_sync.guard import UpdateGuard
from posttrain.weight_sync.sglang_worker import LOADER, pack, run_scheduler

_ENVIRONMENT = {
    # A colocated trainer uses more memory on some GPUs of a tensor-parallel engine than on others.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    # NCCL's default, which the trainer uses; SGLang sets 0. Ranks that differ in it cannot connect ("invalid
    # argument").
    "NCCL_CUMEM_ENABLE": "-2",
    # No outputs of unfinished requests, which SGLang otherwise sends every 50 tokens.
    "SGLANG_FORCE_STREAM_INTERVAL": "1000000",
    # DeepGEMM's kernels are compiled as sizes come, and not for minutes beforehand for all that might.
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0",
}
"""Variables that SGLang reads when it is imported. Those that the user has set stay."""
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


_UNREACHED = 0.9
"""Share of the free memory for weights and KV cache where the cache has a size of its own."""
_SPARE = 8
"""Tokens of the context beyond the longest request. SGLang refuses a request with 6 tokens left, and samples up to 2
tokens before the end."""
_RECEIVE_EVERY = 10
"""Decoding steps between two looks for new requests, where episodes have several turns. SGLang computes the prompts of
new requests before it decodes another token of all others: those of several episodes are better computed together."""


async def open_engine(spec: EngineSpec) -> SGLangEngine:
    """Start SGLang with the weights of ``spec.source`` as version 0. Raises ``RunError``, ``ModelError``."""
    engine = SGLangEngine(spec)
    await load_initial_weights(engine, spec)
    await engine.manager.freeze_gc()  # else Python looks through all that was imported, for a second, amid sampling
    return engine


def memory_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments for the memory of weights and KV cache. SGLang takes the fraction of what is free when it
    starts, and counts what others take meanwhile as its own: engines that start side by side on a GPU are given the
    size of their cache, and a fraction that no engine reaches."""
    if not spec.shares_gpu:
        return {"mem_fraction_static": spec.rollout.memory_fraction}
    return {"mem_fraction_static": _UNREACHED, "max_total_tokens": int(cache_tokens(spec))}


def fp8_kernels(spec: EngineSpec) -> dict[str, Any]:
    """Return the kernels for weights in FP8, unless the user names others: those that read weights and scales as they
    are sent. DeepGEMM's do where it can be taken, Triton's on all GPUs that have FP8."""
    quantized = fp8_of(spec)
    if quantized is None:
        return {}
    deep_gemm = takes_deep_gemm(quantized, torch.cuda.get_device_capability(), "deep_gemm")
    return {"fp8_gemm_runner_backend": "deep_gemm" if deep_gemm else "triton", "moe_runner_backend": "triton"}


class SGLangEngine:
    """An ``Engine`` over one ``sglang.Engine``, whose schedulers are processes of their own. Create it in the
    process whose event loop will use it."""

    def __init__(self, spec: EngineSpec) -> None:
        from sglang.srt.entrypoints.engine import Engine

        self.spec = spec
        self.max_concurrent = concurrent_requests("sglang", spec.rollout, cache_tokens(spec), spec.episodes)
        self.request_ids, self.seeds = itertools.count(), itertools.count()
        self.released: set[str] = set()
        """Memory that is released now. SGLang's schedulers die when it is resumed twice."""
        self.guard = UpdateGuard("SGLang", shapes(spec), self._abort_all, frozen=frozen(spec), empty=starts_empty(spec))
        self.images = EngineImages.of(spec, "SGLang")
        self.routing = routing_format(spec)
        with readable_model(spec) as (path, load_format):
            ours = {
                "model_path": path,
                "load_format": load_format,
                "trust_remote_code": spec.source.trust_remote_code,
                "skip_tokenizer_init": True,
                "dtype": spec.dtype,
                "random_seed": spec.stream,
                "context_length": context_length(spec, spare=_SPARE),
                "max_running_requests": self.max_concurrent,
                **memory_arguments(spec),
                "tp_size": spec.rollout.tensor_parallel,
                "enable_memory_saver": spec.rollout.sleep,
                "sampling_backend": "pytorch",
                "sampling_defaults": "openai",  # not the model's: each request states its own sampling
                "custom_weight_loader": [LOADER],
            }
            if spec.rollout.batch_invariant:  # its batch-invariant products give logits of the weights' type only
                ours |= {"enable_deterministic_inference": True, "enable_fp32_lm_head": True}
            if self.routing is not None:
                ours |= {"enable_return_routed_experts": True}
            if spec.rollout.kv_cache_dtype == "fp8":
                ours |= {"kv_cache_dtype": "fp8_e4m3"}
            defaults: dict[str, Any] = fp8_kernels(spec) | {
                "log_level": "error",
                # A larger batch than that of the largest graph runs without one. SGLang would choose by the GPU alone.
                "cuda_graph_max_bs_decode": self.max_concurrent,
                "scheduler_recv_interval": _RECEIVE_EVERY if spec.rollout.max_turns > 1 else 1,
            }
            ours_to_run = {"run_scheduler_process_func": staticmethod(run_scheduler)}
            try:
                self.engine = type("Engine", (Engine,), ours_to_run)(**arguments(spec, ours, defaults))
            except (RuntimeError, ValueError, TypeError) as error:
                raise RunError(
                    f"SGLang does not start: {error}", hint="its own messages are in the worker's log"
                ) from error
        self.manager: Any = self.engine.tokenizer_manager

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        read = await self.images.processed(prompt_ids, images)
        sampling: dict[str, Any] = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": self.spec.stop_token_ids,
        }
        if self.images.reader is not None:
            sampling["logit_bias"] = {str(token): bias for token, bias in self.images.bias.items()}
        async with self.guard.request() as version:
            if self.spec.rollout.batch_invariant:  # SGLang reads seeds in this mode only
                sampling["sampling_seed"] = self._seed(version) if params.seed is None else params.seed
            asked: dict[str, Any] = {"return_routed_experts": True} if self.routing is not None else {}
            if read is not None:
                asked["image_data"] = [read]
            output = await self._run(prompt_ids, sampling, return_logprob=True, **asked)
        meta = output["meta_info"]
        reason = meta["finish_reason"]["type"]
        # An answer to a request that was aborted while it waited tells nothing of its prompt.
        if read is not None and reason != "abort" and meta["prompt_tokens"] != len(prompt_ids):
            raise RunError(
                f"SGLang read {meta['prompt_tokens']} tokens of a prompt with images, and trainers {len(prompt_ids)}",
                hint="--set rollout.engine=hf samples with images",
            )
        ids = list(output.get("output_ids") or [])
        logprobs = [float(of_token[0]) for of_token in (meta.get("output_token_logprobs") or [])][: len(ids)]
        reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
        routing = None
        if self.routing is not None and ids:
            routing = stored_routing(_experts(meta, self.routing), self.routing, len(prompt_ids) + len(ids))
        return Sample(ids, logprobs, reasons[reason], version, routing)

    def _seed(self, version: int) -> int:
        """Return a seed for the next request. In its deterministic mode SGLang gives all requests without one the same
        seed."""
        return zlib.crc32(f"{self.spec.stream} {version} {next(self.seeds)}".encode())

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        async with self.guard.request():
            return await self._score(sequences)

    async def _score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        outputs = await asyncio.gather(
            *(self._run(ids, sampling, return_logprob=True, logprob_start_len=0) for ids in sequences)
        )
        return [[0.0, *(float(x[0]) for x in o["meta_info"]["input_token_logprobs"][1:])] for o in outputs]

    async def _run(self, ids: Ids, sampling: Mapping[str, Any], **more: Any) -> Any:
        """Return the output of a request, which is aborted if this is cancelled. Raises ``RunError``,
        ``WorkerError``."""
        # SGLang aborts all requests whose ids begin with that of the aborted one: no id may begin with another.
        request_id = f"r{next(self.request_ids)}."
        try:
            return await self.engine.async_generate(
                input_ids=np.asarray(ids).tolist(), sampling_params=dict(sampling), rid=request_id, **more
            )
        except asyncio.CancelledError:
            self.manager.abort_request(rid=request_id)
            raise
        except ValueError as error:
            raise RunError(f"SGLang refuses a request of {len(ids)} tokens: {error}") from error
        except RuntimeError as error:
            raise WorkerError(f"SGLang's engine has died: {error}") from error

    async def _abort_all(self) -> None:
        self.manager.abort_request(abort_all=True)

    async def sleep(self) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        await self.guard.close()
        self.guard.lost_weights()
        if not self.released:
            self.released = {"kv_cache", "weights"}
            request = ReleaseMemoryOccupationReqInput(tags=sorted(self.released))
            await self.manager.release_memory_occupation(request, None)

    async def wake(self) -> None:
        await self._resume_memory("weights")

    async def _resume_memory(self, tag: str) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if tag in self.released:
            self.released.remove(tag)
            await self.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[tag]), None)

    async def load_bucket(self, bucket: Bucket) -> None:
        async with self.guard.loading(bucket):
            await self._pass_on(bucket)

    async def _pass_on(self, bucket: Bucket) -> None:
        """Have all schedulers load a bucket; one without tensors is the end of an update, and checked by them."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[pack(bucket, rank) for rank in range(self.spec.rollout.tensor_parallel)],
            load_format=LOADER,
            flush_cache=False,
        )
        good, message = await self.manager.update_weights_from_tensor(request, None)
        if not good:
            kind = RankLost if RankLost.__name__ in message else WeightSyncError
            raise kind(f"SGLang did not take the weights: {message}")

    async def finish_update(self, version: int, check: Sequence[Ids] = ()) -> list[list[float]]:
        async with self.guard.finish(version):
            if self.spec.rollout.quantization == "fp8":
                await self._pass_on(Bucket(()))
            await self._resume_memory("kv_cache")
            flushed = await self.manager.flush_cache()
            if not flushed.success:
                raise WeightSyncError("SGLang did not drop the prefixes that it computed with the old weights")
            return await self._score(check)

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.shutdown)


def _experts(meta: Mapping[str, Any], form: RoutingFormat) -> npt.NDArray[Any]:
    """Return the experts of a request's tokens, [tokens computed, decoder layers, k]. Raises ``RunError`` where the
    answer has none."""
    found = meta.get("routed_experts")
    if found is None:
        raise RunError("SGLang gave no experts of a request", hint="--set rollout.router_replay=off")
    if isinstance(found, str):  # as its detokenizer passes them on, which does not run where there is no tokenizer
        found = np.frombuffer(base64.b64decode(found), np.dtype(meta.get("routed_experts_dtype") or "int32"))
    return np.asarray(found).reshape(-1, form.decoder_layers, form.top_k)
