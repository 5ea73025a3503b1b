"""An OpenAI completions server with scripted delays and errors: the load generator's peer in tests, run as a process of its own.

Not recorded: written from vLLM's published API (vllm/entrypoints/openai/completion/protocol.py and serving.py, 0.25). Like vLLM it puts the
prompt's ids into the first chunk, sends a chunk with empty text where a token is no whole character, and the usage in a chunk of its own.

It prints `ready on HOST:PORT`. A SIGTERM makes it print, as one JSON object, what it has seen, and exit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

MAX_CONTEXT = 4096


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections, and chunks bodies
    options: ClassVar[argparse.Namespace]
    seen: ClassVar[list[dict[str, Any]]] = []
    lock: ClassVar[threading.Lock] = threading.Lock()

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send_json(200, {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": MAX_CONTEXT}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.options.hang:
            time.sleep(3600)
        seen = {**request, "path": self.path, "traceparent": self.headers.get("traceparent", ""), "port": self.client_address[1]}
        with self.lock:
            self.seen.append(seen)
            number = len(self.seen)
        if number == self.options.die_at:
            os._exit(9)
        if self.options.fail_every and number % self.options.fail_every == 0:
            statuses: list[int] = self.options.fail_with
            seen["outcome"] = status = statuses[number // self.options.fail_every % len(statuses)]
            self._send_json(status, {"error": {"message": "as scripted", "type": "stub", "param": None, "code": status}})
            return
        seen["outcome"] = "cut off"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(request)
            self._send_chunk(b"")
            seen["outcome"] = "finished"
        except OSError:
            self.close_connection = True

    def _stream(self, request: dict[str, Any]) -> None:
        options, prompt, wanted = self.options, request["prompt"], request["max_tokens"] - self.options.short
        # A chunk without tokens must not count as the first one.
        self._send_choice({"text": "", "token_ids": []} if options.token_ids else {"text": ""})
        time.sleep(options.first_token_s)
        sent = 0
        while sent < wanted:
            if sent:
                time.sleep(options.gap_s)
            if sent and options.error_in_stream:
                self._send_event({"error": {"message": "as scripted", "type": "InternalServerError", "param": None, "code": 500}})
                break
            count = min(options.tokens_per_chunk, wanted - sent)
            choice: dict[str, Any] = {"text": "" if options.token_ids and sent % 2 == 0 else "é" * count}
            if options.token_ids:
                choice |= {"token_ids": [1] * count, "prompt_token_ids": None if sent else prompt}
            self._send_choice(choice)
            sent += count
        if options.no_usage:
            return
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sent + options.usage_error, "total_tokens": len(prompt) + sent}
        self._send_event({"object": "text_completion", "choices": [], "usage": usage})
        self._write(b"data: [DONE]\n\n")

    def _send_choice(self, choice: dict[str, Any]) -> None:
        self._send_event({"id": "1", "object": "text_completion", "choices": [{"index": 0, "finish_reason": None, **choice}]})

    def _send_event(self, event: dict[str, Any]) -> None:
        self._write(f"data: {json.dumps(event)}\n\n".encode())

    def _write(self, event: bytes) -> None:
        """Split in the middle where asked to, since a reader may get any part of an event first."""
        middle = len(event) // 2 if self.options.split else len(event)
        for part in (event[:middle], event[middle:]):
            if part:
                self._send_chunk(part)

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-token-s", type=float, default=0.0)
    parser.add_argument("--gap-s", type=float, default=0.0)
    parser.add_argument("--tokens-per-chunk", type=int, default=1)
    parser.add_argument("--no-token-ids", dest="token_ids", action="store_false", help="as a server that does not know return_token_ids")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--fail-with", nargs="+", type=int, default=[429])
    parser.add_argument("--error-in-stream", action="store_true")
    parser.add_argument("--no-usage", action="store_true")
    parser.add_argument("--usage-error", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--short", type=int, default=0, help="answers lack so many tokens")
    parser.add_argument("--hang", action="store_true", help="no request is answered")
    parser.add_argument("--die-at", type=int, default=0, help="the request at which it dies")
    Handler.options = parser.parse_args()

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"ready on 127.0.0.1:{server.server_address[1]}", flush=True)
    stop.wait()
    print(json.dumps({"requests": Handler.seen}), flush=True)


if __name__ == "__main__":
    main()
