"""Keys that verl's two trainers share, under other prefixes."""

from __future__ import annotations

import posixpath
from typing import Any

from posttrain.config.verl.rules import SKIP, Draft, Outcome, Rule, ScriptValues, no_need, only, same, unless_set

_LOGGERS = ("console", "tensorboard", "wandb", "mlflow")


def frequency(value: Any) -> Any:
    """verl's ``save_freq`` and ``test_freq``: -1 is never. Raises ``ValueError`` for ``after_each_epoch``."""
    if isinstance(value, str):
        raise ValueError(value)
    return value if isinstance(value, int) and value > 0 else SKIP


def path(value: Any) -> Any:
    return value or SKIP


def files(theirs: str, ours: str) -> Rule:
    def apply(view: ScriptValues, draft: Draft) -> None:
        value = view[theirs]
        paths = [value] if isinstance(value, str) else list(value or [])
        paths = [posixpath.join(view.home, p[2:]) if str(p).startswith("~/") else str(p) for p in paths]
        if not paths:
            return
        if len(paths) > 1 and "actor_rollout_ref.model.path" in view.defaults:
            draft.refuse(view, theirs, f"rl reads one file, the script names {len(paths)}: put their rows into one")
            return
        draft.set(ours, paths[0] if len(paths) == 1 else paths, view.origin(theirs))

    return Rule((theirs,), (ours,), "the same parquet rows (data.md); `rl` takes one file", apply)


def schedule(prefix: str, ours: str, kind: str, per_step: bool) -> Rule:
    """Warm-up, schedule. ``per_step``: verl steps the schedule once an RL step, ours once an optimizer step."""
    steps, ratio = f"{prefix}lr_warmup_steps", f"{prefix}lr_warmup_steps_ratio"

    def apply(view: ScriptValues, draft: Draft) -> None:
        if prefix.startswith("critic.") and view["algorithm.adv_estimator"] != "gae":
            return
        given = view[steps]
        if isinstance(given, int) and given > 0:
            updates = draft.values.get("algo.updates_per_step", 1) if per_step else 1
            about = f"{view.origin(steps)}: RL steps, times {updates} updates" if updates > 1 else view.origin(steps)
            draft.set(f"{ours}.warmup_steps", given * updates, about)
            draft.pass_over(view, ratio, f"verl reads it without {steps} only")
        elif view[ratio]:
            draft.set(f"{ours}.warmup_ratio", float(view[ratio]), view.origin(ratio))
        name = view[f"{prefix}{kind}"]
        if name in ("cosine", "constant", "linear"):
            if name != "constant" or f"{prefix}{kind}" in view.given:
                draft.set(f"{ours}.schedule", name, view.origin(f"{prefix}{kind}"))
        elif name is not None:
            draft.refuse(view, f"{prefix}{kind}", f"the schedule {name!r} is not here: constant, cosine, linear")
        if name == "cosine" and view[f"{prefix}min_lr_ratio"]:
            draft.set(f"{ours}.min_lr_ratio", view[f"{prefix}min_lr_ratio"], view.origin(f"{prefix}min_lr_ratio"))

    about = "warm-up and schedule" + (
        "; verl's steps are RL steps, ours optimizer steps: times `algo.updates_per_step`" if per_step else ""
    )
    theirs = (steps, ratio, f"{prefix}{kind}", f"{prefix}min_lr_ratio")
    return Rule(theirs, tuple(f"{ours}.{key}" for key in ("warmup_steps", "warmup_ratio", "schedule")), about, apply)


def lora(prefix: str) -> Rule:
    def apply(view: ScriptValues, draft: Draft) -> None:
        rank = view[f"{prefix}lora_rank"]
        if not rank or rank < 1:
            return
        draft.set("train.lora.rank", rank, view.origin(f"{prefix}lora_rank"))
        draft.set("train.lora.alpha", view[f"{prefix}lora_alpha"], view.origin(f"{prefix}lora_alpha"))
        modules = view[f"{prefix}target_modules"]
        if modules != "all-linear":
            draft.set("train.lora.target_modules", modules, view.origin(f"{prefix}target_modules"))

    theirs = tuple(f"{prefix}{key}" for key in ("lora_rank", "lora_alpha", "target_modules"))
    ours = ("train.lora.rank", "train.lora.alpha", "train.lora.target_modules")
    return Rule(theirs, ours, "rank 0 is no LoRA, and then the others say nothing", apply)


def checkpointing(theirs: str) -> Rule:
    return same(
        theirs,
        "train.activation_checkpointing",
        "`full` or `none`; verl's default is on",
        lambda on: "full" if on else "none",
    )


def param_dtype(theirs: str) -> Rule:
    names = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}

    def apply(view: ScriptValues, draft: Draft) -> None:
        if theirs not in view.given:
            return
        if view[theirs] in names:
            draft.set("train.param_dtype", names[view[theirs]], view.origin(theirs))
        else:
            draft.refuse(view, theirs, f"{view[theirs]!r}: float32 and bfloat16 are here")

    return Rule((theirs,), ("train.param_dtype",), "`fp32` is float32, `bf16` bfloat16", apply)


