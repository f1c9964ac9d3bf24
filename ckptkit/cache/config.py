"""The daemon's configuration: one TOML file, strict. An unknown key, a wrong type or a value out of range is an error that names it.

Every key has a default but `job`. Sizes are bytes or texts such as "600GiB"; times are seconds. `time_scale` multiplies every time in the
daemon, so that a test of an hour of faults takes seconds.
"""

import os
import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ckptkit.errors import UsageError

JOB = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class Slots:
    """`[slots]`: memory.

    Attributes:
        per_rank: Slots of one rank (S): 3, or 2 where memory is short.
        budget: Most bytes for slots; 0 for what the trainers' plan needs.
        reserve: Bytes of memory that stay free; 0 for the larger of 32 GiB and 10 % of the memory.
        round: Slots are rounded up to a multiple of this.
        margin: Slots are this much larger than the largest shard.
        zombie_s: After this time a fenced process that still holds a slot may be killed.
        kill_zombies: Whether it is.
    """

    per_rank: int = 3
    budget: int = 0
    reserve: int = 0
    round: int = 1 << 30
    margin: float = 1.05
    zombie_s: float = 30.0
    kill_zombies: bool = False


@dataclass(frozen=True)
class Replicas:
    """`[replicas]`: copies on other nodes.

    Attributes:
        count: Copies of each shard beside the node's own (k).
        max_bps: Bytes a second that this node fetches; 0 for no limit.
        conns: Connections for one shard.
        request: Bytes of one request.
        stall_s: A fetch without progress for so long is started again; after three times it is given up.
        timeout_s: A version that is not replicated by then is given up for the newest one.
    """

    count: int = 1
    max_bps: int = 0
    conns: int = 4
    request: int = 64 << 20
    stall_s: float = 15.0
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Drain:
    """`[drain]`: durable storage.

    Attributes:
        url: A run folder; steps go to `<url>/<job>/step-00001200.e3`. Empty: nothing is drained.
        every: Every committed step that is a multiple of this is drained; 0 for only those asked for.
        max_bps: Bytes a second of this node; 0 for no limit.
        keep_last: Steps that are kept; 0 keeps all.
        keep_every: Steps that are a multiple of this are always kept; 0 for none.
        grace_s: Time between SIGTERM and the end of this process that the scheduler leaves.
        orphan_s: Age from which unfinished folders of earlier incarnations are removed.
    """

    url: str = ""
    every: int = 0
    max_bps: int = 0
    keep_last: int = 0
    keep_every: int = 0
    grace_s: float = 60.0
    orphan_s: float = 86400.0


@dataclass(frozen=True)
class Tls:
    """`[tls]`: `mode` is `all`, or `off` on loopback addresses only. `ca`, `cert` and `key` are PEM files (`ckptkit cache certs`).

    `admins` are the names of certificates that may ban, drain and scrub over HTTP.
    """

    mode: str = "all"
    ca: str = ""
    cert: str = ""
    key: str = ""
    admins: tuple[str, ...] = ("admin",)


@dataclass(frozen=True)
class Scrub:
    """`[scrub]`: every slot is read again once in `period_s` (0: never), at `max_bps` bytes a second at most."""

    period_s: float = 3600.0
    max_bps: int = 1_000_000_000


@dataclass(frozen=True)
class Limits:
    """`[limits]`: what strangers may cost.

    Attributes:
        body: Bytes of a JSON body.
        index, extras: Bytes of an index and of one rank's extras.
        header_s: Time in which a request's header must have come, and its body thereafter.
        idle_s: Time after which an idle connection is closed.
        clients: Connections to the Unix socket at once.
        connections: Connections from peers at once.
    """

    body: int = 8 << 20
    index: int = 1 << 30
    extras: int = 256 << 20
    header_s: float = 10.0
    idle_s: float = 60.0
    clients: int = 512
    connections: int = 4096


@dataclass(frozen=True)
class CacheConfig:
    """A daemon's configuration (module docstring).

    Attributes:
        job: Name of the job; one daemon a job and node.
        root: Folder on tmpfs; the job's own folder is made in it.
        node: Name of this node, the same after a restart. [host name]
        domain: Failure domain: nodes with the same text may fail together.
        socket: Unix socket for trainers. [<root>/<job>/daemon.sock]
        listen: Address for peers; port 0 takes a free one. Where it is one address (and not all), connections to peers go out from it, too.
        advertise: Host name or address under which peers reach this node, with a port where it is another than that of `listen`.
            [that of `listen`, or the host name]
        uids: Users, beside our own, that may use the socket.
        threads: For digests and copies. [CPUs allowed, 8 at most]
        hash_verify: Whether leaves that came with device digests are read and compared.
        restore_wait_s: How long a restore waits for inventories of former members, and for storage. Members are waited for without a limit.
        vote_s: Time from the first vote to the abort of a version whose other votes do not come.
    """

    job: str
    root: str = ""
    node: str = ""
    domain: str = ""
    socket: str = ""
    listen: str = "0.0.0.0:0"
    advertise: str = ""
    uids: tuple[int, ...] = ()
    threads: int = 0
    hash_verify: bool = True
    restore_wait_s: float = 30.0
    vote_s: float = 120.0
    time_scale: float = 1.0
    slots: Slots = field(default_factory=Slots)
    replicas: Replicas = field(default_factory=Replicas)
    drain: Drain = field(default_factory=Drain)
    tls: Tls = field(default_factory=Tls)
    scrub: Scrub = field(default_factory=Scrub)
    limits: Limits = field(default_factory=Limits)

    @property
    def folder(self) -> str:
        """This job's folder."""
        return os.path.join(self.root, self.job)

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def loopback(self) -> bool:
        return self.host_port[0].startswith("127.") or self.host_port[0] in ("::1", "localhost")

    @property
    def source(self) -> str:
        """The address from which connections go out; empty for any."""
        host = self.host_port[0]
        return "" if host in ("0.0.0.0", "::", "localhost") else host


