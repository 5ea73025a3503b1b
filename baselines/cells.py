"""The cells of a comparison: what is sent, and by how many users.

Written as INPUT/OUTPUT@CONCURRENCY[,CONCURRENCY...], several with spaces or semicolons between:

    128/256@1,8,32          128 tokens in, 256 out, at three concurrencies; greedy
    128/256~0.8,0.95@32     with temperature 0.8 and top-p 0.95
    4096/16+128/256@8       half of the 8 users send the one shape, half the other
    8192/1024@1:20          measured for 20 s
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass
from typing import Any, TypeAlias

_CELLS = re.compile(
    r"(?P<shapes>\d+/\d+(\+\d+/\d+)?)(~(?P<temperature>\d+(\.\d+)?),(?P<top_p>\d+(\.\d+)?))?@(?P<levels>\d+(,\d+)*)(:(?P<window>\d+(\.\d+)?))?"
)
_MOST = 256
"""The concurrency from which on windows do not grow."""

Row: TypeAlias = dict[str, Any]
"""A cell's figures, as they stand in the result."""


@dataclass(frozen=True)
class Shape:
    """Tokens of a prompt and of its answer."""

    input_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.input_tokens}/{self.output_tokens}"


@dataclass(frozen=True)
class Cell:
    """One point of measurement. Of two shapes, each has half the users, and a row of its own in the result."""

    shapes: tuple[Shape, ...]
    concurrency: int
    temperature: float = 0.0
    top_p: float = 1.0
    window_s: float = 0.0
    """0: by the comparison's settings."""

    def __str__(self) -> str:
        sampling = f"~{self.temperature:g},{self.top_p:g}" if self.temperature else ""
        return f"{'+'.join(map(str, self.shapes))}{sampling}@{self.concurrency}"

    @property
    def users(self) -> int:
        """Of each shape."""
        return self.concurrency // len(self.shapes)

    def workload(self, shape: Shape) -> dict[str, Any]:
        """What the row of one of its shapes says about the requests."""
        workload: dict[str, Any] = {"input_tokens": shape.input_tokens, "output_tokens": shape.output_tokens}
        if self.temperature:
            workload |= {"temperature": self.temperature, "top_p": self.top_p}
        for other in self.shapes:
            if other != shape:
                workload["beside"] = {"input_tokens": other.input_tokens, "output_tokens": other.output_tokens}
        return workload

    def measured_s(self, window_s: tuple[float, float]) -> float:
        """How long it is measured: from the first of `window_s` at concurrency 1 to the second at 256."""
        share = min(1.0, math.log2(self.concurrency) / math.log2(_MOST))
        return self.window_s or window_s[0] + (window_s[1] - window_s[0]) * share

    def seed(self, base: int, part: int, round: str = "") -> int:
        """Of its prompts: the same for every target, another for every cell and each `round` of it, so that none finds its prompts in a
        prefix cache."""
        return zlib.crc32(f"{base}/{self}/{part}{round and '/' + round}".encode())


def parse_cells(text: str) -> list[Cell]:
    """Raises ValueError, which names the part that is wrong."""
    cells: list[Cell] = []
    for part in re.split(r"[\s;]+", text.strip()):
        match = _CELLS.fullmatch(part)
        if not match:
            raise ValueError(f"cells: {part!r}: write INPUT/OUTPUT@CONCURRENCY, such as 128/256@1,8,32")
        shapes = tuple(Shape(*map(int, shape.split("/"))) for shape in match["shapes"].split("+"))
        levels = [int(level) for level in match["levels"].split(",")]
        if len(set(shapes)) < len(shapes) or any(level % len(shapes) or not level for level in levels):
            raise ValueError(f"cells: {part!r}: two shapes must differ, and share the users evenly")
        temperature, top_p = float(match["temperature"] or 0), float(match["top_p"] or 1)
        cells += [Cell(shapes, level, temperature, top_p, float(match["window"] or 0)) for level in levels]
    return cells
