"""HTTP between nodes: inventories, shards, indexes, messages, metrics.

    GET  /v1/healthz                                  alive, state, uptime
    GET  /v1/inventory                                every readable shard of this node
    GET  /v1/shards/EPOCH/STEP/INC/RANK/data          bytes of a rank file; ranges
    GET  /v1/shards/EPOCH/STEP/INC/RANK/digests       its `.digests`
    GET  /v1/shards/EPOCH/STEP/INC/RANK/extras        its `.extras`
    GET  /v1/files/EPOCH/STEP/INC                     what a manifest says of every shard here: rank, size, digests
    GET  /v1/index/HASH                               an index
    POST /v1/messages                                 a message of the protocol (ckptkit.cache.messages)
    POST /v1/drain /v1/scrub /v1/bans                 the operator's; needs an admin's certificate
    GET  /metrics                                     Prometheus

Whoever asks has a certificate of the job (see `door`) and says `X-Ckpt-Job`. Errors are `{code, detail}`. Names in URLs are numbers and hex digits by
the routes' patterns: no request can name a path.
"""

import asyncio
import json
import logging
import os
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http_exceptions import HttpProcessingError

from ckptkit.cache.codec import MessageError, decode, encode
from ckptkit.cache.config import CacheConfig
from ckptkit.cache.door import Door, server_context
from ckptkit.cache.logs import Log
from ckptkit.cache.messages import TO_COORDINATOR, TO_NODE, Bans, Inventory, PeerMessage, SlotRecord, Version
from ckptkit.cache.metrics import Metrics
from ckptkit.cache.sending import Sender
from ckptkit.cache.tmpfs import Tmpfs

_TLS_PIECE = 1 << 20
_VERSION = r"{epoch:\d{1,16}}/{step:\d{1,16}}/{inc:[0-9a-f]{32}}"
_SEEN = "seen"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Backend(Protocol):
    """What the server needs of the daemon."""

    tmpfs: Tmpfs

    def inventory(self) -> Inventory: ...
    def acquire(self, version: Version, rank: int) -> SlotRecord | None: ...
    def release(self, record: SlotRecord) -> None: ...
    def files(self, version: Version) -> list[dict[str, Any]]: ...
    def receive(self, message: PeerMessage) -> tuple[int, str]: ...
    def operate(self, what: str, facts: dict[str, Any]) -> None: ...
    def health(self) -> dict[str, Any]: ...


