"""What keys of verl's algorithms, critics and rewards mean here."""

from __future__ import annotations

from posttrain.config.verl.keys_shared import schedule
from posttrain.config.verl.rules import Draft, Rule, ScriptValues, missing, no_need, only, same, unless_set

A, G, C = "actor_rollout_ref.actor.", "algorithm.", "critic."
P = A + "policy_loss."

_ADVANTAGES = {
    "gae": "ppo", "grpo": "grpo", "grpo_vectorized": "grpo", "grpo_passk": "grpo_passk", "rloo": "rloo",
    "rloo_vectorized": "rloo", "opo": "opo", "gpg": "gpg", "gdpo": "gdpo", "remax": "remax",
    "reinforce_plus_plus": "reinforce_plus_plus", "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip
_LOSSES = {
    "vanilla": "clipped", "gspo": "gspo", "gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "geo_mean": "gmpo",
    "cispo": "cispo", "sapo": "sapo",
}  # fmt: skip
_BY_SEQUENCE = ("gspo", "gmpo", "sapo")
"""Losses that verl aggregates by sequence whatever the script says."""
_ESTIMATORS = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "k3"}


def _advantage(view: ScriptValues, draft: Draft) -> None:
    key = G + "adv_estimator"
    name = view[key]
    bundle = _ADVANTAGES.get(name)
    if bundle is None:
        draft.refuse(view, key, f"there is no estimator {name!r}: see docs/algorithms.md")
        return
    draft.set("algo.name", bundle if bundle == "ppo" else "grpo", view.origin(key))
    draft.set("algo.advantage", "gae" if bundle == "ppo" else bundle, view.origin(key))
    std = G + "norm_adv_by_std_in_grpo"
    if bundle in ("grpo", "grpo_passk"):
        draft.set("algo.normalize_by_std", bool(view[std]), view.origin(std))
    readers = {"gamma": ("ppo", "reinforce_plus_plus"), "lam": ("ppo",)}
    for name, bundles in readers.items():
        if bundle in bundles:
            draft.set(f"algo.{name}", float(view[G + name]), view.origin(G + name))
        else:
            draft.pass_over(view, G + name, f"{view[key]} does not read it, in verl either")


def _loss(view: ScriptValues, draft: Draft) -> None:
    mode = view[P + "loss_mode"]
    loss = _LOSSES.get(mode)
    if loss is None:
        draft.refuse(view, P + "loss_mode", f"there is no loss {mode!r}: see docs/algorithms.md")
        return
    draft.set("algo.policy_loss", loss, view.origin(P + "loss_mode"))
    for name in ("low", "high"):
        key, both = f"{A}clip_ratio_{name}", A + "clip_ratio"
        chosen = key if key in view.given or both not in view.given else both
        bound = float(view[chosen])
        about = view.origin(chosen)
        if name == "low" and bound > 1:  # a ratio is never below 0
            bound, about = 1.0, f"{about} = {bound:g}: no lower bound, as a ratio is above 0"
        draft.set(f"algo.clip_{name}", bound, about)
    dual = A + "clip_ratio_c"
    if loss == "clipped":
        draft.set("algo.dual_clip", float(view[dual]), view.origin(dual))
    else:
        draft.pass_over(view, dual, f"{mode} does not read it")
    of_loss = {
        "sapo": {"tau_positive": A + "tau_pos", "tau_negative": A + "tau_neg"},
        "clip_cov": {"clip_cov_share": P + "clip_cov_ratio", "clip_cov_low": P + "clip_cov_lb",
                     "clip_cov_high": P + "clip_cov_ub"},
        "kl_cov": {"kl_cov_share": P + "kl_cov_ratio", "kl_cov_coef": P + "ppo_kl_coef"},
    }  # fmt: skip
    for reader, keys in of_loss.items():
        for ours, theirs in keys.items():
            if reader == loss:
                draft.set(f"algo.{ours}", float(view[theirs]), view.origin(theirs))
            else:
                draft.pass_over(view, theirs, f"{mode} does not read it")


