"""Tool calls as models write them, one of each format."""

from posttrain.tools.formats import ParsedCall

CALLS, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
KIMI, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}, metric={"type": "boolean"}),
    tool("run", code={"type": "string"}, options={"type": "object"}, files={"type": "array"}),
]
ROME = ParsedCall("get_weather", {"city": "Rome", "days": 3})


def kimi_call(head, arguments="{}", end="<|tool_call_end|>"):
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}{end}"


def xml_call(name, arguments):
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm_call(name, arguments):
    inside = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{inside}</tool_call>"


def harmony(arguments, to=" to=functions.get_weather", channel="commentary", end="<|call|>"):
    return f"<|channel|>{channel}{to} <|constrain|>json<|message|>{arguments}{end}"


# One call, as published templates and the engines' documentation show it.
ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "qwen3_coder": xml_call("get_weather", {"city": "Rome", "days": "3"}),
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}',
    "mistral_v3": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}]',
    "deepseek": f'{CALLS}{CALL}function{SEP}get_weather\n```json\n{{"city": "Rome", "days": 3}}\n```'
    f"{CALL_END}{CALLS_END}",
    "deepseek_v31": f'{CALLS}{CALL}get_weather{SEP}{{"city": "Rome", "days": 3}}{CALL_END}{CALLS_END}',
    "glm": glm_call("get_weather", {"city": "Rome", "days": "3"}),
    "kimi": KIMI + kimi_call("functions.get_weather:0", '{"city": "Rome", "days": 3}') + KIMI_END,
    "gpt_oss": harmony('{"city": "Rome", "days": 3}'),
}
