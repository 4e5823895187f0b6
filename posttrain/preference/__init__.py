"""The command `prefer`: training on preference pairs, and reward models."""
