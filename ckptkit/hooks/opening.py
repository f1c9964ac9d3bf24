"""Opening a run: its URL is tried, an epoch is claimed, and the node's cache is joined where one runs."""

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.cache.client import AwayError, CacheClient, Lane, Member, RefusedError, default_socket
from ckptkit.cache.durable import DurableRun
from ckptkit.errors import CkptError, StoreError, UsageError
from ckptkit.hooks.meeting import Meeting, split_ranks
from ckptkit.hooks.metrics import log
from ckptkit.hooks.targets import CacheTarget, Target, UrlTarget, probe

_CLAIMS = 20


@dataclass(frozen=True)
class Opened:
    """A run that saves can go to.

    Attributes:
        run: Its folder.
        target: Where saves go.
        client: Of the node's cache; None without one.
    """

    run: DurableRun
    target: Target
    client: CacheClient | None

    @property
    def cached(self) -> bool:
        return self.client is not None


def open_run(url: str, cache: str, meeting: Meeting, arguments: Mapping[str, Any]) -> Opened:
    """Open a run on all ranks.

    Args:
        cache: `auto`, `off`, or the path of a daemon's socket.
        arguments: What all ranks must have said alike.

    Raises:
        UsageError: ranks were given different arguments, or the URL makes no sense.
        StoreError: the URL cannot be written, a rank did not arrive, or the cache that was asked for does not answer.
    """
    run = DurableRun(url)
    client, why = _connect(url, cache)
    said = {
        "arguments": dict(arguments), "cache": client is not None, "why": why,
        "node": None if client is None else _node(client),
    }  # fmt: skip

    def decide(every: Sequence[Any]) -> dict[str, Any]:
        for name in arguments:
            values = split_ranks([one["arguments"][name] for one in every])
            if len(values) > 1:
                raise UsageError(
                    f"ranks made their Checkpointer with different {name}: "
                    + ", ".join(f"{value} on rank {ranks[0]}" for value, ranks in values.items())
                )
        without = [rank for rank, one in enumerate(every) if not one["cache"]]
        cached = not without
        if without and cache not in ("auto", "off"):
            raise StoreError(f"rank {without[0]} has no cache at {cache}: {every[without[0]]['why']}")
        if without and len(without) < len(every):
            log.warning(
                "ranks %s have no cache daemon, so no rank uses one (%s)",
                without[:8],
                every[without[0]]["why"],
            )
        probe(run)
        above = max([0, *(one["node"]["max_epoch"] for one in every if cached)])
        epoch, inc = claim_above(run, above)
        members = [
            Member(rank, one["node"]["node"], one["node"]["address"], one["node"]["domain"]).as_dict()
            for rank, one in enumerate(every)
            if cached
        ]
        return {"cached": cached, "epoch": epoch, "inc": inc, "members": members}

    try:
        found = meeting.agree("open", said, decide)
    except BaseException:
        if client is not None:
            client.close()
        raise
    claim = int(found["epoch"]), str(found["inc"])
    if not found["cached"] or client is None:
        if client is not None:
            client.close()
        return Opened(run, UrlTarget(run, meeting, claim), None)
    drained = client.info().url
    if drained and os.path.normpath(drained) != os.path.normpath(url):
        log.warning("rank=%d the cache drains to %s, not to %s", meeting.rank, drained, url)
    members = [Member(**one) for one in found["members"]]

    def join(bytes_max: int, epoch: int, inc: str, fresh: bool) -> Lane:
        mine = members[meeting.rank]
        local = sum(1 for one in members[: meeting.rank] if one.node == mine.node)
        return client.join(
            epoch, inc, rank=meeting.rank, local_rank=local, members=members, bytes_max=bytes_max, fresh=fresh, timeout_s=meeting.timeout_s
        )  # fmt: skip

    return Opened(run, CacheTarget(client, meeting, claim, join, arguments["durable_every"]), client)


def claim_above(run: DurableRun, above: int) -> tuple[int, str]:
    """Take an epoch for this start of the run, with an incarnation of its own; of two that start at once each gets another.

    Raises StoreError where the store does not answer, or others keep claiming.
    """
    inc = secrets.token_hex(16)
    for _ in range(_CLAIMS):
        epoch = max(above, run.latest_epoch()) + 1
        try:
            run.claim(epoch, inc)
            return epoch, inc
        except StoreError:
            if run.latest_epoch() < epoch:
                raise
    raise StoreError(f"{run.url}: other starts of the run keep claiming its epochs; start it once")


def _node(client: CacheClient) -> dict[str, Any]:
    info = client.info()
    return {"node": info.node, "address": info.address, "domain": info.domain, "max_epoch": info.max_epoch}


def job_of(url: str) -> str:
    """The job whose daemon serves a run, unless `CKPTKIT_CACHE_JOB` names it: the last part of the URL."""
    given = os.environ.get("CKPTKIT_CACHE_JOB")
    name = given or re.sub(r"[^a-z0-9-]+", "-", url.rstrip("/").rpartition("/")[2].lower()).strip("-")
    return name[:63] or "run"


def _connect(url: str, cache: str) -> tuple[CacheClient | None, str]:
    """The client of this node's daemon, or why there is none."""
    if cache == "off":
        return None, "the cache is off"
    path = default_socket(job_of(url)) if cache == "auto" else cache
    if cache == "auto" and not os.path.exists(path):
        return None, f"no daemon listens at {path}"
    try:
        return CacheClient.connect(path, "" if cache != "auto" else job_of(url)), ""
    except (AwayError, RefusedError) as error:
        if cache != "auto":
            raise StoreError(f"the cache at {path} cannot be used: {error}") from error
        return None, str(error)
    except CkptError as error:
        return None, str(error)
