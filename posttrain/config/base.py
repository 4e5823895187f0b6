"""What all sections of the config share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """Base of every section: frozen, unknown keys forbidden. Docstrings of fields become docs/config.md."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", protected_namespaces=())

    @property
    def changed(self) -> set[str]:
        """Fields that are not at their default."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
