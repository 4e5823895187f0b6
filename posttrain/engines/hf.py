"""The embedded engine: transformers' continuous batching with the trainer's attention kernel.

It needs no package beyond transformers and runs on a CPU. SGLang and vLLM are faster on GPUs.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from posttrain.core.errors import RunError, WeightSyncError, WorkerError
from posttrain.core.types import FinishReason, Ids, Sample, SamplingParams
from posttrain.data.images import PlacedImage
from posttrain.engines.base import EngineSpec
from posttrain.engines.choice import concurrent_requests
from posttrain.engines.hf_images import ImageRequests
from posttrain.engines.hf_routing import RoutingRecorder
from posttrain.engines.hf_sampling import SeededSampling
from posttrain.engines.hf_updates import KeptRequests
from posttrain.models import attention, attention_kernels, fp8, vision
from posttrain.models.fp8_layers import SCALE
from posttrain.models.load import load_model
from posttrain.models.logprobs import token_logprobs
from posttrain.models.output_head import LogitRule
from posttrain.models.processors import load_vision
from posttrain.models.support import check_embedded
from posttrain.weight_sync.buckets import Bucket, BucketReader
from posttrain.weight_sync.guard import UpdateGuard

BLOCK = 32
"""Tokens in a block of the KV cache."""
_STOP_S = 60.0
"""Longest wait for the generation thread to end or to pause in a weight update."""
_GREEDY_TEMPERATURE = 1e-6
"""Replaces temperature 0: with it, float32 gives all probability to the largest logit."""


async def open_engine(spec: EngineSpec) -> HFSampler:
    """Load the model and start the generation thread. Raises ``RunError``, ``ModelError``."""
    return HFSampler(spec)


class _Answer(NamedTuple):
    """What became of a request."""

    output: Any
    """The library's output; of a request that was aborted what it had sampled until then, or None."""
    cut: bool
    """It was aborted."""
    routing: npt.NDArray[np.uint8] | None
    """The experts of its tokens, where they are asked for."""
    updates: tuple[tuple[int, int], ...]
    """``Sample.updates``"""


