"""Rows on disk, and the batches made from them."""

from posttrain.data.chat import RenderedChat, render_chat

__all__ = ["RenderedChat", "render_chat"]
