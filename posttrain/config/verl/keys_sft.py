"""What keys of ``verl.trainer.fsdp_sft_trainer`` and ``verl.trainer.sft_trainer`` mean here."""

from __future__ import annotations

from posttrain.config.verl.keys_shared import SHARED, checkpointing, contents, files, lora, param_dtype, schedule
from posttrain.config.verl.rules import SKIP, Draft, Rule, ScriptValues, missing, no_need, only, same, unless_set

D, T = "data.", "trainer."
_PAIRS = (("question", "answer"), ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"))
"""Columns that `posttrain prep messages` makes conversations of."""


def _columns(view: ScriptValues, draft: Draft) -> None:
    """A prompt and a response, in columns or in a struct of ``extra_info``."""
    keys = [D + name for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys")]
    if view[D + "multiturn.enable"] or not view.named(*keys):
        return
    columns = []
    for column, fields in ((keys[0], keys[2]), (keys[1], keys[3])):
        inner = view[fields] or []
        inner = [inner] if isinstance(inner, str) else inner
        known = view[column] == "extra_info" and len(inner) == 1
        columns.append(inner[0] if known else view[column] if not inner else "")
    if tuple(columns) not in _PAIRS:
        for key in keys:
            draft.refuse(view, key, f"columns {columns}: `posttrain prep messages` knows {_PAIRS}")
        return
    draft.notes.append(
        "rows of a prompt and a response become conversations by "
        "`posttrain prep messages --source FILE --out DIR`; then --set data.train=DIR/sft_train.parquet"
    )
    for key in keys:
        draft.pass_over(view, key, "`posttrain prep messages` finds these columns and writes `messages`")


def _microbatches(view: ScriptValues, draft: Draft) -> None:
    rows, tokens = D + "micro_batch_size_per_gpu", D + "max_token_len_per_gpu"
    if view[D + "use_dynamic_bsz"]:
        share = view["ulysses_sequence_parallel_size"]
        about = view.origin(tokens) + (f" x {share} workers that share a sequence" if share > 1 else "")
        draft.set("train.tokens_per_microbatch", view[tokens] * share, about)
        draft.pass_over(view, rows, "verl reads it without use_dynamic_bsz only")
        return
    draft.pass_over(view, tokens, "verl reads it with use_dynamic_bsz only")
    count = int(view[rows])
    draft.set("train.sequences_per_microbatch", count, view.origin(rows))
    about = f"{count} longest conversations ({view.origin(rows)})"
    draft.set("train.tokens_per_microbatch", count * view[D + "max_length"], about)


def _machine(view: ScriptValues, draft: Draft) -> None:
    keys = ("launcher.nproc_per_node", "launcher.nnodes")
    if not view.named(*keys):
        keys = (T + "n_gpus_per_node", T + "nnodes")
    gpus, nodes = view[keys[0]], view[keys[1]] or 1
    if gpus:
        draft.set("cluster.workers", gpus * nodes, f"{view.origin(keys[0])} x {nodes}")


def _offload(view: ScriptValues, draft: Draft) -> None:
    key = next((k for k in view.given if k.endswith(("cpu_offload", "offload_policy")) and view[k]), None)
    if key is not None:
        draft.set("train.cpu_offload", True, key)


def _keep(view: ScriptValues, draft: Draft) -> None:
    key = T + "max_ckpt_to_keep"
    if view[key]:
        draft.set("checkpoint.keep", view[key], view.origin(key))
    else:
        draft.refuse(view, key, "all of them: here checkpoint.keep is a number, two unless it is set")


SFT = (
    files(D + "train_files", "data.train"),
    files(D + "val_files", "data.val"),
    Rule(tuple(D + name for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys")), (),
         "rows are conversations: `posttrain prep messages` makes them of a prompt and a response", _columns),
    same(D + "train_batch_size", "data.batch_size"),
    same(D + "max_length", "data.max_length"),
    same(D + "truncation", "data.truncation", "", lambda how: how if how in ("error", "left", "right") else SKIP),
    Rule((D + "micro_batch_size_per_gpu", D + "max_token_len_per_gpu", D + "use_dynamic_bsz"),
         ("train.tokens_per_microbatch", "train.sequences_per_microbatch"),
         "a budget of tokens, or so many longest conversations", _microbatches),
    no_need("verl's trainer reads micro_batch_size_per_gpu; no size changes the gradient", D + "micro_batch_size"),
    Rule(("launcher.nproc_per_node", "launcher.nnodes", T + "n_gpus_per_node", T + "nnodes"), ("cluster.workers",),
         "torchrun's processes, else the trainer's keys", _machine),
    no_need("the driver finds its workers", "launcher.*"),
    no_need("conversations are rows of `messages`, always", D + "multiturn.enable"),
    no_need("the column is called so here too", D + "multiturn.messages_key", D + "messages_key",
         unless=only("messages")),
    no_need("the column is called so here too", D + "multiturn.tools_key", D + "tools_key", unless=only("tools")),
    no_need("the column is called so here too", D + "multiturn.enable_thinking_key", D + "enable_thinking_key",
            unless=only("enable_thinking")),
    no_need("sequences are packed without padding", D + "pad_mode", unless=only("no_padding")),
    no_need("a conversation is rendered as a whole, and its mask comes from the template",
         D + "ignore_input_ids_mismatch"),
    same(D + "apply_chat_template_kwargs.enable_thinking", "data.enable_thinking", "",
         lambda value: SKIP if value is None else value),
    same("model.partial_pretrain", "model.path", "", lambda name: name or SKIP),
    same("model.path", "model.path", "", lambda name: name or SKIP),
    same("model.trust_remote_code", "model.trust_remote_code", "", lambda on: bool(on) or SKIP),
    same("model.external_lib", "plugins", "a module that is imported in every process", lambda m: [m] if m else SKIP),
    lora("model."),
    checkpointing("model.enable_gradient_checkpointing"),
    param_dtype("model.fsdp_config.model_dtype"),
    param_dtype("engine.model_dtype"),
    Rule(("*cpu_offload", "*offload_params", "engine.offload_policy", "engine.param_offload",
         "engine.optimizer_offload"),
         ("train.cpu_offload",), "it is off", _offload),
    same("ulysses_sequence_parallel_size", "train.sequence_parallel"),
    same("engine.fsdp_size", "train.shard_size", "-1: one copy of the weights", lambda n: n if n and n > 0 else SKIP),
    same("optim.lr", "train.optim.lr", "", float),
    same("optim.betas", "train.optim.betas", "", list),
    same("optim.weight_decay", "train.optim.weight_decay", "here of matrices only", float),
    same("optim.clip_grad", "train.optim.grad_clip", "", float),
    schedule("optim.", "train.optim", "lr_scheduler", per_step=False),
    same("trainer.seed", "run.seed"),
    *SHARED,
    contents("trainer.checkpoint."),
    contents("checkpoint."),
    Rule((T + "max_ckpt_to_keep",), ("checkpoint.keep",), "verl keeps all by default, posttrain two", _keep),
    no_need("all rows are used", D + "val_max_samples", unless=unless_set),
    no_need("no step is profiled", "trainer.profile_interval", unless=only([-1, -1])),
    no_need("it is switched off", "model.enable_activation_offload", "*tiled_mlp.enabled", "profiler.enable",
         unless=unless_set),
    missing("Megatron is not here: FSDP2 shards the model", "engine.*", "optim.lr_decay_style", "optim.lr_warmup_init",
            "optim.min_lr"),
    missing("the data set is verl's own code: write the parquet with `posttrain prep`, or as a plugin",
         D + "custom_cls.*"),
    missing("changes to a model's config belong into its config.json", "model.override_config*"),
    missing("the chat template is that of the tokenizer", D + "chat_template"),
)  # fmt: skip

SFT_ENGINE = tuple(
    schedule("optim.", "train.optim", "lr_scheduler_type", per_step=False)
    if "optim.lr_scheduler" in rule.theirs
    else rule
    for rule in SFT
)
"""Rules of ``sft_trainer``, whose schedule has another name."""
