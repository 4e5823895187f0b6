"""What a run will take, reckoned before it starts: memory, time and batches, from config, model shape and machine.

Pure arithmetic on dataclasses. Nothing here imports torch, and it imports config, errors and the registry only.
"""
