"""The plan of a run: its figures beside measured ones and beside what a run divides, and the problems that it finds."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli import app
from posttrain.config import Config
from posttrain.config.preset_files import list_presets
from posttrain.config.writing import dump_toml
from posttrain.core.errors import ConfigError, ModelError
from posttrain.core.machines import GPUS, Machine, gpu_named, gpu_of_name, machine_stored, this_machine
from posttrain.data.bins import assign
from posttrain.data.pack import place
from posttrain.engines import choice
from posttrain.engines.choice import EngineChoice
from posttrain.plan.advice import changed
from posttrain.plan.batch import Lengths, assumed_lengths, batch_of
from posttrain.plan.budget import MemoryBudget, check_budget, memory_warning
from posttrain.plan.compare import Pair, lengths_of
from posttrain.plan.estimate import Plan, Question
from posttrain.plan.inputs import Known, PlanOptions, replans, shapes_of
from posttrain.plan.known import known_models
from posttrain.plan.layout import Kernels, Shapes
from posttrain.plan.memory import total
from posttrain.plan.problems import found, impossible, problems
from posttrain.plan.shape import shape_of

REPO = Path(__file__).parents[3]


def load_bench():
    spec = importlib.util.spec_from_file_location("bench_plan", REPO / "scripts" / "bench_plan.py")
    module = sys.modules["bench_plan"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bench = load_bench()

# ---------------------------------------------------------------------- against what was measured


@pytest.mark.parametrize("row", bench.UPDATES, ids=lambda row: row.what)
def test_an_optimizer_step_is_as_it_was_measured(row):
    assert abs(bench.off(row.predicted_memory(), row.memory_gib)) < bench.MEMORY_BOUND
    if row.tokens_per_s is not None:
        assert abs(bench.off(row.predicted_speed(), row.tokens_per_s)) < bench.TIME_BOUND


def test_phases_and_the_memory_of_taking_turns_are_as_they_were_measured():
    phases = list(bench.phases())
    assert len(phases) >= 14
    for phase in phases:
        assert abs(bench.off(phase.predicted, phase.measured)) < bench.TIME_BOUND, phase
    in_turns = list(bench.in_turns())
    assert len(in_turns) == 4
    for used in in_turns:
        assert abs(bench.off(used.predicted, used.measured)) < bench.MEMORY_BOUND, used


def test_the_table_in_the_docs_is_the_one_that_the_script_prints(capsys):
    bench.main()
    page = (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(printed) > 25
    assert [line for line in printed if line not in page] == []


# ---------------------------------------------------------------------- batches


def config(command="sft", **sections):
    return Config.model_validate({"command": command, "run": {"name": "x"}, **sections})


@pytest.mark.parametrize("seed", range(6))
def test_micro_batches_are_those_of_a_run(seed):
    draw = random.Random(seed)
    ranks, budget = draw.choice([1, 2, 4]), draw.choice([500, 2000])
    lengths = [draw.randint(1, 700) for _ in range(8 * ranks * draw.randint(1, 4))]
    limit = draw.choice([None, 3])
    train = {"tokens_per_microbatch": budget, "sequences_per_microbatch": limit}
    cfg = config(data={"batch_size": len(lengths), "max_length": 700}, train=train, cluster={"workers": ranks})
    placed = place(lengths, ranks=ranks, token_budget=budget, sequence_limit=limit).parts
    batch = batch_of(cfg, Lengths(1.0, 700), 10, lengths)
    tokens = [[sum(lengths[i] for i in micro) for micro in of_rank] for of_rank in placed]
    assert batch.micro_batches == len(placed[0])
    assert batch.largest == max(map(max, tokens)) <= batch.worst
    assert batch.tokens == sum(lengths)
    assert batch.work.tokens == max(map(sum, tokens))


def test_updates_of_a_step_get_whole_groups():
    cfg = config("rl", data={"batch_size": 6}, algo={"updates_per_step": 3}, rollout={"n": 4}, train={"steps": 5})
    batch = batch_of(cfg, Lengths(100.0, 2048), 5)
    assert (batch.groups_per_update, batch.sequences, batch.total_updates) == ((2, 2, 2), 24, 15)
    short = batch_of(cfg, Lengths(100.0, 2048), 5, [100] * 16)  # of a replay, 4 groups
    assert short.groups_per_update == (2, 1, 1)


@pytest.mark.parametrize("seed", range(20))
def test_sequences_of_one_length_are_placed_as_a_run_places_them(seed):
    draw = random.Random(seed)
    ranks, budget, limit = draw.choice([1, 2, 3, 7]), draw.randint(1, 200), draw.choice([None, 1, 3])
    lengths = [draw.randint(1, 50)] * draw.randint(ranks, 60)
    train = {"tokens_per_microbatch": budget, "sequences_per_microbatch": limit}
    cfg = config("rl", data={"batch_size": ranks}, train=train, cluster={"workers": ranks}, rollout={"n": 1},
                 algo={"advantage": "reinforce_plus_plus"})  # fmt: skip
    batch = batch_of(cfg, Lengths(1.0, 50), 10, lengths)
    placed = assign(lengths, ranks=ranks, token_budget=budget, sequence_limit=limit)
    tokens = [[sum(lengths[i] for i in micro) for micro in of_rank] for of_rank in placed]
    assert (batch.micro_batches, batch.largest) == (len(placed[0]), max(map(max, tokens)))
    assert sorted(map(sum, batch.work.micro_batches)) == sorted(max(tokens, key=sum))


def test_a_mean_stands_for_sequences_that_fill_micro_batches():
    """Nine and a half of the mean length are one micro-batch and not two, since some are shorter."""
    off = []
    for seed in range(40):
        draw = random.Random(seed)
        ranks, mean = draw.choice([1, 2]), draw.randint(200, 900)
        lengths = [draw.randint(mean * 3 // 4, mean * 5 // 4) for _ in range(64 * ranks)]
        cfg = config("sft", data={"batch_size": 64 * ranks}, train={"tokens_per_microbatch": 8192},
                     cluster={"workers": ranks})  # fmt: skip
        batch = batch_of(cfg, Lengths(sum(lengths) / len(lengths), 2048), 10)
        placed = assign(lengths, ranks=ranks, token_budget=8192)
        largest = max(sum(lengths[i] for i in micro) for of_rank in placed for micro in of_rank)
        assert sum(map(sum, batch.work.micro_batches)) == pytest.approx(sum(lengths) / ranks, rel=0.01)
        off.append(abs(batch.micro_batches - len(placed[0])))
        assert off[-1] or 0.93 * largest <= batch.largest <= 1.02 * largest
    assert max(off) == 1  # where they fit by a hair, or do not
    assert sum(off) <= 8


# ---------------------------------------------------------------------- problems


def kernels():
    return Kernels(True, 2, True, EngineChoice("hf", "a test"))


def question(cfg, model="7b", gpu="h200", gpus=1, mean=None):
    shape = shape_of(bench.QWEN[model], model)
    lengths = assumed_lengths(cfg, mean)
    return Question(cfg, Shapes(shape), Machine(gpu_named(gpu), gpus), kernels(), lengths, steps=10)


def told(asked):
    """The problems of a question, with settings that were tried."""
    return problems(Plan(asked), replans(asked, PlanOptions(), Known(steps=asked.steps)))


def test_what_does_not_fit_is_told_with_settings_that_do():
    cfg = config(train={"tokens_per_microbatch": 32768}, data={"max_length": 4096}, cluster={"workers": 2})
    asked = question(cfg, gpus=2)
    [problem] = [p for p in told(asked) if p.level == "error"]
    assert "does not fit by" in problem.message
    assert "update" in problem.message
    assert problem.settings
    for settings in problem.settings:
        assert Plan(replace(asked, cfg=changed(cfg, settings))).fits
    # One setting is not enough on one GPU: 114 GiB are weights, gradients and moments in float32.
    one = config(train={"tokens_per_microbatch": 32768}, data={"max_length": 4096})
    [problem] = [p for p in told(question(one, gpus=1)) if p.level == "error"]
    assert problem.settings
    for settings in problem.settings:
        assert Plan(replace(question(one, gpus=1), cfg=changed(one, settings))).fits


@pytest.mark.parametrize(
    ("command", "sections", "said"),
    [
        ("sft", {"train": {"sequence_parallel": 3}, "cluster": {"workers": 3}}, "train.sequence_parallel = 3"),
        ("rl", {"rollout": {"tensor_parallel": 8, "engine": "vllm"}, "cluster": {"workers": 8}}, "tensor_parallel = 8"),
        ("rl", {"rollout": {"memory_fraction": 0.11, "engine": "vllm"}, "cluster": {"workers": 8}},
         "leaves a KV cache of"),
        ("rl", {"rollout": {"memory_fraction": 0.2, "engine": "vllm", "max_response_tokens": 8192},
                "data": {"batch_size": 8}, "cluster": {"workers": 8}}, "at once"),
        ("rl", {"rollout": {"replicas": 12, "memory_fraction": 0.5, "engine": "vllm"}, "cluster": {"workers": 8}},
         "2 engines on a GPU"),
        ("rl", {"rollout": {"tensor_parallel": 4, "engine": "vllm"}, "cluster": {"workers": 2}},
         "the run trains on 2 GPUs"),
        ("rl", {"rollout": {"tensor_parallel": 2}, "cluster": {"workers": 8}}, "an engine hf is of one GPU"),
        ("sft", {"cluster": {"workers": 64}, "data": {"batch_size": 64}}, "needs 64 GPUs, and there are 8"),
        ("rl", {"cluster": {"placement": "separate", "workers": 8}}, "needs 9 GPUs, and there are 8"),
        ("rl", {"rollout": {"filter_groups": True}, "algo": {"updates_per_step": 4}}, "may have fewer groups than 32"),
        ("sft", {"train": {"optim": {"warmup_steps": 10}}}, "warm-up takes 10 optimizer steps, and the run has 10"),
        ("sft", {"data": {"max_length": 32768}}, "more than train.tokens_per_microbatch = 16,384"),
    ],
)  # fmt: skip
def test_a_problem_is_found_and_a_setting_named(command, sections, said):
    cfg = config(command, **sections)
    [problem] = [p for p in told(question(cfg, gpus=8)) if said in p.message]
    assert problem.settings or problem.otherwise.startswith("gone with") or problem.level == "note"


def test_a_step_of_a_replay_may_have_fewer_groups_than_updates():
    cfg = config("rl", data={"batch_size": 8}, algo={"updates_per_step": 4}, rollout={"replay": "traces"})
    asked = question(cfg, "0.5b")
    three = Question(**{**asked.__dict__, "of_step": (100,) * 24})
    [problem] = [p for p in found(Plan(three)) if "3 groups for 4 updates" in p.message]
    assert problem.advice[0] == "algo.updates_per_step=3"
    five = Question(**{**asked.__dict__, "of_step": (100,) * 40})
    assert any("the last update has fewer groups: 2, 1, 1, 1" in p.message for p in found(Plan(five)))


def test_plans_with_the_engine_that_a_run_would_choose(tmp_path, monkeypatch):
    def engines(*arguments):
        done = planned(tmp_path, "--preset", "qwen2.5-0.5b-gsm8k", *arguments)
        return next(line for line in done.stdout.splitlines() if line.startswith("engines: "))

    def version(package):
        raise choice.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(choice.metadata, "version", version)
    assert "1 x sglang of 1" in engines("--gpu", "h200")
    assert "rollout.engine = auto: assumed to be installed there" in engines("--gpu", "h200")
    assert "1 x vllm of 1" in engines("--gpu", "h200", "--set", "rollout.engine=vllm")
    monkeypatch.setattr("posttrain.plan.inputs.this_machine", lambda: Machine(None))
    assert "1 x hf of 1" in engines()
    assert "rollout.engine = auto: no GPU" in engines()
    monkeypatch.setattr("posttrain.plan.inputs.this_machine", lambda: Machine(gpu_named("h200")))
    assert "sglang is not installed and vllm is not installed" in engines()
    monkeypatch.setattr(choice.metadata, "version", {"vllm": "0.24.0", "sglang": "0.4.1"}.__getitem__)
    assert "1 x vllm of 1" in engines()
    assert "rollout.engine = auto: a GPU, and vllm 0.24.0 is installed" in engines()


# ---------------------------------------------------------------------- the memory of colocated runs


def test_turns_on_the_gpu_take_less_at_every_moment():
    def totals(**sections):
        rollout = {"engine": "sglang", "memory_fraction": 0.5, **sections.pop("rollout", {})}
        cfg = config("rl", rollout=rollout, cluster={"workers": 2}, **sections)
        return {moment.name: moment.total for moment in Plan(question(cfg, gpus=2)).moments}

    both = totals()
    turns = totals(rollout={"sleep": True}, train={"offload": True})
    assert list(both) == ["start", "first sync", "sample", "free", "update_actor", "load", "save"]
    assert turns["start"] == both["start"]
    assert all(turns[name] < both[name] for name in ("sample", "free", "update_actor", "load", "save"))
    # Amid the update trainers, buckets and the engine's weights are there, and the cache comes when trainers have left.
    assert turns["free"] < turns["load"]


def test_engines_that_share_a_gpu_take_their_share_of_all_of_its_memory():
    def cache(replicas):
        rollout = {"engine": "sglang", "memory_fraction": 0.2, "replicas": replicas}
        plan = Plan(question(config("rl", rollout=rollout), "0.5b", "h100"))
        sampled = next(moment for moment in plan.moments if moment.name == "sample")
        return plan.layout.engine.gpu_bytes, total(sampled.terms)

    (free, alone), (whole, three) = cache(1), cache(3)
    assert free < whole
    assert three > 2 * alone


def test_engines_without_trainers_share_the_gpus_that_there_are():
    def plan(fraction):
        rollout = {"engine": "sglang", "memory_fraction": fraction, "replicas": 3, "only": True}
        return Plan(question(config("rl", rollout=rollout), "0.5b", "h100"))

    def wants(plan):
        """(GPUs, engines on each, whether there are too few)"""
        errors = {problem.kind for problem in found(plan) if problem.level == "error"}
        return plan.layout.gpus_needed, plan.layout.engines_per_gpu, "gpus" in errors

    assert wants(plan(0.2)) == (1, 3, False)
    assert wants(plan(0.5)) == (3, 1, True)


def test_a_budget_that_cannot_be_met_is_refused(monkeypatch):
    cfg = config("rl", rollout={"engine": "vllm", "memory_fraction": 0.9})

    def refused(cfg, model="7b"):
        asked = question(cfg, model)
        return impossible(Plan(asked), replans(asked, PlanOptions(), Known(steps=asked.steps)))

    problem = refused(cfg)
    assert problem is not None
    assert problem.message.startswith("no room on a GPU at: start")
    assert problem.settings
    of_what_is_free = refused(config("rl", rollout={"engine": "sglang", "memory_fraction": 0.9}))
    assert of_what_is_free is not None
    assert of_what_is_free.message.startswith("no room on a GPU at: first sync")
    assert refused(cfg, "0.5b") is None
    monkeypatch.setattr("posttrain.plan.budget.this_machine", lambda: Machine(gpu_named("4090")))
    small = config("rl", rollout={"engine": "sglang", "memory_fraction": 0.8})  # builtin:tiny
    budget = check_budget(small)
    assert budget is not None
    assert 0.8 * 23.5 < budget < 23.5
    assert check_budget(config("rl", cluster={"device": "cpu"})) is None
    monkeypatch.setattr("posttrain.plan.budget.this_machine", lambda: Machine(gpu_named("4090"), 2))
    assert check_budget(config("rl", cluster={"placement": "separate"})) is None


def test_a_run_whose_updates_do_not_fit_is_told_so(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(bench.QWEN["7b"]))
    monkeypatch.setattr("posttrain.plan.budget.this_machine", lambda: Machine(gpu_named("h100"), 2))

    def warned(**rollout):
        train = {"lora": {"rank": 32}, "param_dtype": "bfloat16", "tokens_per_microbatch": 8192}
        cfg = {"rollout": {"engine": "sglang", "replicas": 2, **rollout}, "cluster": {"workers": 2}, "train": train}
        return memory_warning(config("rl", model={"path": str(tmp_path)}, **cfg))

    text = warned()  # two H100 ran out of memory with it
    assert text.startswith("warning: by its plan this run does not fit by ")
    assert "update_actor" in text
    assert "--set rollout.sleep=true or --set" in text
    assert warned(sleep=True) is None
    monkeypatch.setattr("posttrain.plan.budget.this_machine", lambda: Machine(None))
    assert warned() is None


def test_the_refusal_of_a_run_is_bad_input(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(bench.QWEN["7b"]))
    monkeypatch.setattr("posttrain.plan.budget.this_machine", lambda: Machine(gpu_named("4090")))
    with pytest.raises(ConfigError, match="no room on a GPU at: start") as refused:
        check_budget(config("rl", model={"path": str(tmp_path)}))
    assert "posttrain plan" in str(refused.value.hint)


def test_an_update_above_its_budget_is_told_of_once():
    said = []
    watch = MemoryBudget(10.0, said.append)
    assert watch.check({"sync/check_gap": 0.0}) == {"sync/check_gap": 0.0}  # on a CPU
    assert watch.check({"sync/gpu_used_gib": 10.4})["sync/gpu_budget_gib"] == 10.0
    assert said == []
    watch.check({"sync/gpu_used_gib": 10.6})
    watch.check({"sync/gpu_used_gib": 11.0})
    assert len(said) == 1
    assert MemoryBudget(None, said.append).check({"sync/gpu_used_gib": 9.0}) == {"sync/gpu_used_gib": 9.0}


# ---------------------------------------------------------------------- machines, models, the command


def test_gpus_are_found_by_their_names():
    assert gpu_of_name("NVIDIA H100 80GB HBM3") == gpu_named("H100")
    assert gpu_of_name("NVIDIA H100 PCIe") == gpu_named("h100-pcie")
    assert gpu_of_name("NVIDIA GeForce RTX 4090") == gpu_named("rtx4090")
    assert gpu_of_name("NVIDIA A100-SXM4-80GB") == gpu_named("a100")
    assert gpu_of_name("NVIDIA L4") == gpu_named("l4")
    assert gpu_of_name("NVIDIA L40") == gpu_named("l40")
    assert gpu_of_name("NVIDIA L40S") == gpu_named("l40s")
    assert gpu_of_name("NVIDIA A10G") == gpu_named("a10g")
    assert gpu_of_name("NVIDIA A100-SXM4-40GB") == gpu_named("a100-40g")
    assert gpu_of_name("NVIDIA A100-PCIE-40GB") == gpu_named("a100-pcie-40g")
    assert gpu_of_name("NVIDIA GB200") == gpu_named("gb200")
    for other in ("Tesla T4", "NVIDIA RTX A1000", "NVIDIA GH200 480GB"):
        assert gpu_of_name(other) is None
    assert all(gpu_of_name(f"NVIDIA {gpu.match}") == gpu for gpu in GPUS)
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    with pytest.raises(ConfigError, match="unknown GPU") as refused:
        gpu_named("h2000")
    assert "h200" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("said", "kind", "gib"),
    [
        ("NVIDIA H100 80GB HBM3, 81559, 551", "h100", 79.1),
        ("NVIDIA H100 NVL, 95830, 551", "h100", 93.0),  # another one of the kind
        ("NVIDIA GeForce RTX 4090 Laptop GPU, 16376, [N/A]", "4090", 16.0),
        ("NVIDIA GB10, [N/A], [N/A]", "NVIDIA GB10", 0.0),
        ("NVIDIA GH200 480GB, 97871, 551", "NVIDIA GH200 480GB", 95.0),
        ("NVIDIA H200, [N/A], [N/A]", "h200", 139.8),
    ],
)
def test_this_machines_memory_is_what_its_driver_says(said, kind, gib, tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{said}'\necho '{said}'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    machine = this_machine()
    assert (machine.kind, machine.gpu.memory_gib, machine.gpus) == (kind, gib, 2)
    assert machine_stored(machine.stored()) == machine


def test_every_phase_has_its_time_and_what_bounds_it():
    cfg = config(
        "rl", algo={"name": "ppo", "advantage": "gae", "kl_coef": 0.1, "updates_per_step": 2},
        rollout={"engine": "vllm"}, cluster={"workers": 2},
    )  # fmt: skip
    found = Plan(question(cfg, gpus=2)).phases
    phases = ["gen", "old_log_prob", "ref", "values", "update_actor", "update_critic", "sync"]
    assert list(found) == phases
    assert all(phase.total > 0 and phase.bound for phase in found.values())
    assert found["update_actor"].total > found["old_log_prob"].total


def test_a_config_that_is_no_decoder_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ModelError, match="does not give the sizes"):
        shapes_of(config(model={"path": str(tmp_path / "config.json")}))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="no JSON object"):
        shapes_of(config(model={"path": str(tmp_path)}))


def test_the_command_answers_without_torch(tmp_path):
    (tmp_path / "7b.json").write_text(json.dumps(bench.QWEN["7b"]))
    program = (
        "import sys\nfrom posttrain.cli import main\n"
        "try:\n    main()\nfinally:\n"
        "    print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules], file=sys.stderr)\n"
    )
    arguments = ["plan", "--preset", "qwen2.5-coder-7b-sft", "--model", "7b.json", "--gpu", "h200", "--json"]
    command = [sys.executable, "-c", program, *arguments]
    environment = {"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    told = json.loads(done.stdout)
    assert told["model"]["parameters"] == 7_615_616_512
    assert told["fits"] is True
    assert {moment["at"] for moment in told["memory"]} == {"start", "update", "save"}
    assert list(tmp_path.iterdir()) == [tmp_path / "7b.json"]


@pytest.mark.parametrize(("command", "rows", "share"), [
    ("sft", {"train/tokens": 800.0, "train/loss_tokens": 200.0}, 0.25),
    ("sft", {"train/tokens": 800.0}, 1.0),
    ("rl", {"perf/total_num_tokens": 1600.0, "prompt_length/mean": 10.0}, 0.6),
])  # fmt: skip
def test_a_run_tells_what_share_of_its_tokens_carries_loss(command, rows, share):
    cfg = config(command, data={"batch_size": 8}, rollout={"n": 8})
    lengths = lengths_of(cfg, [rows] * 3)
    assert lengths.loss_share == pytest.approx(share)


def test_a_figure_says_how_far_it_is_off():
    assert Pair("perf/memory_gib", 22.0, 20.0).describe() == "perf/memory_gib 22 / 20 (+10%)"


# ---------------------------------------------------------------------- shipped presets, offline


def planned(folder, *arguments):
    """`posttrain plan` in a folder without models and runs, and without the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HOME", str(folder))
        done = CliRunner().invoke(app, ["plan", *arguments])
    assert "Traceback" not in done.output
    return done


