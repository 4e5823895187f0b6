"""An engine of vLLM on a CPU whose processes began ahead: ``python -m tests.helpers.vllm_ahead THREADS PROMPT`` prints
what it samples, and whether its processes are those that waited, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
import psutil

from posttrain.config import RolloutConfig
from posttrain.core import spawn_ahead as waiting
from posttrain.core.types import SamplingParams
from posttrain.engines.ahead import processes_ahead

ROLLOUT = RolloutConfig(engine="vllm", kv_tokens=8192, max_prompt_tokens=256, max_response_tokens=512)


async def sampled(threads: int, prompt: list[int]) -> dict[str, Any]:
    from posttrain.engines.base import EngineSpec
    from posttrain.engines.start import open_engine
    from posttrain.models.load import ModelSource

    spec = EngineSpec(ModelSource("builtin:tiny"), "cpu", "float32", 1, ROLLOUT, [], threads=threads)
    engine = await open_engine(spec)
    sample = await engine.generate(np.asarray(prompt, np.int32), SamplingParams(8, 0.0))
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    await engine.close()
    return {"ids": list(sample.ids), "processes": pids, "left": len(waiting._waiting)}


def main() -> None:
    threads, prompt = int(sys.argv[1]), json.loads(sys.argv[2])
    waiting.spawn_ahead(processes_ahead("vllm", ROLLOUT, threads))
    core = psutil.Process(waiting._waiting[0].pid)
    while not (workers := core.children()):
        core.status()  # raises where it has ended
    found = asyncio.run(sampled(threads, prompt))
    print(json.dumps(found | {"waited": [core.pid, workers[0].pid]}))


if __name__ == "__main__":  # vLLM's processes import this module too
    main()