def _aggregation(view: ScriptValues, draft: Draft) -> None:
    key, scale = A + "loss_agg_mode", A + "loss_scale_factor"
    loss = _LOSSES.get(view[P + "loss_mode"])
    if loss in _BY_SEQUENCE:
        draft.set("algo.loss_agg", "seq-mean-token-mean", f"what verl does for {view[P + 'loss_mode']} in any case")
        draft.pass_over(view, key, f"verl does not read it for {view[P + 'loss_mode']}")
    else:
        draft.set("algo.loss_agg", view[key], view.origin(key))
    if view[scale]:
        if view[key] == "seq-mean-token-sum-norm":
            draft.set("algo.norm_length", int(view[scale]), view.origin(scale))
        else:
            draft.pass_over(view, scale, f"{view[key]} does not read it")


def _kl(view: ScriptValues, draft: Draft) -> None:
    in_loss, in_reward = view[A + "use_kl_loss"], view[G + "use_kl_in_reward"]
    loss_keys, reward_keys = (A + "kl_loss_coef", A + "kl_loss_type"), (
        G + "kl_ctrl.kl_coef", G + "kl_penalty", G + "kl_ctrl.type", G + "kl_ctrl.target_kl", G + "kl_ctrl.horizon",
    )  # fmt: skip
    for keys, used, switch in (
        (loss_keys, in_loss, "actor_rollout_ref.actor.use_kl_loss"),
        (reward_keys, in_reward, "algorithm.use_kl_in_reward"),
    ):
        for key in keys:
            if not used:
                draft.pass_over(view, key, f"verl reads it with {switch} only")
    if in_reward and in_loss:
        draft.refuse(view, G + "use_kl_in_reward", "a KL both in the loss and in the reward: here it is in one of them")
        in_reward = False
    if not (in_loss or in_reward):
        draft.set("algo.kl_coef", 0.0, f"no KL: {view.origin(A + 'use_kl_loss', G + 'use_kl_in_reward')}")
        return
    coef, kind = loss_keys if in_loss else reward_keys[:2]
    value = float(view[coef])
    draft.set("algo.kl_coef", value, view.origin(coef))
    if not value:
        for key in loss_keys[1:] if in_loss else reward_keys[1:]:
            draft.pass_over(view, key, "a KL with the coefficient 0 has no effect")
        return
    name = str(view[kind])
    base, plus = name.removesuffix("+"), "+" if name.endswith("+") else ""
    estimator = _ESTIMATORS.get(base)
    estimator = f"{'k3' if estimator == 'low_var_kl' else estimator}+" if estimator and plus else estimator
    if estimator in ("abs+", None):
        draft.refuse(view, kind, f"there is no estimator {name!r}")
    else:
        draft.set("algo.kl_estimator", estimator, view.origin(kind))
    if in_reward:
        draft.set("algo.kl_in", "reward", view.origin(G + "use_kl_in_reward"))
        if view[G + "kl_ctrl.type"] == "adaptive":
            draft.set("algo.kl_target", float(view[G + "kl_ctrl.target_kl"]), view.origin(G + "kl_ctrl.target_kl"))
            draft.set("algo.kl_horizon", int(view[G + "kl_ctrl.horizon"]), view.origin(G + "kl_ctrl.horizon"))
        else:
            for key in reward_keys[3:]:
                draft.pass_over(view, key, "the coefficient is fixed")


