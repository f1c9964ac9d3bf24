"""A cluster on one machine: real daemons (one process a node), light ranks (`rank.py`), a proxy between nodes.

    with Cluster(tmp_path, nodes=2, ranks=2) as cluster:
        cluster.launch()                      # processes of all ranks
        cluster.start()                       # an epoch: join and restore; gives the step
        cluster.save(1)
        cluster.nodes[0].kill()               # and so on

Times are scaled by `SCALE`; `wait_for` polls a condition and fails with the logs' tails, so that nothing depends on a time.
"""

import json
import os
import secrets
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ckptkit.cache.client import CacheClient
from ckptkit.faults.cluster.nursery import Child, Nursery
from ckptkit.faults.cluster.proxy import Proxy

SCALE = 0.1
PATIENCE_S = 60.0
MIB = 1 << 20


class Failed(AssertionError):
    """A condition did not come about, or a rank answered with an error."""


def wait_for(
    condition: Callable[[], Any], what: str, cluster: "Cluster | None" = None, timeout_s: float = PATIENCE_S
) -> Any:
    """What `condition` gives once it is true. Raises Failed after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > until:
            tails = "" if cluster is None else "\n".join(node.tail() for node in cluster.nodes)
            raise Failed(f"{what} did not happen within {timeout_s} s\n{tails}")
        time.sleep(0.02)


class Node:
    """One daemon: a process with a folder, a socket and a log."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.cluster, self.number = cluster, number
        self.name = f"n{number}"
        self.host = f"127.0.{1 + number // 200}.{10 + number % 200}"
        self.base = cluster.root / self.name
        self.base.mkdir(parents=True, exist_ok=True)
        self.folder = self.base / cluster.job
        self.socket = str(self.folder / "daemon.sock")
        self.log_path = self.base / "log"
        self.config_path = self.base / "cache.toml"
        self.port = cluster.proxy.add(self.name, self.host)
        self.process: Child | None = None
        self.environment: dict[str, str] = {}
        """Of its daemon, when it is started: faults of `inject.program`, for example."""

    def write_config(self) -> None:
        cluster = self.cluster
        sections = {name: dict(values) for name, values in cluster.config.items() if isinstance(values, dict)}
        top = {name: value for name, value in cluster.config.items() if not isinstance(value, dict)}
        top = {
            "job": cluster.job, "root": str(self.base), "node": self.name, "listen": f"{self.host}:0", "time_scale": cluster.scale,
            "advertise": f"127.0.0.1:{self.port}", "domain": cluster.domains[self.number] if cluster.domains else "", "threads": 2, **top,
        }  # fmt: skip
        if cluster.url:
            sections.setdefault("drain", {})["url"] = cluster.url
        sections.setdefault("slots", {}).setdefault("round", MIB)
        sections["slots"].setdefault("reserve", MIB)
        sections.setdefault("tls", {}).setdefault("mode", "off")
        if "ca" in sections["tls"] and "cert" not in sections["tls"]:
            stem = str(cluster.certs / self.name)
            sections["tls"] |= {"cert": f"{stem}.pem", "key": f"{stem}.key"}
        lines = [f"{name} = {json.dumps(value)}" for name, value in top.items()]
        for name, values in sections.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        self.config_path.write_text("\n".join(lines) + "\n")

    def start(self, *arguments: str, wait: bool = True) -> None:
        """Start the daemon; it serves when this returns."""
        assert self.process is None or self.process.poll() is not None, f"{self.name} runs already"
        self.write_config()
        with self.log_path.open("ab") as log, open(os.devnull, "rb") as null:
            arguments = ("--config", str(self.config_path), *arguments)
            self.process = Nursery.shared().start(
                "daemon", arguments, null.fileno(), log.fileno(), log.fileno(), self.environment
            )
        if wait:
            self.wait_serving()

    def wait_serving(self) -> None:
        def serving() -> list[dict[str, Any]]:
            assert self.process is not None
            if self.process.poll() is not None:
                raise Failed(f"{self.name} ended with {self.process.returncode}\n{self.tail()}")
            return [line for line in self.events("serving") if line["pid"] == self.process.pid]

        found = wait_for(serving, f"{self.name} serving", self.cluster)
        self.cluster.proxy.target(self.name, self.host, found[-1]["port"])

    @property
    def port_behind(self) -> int:
        """Where the daemon really listens."""
        return int(self.events("serving")[-1]["port"])

    def kill(self) -> None:
        """SIGKILL the daemon; its slots stay."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """SIGTERM, and wait; gives the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def lose(self) -> None:
        """The node dies: daemon killed, its ranks killed, its memory gone."""
        for rank in self.cluster.ranks:
            if rank.node is self:
                rank.kill()
        if self.process is not None and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> list[dict[str, Any]]:
        """What the daemon has logged, all its lives."""
        found = []
        for line in self.log_path.read_text().splitlines() if self.log_path.exists() else ():
            with suppress(ValueError):
                plain = json.loads(line)
                if isinstance(plain, dict):
                    found.append(plain)
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] == name]

    def tail(self) -> str:
        text = self.log_path.read_text() if self.log_path.exists() else ""
        return f"--- {self.name}\n" + "\n".join(text.splitlines()[-25:])

    @contextmanager
    def client(self) -> Iterator[CacheClient]:
        """A connection as an operator's."""
        client = CacheClient.connect(self.socket, self.cluster.job, timeout_s=20, time_scale=1.0)
        try:
            yield client
        finally:
            client.close()

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.status()["status"]

    def versions(self) -> list[dict[str, Any]]:
        with self.client() as client:
            return client.request("ls")["versions"]

    def metrics(self) -> dict[str, float]:
        """All metrics, by name with labels as Prometheus writes them."""
        import urllib.request

        with urllib.request.urlopen(f"http://{self.host}:{self.port_behind}/metrics", timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line and line[0] != "#")
        }

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all labels that are not given."""
        total = 0.0
        for key, value in self.metrics().items():
            bare, _, rest = key.partition("{")
            if bare == f"ckptkit_cache_{name}" and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += value
        return total

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────

    def records(self) -> dict[int, dict[str, Any]]:
        """The records of all slots, by number."""
        found = {}
        for path in sorted((self.folder / "slots").glob("*.json")):
            with suppress(ValueError, FileNotFoundError):
                found[int(path.stem)] = json.loads(path.read_text())
        return found

    def holding(self, step: int, rank: int | None = None) -> list[int]:
        """Slots with a sealed shard of a step."""
        return [
            number for number, record in self.records().items()
            if record["state"] == "SEALED" and record["version"]["step"] == step and rank in (None, record["rank"])
        ]  # fmt: skip

    def flip(self, slot: int, offset: int = 5000, bit: int = 1) -> None:
        """Change a bit in a slot's bytes."""
        with (self.folder / "slots" / f"{slot:04d}.dat").open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ bit]))


