"""The workspace and the cases of ``bad_input.py``: what is broken, and what a person must be told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOTHING = r"(?!)"
"""A pattern that no path matches."""


@dataclass(frozen=True)
class Case:
    """One command line, and what must come of it."""

    name: str
    words: str
    message: str
    """Pattern that the output has."""
    hint: str = ""
    """Pattern that its hints have. There must be one where ``code`` is 2."""
    code: int = 2
    leaves: str = NOTHING
    """Paths below the workspace that may change."""
    disk_kb: int | None = None
    """Size of a disk that is mounted at ``disk`` for this case."""
    act: Callable[[int, Path], None] | None = None
    always: bool = False
    """Whether ``--short`` runs it."""


def all_cases(root: Path) -> list[Case]:
    work = root / "work"
    groups = (
        _configs(),
        _files(work),
        _rows(),
        _models(),
        _prep(),
        _plugins(),
        _checkpoints(),
        _others(),
        _disks(),
        _signals(),
    )
    return [case for group in groups for case in group]


# ---------------------------------------------------------------------- configs

SFT = "sft --preset tiny-arith-sft --steps 2"
RL = "rl --preset tiny-arith --model builtin:tiny --steps 2"
PREFER = "prefer --preset tiny-prefer --model builtin:tiny --steps 2"
GENERATE = "generate --preset tiny-arith-generate --model builtin:tiny"
COMMANDS = {"sft": SFT, "prefer": PREFER, "rl": RL, "generate": GENERATE}

_VALUES = {  # key=value: pattern of the message, for the commands that have the key
    "train.lr=1": ("unknown key `train.lr`", "train.optim.lr", "sft"),
    "learning_rate=1e-4": ("unknown key `learning_rate`", "train.optim.lr", "sft"),
    "rollout.temprature=1": ("unknown key `rollout.temprature`", "rollout.temperature", "rl generate"),
    "train.steps=ten": ("train.steps", "", "sft prefer rl"),
    "train.steps=0": ("train.steps", "", "sft rl"),
    "train.optim.lr=inf": ("train.optim.lr", "", "sft prefer rl"),
    "train.optim.lr=nan": ("train.optim.lr", "", "sft"),
    "train.optim.lr=-1": ("train.optim.lr", "", "rl"),
    "train.optim.betas=[2,3]": ("train.optim.betas", "", "sft rl"),
    "train.optim.eps=-1": ("train.optim.eps", "", "sft"),
    "train.grad_clip=-1": ("train.grad_clip", "", "sft"),
    "train.tokens_per_microbatch=0": ("train.tokens_per_microbatch", "", "sft"),
    "train.dtype=float7": ("train.dtype", "", "rl"),
    "run.seed=-1": ("run.seed", "", "sft prefer rl generate"),
    "run.name=": ("run.name", "", "sft"),
    "run.name=a/b": ("run.name", "", "rl"),
    "run.name=..": ("run.name", "", "generate"),
    "'run.name=a\x1b[31mb'": ("run.name", "", "sft"),
    f"run.name={'x' * 300}": ("run.name", "", "sft rl"),
    'run.logger=["tensorbord"]': ("run.logger", "", "sft"),
    "run.console=fancy": ("run.console", "", "sft"),
    "run.resume=sometimes": ("sometimes", "", "sft rl"),
    "data.batch_size=0": ("data.batch_size", "", "sft rl"),
    "data.max_length=1": ("max_length|overlong|longer", "", "sft"),
    "rollout.n=0": ("rollout.n", "", "rl generate"),
    "rollout.temperature=-1": ("rollout.temperature", "", "rl generate"),
    "rollout.top_p=2": ("rollout.top_p", "", "rl generate"),
    "rollout.max_prompt_tokens=1": ("rollout.max_prompt_tokens", "", "rl generate"),
    'rollout.tools=["calculater"]': ("calculater", "calculator", "rl generate"),
    "rollout.tool_format=herms": ("herms", "hermes", "rl generate"),
    "rollout.engine=sglang": ("sglang", "", "rl generate"),
    "algo.name=gpro": ("gpro", "grpo", "rl"),
    "algo.clip_low=2": ("algo.clip_low", "", "rl"),
    "cluster.workers=0": ("cluster.workers", "", "sft rl"),
    "cluster.device=tpu": ("cluster.device", "", "sft rl"),
    "cluster.device=cuda": ("no GPU", "", "sft rl"),
    "cluster.address=127.0.0.1:1": ("127.0.0.1:1", "", "sft"),
    "reward.function=nofile.py:f": ("nofile.py", "", "rl"),
    'plugins=["nofile.py"]': ("nofile.py", "", "sft rl generate"),
    "model.path=run:nothing": ("nothing", "", "sft generate"),
}

_TOMLS = {
    "syntax": (b"command = \n", "syntax.toml"),
    "bom": (b"\xef\xbb\xbfcommand = 'sft'\n", "BOM|byte order"),
    "duplicate": (b"command = 'sft'\n[train]\nsteps = 1\nsteps = 2\n", "steps|train"),
    "latin": ("command = 'sft' # caf\xe9\n".encode("latin-1"), "UTF-8|utf-8"),
    "unknown": (b"command = 'sft'\n[trian]\nsteps = 1\n", "trian"),
    "nocommand": (b"[train]\nsteps = 1\n", "command"),
    "badcommand": (b"command = 'stf'\n", "stf|command"),
    "extends": (b"extends = 'nowhere'\n", "nowhere"),
    "cycle": (b"extends = 'cycle.toml'\n", "cycle"),
    "table": (b"command = 'sft'\ntrain = 3\n", "train"),
    "empty": (b"", "command|empty"),
}


def _configs() -> Iterator[Case]:
    for setting, (message, hint, commands) in _VALUES.items():
        for command in commands.split():
            text = setting if setting.startswith("'") else f"'{setting}'"
            words = COMMANDS[command]
            for flag, key in ((" --steps 2", "train.steps"), (" --model builtin:tiny", "model.path")):
                words = words.replace(flag, "") if key in setting else words  # a flag wins over --set
            yield Case(f"{command}:config:{setting[:30]}", f"{words} --set {text}", message, hint)
    for name, (_, message) in _TOMLS.items():
        yield Case(f"sft:toml:{name}", f"sft --preset {name}.toml", message)
    crowded = f"{SFT} --set data.batch_size=1000"
    yield Case("sft:batch", crowded, "data.batch_size = 1,?000, and there are 40 rows", code=0, leaves="runs/.*")
    yield Case("sft:preset:unknown", "sft --preset tiny-multitrun", "unknown preset", "tiny-multiturn")
    yield Case("sft:preset:other command", "sft --preset tiny-gsm8k", "is for `posttrain rl`")
    yield Case("sft:preset:folder", "sft --preset ./data", "data")
    yield Case("sft:set:no value", f"{SFT} --set train.steps", "train.steps")
    yield Case("sft:flag:steps", "sft --preset tiny-arith-sft --steps -3", "train.steps")
    yield Case("sft:flag:profile", f"{SFT} --profile 9:1", "profile")
    yield Case("sft:flag:unknown", f"{SFT} --stepz 3", "(?i)no such option")
    yield Case("sft:flag:resume", f"{SFT} --resume nowhere/global_step_3", "nowhere")


# ---------------------------------------------------------------------- data files and their rows


def _files(work: Path) -> Iterator[Case]:
    found = {
        "missing": "no such file|missing",
        "folder": "folder|not a file",
        "empty": "empty|parquet",
        "text": "parquet|jsonl",
    }
    found |= {"truncated": "parquet", "norows": "no rows|column", "lines": "jsonl|JSON|parquet"}
    for kind, message in found.items():
        for command, words in COMMANDS.items():
            path = f"files/{kind}.parquet" if kind != "lines" else "files/lines.jsonl"
            yield Case(
                f"{command}:file:{kind}",
                f"{words} --data {path}",
                rf"{Path(path).stem}.*({message})|({message}).*{Path(path).stem}",
            )
    for kind in ("missing", "empty", "text", "truncated"):
        yield Case(f"eval:file:{kind}", f"eval files/{kind}.parquet", f"files/{kind}.parquet")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _prompt(**changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "posttrain/arith",
        "prompt": [_user("1+1?")],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    return {key: value for key, value in (row | changes).items() if value is not None}


_MESSAGES: dict[str, tuple[list[Any], str]] = {
    "null": ([{"messages": None}], "messages"),
    "none": ([{"messages": []}], "messages"),
    "role": ([{"messages": [{"role": "robot", "content": "x"}, _answer("y")]}], "robot|role"),
    "number": ([{"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": 4}]}], "content"),
    "noanswer": ([{"messages": [_user("x")]}], "assistant"),
    "text": ([{"messages": "hello"}], "messages"),
    "othercolumn": ([{"text": "hello"}], "messages"),
    "sharegpt": (
        [{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}],
        "conversations|messages",
    ),
    "prompts": ([_prompt()], "messages"),
}
_PROMPTS: dict[str, tuple[list[Any], str]] = {
    "null": ([_prompt() | {"prompt": None}], "prompt"),
    "none": ([_prompt(prompt=[])], "prompt"),
    "role": ([_prompt(prompt=[{"role": "robot", "content": "x"}])], "robot|role"),
    "nosource": ([_prompt(data_source=None)], "data_source"),
    "unknownsource": ([_prompt(data_source="nobody/knows")], "nobody/knows"),
    "nogold": ([_prompt(reward_model={"style": "rule"})], "ground_truth"),
    "sft": ([{"messages": [_user("x"), _answer("y")]}], "prompt|messages"),
    "long": ([_prompt(prompt=[_user("many words " * 2000)])], "longer|tokens|overlong"),
}
_PAIRS: dict[str, tuple[list[Any], str]] = {
    "null": ([{"prompt": [_user("x")], "chosen": None, "rejected": [_answer("y")]}], "chosen"),
    "norejected": ([{"prompt": [_user("x")], "chosen": [_answer("y")]}], "rejected"),
    "number": ([{"prompt": [_user("x")], "chosen": 3, "rejected": 4}], "chosen"),
    "sft": ([{"messages": [_user("x"), _answer("y")]}], "chosen|prompt"),
}
_ROWS = {"sft": _MESSAGES, "rl": _PROMPTS, "prefer": _PAIRS}


def _rows() -> Iterator[Case]:
    for command, kinds in _ROWS.items():
        for kind, (_, message) in kinds.items():
            yield Case(f"{command}:rows:{kind}", f"{COMMANDS[command]} --data rows/{command}-{kind}.parquet", message)
    for kind in ("null", "none", "role", "sft", "long"):
        yield Case(f"generate:rows:{kind}", f"{GENERATE} --data rows/rl-{kind}.parquet", _PROMPTS[kind][1])
    for kind in ("null", "sft"):
        yield Case(f"eval:rows:{kind}", f"eval rows/rl-{kind}.parquet", "column 'responses?'|column 'data_source'")


# ---------------------------------------------------------------------- models


def _edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        data = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(data | changes))

    return edit


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def _remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)


def _without_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _large_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    first = 1 + max(max(data["model"]["vocab"].values()), *(token["id"] for token in data["added_tokens"]))
    kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] += [{"id": first + i, "content": f"<extra{i}>"} | kind for i in range(3000)]
    path.write_text(json.dumps(data))


def _template(text: str | None) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        data = json.loads((folder / "tokenizer_config.json").read_text())
        data.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(data))
        if text is not None:
            (folder / "chat_template.jinja").write_text(text)

    return replace


_BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "noconfig": (_remove("config.json"), "config.json"),
    "badjson": (_write("config.json", b"{"), "config.json"),
    "notype": (_edit("config.json", model_type="quux"), "quux"),
    "noweights": (_remove("model.safetensors"), "weights|safetensors"),
    "cut": (_cut, "model.safetensors"),
    "garbage": (_write("model.safetensors", b"\xff" * 5000), "model.safetensors"),
    "nothing": (_write("model.safetensors", b""), "model.safetensors"),
    "missingtensor": (_without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
    "morelayers": (_edit("config.json", num_hidden_layers=4, layer_types=["full_attention"] * 4), "layers.[23]"),
    "layertypes": (_edit("config.json", layer_types=["full_attention"] * 3), "layer_types"),
    "shape": (_edit("config.json", intermediate_size=512), "shape|mlp"),
    "notokenizer": (_remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "badtokenizer": (_write("tokenizer.json", b"{}"), "tokenizer"),
    "largetokenizer": (_large_tokenizer, "vocab|embedding|tokens"),
    "notemplate": (_template(None), "template"),
    "badtemplate": (_template("{% for m in messages %}{{ m.content "), "template"),
    "toolless": (_template("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                           "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"), "template|tools"),
}  # fmt: skip


def _models() -> Iterator[Case]:
    for kind, (_, message) in _BROKEN.items():
        for command, words in COMMANDS.items():
            if kind == "toolless" and command not in ("rl", "generate"):
                continue
            words = words.replace(" --model builtin:tiny", "")
            if kind == "toolless":
                words += " --set rollout.tool_format=hermes --set 'rollout.tools=[\"gsm8k\"]'"
            yield Case(
                f"{command}:model:{kind}", f"{words} --model models/{kind}", message, always=command == "generate"
            )
    for command, words in COMMANDS.items():
        words = words.replace(" --model builtin:tiny", "")
        yield Case(f"{command}:model:missing", f"{words} --model models/nowhere", "models/nowhere")
        yield Case(f"{command}:model:builtin", f"{words} --model builtin:tinny", "tinny", "tiny")
    yield Case("rl:reference:cut", f"{RL} --set reward.model.path=models/cut", "model.safetensors|classifier|reward")
    yield Case("rl:critic:cut", f"{RL} --algo ppo --set critic.path=models/cut", "model.safetensors")


# ---------------------------------------------------------------------- prep, plugins


def _prep() -> Iterator[Case]:
    yield Case("prep:which", "prep", "which data set")
    yield Case("prep:unknown", "prep gms8k", "gms8k", "gsm8k")
    yield Case("prep:missing source", "prep gsm8k --source nowhere", "nowhere")
    yield Case("prep:empty source", "prep gsm8k --source raw/empty --out out", "raw/empty")
    yield Case("prep:column", "prep gsm8k --source raw/column --out out", "answer", leaves=NOTHING)
    yield Case("prep:type", "prep gsm8k --source raw/type --out out", "question")
    yield Case("prep:json", "prep gsm8k --source raw/json --out out", "train.jsonl")
    yield Case("prep:gold", "prep gsm8k --source raw/gold --out out", "answer|gold|####")
    yield Case("prep:one file", "prep gsm8k --source raw/one/data.jsonl --out out", "(?i)overlap|same rows|split")
    yield Case("prep:fraction", "prep arith --val-fraction 2 --out out", "val")
    yield Case("prep:split", "prep arith --split tset --out out", "tset")
    yield Case("prep:tools", "prep arith --tools nosuch --out out", "nosuch")
    yield Case("prep:template", "prep arith --template nosuch.jinja --out out", "nosuch")
    yield Case("prep:exists", "prep arith --train-rows 40 --test-rows 12", "exist|data/arith", "overwrite")
    yield Case("prep:name", f"prep {'x' * 300} --out out", "unknown|x{20}")
    yield Case("prep:out name", f"prep arith --out {'x' * 300}", "(?i)too long|name")


_PLUGINS = {
    "syntax": ("def f(:\n", "syntax.py"),
    "raises": ("value = 1 / 0\n", "raises.py.*line 1|raises.py:1"),
    "exits": ("import sys\nsys.exit(0)\n", "exits.py"),
    "imports": ("import nosuchmodule\n", "nosuchmodule"),
}
_REWARDS = {
    "noname": (
        "def other(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n",
        "compute_score|score",
    ),
    "signature": ("def score():\n    return 1.0\n", "score"),
    "result": ("def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 'good'\n", "good|str"),
    "bug": (
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return undefined_name\n",
        "undefined_name",
    ),
}


def _plugins() -> Iterator[Case]:
    for kind, (_, message) in _PLUGINS.items():
        for command in ("sft", "rl", "generate"):
            yield Case(f"{command}:plugin:{kind}", f"{COMMANDS[command]} --plugin plugins/{kind}.py", message)
        yield Case(f"prep:plugin:{kind}", f"prep arith --plugin plugins/{kind}.py --out out", message)
    for kind, (_, message) in _REWARDS.items():
        yield Case(f"rl:reward:{kind}", f"{RL} --set reward.function=plugins/reward_{kind}.py:score", message)


# ---------------------------------------------------------------------- checkpoints and other commands


def _checkpoints() -> Iterator[Case]:
    yield Case("merge:no run", "merge-ckpt nothing --out merged", "nothing")
    yield Case("merge:no checkpoint", "merge-ckpt runs/empty --out merged", "checkpoint")
    yield Case("merge:out exists", "merge-ckpt done --out data", "data", "overwrite")
    yield Case("merge:damaged", "merge-ckpt damaged --out merged", "global_step_2", always=True)
    yield Case("merge:damaged step", "merge-ckpt runs/damaged/checkpoints/global_step_2 --out merged", "global_step_2")
    yield Case("merge:adapter", "merge-ckpt done --out merged --adapter", "adapter|LoRA")
    yield Case("merge:shard size", "merge-ckpt done --out merged --max-shard-size many", "many")
    yield Case("merge:into proc", "merge-ckpt done --out /proc/merged", "/proc/merged")
    yield Case("sft:finished", f"{SFT} --name done", "done", "steps|run:done|overwrite", always=True)
    yield Case("sft:resume step", f"{SFT} --name other --resume runs/done/checkpoints/global_step_2 --steps 1", "step")
    yield Case(
        "generate:damaged", f"{GENERATE} --model runs/damaged/checkpoints/global_step_2", "global_step_2", always=True
    )
    yield Case("rl:damaged", f"{RL} --model runs/damaged/checkpoints/global_step_2", "global_step_2")


def _others() -> Iterator[Case]:
    yield Case("eval:nothing", "eval", "no responses|responses.parquet")
    yield Case("eval:k", "eval rows/rl-null.parquet --pass-at five", "five")
    yield Case("eval:k 0", "eval rows/rl-null.parquet --pass-at 0", "eval.pass_at")
    yield Case("eval:compare", "eval --compare rows/rl-null.parquet files/missing.parquet", "response|missing")
    yield Case("eval:model and file", "eval rows/rl-null.parquet --model builtin:tiny", "file")
    yield Case("plan:preset", "plan --preset tiny-arith-generate", "plan")
    yield Case("plan:gpu", "plan --preset qwen2.5-0.5b-gsm8k --gpu h900", "h900")
    yield Case("plan:run", "plan --run nothing", "nothing")
    yield Case("plan:model", "plan --preset tiny-arith --model models/badjson", "config.json")
    yield Case("report:run", "report nothing", "nothing")
    yield Case("import-verl:missing", "import-verl nothing.sh", "nothing.sh")
    yield Case("import-verl:text", "import-verl files/text.parquet", "verl|trainer")
    yield Case("import-verl:env", "import-verl nothing.sh --env X", "--env")
    yield Case("import-verl:out", "import-verl nothing.sh --out x.txt", "x.txt", r"x\.toml")
    yield Case("presets:unknown", "presets show tiny-arit", "tiny-arit", "tiny-arith")
    yield Case("quickstart:out", "quickstart --out files/text.parquet", "text.parquet")
    yield Case("command:unknown", "trian", "trian")


# ---------------------------------------------------------------------- full disks and signals


def _disks() -> Iterator[Case]:
    full = "no room is left on its disk"
    inside = r"disk/runs.*"
    sft = f"{SFT} --set run.dir=disk/runs"
    generate = f"{GENERATE} --limit 2 --out disk/responses.parquet"
    yield Case("prep:disk", "prep arith --train-rows 1700 --out disk/out", full, code=1, disk_kb=64)
    yield Case("sft:disk", sft, "a checkpoint takes .* free", "free some", leaves=inside, disk_kb=1024, always=True)
    yield Case("merge:disk", "merge-ckpt done --out disk/merged", full, "free some room", code=1, disk_kb=256)
    yield Case("generate:disk", generate, full, "free some room", code=1, leaves=r"disk/.*", disk_kb=16)


def _once(text: str, number: signal.Signals) -> Callable[[int, Path], None]:
    """Send a signal when the output has ``text``."""

    def act(pid: int, log: Path) -> None:
        end = time.monotonic() + 100
        while time.monotonic() < end and text not in log.read_text(errors="replace"):
            time.sleep(0.02)
        os.kill(pid, number)

    return act


def _signals() -> Iterator[Case]:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)):
        name = number.name
        long = f"sft --preset tiny-arith-sft --steps 5000 --name {name}"
        goes_on = "the same command goes on"
        yield Case(f"sft:{name}", long, goes_on, code=code, act=_once("step 1/", number), leaves="runs/.*", always=True)


# ---------------------------------------------------------------------- the workspace


def make_workspace(root: Path, run: Callable[[list[str], Path], Any]) -> None:
    """Make data, broken files, broken models, plugins and two runs below ``root/work``."""
    work = root / "work"
    for words in (
        "prep arith --train-rows 40 --test-rows 12", "prep arith-preferences --train-rows 40 --test-rows 12",
        f"{SFT} --name done",
    ):  # fmt: skip
        done = run(words.split(), root)
        if done.code != 0:
            raise RuntimeError(f"posttrain {words}: exit code {done.code}\n{done.output}")
    shutil.copytree(work / "runs/done", work / "runs/damaged")
    shard = next((work / "runs/damaged/checkpoints/global_step_2/actor/model").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0xFF
    shard.write_bytes(data)
    (work / "runs/empty").mkdir()
    _make_files(work)
    _make_models(work)
    (work / "plugins").mkdir()
    for kind, (text, _) in _PLUGINS.items():
        (work / "plugins" / f"{kind}.py").write_text(text)
    for kind, (text, _) in _REWARDS.items():
        (work / "plugins" / f"reward_{kind}.py").write_text(text)
    for name, (text, _) in _TOMLS.items():
        (work / f"{name}.toml").write_bytes(text)
    _make_raw(work / "raw")


def _make_files(work: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = work / "files"
    (files / "folder.parquet").mkdir(parents=True)
    (files / "empty.parquet").write_bytes(b"")
    (files / "text.parquet").write_text("hello\n")
    (files / "truncated.parquet").write_bytes((work / "data/arith/train.parquet").read_bytes()[:-200])
    (files / "lines.jsonl").write_text(json.dumps({"messages": [_user("x"), _answer("y")]}) + "\n")
    pq.write_table(pa.table({"messages": pa.array([], pa.string())}), files / "norows.parquet")
    (work / "rows").mkdir()
    for command, kinds in _ROWS.items():
        for kind, (rows, _) in kinds.items():
            pq.write_table(pa.Table.from_pylist(rows), work / "rows" / f"{command}-{kind}.parquet")


def _make_models(work: Path) -> None:
    from posttrain.models.builtin import builtin_tokenizer, create_builtin

    good = work / "models/good"
    create_builtin("tiny", 0).save_pretrained(good)
    builtin_tokenizer("tiny").save_pretrained(good)
    for kind, (break_it, _) in _BROKEN.items():
        shutil.copytree(good, work / "models" / kind)
        break_it(work / "models" / kind)


def _make_raw(raw: Path) -> None:
    good = {"question": "1+1?", "answer": "It is 2.\n#### 2"}
    rows: dict[str, list[Any]] = {
        "column": [{"question": "1+1?"}],
        "type": [{"question": 3, "answer": "#### 2"}],
        "gold": [{"question": f"{i}+1?", "answer": "a long solution without its mark"} for i in range(9)],
    }
    for kind, found in rows.items():
        (raw / kind).mkdir(parents=True)
        for split in ("train", "test"):
            (raw / kind / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    (raw / "empty").mkdir()
    (raw / "json").mkdir()
    (raw / "json/train.jsonl").write_text(json.dumps(good) + "\n{broken\n")
    (raw / "json/test.jsonl").write_text(json.dumps(good) + "\n")
    (raw / "one").mkdir()
    (raw / "one/data.jsonl").write_text("".join(json.dumps(good | {"question": f"{i}+1?"}) + "\n" for i in range(20)))
