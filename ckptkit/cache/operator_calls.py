"""Calls of `ckptkit cache`, and the normal end of a job."""

import asyncio

from ckptkit.cache.callgroup import CallGroup, whole
from ckptkit.cache.durable import DurableRun
from ckptkit.cache.events import Operator
from ckptkit.cache.messages import Ban, Bans
from ckptkit.cache.uds import Reply, Session
from ckptkit.cache.wire import Message
from ckptkit.errors import StoreError
from ckptkit.formats.native import step_dir


class OperatorCalls(CallGroup):
    """The calls of this module."""

    names = ("status", "ls", "pin", "unpin", "drain", "evict", "ban", "scrub", "bye")

    async def _status(self, session: Session, message: Message) -> Reply:
        return Reply({"status": await self.d.upkeep.status()})

    async def _ls(self, session: Session, message: Message) -> Reply:
        return Reply({"versions": await self.d.upkeep.versions()})

    async def _pin(self, session: Session, message: Message) -> Reply:
        version = self.version_of(message)
        await asyncio.to_thread(self._durable().pin, step_dir(version.step, version.epoch))
        self.d.log("pinned", step=version.step, epoch=version.epoch)
        return Reply()

    async def _unpin(self, session: Session, message: Message) -> Reply:
        version = self.version_of(message)
        await asyncio.to_thread(self._durable().unpin, step_dir(version.step, version.epoch))
        self.d.log("unpinned", step=version.step, epoch=version.epoch)
        return Reply()

    def _durable(self) -> DurableRun:
        if self.d.run_folder is None:
            raise StoreError("this daemon drains to nowhere; give drain.url in its configuration")
        return self.d.run_folder

    async def _drain(self, session: Session, message: Message) -> Reply:
        self._durable()
        self.d.apply(Operator(drain=True))
        record = self.d.node.record
        return Reply({"step": record.newest.step if record and record.newest else None})

    async def _evict(self, session: Session, message: Message) -> Reply:
        return Reply({"released": self.d.upkeep.evict(whole(message.fields, "slots"))})

    async def _ban(self, session: Session, message: Message) -> Reply:
        fields = message.fields
        epoch, step = whole(fields, "epoch"), whole(fields, "step")
        ban = Ban(epoch, step, epoch, step)
        if fields.get("newer") is True:
            # Up to the present epoch: what a later one saves, after it went back, is not meant.
            present = self.d.node.epoch
            ban = Ban(epoch, step + 1, max(epoch, present.epoch if present is not None else 0), 2**53 - 1)
        self.d.log("ban", epoch=epoch, step=step, newer=fields.get("newer") is True)
        self.d.apply(Operator(bans=Bans((ban,))))
        return Reply()

    async def _scrub(self, session: Session, message: Message) -> Reply:
        self.d.upkeep.scrub_now()
        return Reply()

    async def _bye(self, session: Session, message: Message) -> Reply:
        if message.fields.get("drain") is True:
            if not self.d.stopping:  # said by several ranks, it must not cut the drain short
                self.d.end("the job has ended")
        else:
            self.d.stopping = self.d.stopping or "the job has ended"
            self.d.end("the job has ended")
        return Reply()
