"""Whole runs of `prefer` in real processes on the CPU: DPO against a plain loop, reward models, resuming, the guide."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from posttrain import merge_ckpt
from posttrain.cluster.cluster import Cluster, local_ray
from posttrain.config.presets import resolve
from posttrain.core.errors import ConfigError, DataError, Interrupted
from posttrain.data.parquet import read_preferences, write_rows
from posttrain.models.builtin import builtin_tokenizer, create_builtin
from posttrain.models.load import load_model, locate
from posttrain.models.reward import RewardModel
from posttrain.preference import command as prefer
from posttrain.runs.training_run import TrainingRun
from posttrain.train import checkpoint
from tests.e2e.run_commands import run_commands

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

REPO = Path(__file__).resolve().parents[2]
TOKENIZER = builtin_tokenizer("tiny")
WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five"]
SEED = 5


@pytest.fixture(scope="module", autouse=True)
def ray_here():
    with local_ray():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pairs of which the chosen answer has the word "yes" somewhere, and the other one has not."""
    folder = tmp_path_factory.mktemp("prefer")
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return [WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator).tolist()]

    def row():
        question, rejected = draw(4), draw(2 + int(torch.randint(6, (1,), generator=generator)))
        chosen = list(rejected)
        chosen[int(torch.randint(len(chosen), (1,), generator=generator))] = "yes"
        answers = {
            k: [{"role": "assistant", "content": " ".join(v)}] for k, v in (("chosen", chosen), ("rejected", rejected))
        }
        return {"prompt": [{"role": "user", "content": " ".join(question)}], **answers}

    for name, count in (("train", 120), ("val", 40)):
        write_rows(folder / f"{name}.parquet", [row() for _ in range(count)])
    (folder / "plain.toml").write_text('command = "prefer"\n')
    return folder


def train(place, name, *sets):
    fixed = [
        f"run.dir='{place / 'runs'}'",
        f"run.name='{name}'",
        f"run.seed={SEED}",
        f"data.train='{place / 'train.parquet'}'",
        "data.batch_size=8",
        "train.optim.lr=1e-3",
        "train.optim.eps=1e-5",  # with less, AdamW makes whole steps of gradients that are rounding alone
        "train.optim.weight_decay=0.0",
        "run.logger=['jsonl']",
        "cluster.device='cpu'",
    ]
    return prefer.run(resolve("prefer", str(place / "plain.toml"), [*fixed, *sets]))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return dict(load_model(locate(str(checkpoint.find(folder).path)), dtype=torch.float32).named_parameters())


def val(place, every):
    return [f"data.val='{place / 'val.parquet'}'", f"train.val_every={every}"]


def same(run, other, names, rel=1e-5):
    for row, wanted in zip(rows(run), rows(other), strict=True):
        for name in names:
            assert row[name] == pytest.approx(wanted[name], rel=rel, abs=rel), (row["step"], name)


NUMBERS = ("train/loss", "train/grad_norm", "rewards/chosen", "rewards/rejected")


# ---------------------------------------------------------------------- DPO


def logp(model, prompt, answer):
    """Log-probability of an answer of one message, its end-of-turn token included."""
    whole = TOKENIZER.apply_chat_template([*prompt, *answer], tokenize=True, return_dict=False)
    start = len(TOKENIZER.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False))
    stop = len(whole) - whole[::-1].index(TOKENIZER.eos_token_id)
    ids = torch.tensor([whole])
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).flatten()
    return found[start - 1 : stop - 1].sum()


def plain_dpo(place, steps, beta):
    """Losses and gradient norms of the first steps: transformers and torch alone, each pair by itself."""
    model, ref = create_builtin("tiny", SEED), create_builtin("tiny", SEED).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    pairs = read_preferences(place / "train.parquet")
    for step in range(steps):
        losses = []
        for pair in pairs[8 * step : 8 * step + 8]:
            sides = [
                logp(model, pair.prompt, a) - logp(ref, pair.prompt, a).detach() for a in (pair.chosen, pair.rejected)
            ]
            losses.append(-logsigmoid(beta * (sides[0] - sides[1])))
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), norm.item()


