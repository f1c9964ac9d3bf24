"""Calls on the Unix socket: those of ranks become events of the protocol, those of the operator are answered from its state.

Arguments are checked by name and type; nothing of them reaches a path. A connection says `hello` first.
"""

import asyncio
import os
from typing import TYPE_CHECKING

import ckptkit
from ckptkit.cache.callgroup import CallGroup, whole
from ckptkit.cache.codec import MessageError
from ckptkit.cache.joining import JoinCalls
from ckptkit.cache.messages import Epoch, Owner
from ckptkit.cache.operator_calls import OperatorCalls
from ckptkit.cache.restore_calls import RestoreCalls
from ckptkit.cache.save_calls import SaveCalls
from ckptkit.cache.uds import CallError, Reply, Session
from ckptkit.cache.wire import OLDEST, PROTOCOL, Message
from ckptkit.errors import CkptError

if TYPE_CHECKING:
    from ckptkit.cache.daemon import Daemon

_FRESH_S = 5.0
"""How long an answer of storage holds for further ranks."""


class Calls(CallGroup):
    """All calls of one daemon."""

    names = ("hello",)

    def __init__(self, daemon: "Daemon") -> None:
        super().__init__(daemon)
        self._joining, self._restoring = JoinCalls(daemon), RestoreCalls(daemon)
        groups = (self, self._joining, SaveCalls(daemon), self._restoring, OperatorCalls(daemon))
        self._durable_epoch: tuple[float, int] | None = None  # until when it holds, and what it is
        self._calls = {name: handler for group in groups for name, handler in group.table.items()}

    async def handle(self, session: Session, message: Message) -> Reply:
        """Answer one call. Raises CallError."""
        name = message.fields.pop("call")
        handler = self._calls.get(name)
        if handler is None:
            raise CallError(
                400,
                f"there is no call {name[:40]!r}; this daemon is ckptkit {ckptkit.__version__}, protocol {PROTOCOL}",
            )
        if not session.greeted and name != "hello":
            raise CallError(403, "say hello first")
        try:
            return await handler(session, message)
        except MessageError as error:
            raise CallError(400, str(error)) from None
        except CallError:
            raise
        except CkptError as error:
            raise CallError(503, str(error)) from None

    def closed(self, session: Session) -> None:
        """A session has ended."""
        self._restoring.closed(session)
        self.d.notes.skipped_in_row.pop(session.number, None)

    def new_epoch(self, epoch: Epoch) -> None:
        """An epoch is about to be accepted."""
        self._joining.new_epoch(epoch)
        self._restoring.forget()

    def pidfd(self, owner: Owner) -> int | None:
        """A descriptor of a process that is connected, duplicated; None for others."""
        for session in self.d.uds.sessions:
            if session.peer.owner == owner:
                return os.dup(session.peer.pidfd)
        return None

    async def _hello(self, session: Session, message: Message) -> Reply:
        fields, config = message.fields, self.d.config
        protocol, oldest = whole(fields, "protocol"), whole(fields, "oldest")
        if protocol < OLDEST or oldest > PROTOCOL:
            raise CallError(
                400, f"the trainer speaks protocol {oldest} to {protocol}, this daemon {OLDEST} to {PROTOCOL}; update the older of the two",
            )  # fmt: skip
        job = fields.get("job", "")
        if job not in ("", config.job):
            raise CallError(403, f"this is the daemon of job {config.job}, not of {str(job)[:80]!r}")
        session.greeted = True
        tls = config.tls
        return Reply(
            {
                "node": config.node, "address": self.d.address, "domain": config.domain, "job": config.job,
                "max_epoch": await self._max_epoch(),
                "url": self.d.run_folder.url if self.d.run_folder else "",
                "tls": {"ca": tls.ca, "cert": tls.cert, "key": tls.key} if tls.mode == "all" else None,
                "protocol": min(protocol, PROTOCOL), "version": ckptkit.__version__,
            }
        )  # fmt: skip

    async def _max_epoch(self) -> int:
        """The highest epoch that memory or storage know. Raises CallError where only storage could tell, and does not."""
        known = self.d.node.epoch.epoch if self.d.node.epoch is not None else 0
        if self.d.run_folder is None or known:
            return known
        if self._durable_epoch is None or self.d.now() > self._durable_epoch[0]:
            try:
                found = await asyncio.to_thread(self.d.run_folder.latest_epoch)
            except CkptError as error:
                raise CallError(
                    503, f"nothing is in memory, and storage does not tell which epochs there were: {error}"
                ) from error
            self._durable_epoch = self.d.now() + _FRESH_S * self.d.scale, found
        return self._durable_epoch[1]
