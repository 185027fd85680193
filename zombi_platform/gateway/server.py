"""Running the gateway: checks, start, upkeep of connections, clean stop.

A start that cannot work raises `StartupError` before anything is served. On SIGTERM and
SIGINT the server stops listening, lets requests in flight get their acks, and closes the
hot buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
import uvloop

from zombi_platform.catalog.live.warehouse import LiveWarehouse
from zombi_platform.catalog.warehouse import LakeWarehouse
from zombi_platform.errors import StartupError
from zombi_platform.gateway.access import Access, check_bind
from zombi_platform.gateway.app import create_app
from zombi_platform.gateway.bodies import Arriving
from zombi_platform.gateway.confirmation import Confirmation
from zombi_platform.gateway.fast_lane import GatewayProtocol
from zombi_platform.gateway.lake_view import LakeView
from zombi_platform.gateway.metrics import Metrics
from zombi_platform.gateway.pipeline import Pipeline
from zombi_platform.gateway.reads import OpenReads
from zombi_platform.gateway.state import GatewayState
from zombi_platform.gateway.writes import Writes
from zombi_platform.hot import HotBuffer
from zombi_platform.lake.lake import Lake
from zombi_platform.settings import Settings

log = logging.getLogger("zombi.gateway")


def run(settings: Settings) -> int:
    """Serve until a signal comes; the exit code."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if settings.log_level != "debug":
        # They tell of every file that is opened.
        for library in ("pyiceberg", "botocore"):
            logging.getLogger(library).setLevel(logging.WARNING)
    check_bind(settings.host, settings)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))
    return 0


async def _serve(settings: Settings) -> None:
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(_listen(settings))
        metrics = Metrics(settings.max_inflight_writes)
        access = Access(settings.tokens_file, settings.oauth_token_secs)
        readers = ThreadPoolExecutor(settings.max_concurrent_reads, thread_name_prefix="reader")
        stack.callback(readers.shutdown)
        hot = HotBuffer(settings, metrics.committed)
        stack.push_async_callback(hot.close)
        lake = Lake(settings)
        committed = LakeWarehouse(lake)
        stack.callback(committed.close)
        live = LiveWarehouse(lake, committed, hot, metrics.staged)
        stack.push_async_callback(live.close)
        view = LakeView(lake)
        stack.callback(view.close)
        pipeline = Pipeline(settings, hot, view)
        confirmation = Confirmation(hot, pipeline, view)
        stack.push_async_callback(confirmation.close)
        state = GatewayState(
            settings,
            access,
            metrics,
            hot,
            Writes(settings, hot, metrics, confirmation),
            committed,
            live,
            pipeline,
            confirmation,
            Arriving(settings.max_inflight_bytes_mb * 2**20),
            OpenReads(settings.max_open_reads),
            readers,
        )
        await _serve_state(state, listener, stack)


async def _serve_state(
    state: GatewayState, listener: socket.socket, stack: contextlib.AsyncExitStack
) -> None:
    server = _Server(_config(state), state.pipeline)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    watch = state.pipeline.lake.watch()
    for work in (_keep_up(state, server), _announce(listener, server), watch):
        stack.callback(asyncio.create_task(work).cancel)
    await server.serve(sockets=[listener])


def _config(state: GatewayState) -> uvicorn.Config:
    settings = state.settings
    protocol = type("Connection", (GatewayProtocol,), {"gateway": state})
    return uvicorn.Config(
        create_app(state),
        http=protocol,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        # Its warnings are about broken requests: any caller could fill the disk with them.
        log_level="error",
        server_header=False,
        proxy_headers=False,
        backlog=4096,
        timeout_keep_alive=int(settings.idle_timeout_secs) + 1,
        timeout_graceful_shutdown=settings.shutdown_grace_secs,
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which ends the process by the signal."""

    def __init__(self, config: uvicorn.Config, pipeline: Pipeline) -> None:
        super().__init__(config)
        self._pipeline = pipeline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._pipeline.stop_waiting()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        # A second signal does not wait for requests any more.
        self.force_exit = self.should_exit
        self.should_exit = True


async def _announce(listener: socket.socket, server: _Server) -> None:
    while not server.started:
        await asyncio.sleep(0.005)
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"zombi gateway answers at http://{shown}:{port}", flush=True)  # noqa: T201


async def _keep_up(state: GatewayState, server: _Server) -> None:
    """Once a second: reread tokens, close connections that keep us waiting."""
    told: str | None = None
    while True:
        await asyncio.sleep(1)
        problem = state.access.refresh()
        if problem is not None and problem != told:
            log.error("%s", problem)
        told = problem
        broken = state.pipeline.thresholds.refresh()
        if broken is not None:
            log.error("%s", broken)
        now = time.monotonic()
        for connection in list(server.server_state.connections):
            if isinstance(connection, GatewayProtocol) and connection.timed_out(now):
                connection.close_late()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "stop what uses it or set ZOMBI_PORT"
        ) from error
    listener.set_inheritable(False)
    return listener


def _raise_file_limit() -> None:
    """Each connection is a file; take as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
