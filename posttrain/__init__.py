"""posttrain: one CLI from raw data to a better language model (prep, sft, rl, generate, eval, merge-ckpt)."""

__version__ = "0.1.0"
