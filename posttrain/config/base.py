"""Base class and bounded types of all config sections."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_LARGEST_INT = 2**31 - 1
"""Engines, kernels and random generators take 32-bit integers."""
_LARGEST_FACTOR = 1e6
"""A term with a larger factor leaves no float32 digits for the terms that it is added to."""
_YEAR_S = 365 * 86400.0
"""Longer waits are of no use, and waits of centuries overflow the clocks of other libraries."""

PositiveInt = Annotated[int, Field(gt=0, le=_LARGEST_INT)]
NaturalInt = Annotated[int, Field(ge=0, le=_LARGEST_INT)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Factor = Annotated[float, Field(ge=0.0, le=_LARGEST_FACTOR)]
PositiveFactor = Annotated[float, Field(gt=0.0, le=_LARGEST_FACTOR)]
SignedFactor = Annotated[float, Field(ge=-_LARGEST_FACTOR, le=_LARGEST_FACTOR)]
Temperature = Annotated[float, Field(ge=0.0, le=100.0)]
Seconds = Annotated[float, Field(gt=0.0, le=_YEAR_S)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys forbidden, all numbers finite. Docstrings of fields become
    docs/config.md."""

    model_config = ConfigDict(
        frozen=True, defer_build=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    @property
    def changed(self) -> set[str]:
        """Return the fields that differ from their defaults."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
