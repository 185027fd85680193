"""The floor: the same HTTP server as the gateway's, answering a constant 202 to everything.

What a workload costs here is spent on sockets and HTTP parsing alone, so no gateway built on this
server can be cheaper. It reads whole bodies and throws them away.
"""

import sys
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BODY = b'{"offset":1,"partition":0,"table":"floor"}'
ANSWER = (
    b"HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)


class FloorProtocol(HttpToolsProtocol):
    """Answers when a request is complete; never builds a scope nor calls an application."""

    def on_message_begin(self) -> None:
        pass

    def on_url(self, url: bytes) -> None:
        pass

    def on_header(self, name: bytes, value: bytes) -> None:
        pass

    def on_headers_complete(self) -> None:
        pass

    def on_body(self, body: bytes) -> None:
        pass

    def on_message_complete(self) -> None:
        self.transport.write(ANSWER)


async def unused(scope: Any, receive: Any, send: Any) -> None:
    """uvicorn wants an application; the protocol never calls it."""


def main(port: int) -> None:
    uvicorn.run(
        unused,
        host="127.0.0.1",
        port=port,
        http=FloorProtocol,
        loop="uvloop",
        lifespan="off",
        log_level="error",
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