MACHINES = [("4090", 1), ("4090", 3), ("h200", 8), ("a10", None)]


@pytest.mark.parametrize("preset", [p.name for p in list_presets() if p.command in ("sft", "prefer", "rl")])
def test_all_advice_for_a_shipped_preset_is_accepted_and_helps(preset, tmp_path):
    for gpu, gpus in MACHINES:
        machine = ["--preset", preset, "--gpu", gpu, *(["--gpus", str(gpus)] if gpus else []), "--json"]
        done = planned(tmp_path, *machine)
        assert done.exit_code == 0, done.stderr
        before = {p["message"]: p for p in json.loads(done.stdout)["problems"]}
        firsts: dict[str, str] = {}
        for message, problem in before.items():
            for alternative in problem["set"]:
                sets = [part for setting in alternative for part in ("--set", setting)]
                done = planned(tmp_path, *machine, *sets)
                assert done.exit_code == 0, (machine, sets, done.stderr)
                after = json.loads(done.stdout)["problems"]
                assert message not in [p["message"] for p in after], (machine, sets)
                if problem["level"] == "error" and sum(p["level"] == "error" for p in before.values()) == 1:
                    assert not [p["message"] for p in after if p["level"] == "error"], (machine, sets)
            if problem["set"]:
                pairs = dict(setting.split("=", 1) for setting in problem["set"][0])
                assert all(firsts.get(key, value) == value for key, value in pairs.items()), (machine, firsts, pairs)
                firsts |= pairs
        together = [part for key, value in firsts.items() for part in ("--set", f"{key}={value}")]
        done = planned(tmp_path, *machine, *together)
        assert done.exit_code == 0, (machine, together, done.stderr)
        left = [p for p in json.loads(done.stdout)["problems"] if p["level"] == "error"]
        assert not left or any(p["level"] == "error" and not p["set"] for p in before.values()), (machine, together)


