"""The command `generate`: responses of a model to prompts, written as they come."""
