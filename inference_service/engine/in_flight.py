"""The requests that have not ended, by front end and key, and by the names that clients gave them."""

from __future__ import annotations

from collections.abc import Iterator

from inference_service.engine.requests import Request

Key = tuple[bytes, int]
"""A front end and its key for a request."""


class InFlight:
    """A request's choices are requests of one name; no two requests of clients have the same."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Request] = {}
        self._by_id: dict[str, dict[Key, Request]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_key.values())

    def get(self, origin: bytes, key: int) -> Request | None:
        return self._by_key.get((origin, key))

    def named(self, request_id: str) -> list[Request]:
        """The choices in flight of a client's request."""
        return list(self._by_id.get(request_id, {}).values())

    def of(self, origin: bytes) -> list[Request]:
        """All requests of a front end."""
        return [request for request in self if request.origin == origin]

    def add(self, request: Request) -> bool:
        """False, and nothing is done, where another client's request of the same name is in flight."""
        key, name = (request.origin, request.submit.key), request.submit.request_id
        if name:
            others = self._by_id.setdefault(name, {})
            if others and _group(next(iter(others.values()))) != _group(request):
                return False
            others[key] = request
        self._by_key[key] = request
        return True

    def remove(self, request: Request) -> None:
        key, name = (request.origin, request.submit.key), request.submit.request_id
        del self._by_key[key]
        if name:
            del self._by_id[name][key]
            if not self._by_id[name]:
                del self._by_id[name]


def _group(request: Request) -> Key:
    """The same for all choices of a request."""
    submit = request.submit
    return request.origin, submit.fork_of if submit.fork_of >= 0 else submit.key
