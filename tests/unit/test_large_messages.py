"""Threads for large messages: nobody has them all."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextvars import copy_context

from inference.v1 import generate_pb2 as pb
from inference_service.rpc.caller import CALLER, Caller
from inference_service.rpc.large_messages import AT_ONCE, LARGE_BYTES, LargeMessages

LARGE = pb.TokenizeRequest(text="x" * LARGE_BYTES)


async def test_small_messages_are_read_at_once_and_large_ones_elsewhere() -> None:
    here, messages = threading.get_ident(), LargeMessages()
    assert await messages.read(pb.TokenizeRequest(text="x"), threading.get_ident) == here
    assert await messages.read(LARGE, threading.get_ident) != here


async def test_one_client_leaves_threads_for_others_even_when_it_cancels() -> None:
    messages, go_on, begun = LargeMessages(), threading.Event(), Counter[str]()

    def tokenize(name: str) -> str:
        begun[name] += 1
        if name == "alice":
            go_on.wait(30)
        return name

    def call(name: str) -> asyncio.Task[str]:
        context = copy_context()
        context.run(CALLER.set, Caller(name, None))
        return asyncio.get_running_loop().create_task(messages.read(LARGE, tokenize, name), context=context)

    try:
        calls = [call("alice") for _ in range(2 * AT_ONCE)]
        assert await call("bob") == "bob"
        for each in calls[:AT_ONCE]:
            each.cancel()
        assert await call("bob") == "bob"
        assert begun["alice"] == AT_ONCE, "those that were cancelled keep their threads"
    finally:
        go_on.set()
    assert await asyncio.gather(*calls[AT_ONCE:]) == ["alice"] * AT_ONCE
