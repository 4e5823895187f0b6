"""Tools a model may call in an episode, and the formats in which models write calls."""

from posttrain.tools.base import TOOLS, Tool, ToolResult, function_schema, row_kwargs
from posttrain.tools.functions import tool

__all__ = ["TOOLS", "Tool", "ToolResult", "function_schema", "row_kwargs", "tool"]
