"""Numbers that were measured and not derived. Each says where it comes from; there is none for a row of a table.

All are of one or two H200, torch 2.11 (docs/benchmarks.md). On other GPUs they are taken as shares of the datasheet.
"""

from __future__ import annotations

from posttrain.core.sizes import GIB

# ---------------------------------------------------------------------- memory

CONTEXT_BYTES = 0.6 * GIB
"""GPU memory of a training process beside torch's allocations: CUDA context, cuBLAS workspace, kernels. Assumed: what
the CUDA runtime shows for such a process."""
NCCL_BYTES = 0.4 * GIB
"""More of it, where several work together: NCCL's buffers. Assumed, not measured."""
ENGINE_BYTES = 1.9 * GIB
"""GPU memory of an engine's processes while it sleeps: contexts, CUDA graphs, workspaces. What is left of the 10.8 GiB
that were in use amid a weight update of SGLang at 0.5B when all else is counted."""
FRAGMENTATION = 0.03
"""Share of a trainer's allocations that its allocator holds besides. Assumed."""

# ---------------------------------------------------------------------- time, as shares of the datasheet

MATMUL = 0.72
"""Share of the dense bf16 peak, for products with long inner dimensions. The profile of the 7B row gives 688 TFLOP/s at
an inner dimension of 3,584, and what attention and memory leave of the 0.5B row gives about 620 at 896: together this
and ``MATMUL_DEPTH``. The power limit is in it."""
MATMUL_DEPTH = 138
"""Inner dimension at which a product would reach half of that: filling and emptying the pipeline of a tile."""
ATTENTION_FORWARD, ATTENTION_BACKWARD = 0.574, 0.384
"""Share of the peak, for causal FlashAttention over long rows, FLOPs as the model's: 568 and 380 TFLOP/s in the profile
of the 7B row, head size 128."""
ELEMENTWISE = 0.9
"""Share of the memory bandwidth, for fused elementwise kernels: SwiGLU, norms and rotary embeddings of the 7B row took
105 ms for the bytes that ``speed`` counts."""
TENSOR_LISTS = 0.52
"""Share of the memory bandwidth, for passes over all parameters, one or several tensors at a time: AdamW, and what
FSDP2 casts, copies and adds up, which took 438 ms of the 7B step on two GPUs."""
COLLECTIVES = 0.32
"""Share of the link, for all-gathers and reduce-scatters beside computation: 130 and 159 of 450 GB/s between two
GPUs."""
BESIDE_COLLECTIVES = 1.04
"""How much longer products and attention take beside them: 2 to 6 % in the same profile."""
HOST_FORWARD_S, HOST_BACKWARD_S = 1.2e-3, 1.05e-3
"""Seconds of the host for a layer of one micro-batch, hidden where the GPU takes longer. Forward: the reference's pass
of `rl` at 0.5B, 0.106 s for 72 of them. Backward: what the update of the same run, 0.46 s, leaves beside that and
``HOST_COLLECTIVE_S``. Of a host with nothing else to do: on another one, beside a second such job, they took 0.22 and
0.82 s, and a slow host took 433 ms for the 96 of a step of conversations, by a profile."""
HOST_COLLECTIVE_S = 0.95e-3
"""More of it with FSDP2, for each gather of a layer's weights, and twice for a reduction of its gradients: what the
actor's passes took longer than the reference's on earlier hosts; less by 15 %, since these were slower."""
HOST_DECODE_S = {"hf": 1.25e-3, "sglang": 0.1e-3, "vllm": 0.1e-3}
"""Seconds of the host for a layer of one decoding step. hf: 6.6 to 8.9 s for 256 steps of 24 layers, for 128 and for
256 requests. The other two run CUDA graphs: 1.45 s for up to 512 steps of SGLang."""
HOST_TOKEN_S = {"hf": 0.0, "sglang": 13e-6, "vllm": 13e-6}
"""Seconds of an engine's scheduler for each sampled token, in one thread of Python, hidden where a step's launching or
the GPU takes longer. sglang: 404,000 tokens of 1,024 requests in 5.05 s at 0.5B, and 74,000 tokens/s of
256. vllm: assumed to be the same. hf: not known apart from ``HOST_DECODE_S``."""
HOST_TURN_S = {"hf": 0.0, "sglang": 0.75e-3, "vllm": 0.75e-3}
"""Seconds that a further turn of an episode adds: all others wait while its prompt is read. sglang: GSM8K with the
calculator, 1,024 episodes of 3.8 turns and 247 tokens in 5.5 s, where ``HOST_TOKEN_S`` alone gives 3.3; a slower host
took twice that. vllm: assumed to be the same. hf: not known."""
DECODE_BANDWIDTH = 0.7
"""Share of the memory bandwidth, for reading weights and KV cache while decoding. Assumed."""
CALL_S = 0.02
"""Seconds of a phase of `rl` beyond what the workers do: packing, messages, waiting for the slowest. Assumed."""
BROADCAST = 0.64
"""Share of the link, for weights that are sent to engines: 287 of 450 GB/s between two GPUs, by NCCL alone."""
SYNC_S = {"hf": 0.23, "sglang": 0.30, "vllm": 0.38}
"""Seconds of a weight update beyond its bytes: the check, messages, and with hf the restart of its batching. hf: median
at 0.5B. sglang: SmolLM2-135M in nine runs, 0.25 to 0.39. vllm: one run of it. A script that does nothing but updates
takes a third."""
HOST_COPY = 10e9
"""Bytes a second of a weight update through host memory, and of one rank's copy of its state. Assumed."""
DISK = 1.4e9
"""Bytes a second that a checkpoint is written with: 1.2 to 1.4 GB/s in docs/benchmarks.md."""
SNAPSHOT = 46e9
"""Bytes a second of a GPU's copy into host memory for a save: the same place."""
