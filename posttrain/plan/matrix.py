"""Linear layers, of which models are made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Matrix:
    """A linear layer, or several of one shape."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.count * (self.inputs * self.outputs + self.outputs * self.bias)
