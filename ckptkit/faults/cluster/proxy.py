"""A TCP proxy in front of every node of a test cluster: partitions, slow links, cut connections, flipped bytes.

It runs in a thread of the test. Nodes have addresses of their own (127.0.0.x), so that the proxy knows who is calling.
"""

import asyncio
import contextlib
import threading
from typing import Any


class Proxy:
    """Listens for every node and passes on to where it really is."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._servers: list[asyncio.Server] = []
        self._links: set[tuple[str, str, asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._targets: dict[str, tuple[str, int]] = {}
        self._names: dict[str, str] = {}
        self.cut: set[frozenset[str]] = set()
        """Pairs of nodes that cannot reach each other."""
        self.rate: dict[str, float] = {}
        """Bytes a second from a node; 0 hangs."""
        self.flip: dict[str, int] = {}
        """How many chunks from a node still get a flipped bit."""
        self.cut_after: dict[str, int] = {}
        """After how many further bytes a connection from a node is cut, once."""

    def add(self, name: str, host: str) -> int:
        """Listen for a node with this address; gives the port. `target` says later where it is."""
        self._names[host] = name
        return self._call(self._listen(name))

    def target(self, name: str, host: str, port: int) -> None:
        self._targets[name] = (host, port)

    def partition(self, one: set[str], other: set[str]) -> None:
        """Cut all connections between two groups, and let none be made."""
        self.cut |= {frozenset((a, b)) for a in one for b in other if a != b}
        self._loop.call_soon_threadsafe(self._cut_links)

    def reset(self, name: str) -> None:
        """Cut the connections of a node that are open; new ones may be made."""
        self._loop.call_soon_threadsafe(self._cut_links, name)

    def heal(self) -> None:
        self.cut.clear()
        self.rate.clear()
        self.flip.clear()
        self.cut_after.clear()

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            for _, _, a, b in list(self._links):
                a.transport.abort()
                b.transport.abort()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _listen(self, name: str) -> int:
        server = await asyncio.start_server(lambda r, w: self._serve(name, r, w), "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def _cut_links(self, name: str = "") -> None:
        for a, b, one, other in list(self._links):
            if frozenset((a, b)) in self.cut or name in (a, b):
                one.transport.abort()
                other.transport.abort()

    async def _serve(self, to: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = self._names.get(writer.get_extra_info("peername")[0], "client")
        target = self._targets.get(to)
        if target is None or frozenset((source, to)) in self.cut:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(*target)
        except OSError:
            writer.transport.abort()
            return
        link = (source, to, writer, back)
        self._links.add(link)
        try:
            await asyncio.gather(self._pump(reader, back, source), self._pump(there, writer, to))
        except asyncio.CancelledError:
            pass  # the proxy is closed
        finally:
            self._links.discard(link)
            writer.transport.abort()
            back.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sender: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                data = await self._spoil(data, sender)
                writer.write(data)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    async def _spoil(self, data: bytes, sender: str) -> bytes:
        rate = self.rate.get(sender)
        while rate == 0:
            await asyncio.sleep(0.05)
            rate = self.rate.get(sender)
        if rate:
            await asyncio.sleep(len(data) / rate)
        if sender in self.cut_after and len(data) > 4096:
            self.cut_after[sender] -= len(data)
            if self.cut_after[sender] < 0:
                del self.cut_after[sender]
                raise ConnectionResetError
        if self.flip.get(sender, 0) and len(data) > 30000:
            self.flip[sender] -= 1
            spoiled = bytearray(data)
            spoiled[20000] ^= 4
            return bytes(spoiled)
        return data
