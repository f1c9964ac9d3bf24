"""A store whose requests fail, and a local S3."""

from collections.abc import Iterator

import pytest

from ckptkit.stores.retrying import VARIABLE
from tests.stores import faulty_fs


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> faulty_fs.World:
    """What lies behind `faulty://`; requests are tried again quickly."""
    monkeypatch.setenv(VARIABLE, "attempts=8,wait_s=0.001,longest_s=0.01,total_s=30")
    return faulty_fs.install()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of an S3 server on loopback."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh bucket `s3://...`, reached by the environment as users set it."""
    import fsspec

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv(VARIABLE, "attempts=4,wait_s=0.01,longest_s=0.1,total_s=30")
    files = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=False)
    name = f"runs-{len(files.ls('')):04}"
    files.mkdir(name)
    return f"s3://{name}"
