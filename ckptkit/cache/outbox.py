"""Messages to other nodes: sent in order for each node, dropped where one does not keep up. Whatever matters is said again by the protocol."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import aiohttp

from ckptkit.cache.codec import encode
from ckptkit.cache.messages import PeerMessage

_MOST = 256
"""Messages that wait for one node."""


class Outbox:
    """Sends messages and asks short questions.

    Args:
        headers: Of every request, asked for when it is sent.
        timeout_s: For one request.
        failed: Told the node's address and why, for the log.
        source: Address from which connections go out; empty for any.
    """

    def __init__(
        self, tls: ssl.SSLContext | None, headers: Callable[[], Mapping[str, str]], timeout_s: float,
        failed: Callable[[str, str], None], source: str = "",
    ) -> None:  # fmt: skip
        self._tls, self._headers, self._failed = tls, headers, failed
        self._source = (source, 0) if source else None
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._queues: dict[str, deque[bytes]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}

    def send(self, addresses: Iterable[str], message: PeerMessage) -> None:
        """Send to each, some time soon, perhaps."""
        body = encode(message)
        for address in addresses:
            self._enqueue(address, body)

    def _enqueue(self, address: str, body: bytes) -> None:
        queue = self._queues.setdefault(address, deque(maxlen=_MOST))
        queue.append(body)
        sender = self._senders.get(address)
        if sender is None or sender.done():
            self._senders[address] = asyncio.get_running_loop().create_task(self._run(address, queue))

    async def _run(self, address: str, queue: deque[bytes]) -> None:
        while queue:
            body = queue.popleft()
            try:
                async with self._open().post(
                    self._url(address, "/v1/messages"), data=body, headers=self._headers()
                ) as response:
                    await response.read()
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                queue.clear()
                self._failed(address, str(error) or type(error).__name__)

    async def get(self, address: str, path: str, limit: int = 1 << 30) -> bytes | None:
        """The answer to a question, or None where there is none. Raises nothing that a peer can cause."""
        try:
            async with self._open().get(self._url(address, path), headers=self._headers()) as response:
                if response.status != 200 or (response.content_length or 0) > limit:
                    return None
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            self._failed(address, str(error) or type(error).__name__)
            return None

    async def close(self) -> None:
        for sender in self._senders.values():
            sender.cancel()
        await asyncio.gather(*self._senders.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                ssl=self._tls if self._tls is not None else False,
                limit=0,
                limit_per_host=4,
                local_addr=self._source,
            )
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self._session

    def _url(self, address: str, path: str) -> str:
        return f"{'https' if self._tls is not None else 'http'}://{address}{path}"
