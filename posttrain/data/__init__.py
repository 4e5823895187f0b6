"""Rows on disk, and the batches made from them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.data.chat import RenderedChat, render_chat

__all__ = ["RenderedChat", "render_chat"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On demand: commands that render no chat start without the template engine.
    from posttrain.data import chat

    return getattr(chat, name)
