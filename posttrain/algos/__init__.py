"""The mathematics of RL: advantages, losses, KL and reduction, as pure functions on tensors. Imports torch only."""
