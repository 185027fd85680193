"""A TCP proxy that can lose answers: the request arrives, its answer does not."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Proxy:
    """Forwards connections to a port; every other answer is dropped with its connection."""

    def __init__(self, upstream_port: int) -> None:
        self.answers = 0
        self._upstream_port = upstream_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(("127.0.0.1", self._upstream_port))
            for pump in (self._requests, self._answers):
                threading.Thread(target=_ending, args=(pump, client, upstream), daemon=True).start()

    def _requests(self, client: socket.socket, upstream: socket.socket) -> None:
        while data := client.recv(65536):
            upstream.sendall(data)

    def _answers(self, client: socket.socket, upstream: socket.socket) -> None:
        while data := upstream.recv(65536):
            with self._lock:
                self.answers += 1
                if self.answers % 2:
                    return
            client.sendall(data)


def _ending(
    pump: Callable[[socket.socket, socket.socket], None],
    client: socket.socket,
    upstream: socket.socket,
) -> None:
    """Whichever way ends first ends the connection."""
    with contextlib.suppress(OSError):
        pump(client, upstream)
    for side in (client, upstream):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)
        side.close()


@contextmanager
def losing_answers(upstream_port: int) -> Iterator[Proxy]:
    proxy = Proxy(upstream_port)
    try:
        yield proxy
    finally:
        proxy.close()