def test_three_gpus_get_a_number_of_workers_that_the_batch_allows(tmp_path):
    done = planned(tmp_path, "--preset", "qwen2.5-0.5b-dapo", "--gpu", "h200", "--gpus", "3")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[lines.index("error: the run needs 8 GPUs, and there are 3") + 1] == (
        "  set cluster.workers=2, rollout.replicas=2"
    )


def test_public_models_have_the_parameters_that_are_published():
    counts = {name: shape_of(sizes, name).parameters for name, sizes in known_models().items()}
    assert counts["Qwen/Qwen2.5-0.5B-Instruct"] == 494_032_768
    assert counts["Qwen/Qwen2.5-1.5B-Instruct"] == 1_543_714_304
    assert counts["Qwen/Qwen2.5-3B-Instruct"] == 3_085_938_688
    assert counts["Qwen/Qwen2.5-7B-Instruct"] == counts["Qwen/Qwen2.5-Coder-7B-Instruct"] == 7_615_616_512
    assert counts["Qwen/Qwen3-4B"] == 4_022_468_096
    assert counts["Qwen/Qwen3-8B"] == 8_190_735_360


def test_a_model_that_is_near_a_known_one_is_named(tmp_path):
    done = planned(tmp_path, "--preset", "qwen2.5-0.5b-gsm8k", "--model", "Qwen/Qwen2.5-0.5B-Instuct")
    assert done.exit_code == 2
    assert "is not in the local cache of the Hugging Face hub" in done.stderr
    assert "hint: did you mean 'Qwen/Qwen2.5-0.5B-Instruct'?" in done.stderr


