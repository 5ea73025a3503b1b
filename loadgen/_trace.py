"""Replays a recorded trace: its times, its lengths, and what its prompts have in common.

The format is that of Mooncake's published traces (github.com/kvcache-ai/Mooncake, FAST25-release/traces): JSON lines with `timestamp` in
milliseconds, `input_length`, `output_length` and `hash_ids`, one a block of 512 prompt tokens; equal ids are equal blocks.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from inference_service.config import ConfigError


class Entry(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: str) -> list[Entry]:
    """In the order of their times, of which the first is 0. Raises ConfigError, which names the line."""
    decode = msgspec.json.Decoder(Entry).decode
    entries = []
    try:
        for number, line in enumerate(Path(path).read_text().splitlines(), 1):
            entry = decode(line)
            if min(entry.input_length, entry.output_length) < 1:
                raise ConfigError(f"loadtest.trace: {path}, line {number}: input_length and output_length must be at least 1")
            entries.append(entry)
    except OSError as error:
        raise ConfigError(f"loadtest.trace: {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"loadtest.trace: {path}, line {number}: {error}") from None
    if not entries:
        raise ConfigError(f"loadtest.trace: {path}: no requests")
    entries.sort(key=lambda entry: entry.timestamp)
    first = entries[0].timestamp
    return [msgspec.structs.replace(entry, timestamp=entry.timestamp - first) for entry in entries]