def _critic(view: ScriptValues, draft: Draft) -> None:
    if view[G + "adv_estimator"] != "gae":
        for key in view.given:
            if key.startswith(C) or key == "trainer.critic_warmup":
                draft.pass_over(view, key, f"{view[G + 'adv_estimator']} has no critic")
        return
    draft.set("critic.path", view[C + "model.path"], view.origin(C + "model.path"))
    draft.set("critic.optim.lr", float(view[C + "optim.lr"]), view.origin(C + "optim.lr"))
    draft.set("critic.optim.betas", list(view[C + "optim.betas"]), view.origin(C + "optim.betas"))
    weight_decay = C + "optim.weight_decay"
    draft.set("critic.optim.weight_decay", float(view[weight_decay]), view.origin(weight_decay))
    draft.set("critic.value_clip", float(view[C + "cliprange_value"]), view.origin(C + "cliprange_value"))
    clip = C + "grad_clip" if C + "grad_clip" in view.given else C + "optim.clip_grad"
    draft.set("critic.optim.grad_clip", float(view[clip]), view.origin(clip))
    if view["trainer.critic_warmup"]:
        draft.set("critic.warmup_steps", view["trainer.critic_warmup"], view.origin("trainer.critic_warmup"))
    sp = C + "ulysses_sequence_parallel_size"
    if sp in view.given and view[sp] != view[A + "ulysses_sequence_parallel_size"]:
        draft.refuse(view, sp, "the critic shares sequences among as many workers as the actor")
    for key in view.named(sp, C + "ppo_micro_batch_size_per_gpu", C + "ppo_micro_batch_size", C + "use_dynamic_bsz",
                          C + "ppo_max_token_len_per_gpu", C + "ppo_mini_batch_size"):  # fmt: skip
        draft.pass_over(view, key, "the critic has the actor's batches and sharding")
    checkpointing = C + "model.enable_gradient_checkpointing"
    if (
        checkpointing in view.given
        and view[checkpointing] != view["actor_rollout_ref.model.enable_gradient_checkpointing"]
    ):
        draft.refuse(view, checkpointing, "the critic recomputes as the actor does (train.activation_checkpointing)")
    draft.pass_over(view, checkpointing, "the critic recomputes as the actor does (train.activation_checkpointing)")
    if view[C + "model.lora_rank"]:
        draft.refuse(view, C + "model.lora_rank", "all weights of a critic are trained")


def _filter(view: ScriptValues, draft: Draft) -> None:
    F = G + "filter_groups."
    if not view[F + "enable"]:
        return
    draft.set("rollout.filter_groups", True, view.origin(F + "enable"))
    limit, metric = view[F + "max_num_gen_batches"], view[F + "metric"]
    if limit and limit > 0:
        draft.set("rollout.filter_max_batches", limit, view.origin(F + "max_num_gen_batches"))
    else:
        draft.refuse(view, F + "max_num_gen_batches", "no limit in verl; here one is needed (filter_max_batches)")
    names = {"acc": "correct", "seq_reward": "reward", "seq_final_reward": "reward"}
    if metric:
        draft.set("rollout.filter_metric", names.get(metric, metric), view.origin(F + "metric"))


def _overlong(view: ScriptValues, draft: Draft) -> None:
    if not view["overlong.enable"]:
        return
    longest = view["overlong.max_resp_len"]
    if longest not in (None, view["data.max_response_length"]):
        draft.refuse(view, "overlong.max_resp_len", "it counts from data.max_response_length")
    draft.set("reward.overlong.buffer_tokens", view["overlong.len"], view.origin("overlong.len"))
    weights = {"model" if view["reward_model.enable"] else "score": 1.0}
    weights["overlong"] = float(view["overlong.penalty_factor"])
    draft.set("reward.weights", weights, view.origin("overlong.penalty_factor"))
    draft.pass_over(view, "overlong.log", "the part is a metric of its own, always: reward/overlong/mean")


def _function(view: ScriptValues, draft: Draft) -> None:
    file, name = view["custom_reward_function.path"], view["custom_reward_function.name"] or "compute_score"
    if file:
        keys = view.named("custom_reward_function.path", "custom_reward_function.name")
        draft.set("reward.function", f"{file}:{name}", ", ".join(keys))
    prefix = "custom_reward_function.reward_kwargs."
    more = {key.removeprefix(prefix): value for key, value in view.given.items() if key.startswith(prefix)}
    if more:
        draft.set("reward.function_kwargs", more, prefix + "*")


