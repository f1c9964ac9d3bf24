"""Bad input on every door: refused, logged, counted; the daemon stays up and nothing is wiped (row 36)."""

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.cache import codec
from ckptkit.cache.certs import make_ca, make_cert
from ckptkit.cache.client import CacheClient, Member, RefusedError
from ckptkit.cache.connection import connect_unix
from ckptkit.cache.messages import Inventory, Poll
from ckptkit.cache.wire import encode
from ckptkit.faults.cluster.nodes import Cluster, Node, wait_for

INC = "ab" * 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node in use: step 5 is in its memory. All tests of this module abuse it; the last of each is that it still serves."""
    root = tmp_path_factory.mktemp("bad")
    limits = {
        "header_s": 5.0,
        "idle_s": 20.0,
        "body": "64KiB",
        "index": "1MiB",
        "extras": "64KiB",
        "clients": 40,
        "connections": 40,
    }
    with Cluster(root, ranks=1, limits=limits) as made:
        made.launch()
        made.start()
        made.save(5)
        yield made


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    """The node; afterwards it is the same process, and holds what it held."""
    found = cluster.nodes[0]
    assert found.process is not None
    before = found.process.pid
    held = found.holding(5)
    yield found
    assert found.process.poll() is None and found.process.pid == before, found.tail()
    assert found.holding(5) == held
    assert found.status()["committed"] == {"step": 5, "epoch": 1}


def refused(node: Node, door: str, reason: str) -> float:
    return node.metric("refused_total", door=door, reason=reason)


def ask(
    node: Node,
    path: str,
    *,
    method: str = "GET",
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """One request as it is written; paths are not cleaned up."""
    connection = http.client.HTTPConnection(node.host, node.port_behind, timeout=20)
    connection.putrequest(method, path, skip_host=False, skip_accept_encoding=True)
    for name, value in ({"X-Ckpt-Job": "job"} | (headers or {})).items():
        connection.putheader(name, value)
    if body is not None:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@pytest.mark.parametrize(
    "path",
    [
        "/v1/shards/1/5/../../../../etc/passwd", "/../../etc/passwd", "/v1/index/../../node.json", "/v1/shards/1/5/%2e%2e/0/data",
        f"/v1/shards/1/5/{INC}/0/../../x", "/v1/shards/-1/5/" + INC + "/0/data", f"/v1/shards/1/5/{INC}/0/json",
        "/v1/shards/1/99999999999999999999/" + INC + "/0/data", "/v1/index/zz", "/v1/index/" + "a" * 33, "//v1//inventory", "/v1/files/1/5/x",
        "/v1/slots/0000.dat", "/v1/index/" + "A" * 32, "/v1/shards/1/5/" + INC + "/0/data%00",
    ],
)  # fmt: skip
def test_36_no_url_reaches_a_file(node: Node, path: str) -> None:
    before = refused(node, "http", "404")

    code, body = ask(node, path)

    assert code == 404, body
    assert refused(node, "http", "404") == before + 1
    assert any(line["code"] == 404 for line in node.events("request refused"))


def test_what_is_not_there_is_absent(node: Node) -> None:
    """Well-formed questions after other versions, ranks and indexes."""
    for path in (
        f"/v1/shards/1/5/{INC}/0/data",
        f"/v1/shards/1/6/{'0' * 32}/0/data",
        "/v1/index/" + "a" * 32,
    ):
        assert ask(node, path)[0] == 404


@pytest.mark.parametrize(
    "wanted", ["bytes=9999999-99999999", "bytes=5-2", "bytes=a-b", "bytes=1-2,4-5", "lines=1-2", "bytes=-"]
)
def test_a_senseless_range_is_refused(node: Node, cluster: Cluster, wanted: str) -> None:
    code, _ = ask(node, f"/v1/shards/1/5/{cluster.inc}/0/data", headers={"Range": wanted})

    assert code == 416


def test_another_job_is_refused(node: Node) -> None:
    before = refused(node, "http", "403")

    for headers in ({"X-Ckpt-Job": "other"}, {"X-Ckpt-Job": ""}):
        assert ask(node, "/v1/inventory", headers=headers)[0] == 403

    assert refused(node, "http", "403") == before + 2


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'{"type":"Poll"}', b'{"type":"Nothing"}', b'{"type":"Poll","type":"Poll"}', b"\xff\xfe", b"[" * 5000,
        b'{"type":"Poll","epoch":1e999}', b'{"type":"Poll","epoch":NaN,"inc":"","node":"","dseq":0,"attempt":0}',
        codec.encode(Poll(1, INC, "n0", 0, 0)).replace(b'"n0"', b'"../../n0"'),
        codec.encode(Poll(1, INC, "n0", 0, 0)).replace(b'"dseq":0', b'"dseq":-1'),
        codec.encode(Poll(1, INC, "n0", 0, 0)).replace(b'"dseq"', b'"path":"/etc","dseq"'),
        codec.encode(Inventory("n0", ())),
    ],
)  # fmt: skip
def test_a_body_that_is_no_message_is_refused(node: Node, body: bytes) -> None:
    before = refused(node, "http", "400")

    code, answer = ask(node, "/v1/messages", method="POST", body=body)

    assert code == 400 and set(json.loads(answer)) == {"code", "detail"}
    assert refused(node, "http", "400") == before + 1


def test_a_message_of_another_epoch_is_refused(node: Node, cluster: Cluster) -> None:
    for epoch, inc in ((1, INC), (7, cluster.inc), (0, cluster.inc)):
        assert (
            ask(node, "/v1/messages", method="POST", body=codec.encode(Poll(epoch, inc, "n0", 0, 0)))[0]
            == 409
        )
    assert (
        ask(node, "/v1/messages", method="POST", body=codec.encode(Poll(1, cluster.inc, "stranger", 0, 0)))[0]
        == 403
    )


def test_36_a_body_that_is_too_large_is_refused(node: Node) -> None:
    assert ask(node, "/v1/messages", method="POST", body=b'{"type":"' + b"x" * 100_000)[0] == 413


def test_a_header_that_is_too_large_is_refused(node: Node) -> None:
    assert ask(node, "/v1/inventory", headers={"X-Long": "x" * 20_000})[0] == 400
    assert ask(node, "/v1/" + "x" * 20_000)[0] == 400


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /v1/inventory HTTP/1.1\r\nX-A: b\r\n",
        b"G",
        b"POST /v1/messages HTTP/1.1\r\nHost: n0\r\nX-Ckpt-Job: job\r\nContent-Length: 100\r\n\r\n{",
    ],
)
def test_a_client_that_dawdles_is_cut_off(node: Node, sent: bytes) -> None:
    """A header, or a body, that does not come: the connection is closed, others are served meanwhile."""
    before = refused(node, "http", "slow")
    slow = socket.create_connection((node.host, node.port_behind), timeout=30)
    slow.sendall(sent)

    assert ask(node, "/v1/healthz")[0] == 200
    with contextlib.suppress(ConnectionResetError):
        while slow.recv(1000):
            pass
    slow.close()

    assert refused(node, "http", "slow") == before + 1


def test_bytes_that_are_no_http_are_refused(node: Node) -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00", b"\0" * 1000 + b"\r\n\r\n", b"HELO\r\n\r\n"):
        raw = socket.create_connection((node.host, node.port_behind), timeout=30)
        raw.sendall(sent)
        with contextlib.suppress(OSError):
            raw.recv(1000)
        raw.close()
    wait_for(lambda: refused(node, "http", "malformed") >= 3, "all to be counted")
    assert "Traceback" not in node.log_path.read_text()


def test_many_connections_leave_the_node_alive(node: Node) -> None:
    """Beyond the limit they are closed at once."""
    before = refused(node, "http", "connections")
    crowd = [socket.create_connection((node.host, node.port_behind), timeout=10) for _ in range(60)]
    try:
        wait_for(
            lambda: any(line["reason"] == "connections" for line in node.events("connection refused")),
            "a refusal",
        )
    finally:
        for one in crowd:
            one.close()
    wait_for(lambda: _serves(node), "serving again")
    assert refused(node, "http", "connections") > before


def _serves(node: Node) -> bool:
    try:
        return ask(node, "/v1/healthz")[0] == 200
    except OSError:
        return False


# ── the Unix socket ──────────────────────────────────────────────────────────────────────────────────────────────


def talk(node: Node, *sent: bytes, wait: bool = True) -> bytes:
    """Send bytes as they are, and give all that comes back until the daemon closes or answers."""
    sock = connect_unix(node.socket, 20)
    with sock:
        for data in sent:
            sock.sendall(data)
        return sock.recv(1 << 20) if wait else b""


def hello(**more: Any) -> bytes:
    return encode({"id": 1, "call": "hello", "job": "job", "protocol": 1, "oldest": 1, **more})


@pytest.mark.parametrize(
    "sent",
    [
        b"\n", b"{}\n", b"[]\n", b"nonsense\n", b'{"id":"x","call":"hello"}\n', b'{"id":1}\n', b'{"id":1,"call":7}\n', b"\xff\n", b"[" * 9999 + b"\n",
        b'{"id":1,"call":"hello","blobs":[-1]}\n', b'{"id":1,"call":"hello","blobs":[99999999999]}\n', b'{"id":1,"call":"hello","blobs":"x"}\n',
        b'{"id":1,"call":"hello","fds":3}\n', b'{"id":1,"call":"hello","blobs":[1,1,1,1,1,1,1,1,1]}\n', b"x" * (5 << 20),
    ],
)  # fmt: skip
def test_bytes_that_are_no_call_end_the_connection(node: Node, sent: bytes) -> None:
    before = refused(node, "uds", "malformed")

    with contextlib.suppress(ConnectionError):
        assert talk(node, sent) == b""

    assert refused(node, "uds", "malformed") == before + 1


def answer_of(
    node: Node, fields: dict[str, Any], blobs: tuple[bytes, ...] = (), *, greet: bool = True
) -> dict[str, Any]:
    """The error that a call gets."""
    sock = connect_unix(node.socket, 20)
    with sock:
        if greet:
            sock.sendall(hello())
            assert b"error" not in sock.recv(1 << 16)
        sock.sendall(encode({"id": 2, **fields}, blobs))
        return json.loads(sock.recv(1 << 16))["error"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"call": "begin", "step": -1, "bytes": 10}, 400), ({"call": "begin", "step": "1", "bytes": 10}, 400), ({"call": "begin", "step": 1}, 400),
        ({"call": "begin", "step": 1, "bytes": 2**60}, 400), ({"call": "begin", "step": 9, "bytes": 10}, 409), ({"call": "nothing"}, 400),
        ({"call": "__class__"}, 400), ({"call": "map", "slot": 9999}, 404), ({"call": "map", "slot": "../x"}, 400),
        ({"call": "side", "slot": 0, "what": "../../node.json"}, 400), ({"call": "seal", "slot": 0, "step": 5, "used": 1, "index_hash": "x"}, 400),
        ({"call": "seal", "slot": 0, "step": 5, "used": -1, "index_hash": "a" * 32}, 400),
        ({"call": "seal", "slot": 0, "step": 5, "used": 1, "index_hash": "a" * 32}, 413), ({"call": "restore"}, 409),
        ({"call": "pin", "step": 5}, 503), ({"call": "ban", "epoch": 1}, 400), ({"call": "evict", "slots": -3}, 400),
        ({"call": "join", "epoch": 1, "inc": "x", "members": []}, 400), ({"call": "join", "epoch": True, "inc": INC, "members": []}, 400),
        ({"call": "join", "epoch": 9, "inc": INC, "members": []}, 422),
        ({"call": "join", "epoch": 9, "inc": INC, "members": [{"rank": 0, "node": "../n0", "address": "a:1"}]}, 400),
        ({"call": "join", "epoch": 9, "inc": INC, "members": [{"rank": 1, "node": "n0", "address": "a:1"}]}, 422),
        ({"call": "manifest", "attempt": 1}, 409),
    ],
)  # fmt: skip
def test_calls_that_make_no_sense_are_refused(node: Node, fields: dict[str, Any], code: int) -> None:
    assert answer_of(node, fields)["code"] == code


def test_a_call_before_hello_is_refused(node: Node) -> None:
    assert answer_of(node, {"call": "status"}, greet=False)["code"] == 403


def test_blobs_of_wrong_sizes_and_hashes_are_refused(node: Node) -> None:
    assert answer_of(node, {"call": "put_index", "index_hash": "a" * 32}, (b"x" * 100,))["code"] == 422
    assert answer_of(node, {"call": "put_index", "index_hash": "../../x"}, (b"x",))["code"] == 422
    assert answer_of(node, {"call": "put_index", "index_hash": "a" * 32}, (b"x" * (2 << 20),))["code"] == 413


def test_an_unknown_protocol_is_refused_and_says_who_is_older(node: Node) -> None:
    for theirs in ({"protocol": 9, "oldest": 8}, {"protocol": 0, "oldest": 0}):
        error = json.loads(talk(node, hello(**theirs)))["error"]
        assert error["code"] == 400 and "update the older" in error["detail"]
    assert b"error" not in talk(node, hello(protocol=2, oldest=1))


def test_another_jobs_trainer_is_refused(node: Node) -> None:
    with pytest.raises(RefusedError, match="not of 'other'"):
        CacheClient.connect(node.socket, "other")


def test_a_stale_or_contested_epoch_is_refused(node: Node, cluster: Cluster) -> None:
    """A lower epoch, the same one of another incarnation, a second process as the same rank."""
    with node.client() as client:
        info = client.info()
        members = [Member(0, info.node, info.address)]
        for epoch, inc in ((1, INC), (1, cluster.inc)):
            with pytest.raises(RefusedError) as caught:
                client.join(epoch, inc, rank=0, local_rank=0, members=members, bytes_max=1000)
            assert caught.value.code == 409


def test_a_call_that_dawdles_is_cut_off(node: Node) -> None:
    before = refused(node, "uds", "slow")
    sock = connect_unix(node.socket, 30)
    with sock:
        sock.sendall(b'{"id":1,"call":"hel')
        assert sock.recv(100) == b""
    assert refused(node, "uds", "slow") == before + 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_36_another_user_is_refused(node: Node) -> None:
    """Even where file modes would let him in."""
    os.chmod(node.folder.parent, 0o755)
    os.chmod(node.folder, 0o755)
    os.chmod(node.socket, 0o666)
    for above in [*node.folder.parents][:-2]:
        if above.stat().st_mode & 0o001 == 0:
            above.chmod(above.stat().st_mode | 0o011)
    before = refused(node, "uds", "peer")
    child = os.fork()
    if child == 0:
        try:
            os.setgid(12345)
            os.setuid(12345)
            os._exit(0 if talk(node, hello()) == b"" else 1)
        except ConnectionError:
            os._exit(0)
        except BaseException:  # noqa: BLE001
            os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert refused(node, "uds", "peer") == before + 1
    assert any("user 12345" in line["reason"] for line in node.events("connection refused"))


# ── start ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_format_in_memory_is_left_alone(tmp_path: Path) -> None:
    """A daemon that does not know it says what to do; nothing is wiped before --discard."""
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        node = cluster.nodes[0]
        node.stop()
        about = node.folder / "node.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99}))
        before = {
            path: path.read_bytes()
            for path in node.folder.rglob("*")
            if path.is_file() and path.name != "daemon.lock"
        }

        node.start(wait=False)

        assert node.process is not None and node.process.wait() == 2
        assert "format 99" in node.tail() and "--discard" in node.tail()
        assert {
            path: path.read_bytes()
            for path in node.folder.rglob("*")
            if path.is_file() and path.name != "daemon.lock"
        } == before
        node.start("--discard")
        assert not node.holding(1)


def test_memory_of_before_the_last_boot_is_no_memory(tmp_path: Path) -> None:
    with Cluster(tmp_path, ranks=1) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        node = cluster.nodes[0]
        node.stop()
        about = node.folder / "node.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | {"boot": "another"}))

        node.start()

        # The rank may have come back already, for which slots are made: nothing was ever in them.
        assert all((record["state"], record["seq"]) == ("FREE", 0) for record in node.records().values())
        assert cluster.restart() is None


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nodes_talk_over_tls_and_let_no_stranger_in(tmp_path: Path) -> None:
    """Copies, restores from peers and messages go over TLS. No certificate, an expired one, another CA's, another job's, an old TLS: refused, counted."""
    with Cluster(tmp_path, nodes=2, ranks=1, tls=True) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1, level=2)
        cluster.nodes[1].lose()
        cluster.nodes[1].start()
        assert cluster.restart() == 1
        assert any(answer["sources"].get("peer") for answer in cluster.answers)

        ca, ours = cluster.certs / "ca.pem", tmp_path / "strange"
        make_ca(str(ours / "other"), "job")
        make_cert(str(ours / "other"), "n0", ["127.0.0.1"])
        make_cert(str(cluster.certs), "late", ["127.0.0.1"], days=-1)
        node = cluster.nodes[0]
        good = (cluster.certs / "n1.pem", cluster.certs / "n1.key")
        assert _secure(node, ca, good)[0] == 200
        assert "ckptkit_cache_http_requests_total" in _secure(node, ca, good, "/metrics")[1].decode()

        def count() -> float:
            lines = _secure(node, ca, good, "/metrics")[1].decode().splitlines()
            return sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith('ckptkit_cache_refused_total{door="http",reason="tls"}')
            )

        before = count()
        strangers = [
            None,
            (ours / "other" / "n0.pem", ours / "other" / "n0.key"),
            (cluster.certs / "late.pem", cluster.certs / "late.key"),
        ]
        for stranger in strangers:
            with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
                _secure(node, ca, stranger)
        with pytest.raises((ssl.SSLError, OSError)):
            _secure(node, ca, good, newest=ssl.TLSVersion.TLSv1_2)
        assert ask_clear(node) != 200
        wait_for(lambda: count() >= before + 4, "strangers to be counted", cluster)
        assert {line["reason"] for line in node.events("connection refused")} >= {"tls"}
        cluster.save(2, level=2)


def test_36_a_certificate_of_another_job_is_refused(tmp_path: Path) -> None:
    """Where two jobs share a CA the name of the job decides; and only an admin may ban over HTTP."""
    with Cluster(tmp_path, ranks=1, tls=True) as cluster:
        node, ca = cluster.nodes[0], cluster.certs / "ca.pem"
        _other_job(cluster.certs)
        assert _secure(node, ca, (cluster.certs / "foreign.pem", cluster.certs / "foreign.key"))[0] == 403
        make_cert(str(cluster.certs), "admin", ["127.0.0.1"])
        body = codec.encode(__import__("ckptkit.cache.messages", fromlist=["Bans"]).Bans())
        plain = (cluster.certs / "n0.pem", cluster.certs / "n0.key")
        admin = (cluster.certs / "admin.pem", cluster.certs / "admin.key")
        assert _secure(node, ca, plain, "/v1/bans", body=body)[0] == 403
        assert _secure(node, ca, admin, "/v1/bans", body=body)[0] == 200
        assert _secure(node, ca, admin, "/v1/bans", body=b"{}")[0] == 400
        assert _secure(node, ca, admin, "/v1/scrub", body=b"{}")[0] == 200


def _other_job(certs: Path) -> None:
    """A certificate of the same CA that names another job."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    from ckptkit.cache import certs as ours

    ca = x509.load_pem_x509_certificate((certs / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((certs / "ca.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    made = ours._builder(ours._name("another-job", "n0"), ca.subject, key.public_key(), 1)
    signed = made.sign(ca_key, hashes.SHA256())  # type: ignore[arg-type]
    (certs / "foreign.key").write_bytes(ours._pem_key(key))
    (certs / "foreign.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _secure(
    node: Node, ca: Path, cert: tuple[Path, Path] | None, path: str = "/v1/inventory", body: bytes | None = None,
    newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> tuple[int, bytes]:  # fmt: skip
    context = ssl.create_default_context(cafile=str(ca))
    context.maximum_version = newest
    if cert is not None:
        context.load_cert_chain(*map(str, cert))
    connection = http.client.HTTPSConnection(node.host, node.port_behind, timeout=20, context=context)
    try:
        connection.request("GET" if body is None else "POST", path, body, {"X-Ckpt-Job": "job"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def ask_clear(node: Node) -> int:
    try:
        return ask(node, "/v1/inventory")[0]
    except (OSError, http.client.HTTPException):
        return 0


def test_a_stopped_daemon_does_not_hang_the_trainer(tmp_path: Path) -> None:
    """SIGSTOP: it takes connections and answers nothing. `begin` ends in its deadline; nothing raises."""
    with Cluster(tmp_path, ranks=1, options={"begin_s": 0.2}) as cluster:
        cluster.launch()
        cluster.start()
        cluster.save(1)
        (rank,), node = cluster.ranks, cluster.nodes[0]
        assert node.process is not None
        os.kill(node.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert rank.do("begin", step=2)["skipped"] == "away"
            assert rank.do("begin", step=3)["skipped"] == "away"
            assert time.monotonic() - began < 10
        finally:
            os.kill(node.process.pid, signal.SIGCONT)
        # What it did with calls that nobody waited for is undone: slots come back, saves go on.
        wait_for(lambda: rank.do("save", step=int(time.monotonic() * 1000)).get("sealed"), "a save", cluster)
        wait_for(
            lambda: all(r["state"] != "WRITING" for r in node.records().values()),
            "late slots to be given back",
            cluster,
        )