class RankProcess:
    """One rank: a process that obeys."""

    def __init__(
        self, cluster: "Cluster", rank: int, local_rank: int, node: Node, world: int, **options: Any
    ) -> None:
        self.cluster, self.rank, self.local_rank, self.node, self.world = (
            cluster,
            rank,
            local_rank,
            node,
            world,
        )
        given = {
            "socket": node.socket, "job": cluster.job, "rank": rank, "local_rank": local_rank, "world": world, "time_scale": cluster.scale,
            **cluster.options, **options,
        }  # fmt: skip
        self._errors = node.base / f"rank-{rank}.err"
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        with self._errors.open("ab") as errors:
            self.process = Nursery.shared().start(
                "rank", [json.dumps(given)], theirs_in, theirs_out, errors.fileno(), cluster.environment
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._buffer = b""
        self._due = 1  # answers that were not read; the first says "ready"
        self.member: dict[str, Any] = {}

    def tell(self, do: str, **command: Any) -> None:
        """Give a command without waiting for its answer."""
        os.write(self._in, json.dumps({"do": do, **command}).encode() + b"\n")
        self._due += 1

    def answer(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next answer. Raises Failed where none comes, or it is an error."""
        found = self.raw_answer(timeout_s)
        if "error" in found:
            raise Failed(f"rank {self.rank}: {found['error']}\n{self.node.tail()}")
        return found

    def raw_answer(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """As `answer`, but an error is an answer."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._out], [], [], max(until - time.monotonic(), 0))
            data = os.read(self._out, 1 << 16) if ready else b""
            if not data:
                what = "ended" if ready else "does not answer"
                raise Failed(f"rank {self.rank} {what}\n{self.said()}\n{self.node.tail()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        self._due -= 1
        return json.loads(line)

    def do(self, do: str, timeout_s: float = PATIENCE_S, **command: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self.tell(do, **command)
        return self.answer(timeout_s)

    def try_(self, do: str, timeout_s: float = PATIENCE_S, **command: Any) -> dict[str, Any]:
        """As `do`, but an error is an answer."""
        self.tell(do, **command)
        return self.raw_answer(timeout_s)

    def wait_ready(self) -> None:
        self.member = {"rank": self.rank, **self.answer()["ready"]}

    def said(self) -> str:
        """The end of what it wrote to standard error."""
        return self._errors.read_text(errors="replace")[-3000:]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.alive:
            self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def close(self) -> None:
        """End the process, if it still runs, and close its pipes."""
        self.process.kill()
        self.process.wait()
        for pipe in (self._in, self._out):
            with suppress(OSError):
                os.close(pipe)
        self._in = self._out = -1


class Cluster:
    """Nodes, ranks and the proxy between them.

    Args:
        nodes, ranks: Daemons, and ranks on each.
        domains: Failure domain of each node.
        drain: Whether there is a durable run, in a folder of `tmp_path`.
        options: For every rank (`rank.Rank`): `shapes`, `digests`.
        config: Sections and keys of `cache.toml`.
    """

    def __init__(
        self, tmp_path: Path, *, nodes: int = 1, ranks: int = 1, scale: float = SCALE, domains: Sequence[str] = (), drain: bool = False,
        url: str = "", options: dict[str, Any] | None = None, tls: bool = False, **config: Any,
    ) -> None:  # fmt: skip
        self.job, self.scale, self.domains, self.config = "job", scale, domains, config
        self.root, self.options = tmp_path / "nodes", options or {}
        self.durable = tmp_path / "durable" / self.job
        self.url = url or (str(tmp_path / "durable") if drain else "")
        self.certs = tmp_path / "certs"
        self.per_node = ranks
        self.proxy = Proxy()
        self.nodes = [Node(self, number) for number in range(nodes)]
        self.ranks: list[RankProcess] = []
        self.epoch, self.inc = 0, ""
        self.environment: dict[str, str] = {}
        """Of ranks, when they are started."""
        self.answers: list[dict[str, Any]] = []
        if tls:
            self._make_certs()

    def _make_certs(self) -> None:
        from ckptkit.cache.certs import make_ca, make_cert

        make_ca(str(self.certs), self.job)
        for node in self.nodes:
            make_cert(str(self.certs), node.name, ["127.0.0.1", node.host])
        self.config["tls"] = {"mode": "all", "ca": str(self.certs / "ca.pem")}

    def __enter__(self) -> Self:
        for node in self.nodes:
            node.start(wait=False)
        for node in self.nodes:
            node.wait_serving()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self.ranks:
            rank.close()
        for node in self.nodes:
            if node.process is not None and node.process.poll() is None:
                node.process.kill()
            if node.process is not None:
                node.process.wait()
        self.proxy.close()

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────

    def launch(
        self, nodes: Sequence[Node] | None = None, per_node: int | None = None, **options: Any
    ) -> None:
        """Start the processes of all ranks (those of before are ended first)."""
        self.end_ranks()
        there, count = list(nodes or self.nodes), per_node or self.per_node
        world = len(there) * count
        self.ranks = [
            RankProcess(self, number * count + local, local, node, world, **options)
            for number, node in enumerate(there) for local in range(count)
        ]  # fmt: skip
        for rank in self.ranks:
            rank.wait_ready()

    def end_ranks(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks = []

    def start(
        self, *, epoch: int | None = None, inc: str = "", fresh: bool = False, timeout_s: float = PATIENCE_S
    ) -> int | None:
        """Begin an epoch on all ranks: join, restore, compare every value; gives the step (None: nothing was ever saved)."""
        known = max((rank.member["max_epoch"] for rank in self.ranks), default=0)
        self.epoch = epoch or max(known, self.epoch) + 1
        self.inc = inc or secrets.token_hex(16)
        members = [{k: v for k, v in rank.member.items() if k != "max_epoch"} for rank in self.ranks]
        for rank in self.ranks:
            rank.tell("start", members=members, epoch=self.epoch, inc=self.inc, fresh=fresh)
        try:
            answers = [rank.answer(timeout_s) for rank in self.ranks]
        except Failed as error:  # one rank waits for all, so that each must be asked
            raise Failed(f"{error}\n{self.stacks()}\n" + "\n".join(map(Node.tail, self.nodes))) from None
        steps = {answer["step"] for answer in answers}
        if len(steps) > 1:
            raise Failed(f"ranks restored different steps: {answers}")
        self.answers = answers
        return steps.pop()

    def stacks(self) -> str:
        """Where the ranks are that live."""
        alive = [rank for rank in self.ranks if rank.alive]
        for rank in alive:
            rank.kill(signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {rank.rank}\n{rank.said()}" for rank in alive)

    def restart(
        self, nodes: Sequence[Node] | None = None, per_node: int | None = None, **options: Any
    ) -> int | None:
        """New processes, a new epoch; gives the step that was restored."""
        self.launch(nodes, per_node, **options)
        return self.start()

    def all(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """One command on all ranks at once."""
        for rank in self.ranks:
            rank.tell(do, **command)
        return [rank.answer() for rank in self.ranks]

    def save(self, step: int, level: int = 1) -> None:
        """Save a step on all ranks and wait until it has a level."""
        answers = self.all("save", step=step, tries=100)
        if not all(answer.get("sealed") for answer in answers):
            raise Failed(f"step {step}: {answers}\n{self.nodes[0].tail()}")
        self.reach(step, level)

    def reach(self, step: int, level: int = 1) -> None:
        reached = self.ranks[0].do("wait", step=step, level=level, timeout=PATIENCE_S / 2)["reached"]
        if not reached:
            tails = "\n".join(node.tail() for node in self.nodes)
            raise Failed(f"step {step} did not reach level {level}\n{tails}")