def a_run(folder, **state):
    """A finished run of two steps, in `runs/x`."""
    run = folder / "runs" / "x"
    run.mkdir(parents=True)
    cfg = config(cluster={"device": "auto"})
    (run / "config.toml").write_text(dump_toml(cfg))
    (run / "run.json").write_text(json.dumps({"status": "finished", **state}))
    measured = {"train/tokens": 800.0, "perf/memory_gib": 20.0, "timing_s/update": 1.0}
    rows = [{"step": step} | measured for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_compared_with_a_plan_for_its_own_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.plan.inputs.this_machine", lambda: Machine(None))
    a_run(tmp_path, host="elsewhere", machine=Machine(gpu_named("h200"), 2).stored())
    done = planned(tmp_path, "--run", "x")
    assert (done.exit_code, done.stdout.splitlines()[1]) == (0, "predicted for: 2 x H200 (139.8 GiB each)")
    assert "another machine" not in done.stdout
    assert "perf/memory_gib" in done.stdout
    done = planned(tmp_path, "--run", "x", "--gpu", "4090")
    assert "note: the run was made on another machine: 2 x H200" in done.stdout
    assert (
        "another machine" in json.loads(planned(tmp_path, "--run", "x", "--gpu", "4090", "--json").stdout)["notes"][0]
    )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--preset", "tiny-arith"], "--preset"),
        (["--algo", "ppo"], "--algo"),
        (["--workers", "8"], "--workers"),
        (["--model", "no/such"], "--model"),
        (["--steps", "7"], "--steps"),
        (["--set", "nonsense.key=3"], "--set"),
    ],
)
def test_a_run_has_its_own_config(tmp_path, words, named):
    a_run(tmp_path)
    done = planned(tmp_path, "--run", "x", *words)
    assert done.exit_code == 2
    assert f"--run and {named} exclude each other" in done.stderr


