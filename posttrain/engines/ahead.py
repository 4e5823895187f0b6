"""The processes of SGLang and vLLM that can begin ahead (``core/spawn_ahead.py``). Imports nothing heavy: they begin
before the engine is imported."""

from __future__ import annotations

from posttrain.config import EngineName, RolloutConfig
from posttrain.core.spawn_ahead import AheadProcess
from posttrain.engines.choice import ENGINES, vllm_executor


def imports_ray(name: EngineName) -> bool:
    """Return whether importing an engine imports Ray, which on import reads what a worker's raylet has set."""
    return name == "vllm"


def processes_ahead(name: EngineName, rollout: RolloutConfig, threads: int = 1) -> tuple[AheadProcess, ...]:
    """Return the processes of an engine on a GPU that can import while the engine's own process does, instead of after
    it. Batch-invariant kernels are switched on by a variable that engines read on import: none then.

    Args:
        threads: CPU threads of the engine, if it is vLLM.
    """
    if rollout.batch_invariant:
        return ()
    if name == "sglang" and not rollout.sleep:  # where it may sleep a library of its own is loaded before all others
        return (_sglang_scheduler(),) * rollout.tensor_parallel
    if name == "vllm":
        return _vllm_processes(rollout, threads)
    return ()


def _sglang_scheduler() -> AheadProcess:
    return AheadProcess(
        target_module="posttrain.weight_sync.sglang_worker",
        imports=(ENGINES["sglang"].module, "sglang.srt.managers.scheduler"),
        environment={
            "CUDA_DEVICE_MAX_CONNECTIONS": "8",
            "CUDA_MODULE_LOADING": "AUTO",
            "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "0",
            "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0",
            "SGLANG_ENABLE_TORCH_COMPILE": "0",
        },
        fixed=("SGLANG_",),
        free=("SGLANG_RUN_ID", "SGLANG_OPT_FP8_WO_A_GEMM", "SGLANG_USE_CUDA_IPC_TRANSPORT"),  # not read on import
    )


def _vllm_processes(rollout: RolloutConfig, threads: int) -> tuple[AheadProcess, ...]:
    """Return the scheduler, which has the model too or begins a worker for each GPU."""
    engine, executor = ENGINES["vllm"].module, vllm_executor(rollout)
    environment, fixed = {"OMP_NUM_THREADS": str(threads)}, ("VLLM_",)
    core, workers = "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor"
    model = "vllm.v1.worker.gpu_worker"
    if executor == "uni":
        return (AheadProcess(core, (engine, core, model), environment, fixed),)
    if executor != "mp":
        return ()
    worker = AheadProcess(workers, (engine, workers, model), environment, fixed)
    return (AheadProcess(core, (engine, core), environment, fixed, children=(worker,) * rollout.tensor_parallel),)
