"""What the configuration's sections are made of (config.py, comparison.py)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
CountOrAuto = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=1e6)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Rate = Annotated[float, Meta(gt=0, le=1e6)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e9)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of the tree: immutable, and strict about its keys."""


def readable(error: msgspec.ValidationError) -> str:
    """msgspec ends its messages with "- at `$.a.b`"; begin with the key instead, as a person would write it."""
    what, at, where = str(error).replace(" - at `key` in `$", " as a key - at `$").rpartition(" - at `$")
    return f"{where.strip('.`')}: {what}".removeprefix(": ") if at else str(error)
