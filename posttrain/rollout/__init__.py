"""Episodes: their state machine, groups and batches of them on a pool of samplers, and rollout files."""
