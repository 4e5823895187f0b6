"""Sampling: engines behind one contract, the episode state machine, and the source of trajectories."""
