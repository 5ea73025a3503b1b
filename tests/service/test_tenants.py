"""Clients of different tokens, and requests of different salts, on one server with a real model: none learns of another's."""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from inference.v1 import admin_pb2, admin_pb2_grpc
from inference_service.client import Client, InferenceError
from inference_service.models.synthetic_tokenizer import write_tokenizer
from tests.service.conftest import RunningServer, run_server
from tests.unit.tiny_llama import save_tiny_llama

PAGE = 4
SECRET = list(range(3, 43))
PROMPTS = [SECRET, SECRET[:20] + [7] * 9, SECRET, [*SECRET[:-1], 99], [5] * 12, [5] * 30]
OTHERS = [[5] * 30, SECRET, SECRET + [4] * 20, [9] * 40]
TOKENS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("tenants")
    tokens = directory / "tokens.yaml"
    tokens.write_text("".join(f"- {{name: {name}, token: {token}}}\n" for name, token in TOKENS.items()))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
    model = save_tiny_llama(directory / "model", 0.2, vocab_size=300, **sizes)
    write_tokenizer(model)
    settings = [f"model.path={model}", "device.kind=cpu", f"cache.page_size={PAGE}", "cache.pages=400"]
    settings += [f"security.tokens_file={tokens}", "server.admin_port=0"]
    with run_server(directory, *settings) as server:
        yield server


@pytest.fixture
def alice(server: RunningServer) -> Iterator[Client]:
    with Client(server.address, token=TOKENS["alice"]) as client:
        yield client


@pytest.fixture
def bob(server: RunningServer) -> Iterator[Client]:
    with Client(server.address, token=TOKENS["bob"]) as client:
        yield client


def cached_and_computed(client: Client, prompt: list[int], salt: str) -> tuple[int, int]:
    """Of the prompt's tokens, those found in the cache, and those computed."""
    usage = client.generate_text(prompt, max_tokens=3, temperature=0, ignore_eos=True, cache_salt=salt, timeout=60).usage
    return usage.cached_tokens, usage.prompt_tokens - usage.cached_tokens


def figures(client: Client, salt: str, other: Client | None = None, other_salt: str = "") -> list[tuple[int, int]]:
    """A client's figures for its prompts, with those of another one, which sends the same and longer ones, before and between them."""
    for prompt in OTHERS if other else []:
        cached_and_computed(other or client, prompt, other_salt)
    found = []
    for prompt in PROMPTS:
        if other:
            cached_and_computed(other, prompt, other_salt)
        found.append(cached_and_computed(client, prompt, salt))
    return found


def test_what_another_client_sends_changes_nothing(alice: Client, bob: Client) -> None:
    alone = figures(alice, "1")
    assert max(cached for cached, _ in alone) > 0, "its own prompts are cached"
    assert figures(alice, "2", bob, "2") == alone, "bob gives the same salt"
    assert figures(alice, "3", bob) == alone
    assert figures(alice, "", bob) == alone, "neither gives one"


def test_what_is_sent_with_another_salt_changes_nothing(alice: Client) -> None:
    alone = figures(alice, "4")
    assert figures(alice, "5", alice, "6") == alone
    assert figures(alice, "7", alice, "7") != alone, "with the same salt it would"


def test_a_client_does_not_end_another_ones_request(alice: Client, bob: Client) -> None:
    stream = alice.generate(SECRET, max_tokens=80, ignore_eos=True, request_id="mine", timeout=60)
    next(stream)
    assert not bob.abort("mine")
    # Nor does it learn of the name from being refused it.
    assert bob.generate_text(SECRET, max_tokens=2, ignore_eos=True, request_id="mine", timeout=60).token_ids
    assert sum(len(event.delta.token_ids) for event in stream) == 80
    stream = alice.generate(SECRET, max_tokens=80, ignore_eos=True, request_id="mine", timeout=60)
    next(stream)
    with pytest.raises(InferenceError) as caught:
        alice.generate_text(SECRET, max_tokens=1, request_id="mine")
    assert caught.value.code == grpc.StatusCode.ALREADY_EXISTS
    assert alice.abort("mine")
    assert list(stream)[-1].finished.reason


def test_a_profile_of_the_engine_is_recorded_while_it_goes_on(server: RunningServer, alice: Client) -> None:
    address = re.search(r"admin on (\S+)", server.traces.with_name("server.log").read_text())
    assert address
    with grpc.insecure_channel(address[1]) as channel:
        call = admin_pb2_grpc.AdminServiceStub(channel).Profile.future(admin_pb2.ProfileRequest(seconds=0.5), timeout=120)
        while not call.done():
            alice.generate_text(SECRET, max_tokens=2, ignore_eos=True, timeout=60)
        profile = call.result()
    path = Path(profile.path)
    try:
        assert path.stat().st_size == profile.bytes and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
        assert any(name.startswith("aten::") for name in names), names
    finally:
        shutil.rmtree(path.parent)


def test_the_log_names_nobodys_token(server: RunningServer) -> None:
    written = server.traces.with_name("server.log").read_text() + server.traces.read_text()
    assert not any(token in written for token in TOKENS.values())