def where() -> Rule:
    """The run's folder and name."""
    name, folder = "trainer.experiment_name", "trainer.default_local_dir"

    def apply(view: ScriptValues, draft: Draft) -> None:
        chosen = str(view[name]).replace("/", "-")
        if name in view.given:
            draft.set("run.name", chosen, view.origin(name))
        if folder in view.given and view[folder]:
            parent, last = posixpath.split(str(view[folder]).rstrip("/"))
            if name not in view.given:
                draft.set("run.name", last, view.origin(folder))
            inside = last == chosen or name not in view.given
            draft.set("run.dir", (parent or ".") if inside else str(view[folder]), view.origin(folder))

    return Rule((name, folder), ("run.dir", "run.name"), "folder and name of the run", apply)


def project() -> Rule:
    key = "trainer.project_name"

    def apply(view: ScriptValues, draft: Draft) -> None:
        if "wandb" in _names(view["trainer.logger"]):
            draft.environment["WANDB_PROJECT"] = str(view[key])
            if key in view.given:
                draft.find(key, Outcome.MAPPED, "WANDB_PROJECT, in the command")

    about = "it names a project of W&B: the variable `WANDB_PROJECT`; without W&B there is none"
    return Rule((key,), (), about, apply)


def _names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value or []]


def logger() -> Rule:
    def apply(view: ScriptValues, draft: Draft) -> None:
        asked = _names(view["trainer.logger"])
        known = [name for name in asked if name in _LOGGERS]
        draft.set("run.logger", [*known, "jsonl"], view.origin("trainer.logger"))
        if other := [name for name in asked if name not in _LOGGERS]:
            draft.refuse(view, "trainer.logger", f"there is no logger {', '.join(other)}; {', '.join(known)} is set")

    return Rule(("trainer.logger",), ("run.logger",), "and always `jsonl`, from which the others can be made", apply)


def resume() -> Rule:
    theirs = ("trainer.resume_mode", "trainer.resume_from_path")

    def apply(view: ScriptValues, draft: Draft) -> None:
        mode, start = view[theirs[0]], view[theirs[1]]
        if mode == "resume_path" and start:
            draft.set("run.resume", str(start), view.origin(*reversed(theirs)))
        elif mode == "disable":
            draft.set("run.resume", "never", view.origin(theirs[0]))
        elif mode not in (None, "auto"):
            draft.refuse(view, theirs[0], f"{mode!r} is not known")

    return Rule(theirs, ("run.resume",), "`auto` is the default; with `disable` an unfinished run is an error", apply)


def contents(prefix: str) -> Rule:
    theirs = (f"{prefix}save_contents", f"{prefix}load_contents")

    def apply(view: ScriptValues, draft: Draft) -> None:
        for key in view.named(*theirs):
            asked = set(_names(view[key]))
            if key == theirs[0] and "hf_model" in asked:
                draft.set("checkpoint.save_hf", True, view.origin(key))
            if not asked >= {"model", "optimizer", "extra"}:
                draft.refuse(view, key, "a checkpoint always has model, optimizer and the rest")

    return Rule(theirs, ("checkpoint.save_hf",), "`hf_model` is `save_hf`; all the rest is always saved", apply)


SHARED = (
    where(),
    project(),
    logger(),
    resume(),
    same("trainer.save_freq", "train.save_every", "the last step is always saved, also with -1", frequency,
         "a checkpoint is written after the last step, which verl does not do with -1"),
    same("trainer.test_freq", "train.val_every", "the last step is always validated, where there is `data.val`",
         frequency,
         "the last step is validated"),
    same("trainer.total_epochs", "train.epochs"),
    same("trainer.total_training_steps", "train.steps", "", path),
    no_need("checkpoints and logs of a run lie in its folder", "trainer.default_hdfs_dir",
         "trainer.del_local_ckpt_after_load"),
    no_need("GPUs where there are any (cluster.device)", "trainer.device", unless=only("cuda", "gpu", None)),
    no_need("sequences are always packed, without padding", "*use_remove_padding"),
    no_need("log-probabilities come straight from hidden states, in chunks; there are no logits of a whole batch",
            "*use_fused_kernels", "*fused_kernel_options*", "*use_liger", "*entropy_from_logits_with_chunking",
            "*entropy_checkpointing"),
    no_need("weights are read once, by mapping the files", "*use_shm"),
    no_need("FSDP2 shards the model", "*strategy", "engine", "optim", unless=only("fsdp", "fsdp2", None)),
    no_need("FSDP2 decides when it gathers: it changes the speed alone", "*forward_prefetch", "*use_orig_params",
            "*wrap_policy*", "*reshard_after_forward"),
    no_need("workers get equal shares of tokens, always", "trainer.balance_batch", "data.balance_dp_token"),
    no_need("it chooses between two programs of verl that do the same", "trainer.use_legacy_worker_impl"),
    no_need("data is not loaded by processes of its own, or by data.workers", "data.dataloader_num_workers",
            "data.filter_overlong_prompts_workers"),
    no_need("all rows are used", "data.train_max_samples", unless=unless_set),
)  # fmt: skip