@pytest.fixture(scope="module")
def aligned(place):
    return train(place, "dpo", "data.shuffle=false", "train.steps=12", *val(place, 6))


def test_dpo_is_a_plain_loop_of_pairs(aligned, place):
    found = [(row["train/loss"], row["train/grad_norm"]) for row in rows(aligned)[:5]]
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, plain_dpo(place, 5, 0.1), strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-3)
        assert norm == pytest.approx(wanted_norm, rel=1e-2)


def test_dpo_learns_what_is_preferred(aligned):
    first, *_, last = rows(aligned)
    assert first["train/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert last["rewards/margins"] > 1.0
    before, after = (row for row in rows(aligned) if "val/loss" in row)
    assert after["val/rewards/margins"] > before["val/rewards/margins"] > 0
    assert after["val/rewards/accuracies"] > 0.9
    assert after["val/loss"] < before["val/loss"] < 0.6931
    assert after["val/logps/rejected"] < before["val/logps/rejected"]


@pytest.mark.slow
def test_two_workers_and_small_microbatches_are_the_same(aligned, place):
    sets = ["data.shuffle=false", "train.steps=12", *val(place, 6), "cluster.workers=2"]
    other = train(place, "two", *sets, "train.tokens_per_microbatch=64")
    same(other, aligned, NUMBERS, rel=1e-4)
    for (name, weight), wanted in zip(weights(other).items(), weights(aligned).values(), strict=True):
        torch.testing.assert_close(weight, wanted, rtol=0, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "reward_model"])
def test_a_stopped_run_goes_on_as_if_it_had_not(place, monkeypatch, method):
    sets = [f"prefer.method='{method}'", "train.steps=5", "train.save_every=1", *val(place, 2)]
    whole = train(place, f"whole-{method}", *sets)
    save = TrainingRun.save

    async def stopping(self, step, *args, **more):
        await save(self, step, *args, **more)
        self.stop.requested = step == 3

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "save", stopping)
        with pytest.raises(Interrupted):
            train(place, f"stopped-{method}", *sets)
    assert len(rows(place / "runs" / f"stopped-{method}")) == 3
    same(train(place, f"stopped-{method}", *sets), whole, NUMBERS, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sets",
    [
        ["prefer.loss='ipo'", "prefer.length_normalized=true"],
        ["prefer.label_smoothing=0.1", "prefer.nll_coef=1.0"],
    ],
)
def test_other_losses_learn_too(place, sets):
    run = train(place, f"other-{len(sets[0])}", *sets, "train.steps=8")
    first, *_, last = rows(run)
    assert last["train/loss"] < first["train/loss"]
    assert last["rewards/margins"] > 0.05
    if "nll" in sets[1]:
        assert last["logps/chosen"] > first["logps/chosen"]


@pytest.mark.slow
def test_with_lora_the_base_is_the_reference(place, monkeypatch):
    started = []
    trainer = Cluster.trainer

    async def recording(self, role, *args, **kwargs):
        started.append(role)
        return await trainer(self, role, *args, **kwargs)

    monkeypatch.setattr(Cluster, "trainer", recording)
    run = train(place, "lora", "train.lora.rank=8", "train.optim.lr=1e-2", "train.steps=10", *val(place, 10))
    assert started == ["actor"]
    first, *_, last = rows(run)
    assert first["rewards/chosen"] == pytest.approx(0.0, abs=1e-5)
    assert last["rewards/margins"] > 0.3
    assert last["val/rewards/accuracies"] > 0.8
    # The rewards that it tells are those of the merged model beside its base.
    source = locate(str(checkpoint.find(run).path))
    assert len(source.adapters) == 1
    merged, base = load_model(source, dtype=torch.float32), create_builtin("tiny", SEED)
    merged.set_attn_implementation("sdpa")
    pairs = read_preferences(place / "val.parquet")
    with torch.no_grad():
        for side in ("chosen", "rejected"):
            ratios = [logp(merged, p.prompt, getattr(p, side)) - logp(base, p.prompt, getattr(p, side)) for p in pairs]
            assert 0.1 * torch.stack(ratios).mean().item() == pytest.approx(last[f"val/rewards/{side}"], abs=1e-4)


