"""Meetings: how ranks agree, over a key-value store of our own, with a deadline on every wait.

The trainer's process groups are never used for more than one thing: telling all ranks the address of our store, at the start. No device
collectives; a rank that never arrives is an error that names it, not a hang.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ckptkit.errors import CkptError, StoreError, UsageError

FAREWELL_S = 30.0


class Meeting:
    """The ranks of a run. With one rank nothing is sent anywhere.

    Calls of one kind come in the same order on all ranks; each has a name that is used once. Threads may call at the same time:
    each has a connection of its own.

    Args:
        address: `host:port` of the store; rank 0 serves it where `serve` is given. Empty for one rank.
        timeout_s: The longest wait.
    """

    def __init__(
        self, address: str, rank: int, world: int, timeout_s: float, serve: "dist.TCPStore | None" = None
    ) -> None:
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._address = address
        self._serve = serve
        self._local = threading.local()

    @classmethod
    def of(cls, given: tuple[str, int, int] | None, timeout_s: float) -> "Meeting":
        """The meeting of this process: as told, else that of `torch.distributed`, else of one rank.

        Raises StoreError where rank 0 does not appear in time.
        """
        if given is not None:
            address, rank, world = given
            if not 0 <= rank < world:
                raise UsageError(f"meeting: rank {rank} is none of {world}")
            if world == 1:
                return cls("", 0, 1, timeout_s)
            serve = None
            if rank == 0:
                host, _, port = address.rpartition(":")
                serve = _server(host, int(port), timeout_s)
            return cls(address, rank, world, timeout_s, serve)
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls("", 0, 1, timeout_s)
        rank, world = dist.get_rank(), dist.get_world_size()
        shared = dist.distributed_c10d._get_default_store()
        # Counted in the store: a process may have been in groups that others here were not in.
        key = f"ckptkit/meeting/{shared.add(f'ckptkit/meetings/{rank}', 1)}"
        serve = None
        try:
            if rank == 0:
                host = _host(shared)
                serve = _server(host, 0, timeout_s)
                address = f"{host}:{serve.port}"
                shared.set(key, address)
            else:
                shared.wait([key], timedelta(seconds=timeout_s))
                address = shared.get(key).decode()
        except RuntimeError as error:
            raise StoreError(
                f"rank {rank}: rank 0 made no Checkpointer within {timeout_s:g} s; every rank must make one ({_first(error)})",
                missing=[0],
            ) from error
        return cls(address, rank, world, timeout_s, serve)

    @property
    def lead(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    def post(self, name: str, value: bytes) -> None:
        """Leave this rank's value for rank 0 (see `collect`)."""
        if self.world > 1:
            self._put(f"{name}/{self.rank}", value)

    def collect(self, name: str, mine: bytes, timeout_s: float | None = None) -> list[bytes]:
        """On rank 0: the values of all ranks.

        Raises StoreError that names the ranks that did not arrive in time.
        """
        values = [mine]
        until = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        for rank in range(1, self.world):
            key = f"{name}/{rank}"
            try:
                store = self._store()
                store.wait([key], timedelta(seconds=max(until - time.monotonic(), 0.001)))
                values.append(store.get(key))
                store.delete_key(key)
            except RuntimeError as error:
                missing = [r for r in range(1, self.world) if r >= rank and not self._there(f"{name}/{r}")]
                raise StoreError(
                    f"{name}: rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:8]))} of {self.world} did not arrive "
                    f"within {self.timeout_s if timeout_s is None else timeout_s:g} s. Look at what stopped or delayed it",
                    missing=missing,
                ) from error
        return values

    def publish(self, name: str, value: bytes) -> None:
        """On rank 0: what all ranks may read with `read`."""
        if self.world > 1:
            self._put(name, value)

    def read(self, name: str, timeout_s: float | None = None) -> bytes:
        """What rank 0 published. Raises StoreError where it did not in time."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            store = self._store()
            store.wait([name], timedelta(seconds=limit))
            return store.get(name)
        except RuntimeError as error:
            raise StoreError(
                f"rank {self.rank}: rank 0 did not answer ({name}) within {limit:g} s; it ended or hangs ({_first(error)})",
                missing=[0],
            ) from error

    def there(self, name: str) -> bool:
        """Whether something was published or flagged under a name. Never waits long."""
        return self.world > 1 and self._there(name)

    def flag(self, name: str, value: bytes = b"1") -> None:
        """From any rank: say something that all may see with `there`."""
        if self.world > 1:
            self._put(name, value)

    def agree(self, name: str, value: Any, decide: Any, timeout_s: float | None = None) -> Any:
        """Give each rank what `decide(values of all ranks)` gives on rank 0; values are JSON.

        An error on rank 0, that a rank did not arrive included, is raised on all ranks.
        """
        if self.world == 1:
            return decide([value])
        data = json.dumps(value).encode()
        limit = self.timeout_s if timeout_s is None else timeout_s
        if self.rank != 0:
            self.post(name, data)
            found = self.read(f"{name}/all", limit + 5.0)
            with suppress(StoreError):
                self.flag(f"{name}/heard/{self.rank}")
            return self.answer(found)
        try:
            found = decide([json.loads(one) for one in self.collect(name, data, limit)])
        except CkptError as error:
            self.publish(f"{name}/all", _failure(error))
            # This process may end with the error, and the store with it: the others are to hear the reason first.
            gone = error.facts.get("missing", ())
            self._await([f"{name}/heard/{rank}" for rank in range(1, self.world) if rank not in gone])
            raise
        self.publish(f"{name}/all", json.dumps({"value": found}).encode())
        return found

    @staticmethod
    def answer(data: bytes) -> Any:
        """What rank 0 published in `agree`, or the error it met."""
        found = json.loads(data)
        if "error" in found:
            raise rebuilt(found["error"])
        return found["value"]

    def close(self) -> None:
        """End the meeting. Rank 0 serves the store, so it stays until the others have heard all they wait for, or `FAREWELL_S` are over."""
        with suppress(StoreError):
            if self.world > 1 and self.lead:
                self._await([f"bye/{rank}" for rank in range(1, self.world)])
            else:
                self.flag(f"bye/{self.rank}")
        self._local = threading.local()

    def _await(self, names: Sequence[str]) -> None:
        """Wait until all of these were flagged, for `FAREWELL_S` at most."""
        until = time.monotonic() + min(self.timeout_s, FAREWELL_S)
        for name in names:
            while not self._there(name) and time.monotonic() < until:
                time.sleep(0.02)

    def _put(self, key: str, value: bytes) -> None:
        data: Any = value  # torch's stub knows text only; bytes are taken as they are
        try:
            self._store().set(key, data)
        except RuntimeError as error:
            raise StoreError(f"rank {self.rank} lost rank 0: {_first(error)}", missing=[0]) from error

    def _there(self, key: str) -> bool:
        try:
            return bool(self._store().check([key]))
        except RuntimeError:
            return False

    def _store(self) -> "dist.TCPStore":
        found = getattr(self._local, "store", None)
        if found is None:
            host, _, port = self._address.rpartition(":")
            try:
                found = dist.TCPStore(
                    host, int(port), None, False, timedelta(seconds=self.timeout_s), wait_for_workers=False
                )
            except RuntimeError as error:
                raise StoreError(
                    f"rank {self.rank} cannot reach rank 0 at {self._address}: {_first(error)}", missing=[0]
                ) from error
            self._local.store = found
        return found


def _server(host: str, port: int, timeout_s: float) -> "dist.TCPStore":
    return dist.TCPStore(host, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)


def _host(shared: Any) -> str:
    """Where other ranks reach this process: as they reach the trainer's own store, where it is on this machine."""
    if os.environ.get("MASTER_ADDR"):
        return os.environ["MASTER_ADDR"]
    store = shared
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", None)
    if host:
        return str(host)
    try:
        name = socket.gethostname()
        socket.getaddrinfo(name, None)
        return name
    except OSError:
        return "localhost"


def _failure(error: CkptError) -> bytes:
    return json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}).encode()


def rebuilt(plain: dict[str, str]) -> CkptError:
    """An error of another rank, of its own kind."""
    from ckptkit import errors

    kind = getattr(errors, plain["kind"], StoreError)
    return (
        kind(plain["message"])
        if isinstance(kind, type) and issubclass(kind, CkptError)
        else StoreError(plain["message"])
    )


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def split_ranks(values: Sequence[Any]) -> dict[str, list[int]]:
    """Ranks by what they say (as JSON), for messages on differing arguments."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(json.dumps(value, sort_keys=True), []).append(rank)
    return found