def test_a_number_of_gpus_needs_the_gpu(tmp_path):
    done = planned(tmp_path, "--preset", "qwen2.5-0.5b-dapo", "--gpus", "2")
    assert done.exit_code == 2
    assert "--gpus and --nodes need --gpu\nhint: name the GPU to plan for, such as --gpu h200" in done.stderr


@pytest.mark.parametrize(
    ("file", "message"),
    [("run.json", "run.json does not hold a JSON object"), ("metrics.jsonl", "metrics.jsonl does not hold metrics")],
)
def test_a_damaged_run_is_told_of(tmp_path, file, message):
    a_run(tmp_path, host="elsewhere", machine=Machine(gpu_named("h200"), 2).stored())
    (tmp_path / "runs" / "x" / file).write_text("[1, 2]")
    done = planned(tmp_path, "--run", "x")
    assert (done.exit_code, message in done.stderr) == (2, True), done.output


def test_a_line_that_a_killed_run_left_unfinished_is_left_out(tmp_path):
    a_run(tmp_path, host="elsewhere", machine=Machine(gpu_named("h200"), 2).stored())
    whole = planned(tmp_path, "--run", "x")
    with (tmp_path / "runs" / "x" / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 9, "ti')
    done = planned(tmp_path, "--run", "x")
    assert (done.exit_code, done.stdout) == (0, whole.stdout)


def test_a_run_of_another_host_is_told_to_be_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.plan.inputs.this_machine", lambda: Machine(None))
    a_run(tmp_path, host="elsewhere")
    done = planned(tmp_path, "--run", "x")
    assert done.exit_code == 0
    assert "note: the run was made on another machine, elsewhere, and this is" in done.stdout
    assert "--gpu names the run's" in done.stdout


def test_rates_of_a_policy_begin_after_its_critic_was_alone():
    optim = {"schedule": "linear", "warmup_steps": 60}
    critic = {"warmup_steps": 50}
    algo = {"advantage": "gae", "updates_per_step": 2}
    cfg = config("rl", train={"optim": optim}, critic=critic, algo=algo, data={"batch_size": 8})
    found = batch_of(cfg, Lengths(100.0, 200, 50.0, "known"), 100)
    assert [step for step, _ in found.rates] == [1, 61, 100]
    assert found.total_updates == 100
