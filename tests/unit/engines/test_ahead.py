"""Which processes of an engine begin ahead."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.config import EngineName, RolloutConfig
from posttrain.engines.ahead import processes_ahead

CORE, WORKER, SCHEDULER = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "posttrain.weight_sync.sglang_worker",
)


@pytest.mark.parametrize(
    ("engine", "rollout", "expected"),
    [
        ("vllm", {}, [(CORE, [WORKER])]),
        ("vllm", {"engine_options": {"distributed_executor_backend": "uni"}}, [(CORE, [])]),
        ("vllm", {"tensor_parallel": 2}, [(CORE, [WORKER, WORKER])]),
        ("vllm", {"engine_options": {"distributed_executor_backend": "ray"}}, []),
        ("vllm", {"sleep": True}, [(CORE, [WORKER])]),
        ("sglang", {"tensor_parallel": 2, "sleep": False}, [(SCHEDULER, []), (SCHEDULER, [])]),
        ("sglang", {"sleep": True}, []),
        ("sglang", {"batch_invariant": True, "sleep": False}, []),
        ("vllm", {"batch_invariant": True}, []),
        ("hf", {}, []),
    ],
)
def test_processes_are_those_that_the_engine_starts(
    engine: EngineName, rollout: dict[str, Any], expected: list[Any]
) -> None:
    found = processes_ahead(engine, RolloutConfig(engine=engine, **rollout), threads=3)
    assert [(p.target_module, [c.target_module for c in p.children]) for p in found] == expected
    if engine == "vllm":
        assert all(p.environment["OMP_NUM_THREADS"] == "3" for p in found)
