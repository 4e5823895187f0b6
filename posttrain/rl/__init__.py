"""The command `rl`: rollouts, advantages and policy updates, step by step."""
