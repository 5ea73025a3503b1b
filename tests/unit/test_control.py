"""The socket between supervisor and front ends, when one end is gone."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import uvloop

from inference_service.rpc.control import Alive, Control, FromWorker, ToWorker


def test_what_is_sent_to_an_end_that_is_gone_is_dropped() -> None:
    async def run() -> None:
        here, there = socket.socketpair()
        control: Control[ToWorker, FromWorker] = await Control.open(here, msgspec.json.Decoder(ToWorker))
        there.close()
        for _ in range(20):
            control.send(Alive())
            await asyncio.sleep(0)
        assert [message async for message in control] == []
        await control.close()
        control.send(Alive())

    uvloop.run(run())