def _reward_model(view: ScriptValues, draft: Draft) -> None:
    if not view["reward_model.enable"]:
        for key in view.given:
            if key.startswith(("reward_model.model.", "reward_model.rollout.")):
                draft.pass_over(view, key, "verl reads it with reward_model.enable only")
        return
    draft.set("reward.model.path", view["reward_model.model.path"], view.origin("reward_model.model.path"))
    if not view["overlong.enable"]:
        draft.set("reward.weights", {"model": 1.0}, "reward_model.enable: the model's score alone")


def _sandbox(view: ScriptValues, draft: Draft) -> None:
    S = "reward_model.sandbox_fusion."
    if not view[S + "url"]:
        return
    draft.set("sandbox.mode", "remote", view.origin(S + "url"))
    draft.set("sandbox.url", str(view[S + "url"]).removesuffix("/run_code"), view.origin(S + "url"))
    for theirs, ours in (("memory_limit_mb", "sandbox.memory_mb"), ("max_concurrent", "reward.workers")):
        if S + theirs in view.given:
            draft.set(ours, view[S + theirs], view.origin(S + theirs))


def _correction(view: ScriptValues, draft: Draft) -> None:
    K, older = G + "rollout_correction.", A + "tis_imp_ratio_cap"
    weight, cap = view[K + "rollout_is"], view[older] or 0
    if cap > 0:
        draft.set("algo.correction.weight", "token", older)
        draft.set("algo.correction.upper", float(cap), older)
    elif weight in ("token", "sequence"):
        draft.set("algo.correction.weight", weight, view.origin(K + "rollout_is"))
        draft.set(
            "algo.correction.upper", float(view[K + "rollout_is_threshold"]), view.origin(K + "rollout_is_threshold")
        )
    else:
        draft.pass_over(view, K + "rollout_is_threshold", "verl reads it with rollout_is only")
    for key in (K + "rollout_rs", K + "bypass_mode", K + "rollout_is_batch_normalize"):
        if view[key]:
            draft.refuse(view, key, f"{view[key]!r}: see `algo.correction` in docs/algorithms.md for what is here")
    if not view[K + "rollout_rs"]:
        draft.pass_over(view, K + "rollout_rs_threshold", "verl reads it with rollout_rs only")
    else:
        draft.refuse(view, K + "rollout_rs_threshold", "it belongs to rollout_rs")
    draft.pass_over(view, K + "loss_type", "verl reads it with bypass_mode only")


def _clip(view: ScriptValues, draft: Draft) -> None:
    first, second = A + "grad_clip", A + "optim.clip_grad"
    chosen = first if first in view.given or second not in view.given else second
    draft.set("train.optim.grad_clip", float(view[chosen]), view.origin(chosen))
    if view[first] != view[second]:
        draft.refuse(view, second if chosen == first else first, f"{chosen} says another norm")