# ---------------------------------------------------------------------- reward models


@pytest.fixture(scope="module")
def scorer(place):
    sets = ["prefer.method='reward_model'", "prefer.center_coef=0.01", "train.steps=25", "checkpoint.save_hf=true"]
    return train(place, "scorer", *sets, *val(place, 25))


@pytest.mark.slow
def test_a_reward_model_learns_scores_and_is_opened_elsewhere(scorer, place):
    last = rows(scorer)[-1]
    assert last["val/rewards/accuracies"] > 0.9
    assert last["val/loss"] < 0.3
    assert "logps/chosen" not in last
    merged = merge_ckpt.run("scorer", str(place / "merged"), check=True, runs=str(place / "runs"))
    pairs = read_preferences(place / "val.parquet")
    for folder in (merged, checkpoint.find(scorer).path / "actor" / "huggingface"):
        model = RewardModel(str(folder), "cpu", torch.float32, 256, 4096)
        for side in ("chosen", "rejected"):
            scores = [s.score for s in model.score([[*p.prompt, *getattr(p, side)] for p in pairs])]
            assert sum(scores) / len(scores) == pytest.approx(last[f"val/rewards/{side}"], abs=1e-5)


@pytest.mark.slow
def test_two_workers_train_the_same_reward_model(place):
    sets = ["prefer.method='reward_model'", "train.steps=6"]
    one, two = (train(place, f"rm{n}", *sets, f"cluster.workers={n}") for n in (1, 2))
    same(two, one, NUMBERS, rel=1e-4)


@pytest.mark.slow
def test_a_reward_model_is_refused_as_a_policy(scorer, place):
    with pytest.raises(ConfigError, match=r"model\.path = 'run:scorer' is a reward model"):
        train(place, "x", "model.path='run:scorer'", "train.steps=1")


# ---------------------------------------------------------------------- refused before anything is written


def test_bad_rows_leave_no_run_behind(place, tmp_path):
    good = {"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}]}
    write_rows(
        tmp_path / "bad.parquet",
        [{**good, "rejected": [{"role": "assistant", "content": "c"}]}, {**good, "rejected": good["chosen"]}],
    )
    with pytest.raises(DataError, match=r"bad.parquet: row 1, column 'rejected': it is the same as `chosen`"):
        train(place, "bad", f"data.train='{tmp_path / 'bad.parquet'}'")
    write_rows(tmp_path / "sft.parquet", [{"messages": [*good["prompt"], *good["chosen"]]}])
    with pytest.raises(DataError, match="column 'chosen' is missing"):
        train(place, "bad", f"data.train='{tmp_path / 'sft.parquet'}'")
    assert not (place / "runs" / "bad").exists()


# ---------------------------------------------------------------------- the guide


@pytest.mark.slow
def test_the_commands_of_the_guide(tmp_path, monkeypatch):
    """docs/preference.md, with less data and fewer steps."""
    text = (REPO / "docs" / "preference.md").read_text(encoding="utf-8")
    block = re.search(r"^```bash\n(.*?)^```", text, flags=re.S | re.M)
    assert block is not None
    steps = ["--steps", "3"]
    shorter = {"prep": ["--limit", "32"], "sft": steps, "prefer": steps, "generate": ["--limit", "2"]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    commands = [shlex.split(line)[1:] for line in block[1].splitlines()]
    run_commands(tmp_path, [[*words, *shorter.get(words[0], [])] for words in commands])
    assert (tmp_path / "reward-model" / "model.safetensors").is_file()