class HttpServer:
    """The server of one daemon. `start`, then `port` is known."""

    def __init__(self, config: CacheConfig, backend: Backend, metrics: Metrics, log: Log) -> None:
        self.config, self.backend, self.metrics, self.log = config, backend, metrics, log
        self.port = 0
        self._scale = config.time_scale
        self._runner: web.AppRunner | None = None
        self._door: Door | None = None
        self._sender = Sender()
        self._started = time.monotonic()

    async def start(self) -> int:
        """Listen, and give the port. Raises StoreError."""
        config = self.config
        app = web.Application(middlewares=[self._around], client_max_size=config.limits.body)
        app.add_routes(
            [
                web.get("/v1/healthz", self._healthz),
                web.get("/v1/inventory", self._inventory),
                web.get(
                    f"/v1/shards/{_VERSION}/{{rank:\\d{{1,5}}}}/{{what:data|digests|extras}}", self._shard
                ),
                web.get(f"/v1/files/{_VERSION}", self._files),
                web.get("/v1/index/{hash:[0-9a-f]{32}}", self._index),
                web.post("/v1/messages", self._message),
                web.post("/v1/{what:drain|scrub|bans}", self._operate),
                web.get("/metrics", self._metrics),
            ]
        )
        metrics, log = self.metrics, self.log

        class Count(AbstractAccessLogger):
            def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
                metrics.http_requests.labels(_route(request), response.status).inc()
                if _SEEN not in request:  # the parser gave up before there was one
                    metrics.refused.labels("http", "malformed").inc()
                    log(
                        "request refused",
                        code=response.status,
                        reason="no HTTP that is understood",
                        peer=request.remote,
                    )

        self._runner = web.AppRunner(
            app,
            access_log_class=Count,
            logger=_logger(log),
            keepalive_timeout=config.limits.idle_s * self._scale,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        tls = config.tls
        self._door = Door(
            self._runner.server, server_context(tls.ca, tls.cert, tls.key) if tls.mode == "all" else None,
            header_s=config.limits.header_s * self._scale, idle_s=config.limits.idle_s * self._scale,
            most=config.limits.connections, log=self.log, refused=lambda reason: metrics.refused.labels("http", reason).inc(),
        )  # fmt: skip
        self.port = await self._door.start(*config.host_port)
        return self.port

    async def stop(self) -> None:
        if self._door is not None:
            await self._door.stop()
        if self._runner is not None:
            await self._runner.cleanup()
        self._sender.close()

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self._door is not None
        self._door.busy(request, True)
        request[_SEEN] = True
        try:
            self._admit(request)
            return await handler(request)
        except _HttpError as error:
            if error.code in (400, 403):
                self.metrics.refused.labels("http", str(error.code)).inc()
                self.log(
                    "request refused",
                    path=request.path[:200],
                    code=error.code,
                    reason=error.detail,
                    peer=request.remote,
                )
            return web.json_response({"code": error.code, "detail": error.detail}, status=error.code)
        except web.HTTPException as error:
            if error.status in (404, 405, 413):
                self.metrics.refused.labels("http", str(error.status)).inc()
                self.log(
                    "request refused",
                    path=request.path[:200],
                    code=error.status,
                    reason=error.reason,
                    peer=request.remote,
                )
            return web.json_response({"code": error.status, "detail": error.reason}, status=error.status)
        finally:
            self._door.busy(request, False)

    def _admit(self, request: web.Request) -> None:
        """Whether the certificate and the headers are of this job. Raises _HttpError."""
        if self.config.tls.mode == "all":
            subject = _subject(request)
            if subject.get("organizationName") != self.config.job:
                raise _HttpError(403, f"the certificate is of job {subject.get('organizationName')!r}")
        if (
            request.path not in ("/metrics", "/v1/healthz")
            and request.headers.get("X-Ckpt-Job") != self.config.job
        ):
            raise _HttpError(403, f"this daemon is of job {self.config.job}")

    async def _healthz(self, request: web.Request) -> web.Response:
        found = {"uptime_s": round(time.monotonic() - self._started, 1), **self.backend.health()}
        return web.json_response(found)

    async def _inventory(self, request: web.Request) -> web.Response:
        return _json(encode(self.backend.inventory()))

    async def _shard(self, request: web.Request) -> web.StreamResponse:
        version, rank = _version(request), int(request.match_info["rank"])
        record = self.backend.acquire(version, rank)
        if record is None:
            raise _HttpError(404, f"no copy of rank {rank} of {version} here")
        try:
            what = request.match_info["what"]
            if what != "data":
                return web.Response(body=self.backend.tmpfs.read_side(record.slot, what))
            return await self._data(request, record)
        finally:
            self.backend.release(record)

    async def _data(self, request: web.Request, record: SlotRecord) -> web.StreamResponse:
        try:
            wanted = request.http_range
        except ValueError:
            raise _HttpError(416, "a range that makes no sense") from None
        start = wanted.start or 0
        stop = min(record.used if wanted.stop is None else wanted.stop, record.used)
        if not 0 <= start < stop:
            raise _HttpError(416, f"bytes {wanted.start}:{wanted.stop} of a file of {record.used}")
        response = web.StreamResponse(status=206)
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{record.used}"
        await response.prepare(request)
        fd = self.backend.tmpfs.open_slot(record.slot, writable=False)
        await self._send(request, response, fd, start, stop)
        self.metrics.replica_bytes.labels("out").inc(stop - start)
        return response

    async def _send(
        self, request: web.Request, response: web.StreamResponse, fd: int, start: int, stop: int
    ) -> None:
        """Bytes of a file, which is closed, by `sendfile` where nothing encrypts. A reader that takes none for long is dropped."""
        transport = request.transport
        patience = self.config.limits.idle_s * self._scale
        if transport is not None and transport.get_extra_info("sslcontext") is None:
            await self._sender.send(transport, fd, start, stop, patience)
            return
        with os.fdopen(fd, "rb", buffering=0) as file:
            for at in range(start, stop, _TLS_PIECE):
                async with asyncio.timeout(patience):
                    await response.write(os.pread(file.fileno(), min(_TLS_PIECE, stop - at), at))

    async def _files(self, request: web.Request) -> web.Response:
        return _json(json.dumps(self.backend.files(_version(request))).encode())

    async def _index(self, request: web.Request) -> web.Response:
        found = self.backend.tmpfs.read_index(request.match_info["hash"])
        if found is None:
            raise _HttpError(404, "no such index here")
        return web.Response(body=found)

    async def _message(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        try:
            message: Any = decode(
                body, *dict.fromkeys((*TO_NODE, *TO_COORDINATOR)), limit=self.config.limits.body
            )
        except MessageError as error:
            raise _HttpError(400, str(error)) from None
        code, detail = self.backend.receive(message)
        if code != 200:
            raise _HttpError(code, detail)
        return _json(b"{}")

    async def _operate(self, request: web.Request) -> web.Response:
        if (
            self.config.tls.mode == "all"
            and _subject(request).get("commonName") not in self.config.tls.admins
        ):
            raise _HttpError(403, "only an admin's certificate may do that")
        body = await self._body(request)
        what = request.match_info["what"]
        try:
            facts = {"bans": decode(body, Bans)} if what == "bans" else json.loads(body or b"{}")
        except ValueError as error:
            raise _HttpError(400, str(error)) from None
        except MessageError as error:
            raise _HttpError(400, str(error)) from None
        self.backend.operate(what, facts if isinstance(facts, dict) else {})
        return _json(b"{}")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.text(), content_type="text/plain")

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.config.limits.header_s * self._scale):
                return await request.read()
        except TimeoutError:
            self.metrics.refused.labels("http", "slow").inc()
            raise _HttpError(408, "the body did not arrive in time") from None


