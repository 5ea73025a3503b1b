"""TLS, client certificates and tokens, against real servers; and that what is secret or private stands in nothing they write."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import msgspec
import pytest

from inference_service.client import Client, InferenceError
from inference_service.config import Config, ConfigError, Security, load_config
from inference_service.rpc.tls import server_credentials
from loadgen._verdict import UNTRUSTED
from tests.service.certificates import Certificate, make_authority, sign
from tests.service.conftest import RunningServer, run_server

ALICE, WRONG = "alice-0123456789abcdef", "wrong-0123456789abcdef"
PROMPT = "zebra crossing"
CLI = [sys.executable, "-m", "inference_service.cli"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def certificate(authority: Certificate) -> Certificate:
    return sign(authority, authority.key.parent, "server")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, certificate: Certificate) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("tls")
    tokens = directory / "tokens.yaml"
    tokens.write_text(f"- {{name: alice, token: {ALICE}}}\n")
    settings = (*tls(certificate), f"security.tokens_file={tokens}", "model.load_format=echo", "telemetry.log_format=json")
    with run_server(directory, *settings) as server:
        yield server


def tls(certificate: Certificate) -> tuple[str, str]:
    return f"security.tls_certificate={certificate.certificate}", f"security.tls_key={certificate.key}"


def credentials(authority: Certificate, client: Certificate | None = None) -> grpc.ChannelCredentials:
    if client is None:
        return grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    return grpc.ssl_channel_credentials(authority.certificate.read_bytes(), client.key.read_bytes(), client.certificate.read_bytes())


def environment(authority: Certificate, token: str) -> dict[str, str]:
    return {**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority.certificate), "INFERENCE_TOKEN": token}


def code(client: Client) -> grpc.StatusCode:
    try:
        client.generate_text("hi", max_tokens=1, timeout=10)
    except InferenceError as error:
        return error.code
    return grpc.StatusCode.OK


def test_the_client_speaks_tls_and_brings_its_token(server: RunningServer, authority: Certificate) -> None:
    with Client(server.address, credentials(authority), token=ALICE) as client:
        assert client.generate_text(PROMPT, max_tokens=3, timeout=30).token_ids
        assert client.model_info().name and client.load().pages_used == 0
    with Client(server.address, credentials(authority), token=WRONG) as client:
        client.wait_ready(10)  # health needs none
        assert code(client) == grpc.StatusCode.UNAUTHENTICATED
    with Client(server.address, token=ALICE) as client:
        assert code(client) == grpc.StatusCode.UNAVAILABLE, "in plaintext"
    with Client(server.address, credentials(make_authority(authority.key.parent, "another")), token=ALICE) as client:
        assert code(client) == grpc.StatusCode.UNAVAILABLE, "the authority is not known"


@pytest.mark.parametrize("token", [ALICE, WRONG, f"{ALICE}\u00e9"])
def test_the_command_line_does_by_grpcs_and_the_environment(server: RunningServer, authority: Certificate, token: str) -> None:
    command = [
        sys.executable,
        "-m",
        "inference_service.cli",
        "generate",
        "--raw",
        "--max-tokens=2",
        f"--target=grpcs://{server.address}",
        "hi",
    ]
    done = subprocess.run(command, env=environment(authority, token), capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if token == ALICE else 1), done.stderr
    assert ("UNAUTHENTICATED" in done.stderr) == (token == WRONG)
    assert token not in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_the_load_generator_does_too(server: RunningServer, authority: Certificate, tmp_path: Path) -> None:
    settings = {"target": f"grpcs://{server.address}", "duration_s": 2, "json_file": str(tmp_path / "result.json")}
    sets = [item for key, value in settings.items() for item in ("--set", f"loadtest.{key}={value}")]
    sets += ["--set", "loadtest.workload.input_tokens=8", "--set", "loadtest.workload.output_tokens=4"]
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "locust", "-f", str(root / "loadgen"), "--headless", "--only-summary", *sets]
    done = subprocess.run(command, cwd=tmp_path, env=environment(authority, ALICE), capture_output=True, text=True, timeout=90)
    assert done.returncode in (0, UNTRUSTED), done.stderr
    written = "".join(file.read_text() for file in tmp_path.iterdir())
    assert '"json_file"' in written and ALICE not in written + done.stdout + done.stderr


def test_no_token_and_no_prompt_is_in_what_the_server_has_written(server: RunningServer, authority: Certificate) -> None:
    with Client(server.address, credentials(authority), token=ALICE) as client:
        client.generate_text(PROMPT, max_tokens=2, timeout=30)
        for wrong in ({"model": "another"}, {"temperature": -1.0}, {"max_tokens": 10**6}):
            with pytest.raises(InferenceError) as caught:
                client.generate_text(PROMPT, stop=[PROMPT], traceparent=f"00-{'1' * 32}-{'2' * 16}-01", **wrong)
            assert ALICE not in str(caught.value)
    end = time.monotonic() + 30
    while server.traces.read_text().count("1" * 32) < 3:
        assert time.monotonic() < end, "the spans of the refused requests"
        time.sleep(0.1)
    written = server.traces.read_text() + server.traces.with_name("server.log").read_text()
    assert not any(text in written for text in (ALICE, WRONG, PROMPT))


def test_clients_without_a_certificate_of_the_authority_are_refused_and_certificates_are_renewed(
    tmp_path: Path, authority: Certificate, certificate: Certificate
) -> None:
    used = Certificate(tmp_path / "used.pem", tmp_path / "used.key")
    shutil.copy(certificate.certificate, used.certificate)
    shutil.copy(certificate.key, used.key)
    known = sign(authority, tmp_path, "client")
    foreign = sign(make_authority(tmp_path, "foreign"), tmp_path, "stranger")
    with run_server(tmp_path, *tls(used), f"security.tls_client_ca={authority.certificate}", "model.load_format=echo") as server:
        for client_certificate, expected in ((known, "OK"), (None, "UNAVAILABLE"), (foreign, "UNAVAILABLE")):
            with Client(server.address, credentials(authority, client_certificate)) as client:
                assert code(client).name == expected
        before = served_certificate(server, known)
        assert ssl.PEM_cert_to_DER_cert(certificate.certificate.read_text()) == before
        # A key that does not fit, for as long as only one of the two files is new, changes nothing.
        renewed = sign(authority, tmp_path, "renewed")
        shutil.copy(renewed.key, used.key)
        assert served_certificate(server, known) == before
        shutil.copy(renewed.certificate, used.certificate)
        assert served_certificate(server, known) == ssl.PEM_cert_to_DER_cert(renewed.certificate.read_text())
        with Client(server.address, credentials(authority, known)) as client:
            assert code(client).name == "OK"
        log = (tmp_path / "server.log").read_text()
        assert "security.tls_key" in log and "does not fit the certificate" in log


def served_certificate(server: RunningServer, client: Certificate) -> bytes | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(client.certificate, client.key)
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection, context.wrap_socket(connection) as secured:
        return secured.getpeercert(binary_form=True)


def test_files_that_cannot_be_used_are_errors_that_name_the_key(tmp_path: Path, authority: Certificate, certificate: Certificate) -> None:
    (tmp_path / "empty.pem").write_text("")
    cases = [
        (tmp_path / "none.pem", certificate.key, "", "security.tls_certificate: .*none.pem: No such file"),
        (certificate.certificate, tmp_path / "none.key", "", "security.tls_key: .*none.key: No such file"),
        (tmp_path / "empty.pem", certificate.key, "", "security.tls_certificate: .* holds no PEM certificate"),
        (certificate.certificate, tmp_path / "empty.pem", "", "security.tls_key: .* holds no PEM key"),
        (certificate.certificate, authority.key, "", "security.tls_key: .* does not fit the certificate"),
        (certificate.certificate, certificate.key, tmp_path / "none.pem", "security.tls_client_ca: .*: No such file"),
        (certificate.certificate, certificate.key, certificate.key, "security.tls_client_ca: .* holds no PEM certificate"),
    ]
    for chain, key, client_ca, message in cases:
        with pytest.raises(ConfigError, match=message):
            server_credentials(Security(tls_certificate=str(chain), tls_key=str(key), tls_client_ca=str(client_ca)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tls_certificate"], "tls_key is missing"),
        (["tls_key"], "tls_certificate is missing"),
        (["tls_client_ca"], "tls_client_ca needs TLS"),
    ],
)
def test_half_a_configuration_is_an_error(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"security: {message}"):
        load_config(None, [f"security.{key}=x" for key in given])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["server.admin_port=50051"], "server.admin_port: 50051 is that of server.port too"),
        (["server.admin_port=7", "server.health_port=7"], "server.health_port: 7 is that of server.admin_port too"),
        (["server.workers=3", "telemetry.metrics_port=50049"], "telemetry.metrics_port: 50051 is that of server.port too"),
        (["server.workers=2", "telemetry.metrics_port=65535"], "telemetry.metrics_port: 65535 and the ports after it are too few"),
        (["limits.client_streams=4"], "limits.client_streams limits nobody"),
        (["limits.client_key=x team"], "limits.client_key: "),
        (["limits.max_kv_share=.inf"], "limits.max_kv_share: "),
        (["server.engine_timeout_s=1"], "server.engine_timeout_s: "),
    ],
)
def test_what_would_do_otherwise_than_it_says_is_an_error(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^configuration: {message}"):
        load_config(None, settings)


def test_settings_that_go_together_are_none() -> None:
    load_config(None, ["server.port=0", "server.admin_port=0", "server.health_port=0", "telemetry.metrics_port=0", "server.workers=9"])
    load_config(None, ["server.workers=2", "telemetry.metrics_port=50049"])
    load_config(None, ["limits.client_streams=4", "security.tokens_file=x"])


def test_a_client_cannot_drain_the_server_of_all(server: RunningServer, authority: Certificate) -> None:
    with Client(server.address, credentials(authority), token=ALICE) as client:
        with pytest.raises(InferenceError) as caught:
            client.drain()
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_PORT_ONLY")
        assert code(client) == grpc.StatusCode.OK


def test_a_bad_certificate_ends_the_command_with_one_line(tmp_path: Path) -> None:
    settings = ["model.load_format=echo", "security.tls_certificate=no.pem", "security.tls_key=no.key"]
    command = [*CLI, "serve", *(f"--set={setting}" for setting in settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and "security.tls_certificate: no.pem: No such file" in done.stderr and "Traceback" not in done.stderr


def test_nothing_secret_is_in_the_configuration() -> None:
    """It is handed to the engine, printed by `check` and may be logged: files are named there, never what they hold."""
    assert set(msgspec.structs.asdict(Config().security)) == {"tls_certificate", "tls_key", "tls_client_ca", "tokens_file"}
