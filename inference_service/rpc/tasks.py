"""Coroutines that run beside each other."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_with(main: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, or to the first error of any. Then the others are cancelled, and have ended when this returns."""
    tasks = [asyncio.create_task(coroutine) for coroutine in (main, *beside)]
    try:
        while not tasks[0].done():
            done, _ = await asyncio.wait([task for task in tasks if not task.done()], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
