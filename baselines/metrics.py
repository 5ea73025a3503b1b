"""A server's own metrics, kept as it tells them."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

_ASK_S = 10.0


def scrape(url: str, path: str, file: Path) -> None:
    """Write what the server at `url` shows at `path` to `file`; where it shows nothing, no file."""
    parts = urlsplit(url)
    try:
        with urllib.request.urlopen(f"http://{parts.netloc}{path}", timeout=_ASK_S) as answer:
            text = answer.read()
    except (urllib.error.URLError, OSError, ValueError):
        return
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(text)
