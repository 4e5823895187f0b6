"""What surrounds the loop of a training run: its folder, lock, preflight checks, checkpoints, and resume.

``checkpoints`` decides when a checkpoint begins, is complete and is the best; ``train.saver`` writes its shards.
"""
