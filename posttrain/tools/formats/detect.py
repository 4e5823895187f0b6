"""The call format of a chat template, from its text alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class _Signs:
    """Pieces of text that a format's templates have, and those of its relatives that they lack."""

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def fit(self, template: str) -> bool:
        return all(s in template for s in self.has) and not any(s in template for s in self.lacks)


_SIGNS = {
    "deepseek": _Signs(("<｜tool▁call▁begin｜>", "```json")),
    "deepseek_v31": _Signs(("<｜tool▁call▁begin｜>",), ("```json",)),
    "glm": _Signs(("<tool_call>", "<arg_key>")),
    "gpt_oss": _Signs(("<|channel|>", "<|message|>", "functions.")),
    "hermes": _Signs(("<tool_call>", '"arguments'), ("<arg_key>", "<function=")),
    "kimi": _Signs(("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    "llama3_json": _Signs(("<|start_header_id|>", '"parameters": '), ("<tool_call>",)),
    "mistral": _Signs(("[TOOL_CALLS]", "[ARGS]")),
    "mistral_v3": _Signs(("[TOOL_CALLS]",), ("[ARGS]",)),
    "qwen3_coder": _Signs(("<tool_call>", "<function=", "<parameter=")),
}


def detect(template: str) -> str | None:
    """The name of the format in which a chat template writes calls; None where it shows none, or more than one."""
    found = [name for name, signs in _SIGNS.items() if signs.fit(template)]
    return found[0] if len(found) == 1 else None