_SIZES = {
    "budget", "reserve", "round", "max_bps", "request", "body", "index", "extras",
}  # fmt: skip
_POSITIVE = {
    "round",
    "margin",
    "conns",
    "request",
    "time_scale",
    "header_s",
    "idle_s",
    "clients",
    "connections",
    "body",
}


def load_config(path: str) -> CacheConfig:
    """Read a configuration file. Raises UsageError that names the file and the key."""
    try:
        with open(path, "rb") as file:
            plain = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", file=path) from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}", file=path) from error
    return parse_config(plain, path)


def parse_config(plain: Mapping[str, Any], where: str = "the configuration") -> CacheConfig:
    """The configuration in a parsed TOML document. Raises UsageError."""
    if "job" not in plain:
        raise UsageError(f'{where} names no job; write job = "my-run"', file=where)
    made = _section(CacheConfig, plain, where, "")
    host = socket.gethostname()
    values: dict[str, Any] = {
        "root": made.root or f"/dev/shm/ckptkit-{os.getuid()}",
        "node": made.node or host,
        "advertise": made.advertise
        or (host if made.host_port[0] in ("0.0.0.0", "::", "") else made.host_port[0]),
        "threads": made.threads or min(len(os.sched_getaffinity(0)), 8),
    }
    values["socket"] = made.socket or os.path.join(values["root"], made.job, "daemon.sock")
    made = CacheConfig(**{f.name: values.get(f.name, getattr(made, f.name)) for f in fields(made)})
    _check(made, where)
    return made


def _section(kind: Any, plain: Any, where: str, prefix: str) -> Any:
    if not isinstance(plain, Mapping):
        raise UsageError(f"{where}: {prefix.rstrip('.')} is no table", file=where)
    known = {f.name: f for f in fields(kind)}
    for key in plain:
        if key not in known:
            from difflib import get_close_matches

            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"keys are {', '.join(known)}"
            raise UsageError(f"{where}: there is no {prefix}{key}; {hint}", file=where)
    sections = {
        "slots": Slots,
        "replicas": Replicas,
        "drain": Drain,
        "tls": Tls,
        "scrub": Scrub,
        "limits": Limits,
    }
    values: dict[str, Any] = {}
    for key, value in plain.items():
        if kind is CacheConfig and key in sections:
            values[key] = _section(sections[key], value, where, f"{key}.")
        else:
            values[key] = _value(known[key], value, where, prefix + key)
    return kind(**values)


def _value(known: Any, value: Any, where: str, name: str) -> Any:
    want = known.type
    if known.name in _SIZES and isinstance(value, str):
        value = _size(value, where, name)
    if want is float and type(value) is int:
        value = float(value)
    if want in (tuple[str, ...], tuple[int, ...]):
        item = str if want == tuple[str, ...] else int
        if isinstance(value, list) and all(type(v) is item for v in value):
            return tuple(value)
        raise UsageError(f"{where}: {name} is {value!r}, but should be a list of {item.__name__}", file=where)
    if type(value) is not want:
        raise UsageError(f"{where}: {name} is {value!r}, but should be of type {want.__name__}", file=where)
    if want in (int, float) and (not 0 <= value < float("inf")):
        raise UsageError(f"{where}: {name} is {value!r}, but should be a number from 0 on", file=where)
    if known.name in _POSITIVE and value <= 0:
        raise UsageError(f"{where}: {name} is {value!r}, but should be above 0", file=where)
    return value


def _size(text: str, where: str, name: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f'{where}: {name} is {text!r}; write a size like "256MiB" or "5GB"', file=where)
    base = 1024 if match[3] else 1000
    return round(float(match[1]) * base ** " kmgtp".index(match[2].lower() or " "))


def _check(made: CacheConfig, where: str) -> None:
    def need(holds: bool, text: str) -> None:
        if not holds:
            raise UsageError(f"{where}: {text}", file=where)

    need(
        JOB.fullmatch(made.job) is not None,
        f"job is {made.job!r}; use small letters, digits and -, 63 at most",
    )
    need(NODE.fullmatch(made.node) is not None, f"node is {made.node!r}; use letters, digits, . _ and -")
    need(
        made.domain == "" or NODE.fullmatch(made.domain) is not None,
        f"domain is {made.domain!r}; use letters, digits, . _ and -",
    )
    need(
        re.fullmatch(r".+:\d{1,5}", made.listen) is not None,
        f"listen is {made.listen!r}; write host:port, with port 0 for a free one",
    )
    need(os.path.isabs(made.root), f"root is {made.root!r}; give an absolute path, on tmpfs")
    need(made.slots.per_rank >= 2, "slots.per_rank is below 2: a save would overwrite the last good copy")
    need(made.slots.margin >= 1, "slots.margin is below 1")
    need(made.slots.round % 4096 == 0, "slots.round is no multiple of 4096")
    need(made.replicas.request % (1 << 20) == 0, "replicas.request is no multiple of 1 MiB")
    need(made.tls.mode in ("all", "off"), f"tls.mode is {made.tls.mode!r}; it is all or off")
    if made.tls.mode == "off":
        need(made.loopback, f"tls.mode is off, which is for loopback addresses only, not {made.listen}")
    else:
        need(
            all((made.tls.ca, made.tls.cert, made.tls.key)),
            "tls needs ca, cert and key; make them with `ckptkit cache certs`",
        )
