"""Rows on disk, and the batches made from them."""
