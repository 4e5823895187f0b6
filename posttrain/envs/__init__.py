"""Environments and agents of others: the two protocols, what opens an environment by its name, sessions of tokens, and
the endpoint that agents talk to."""

from posttrain.envs.base import ENVIRONMENTS, Environment, Split, Step

__all__ = ["ENVIRONMENTS", "Environment", "Split", "Step"]