class _Faults(logging.Handler):
    """What aiohttp logs, as lines of ours: a peer that speaks no HTTP is no reason for a traceback."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if record.exc_info and not isinstance(error, HttpProcessingError):
            trace = "".join(traceback.format_exception(*record.exc_info, limit=-4))
            self._log("fault in a request", error=f"{type(error).__name__}: {error}", traceback=trace)


def _logger(log: Log) -> logging.Logger:
    made = logging.getLogger("ckptkit.cache.http")
    made.handlers, made.propagate = [_Faults(log)], False
    return made


class _HttpError(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _version(request: web.Request) -> Version:
    found = request.match_info
    return Version(int(found["epoch"]), int(found["step"]), found["inc"])


def _subject(request: web.Request) -> dict[str, str]:
    """The subject of the peer's certificate, whose chain the handshake checked."""
    transport = request.transport
    certificate = transport.get_extra_info("peercert") if transport is not None else None
    return {name: value for part in (certificate or {}).get("subject", ()) for name, value in part}


def _route(request: web.BaseRequest) -> str:
    """The path of a request for metrics: by kind, so that strangers cannot make many."""
    parts = request.path.split("/")
    known = ("healthz", "inventory", "shards", "files", "index", "messages", "drain", "scrub", "bans")
    if len(parts) > 2 and parts[1] == "v1" and parts[2] in known:
        return parts[2]
    return "metrics" if request.path == "/metrics" else "other"
