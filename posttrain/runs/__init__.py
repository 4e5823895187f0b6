"""What surrounds the loop of a training run: its folder, lock, preflight checks, checkpoints, and resume."""