class HFSampler:
    """An ``Engine`` over transformers' continuous batching. Create it in the process whose event loop will use it."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.threads:
            torch.set_num_threads(spec.threads)
        self.spec = spec
        self.max_concurrent = concurrent_requests("hf", spec.rollout)
        self.device = torch.device(spec.device)
        self.dtype = spec.torch_dtype
        # Any: transformers annotates `to` wrongly, and `init_continuous_batching` not at all.
        self.model = cast(Any, load_model(spec.source, dtype=self.dtype, seed=spec.seed))
        check_embedded(self.model)
        reader = load_vision(spec.source)
        self.kernel = attention_kernels.choose("auto", self.device, self.dtype, attention_kernels.needs(self.model))
        self.rule = LogitRule.of(self.model)
        self.model.to(self.device).eval()
        self.model.requires_grad_(False)
        self.fp8 = fp8.layers_of(self.model, stored=False) if spec.rollout.quantization == "fp8" else None
        if self.fp8 is not None:
            fp8.round_weights(self.model, self.fp8)
            fp8.round_inputs(self.model, self.fp8)
        self.model.set_attn_implementation(vision.attention_of(self.model.config, f"paged|{attention.NAME}"))
        self.images = None if reader is None else ImageRequests(self.model, reader, self.device)
        self.parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        self.shapes = {name: tuple(p.shape) for name, p in self.parameters.items()}
        self.reader = BucketReader(device=self.device)
        self.scales: dict[str, torch.Tensor] = {}
        """Scales of weights that come next, by the scales' names"""
        self.kept = KeptRequests() if spec.rollout.keep_kv else None
        left = [name for name in self.shapes if spec.frozen_tower and name.startswith(vision.TOWER)]
        pause = self._abort_all if self.kept is None else self._pause
        sent = self.shapes if self.fp8 is None else self.fp8.shapes(self.shapes)
        self.guard = UpdateGuard("the embedded engine", sent, pause, keeps=self.kept is not None, frozen=left)
        self.request_ids = itertools.count()
        self.futures: dict[str, asyncio.Future[Any]] = {}
        self.seeded = SeededSampling()
        self.recorder = RoutingRecorder(self.model) if spec.rollout.router_replay != "off" else None
        self.manager: Any = None
        # Every restart of the manager collects garbage several times. Freezing what is imported and loaded by now,
        # which stays, exempts it: a weight update then takes 0.1 s instead of 0.45 s.
        gc.collect()
        gc.freeze()
        threading.Thread(target=self._stop_with_process, name="stop-generation", daemon=True).start()
        self._start(0)

    def _stop_with_process(self) -> None:
        """Stop the generation thread when the main thread ends. The thread is no daemon, so Python would wait for it
        forever, and hold the GPU, in a worker that ends without ``close``."""
        threading.main_thread().join()
        if self.manager is not None:
            self.manager.stop(block=False, hard_stop=True)
            self._resume()

    def _start(self, version: int) -> None:
        """Start the generation thread with an empty KV cache, to sample with the weights of ``version``."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._seed(version)
        on_cpu = self.device.type == "cpu"
        generation = GenerationConfig(
            do_sample=True,
            # Values other than 1 make transformers install the processors; each request brings its own values.
            temperature=0.5,
            top_p=0.5 if self.spec.truncates else 1.0,
            top_k=1 if self.spec.truncates else 0,
            eos_token_id=self.spec.stop_token_ids,
            pad_token_id=self.spec.stop_token_ids[0],
        )
        batching = ContinuousBatchingConfig(
            block_size=BLOCK,
            num_blocks=self.spec.rollout.kv_tokens // BLOCK if on_cpu else None,
            max_batch_tokens=4096 if on_cpu else None,
            max_memory_percent=None if on_cpu else self._share_of_free(),
            max_requests_per_batch=self.max_concurrent,
            return_logprobs=True,
            per_request_processors=True,
            use_async_batching=False,
            use_cuda_graph=False,
            # Blocks are known again by their ids, which are the same for any image and say nothing of experts. Which
            # blocks there are when a request begins depends on other requests.
            allow_block_sharing=self.images is None and self.recorder is None and not self.spec.rollout.batch_invariant,
        )
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self.seeded.attach(self.manager)
        if self.images is not None:
            self.images.attach(self.manager)
        if self.recorder is not None:
            self.recorder.attach(self.manager)
        if self.kept is not None:
            self.kept.attach(self.manager)
        self.manager.start()

    def _seed(self, version: int) -> None:
        """Seed the sampling of a version, so that a run resumed at this version samples as an uninterrupted run
        would."""
        torch.manual_seed(((self.spec.seed * 1009 + self.spec.replica) * 1_000_003 + version) % 2**63)

    def _share_of_free(self) -> float:
        """Return the share of the GPU's free memory for KV cache and activations, so that together with the weights
        they take `rollout.memory_fraction` of the whole GPU at every restart.

        Raises:
            RunError: other processes hold too much of the GPU.
        """
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        weights = sum(p.numel() * p.element_size() for p in self.parameters.values())
        wanted = self.spec.rollout.memory_fraction * total - weights
        if not 0 < wanted <= 0.95 * free:
            raise RunError(
                f"no room for the engine: rollout.memory_fraction = {self.spec.rollout.memory_fraction:g} leaves "
                f"{wanted / 2**30:.1f} GiB beside its weights, and {free / 2**30:.1f} of the GPU's "
                f"{total / 2**30:.1f} GiB are free",
                hint="change rollout.memory_fraction, lower train.tokens_per_microbatch, or set train.offload = true",
            )
        return float(wanted / free)

    async def generate(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage] = ()) -> Sample:
        if params.truncated and not self.spec.truncates:
            raise RunError("top_p and top_k need the processors that `EngineSpec.truncates` asks for")
        # A request that cannot fit would end the library's whole engine; it may take a block more than needed.
        longest = len(prompt_ids) + params.max_new_tokens
        if self.device.type == "cpu" and longest > self.spec.rollout.kv_tokens - BLOCK:
            raise RunError(
                f"a request of up to {longest} tokens does not fit into "
                f"rollout.kv_tokens = {self.spec.rollout.kv_tokens}",
                hint="raise rollout.kv_tokens, or lower rollout.max_response_tokens",
            )
        async with self.guard.request() as version:
            output, cut, routing, updates = await self._run(prompt_ids, params, images)
        if output is None:
            return Sample([], [], "abort", version)
        logprobs = [float(x) for x in output.logprobs]
        ids = list(output.generated_tokens)[: len(logprobs)]  # of one that is cut, its thread may add a token meanwhile
        ended = bool(ids) and ids[-1] in self.spec.stop_token_ids
        reason: FinishReason = "stop" if ended else "abort" if cut else "length"
        if routing is not None:
            routing = routing[: len(prompt_ids) + len(ids)]
        return Sample(ids, logprobs[: len(ids)], reason, version, routing, updates)

    def _truncation(self, params: SamplingParams) -> dict[str, Any]:
        if not self.spec.truncates:
            return {}
        every = self.model.config.get_text_config().vocab_size
        return {"top_p": params.top_p, "top_k": min(params.top_k or every, every)}

    async def _run(self, prompt_ids: Ids, params: SamplingParams, images: Sequence[PlacedImage]) -> _Answer:
        """Run a request to its end, or until it is aborted. Raises ``WorkerError``."""
        request_id = f"r{next(self.request_ids)}"
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def deliver(output: Any) -> None:
            if not future.done():
                future.set_result((output, False))

        self.manager.register_result_handler(request_id, deliver)
        if params.seed is not None:
            self.seeded.seeds[request_id] = params.seed
        if images:
            if self.images is None:
                raise RunError("the model reads no images", hint="docs/vision.md lists models that do")
            self.images.add(request_id, prompt_ids, images)
        if self.recorder is not None:
            self.recorder.begin(request_id)
        if self.kept is not None:
            self.kept.begin(request_id)
        accepted = self.manager.add_request(
            np.asarray(prompt_ids).tolist(),
            request_id=request_id,
            max_new_tokens=params.max_new_tokens,
            eos_token_id=self.spec.stop_token_ids,
            temperature=params.temperature or _GREEDY_TEMPERATURE,
            **self._truncation(params),
        )
        if accepted is None:
            self._forget(request_id)
            raise WorkerError(f"the embedded engine has stopped: {self.manager.background_thread_status.fatal_error}")
        self.futures[request_id] = future
        try:
            output, cut = await future
        except asyncio.CancelledError:
            self._cancel(request_id)
            raise
        finally:
            del self.futures[request_id]
            routing, updates = self._forget(request_id)
        if output is not None and output.error is not None:
            raise WorkerError(f"the embedded engine failed: {output.error}")
        return _Answer(output, cut, routing, updates)

    def _forget(self, request_id: str) -> tuple[npt.NDArray[np.uint8] | None, tuple[tuple[int, int], ...]]:
        """Drop what is kept of a request besides the library's own. Returns the experts of its tokens, and the weight
        updates amid them."""
        self.seeded.seeds.pop(request_id, None)
        if self.images is not None:
            self.images.drop(request_id)
        routing = None if self.recorder is None else self.recorder.end(request_id)
        return routing, () if self.kept is None else self.kept.end(request_id)

    def _cancel(self, request_id: str) -> None:
        self.manager.cancel_request(request_id)
        self.manager.output_router.result_handlers.pop(request_id, None)

    async def _abort_all(self) -> None:
        for request_id, future in self.futures.items():
            if not future.done():
                so_far = self._so_far(request_id)
                self._cancel(request_id)
                future.set_result((so_far, True))

    async def _pause(self) -> None:
        assert self.kept is not None
        await asyncio.to_thread(self.kept.pause, _STOP_S)

    def _resume(self) -> None:
        if self.kept is not None:
            self.kept.resume()

    def _so_far(self, request_id: str) -> Any:
        """Return the library's output of a request as far as it has come: the library drops what a cancelled one has
        sampled. None: it is not at work yet."""
        if (processor := self.manager.batch_processor) is None:
            return None
        scheduler = processor.scheduler  # one that a full cache has moved out waits, with what it has sampled
        state = scheduler.active_requests.get(request_id) or scheduler.waiting_requests.get(request_id)
        return None if state is None else state.to_generation_output()

    async def score(self, sequences: Sequence[Ids]) -> list[list[float]]:
        lengths = torch.tensor([len(s) for s in sequences])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.cat([torch.as_tensor(s, dtype=torch.int64) for s in sequences]).to(self.device)
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(self.device)
        with torch.no_grad():
            hidden = self.model.base_model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                ragged=attention.Ragged.build(offsets, self.device, self.kernel),
            ).last_hidden_state[0]
            weight = self.model.get_output_embeddings().weight
            hidden, temperature = self.rule.scaled(hidden[:-1]), self.rule.temperature(1.0)
            logprobs, _ = token_logprobs(hidden, weight, ids[1:], temperature, self.rule.softcap)
        column = torch.cat([torch.zeros(1), logprobs.cpu()])
        column[offsets[:-1]] = 0.0
        return [part.tolist() for part in torch.split(column, lengths.tolist())]

    async def sleep(self) -> None:
        await self.guard.close()
        self.guard.lost_weights()
        await self._stop()
        for parameter in self.parameters.values():
            parameter.data = parameter.data.new_empty(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.shape != self.shapes[name]:
                parameter.data = parameter.data.new_empty(self.shapes[name])

    async def load_bucket(self, bucket: Bucket) -> None:
        async with self.guard.loading(bucket):
            if bucket.number == 0:
                self.scales.clear()  # of an update that was given up
            for name, tensor in await asyncio.to_thread(self.reader.tensors, bucket):
                self._load(name, tensor)
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # the trainer overwrites the bucket as soon as this has returned

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        """Overwrite a parameter. A quantized weight comes after its scales, maybe in the next bucket."""
        if name not in self.parameters:
            self.scales[name] = tensor.clone()
            return
        if self.fp8 is not None and name in self.fp8.names:
            scale = self.scales.pop(name + SCALE, None)
            if scale is None or tensor.dtype != fp8.DTYPE:
                raise WeightSyncError(f"the trainer sent {name} without scales")
            tensor = fp8.dequantize(tensor, scale, self.dtype)
        self.parameters[name].copy_(tensor)

    async def finish_update(self, version: int, check: Sequence[Ids] = ()) -> list[list[float]]:
        async with self.guard.finish(version):
            if self.kept is not None:
                scores = await self.score(check) if check else []
                self._seed(version)
                self.kept.update(version)
                self.kept.resume()
                return scores
            # Stopping drops the KV cache. Keeping it, as the library offers, would also keep the hashes of prefixes
            # computed with the old weights, and serve them to new requests.
            await self._stop()
            scores = await self.score(check) if check else []
            self._start(version)
            return scores

    async def _stop(self) -> None:
        await asyncio.to_thread(self.manager.stop, block=True, timeout=_STOP_S)
        if self.manager.is_running():
            raise WeightSyncError(f"the embedded engine was still generating {_STOP_S:g} s after it was told to stop")

    async def close(self) -> None:
        self._resume()
        await asyncio.to_thread(self.manager.stop, block=True, timeout=10.0, hard_stop=True)
        self.manager = None
        gc.collect()