ALGO = (
    Rule((G + "adv_estimator", G + "norm_adv_by_std_in_grpo", G + "gamma", G + "lam"),
         ("algo.name", "algo.advantage", "algo.normalize_by_std", "algo.gamma", "algo.lam"),
         "`gae` is the bundle `ppo`; the rest by their names", _advantage),
    Rule((P + "*", A + "clip_ratio", A + "clip_ratio_low", A + "clip_ratio_high", A + "clip_ratio_c", A + "tau_pos",
         A + "tau_neg"),
         ("algo.policy_loss", "algo.clip_low", "algo.clip_high", "algo.dual_clip"),
         "`vanilla` is `clipped`, `geo_mean` is `gmpo`; dual clip is 3.0 in verl unless the script says otherwise",
         _loss),
    Rule((A + "loss_agg_mode", A + "loss_scale_factor"), ("algo.loss_agg", "algo.norm_length"),
         "gspo, sapo and gmpo are by sequence in verl in any case", _aggregation),
    same(A + "entropy_coeff", "algo.entropy_coef", "", float),
    Rule((A + "use_kl_loss", A + "kl_loss_coef", A + "kl_loss_type", G + "use_kl_in_reward", G + "kl_penalty",
         G + "kl_ctrl.*"),
         ("algo.kl_coef", "algo.kl_in", "algo.kl_estimator", "algo.kl_target", "algo.kl_horizon"),
         "in the loss or in the reward; `kl` is `k1`, `mse` is `k2`", _kl),
    no_need("it is switched off", G + "use_pf_ppo", unless=unless_set),
    missing("reweighting of samples (PF-PPO) is not here", G + "pf_ppo.*"),
    # Before the rules of the critic's keys, which are for gae alone.
    Rule((C + "model.path", C + "optim.lr", C + "optim.betas", C + "optim.weight_decay", C + "cliprange_value",
         C + "grad_clip", C + "optim.clip_grad",
          "trainer.critic_warmup", C + "ulysses_sequence_parallel_size", C + "ppo_micro_batch_size*",
          C + "use_dynamic_bsz",
          C + "ppo_max_token_len_per_gpu", C + "ppo_mini_batch_size", C + "model.enable_gradient_checkpointing",
          C + "model.lora_rank"),
         ("critic.path", "critic.optim.lr", "critic.optim.betas", "critic.value_clip", "critic.warmup_steps"),
         "of `gae`; the critic has the actor's batches and sharding", _critic),
    schedule(C + "optim.", "critic.optim", "lr_scheduler_type", per_step=True),
    Rule((G + "filter_groups.*",), ("rollout.filter_groups", "rollout.filter_metric", "rollout.filter_max_batches"),
         "dynamic sampling is off; `acc` is `correct` here", _filter),
    no_need("as many prompts are drawn as a step still lacks", "data.gen_batch_size"),
    Rule(("overlong.*",), ("reward.overlong.buffer_tokens", "reward.weights"), "the overlong penalty is off",
         _overlong),
    Rule(("custom_reward_function.*",), ("reward.function", "reward.function_kwargs"), "the same signature", _function),
    no_need("rows are graded by their data source, in parallel; the overlong penalty is a part of its own",
            "reward_model.reward_manager", "reward.reward_manager.source",
            unless=lambda name: "" if name in ("naive", "dapo", "prime", "batch", "register", None) else
            f"the reward manager {name!r} is verl's own code: see reward.function"),
    Rule(("reward_model.enable", "reward_model.model.path"), ("reward.model.path", "reward.weights"),
         "there is no reward model", _reward_model),
    Rule(("reward_model.sandbox_fusion.*",), ("sandbox.mode", "sandbox.url", "sandbox.memory_mb", "reward.workers"),
         "programs run in the local sandbox", _sandbox),
    no_need("the reward model runs in a process of its own, and its budget changes no score",
            "reward_model.micro_batch_size*", "reward_model.use_reward_loop", "reward_model.num_workers",
            "reward_model.launch_reward_fn_async", "reward_model.use_dynamic_bsz",
            "reward_model.model.fsdp_config.*", "reward_model.rollout.*"),
    Rule((G + "rollout_correction.*", A + "tis_imp_ratio_cap"), ("algo.correction.weight", "algo.correction.upper"),
         "nothing is corrected", _correction),
    Rule((A + "grad_clip", A + "optim.clip_grad"), ("train.optim.grad_clip",), "verl's FSDP actor reads the first",
         _clip),
    no_need("one optimizer: AdamW", "*optim.optimizer", unless=only("AdamW", "adam", "adamw")),
    missing("one optimizer: AdamW, or in 8 bits (train.optim.name)", "*optim.optimizer_impl",
         "*optim.override_optimizer_config*"),
)  # fmt: skip
