"""How models write tool calls: one short file a format, the registry of formats, and a template's format."""

from posttrain.core.registry import Registry
from posttrain.tools.formats.base import ParsedCall, ParsedTurn, ToolParser
from posttrain.tools.formats.detect import detect

PARSERS: Registry[ToolParser] = Registry(
    "tool format",
    {
        "deepseek": "posttrain.tools.formats.deepseek:DEEPSEEK",
        "deepseek_v31": "posttrain.tools.formats.deepseek:DEEPSEEK_V31",
        "glm": "posttrain.tools.formats.glm:GLM",
        "gpt_oss": "posttrain.tools.formats.gpt_oss:GPT_OSS",
        "hermes": "posttrain.tools.formats.hermes:HERMES",
        "kimi": "posttrain.tools.formats.kimi:KIMI",
        "llama3_json": "posttrain.tools.formats.llama3_json:LLAMA3_JSON",
        "mistral": "posttrain.tools.formats.mistral:MISTRAL",
        "mistral_v3": "posttrain.tools.formats.mistral:MISTRAL_V3",
        "qwen3_coder": "posttrain.tools.formats.qwen3_coder:QWEN3_CODER",
    },
)

__all__ = ["PARSERS", "ParsedCall", "ParsedTurn", "ToolParser", "detect"]
