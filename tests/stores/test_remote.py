"""Remote stores are read in ranges; faults that pass are tried again, within bounds, and the others are told at once."""

import os
import random
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pytest

from ckptkit import stores
from ckptkit.errors import CkptError, FormatError, ShardMissingError, StoreError, UnsafeError, UsageError
from ckptkit.stores import filesystems
from ckptkit.stores.remote import RemoteStore
from ckptkit.stores.retrying import VARIABLE, Retry, is_final, plain
from tests.stores.faulty_fs import World

URL = "faulty://runs/step"


def filled(world: World, **objects: bytes) -> RemoteStore:
    world.objects.update({f"runs/step/{name.replace('__', '/')}": data for name, data in objects.items()})
    return RemoteStore(URL)


def test_ranges_are_right_whatever_the_requests_do(world: World) -> None:
    """A fifth of the requests get no answer and a fifth of the bodies are short; every read is the slice all the same."""
    data = random.Random(1).randbytes(100_000)
    store = filled(world, a=data)
    world.set(drop=0.2, truncate=0.2)
    draw = random.Random(2)

    with store.open("a") as reader:
        for _ in range(100):
            cuts = sorted(draw.randrange(len(data) + 1) for _ in range(4))
            views = [memoryview(bytearray(b - a)) for a, b in pairwise(cuts)]
            reader.scatter(cuts[0], views)
            assert b"".join(views) == data[cuts[0] : cuts[-1]]

    assert world.failed["read"] > 5


def test_files_are_listed_once_with_their_sizes(world: World) -> None:
    store = filled(world, a=b"abc", d__b=b"", d__e__c=b"12345")

    assert store.files() == ["a", "d/b", "d/e/c"]
    assert [store.size(path) for path in store.files()] == [3, 0, 5]
    assert store.exists("d/b") and not store.exists("d") and not store.exists("z")
    assert world.requests["list"] == 3 and world.requests["info"] == 0  # a folder each


def test_identity_follows_the_content_after_a_refresh(world: World) -> None:
    store = filled(world, a=b"abc")
    before = store.identity("a")

    world.objects["runs/step/a"] = b"abd"

    assert store.identity("a") == before
    store.refresh()
    assert store.identity("a") != before


def test_a_request_without_any_answer_ends_with_the_object_named(world: World) -> None:
    store = filled(world, a=b"abc")
    reader = store.open("a")
    world.set(refuse=frozenset({"read"}))

    with pytest.raises(StoreError, match=f"cannot read {URL}/a: read: refused \\(8 tries") as caught:
        reader.readinto(0, memoryview(bytearray(3)))

    assert world.requests["read"] == 8 and caught.value.attempts == 8


def test_a_body_that_stays_short_ends_with_the_object_named(world: World) -> None:
    reader = filled(world, a=b"abcdef").open("a")
    world.set(truncate=1.0)

    with pytest.raises(StoreError, match=f"{URL}/a: asked for bytes 0:6, got 3 bytes"):
        reader.readinto(0, memoryview(bytearray(6)))
    assert world.requests["read"] == 8


def test_what_will_not_pass_is_not_tried_again(world: World) -> None:
    store = filled(world, a=b"abc")
    world.set(forbid=frozenset({"read"}))

    with pytest.raises(StoreError, match="You may not do that there"):
        store.read("a")
    with pytest.raises(ShardMissingError, match=f"{URL}/b is missing"):
        store.open("b")
    assert world.requests["read"] == 1 and world.requests["info"] == 1


def test_no_further_try_begins_after_the_total_time(world: World) -> None:
    world.set(refuse=frozenset({"list"}))

    with pytest.raises(StoreError, match="cannot list"):
        RemoteStore(URL, retry=Retry(attempts=100, wait_s=0.001, total_s=0.0)).files()
    assert world.requests["list"] == 1


def test_reads_past_the_end_are_told_without_a_request(world: World) -> None:
    reader = filled(world, a=b"abc").open("a")

    with pytest.raises(FormatError, match=r"ends at byte 3, but bytes 2:5 are needed"):
        reader.readinto(2, memoryview(bytearray(3)))
    assert world.requests["read"] == 0


def test_an_absent_folder_is_told_from_a_store_that_does_not_answer(world: World) -> None:
    filled(world, a=b"abc")
    with pytest.raises(StoreError, match="does not exist"):
        RemoteStore("faulty://runs/other").files()
    assert (
        not stores.is_folder("faulty://runs/other")
        and stores.is_folder(URL)
        and not stores.is_folder(f"{URL}/a")
    )

    world.set(refuse=frozenset({"list", "info"}))
    for ask in (
        stores.is_folder,
        stores.folders,
        stores.is_empty,
        lambda url: stores.open_store(url).files(),
    ):
        with pytest.raises(StoreError, match="8 tries"):
            ask(URL)


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "s3://other/x", "", "a\0b"])
def test_no_path_leaves_the_folder(world: World, path: str) -> None:
    with pytest.raises(UnsafeError, match="not a path inside"):
        filled(world, a=b"abc").open(path)
    assert world.requests["read"] == 0


def test_one_file_of_weights_is_a_store_with_what_lies_beside_it(world: World) -> None:
    filled(world, **{"model.pt": b"abc", "other.pt": b"x", "config.json": b"{}", "deeper__x": b"1"})

    store = stores.open_store(f"{URL}/model.pt")

    assert store.files() == ["config.json", "model.pt"] and store.read("model.pt") == b"abc"
    assert not store.exists("other.pt") and world.requests["list"] == 1


def test_folders_of_a_run(world: World) -> None:
    filled(world, **{"step-1__a": b"", "step-2__b__c": b"", "note": b""})

    assert stores.folders(URL) == ["step-1", "step-2"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sftp://user:hunter2@host/x", "password"),
        ("https://host/model.pt?X-Amz-Signature=hunter2", "query"),
        ("s3://a::s3://b", "chained"),
        ("bogus://a", "no store for bogus://"),
    ],
)
def test_urls_that_are_not_taken_are_told_without_what_is_secret_in_them(url: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        stores.open_store(url).files()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "GET https://b.s3.amazonaws.com/k?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2",
        "https://user:hunter2@host/path failed",
        "Authorization: Bearer hunter2, then",
        "AccountKey=hunter2;EndpointSuffix=core",
        'token="hunter2"',
    ],
)
def test_errors_of_libraries_are_told_without_their_secrets(text: str) -> None:
    told = plain(OSError(text))
    assert "hunter2" not in told and "***" in told


def test_a_missing_library_names_the_extra_to_install() -> None:
    """The extras that messages name exist."""
    fsspec.register_implementation(
        "absent", "no_such_module.FileSystem", clobber=True, errtxt="Install no_such_module"
    )
    with pytest.raises(UsageError, match="library for absent:// is not installed; Install no_such_module"):
        stores.open_store("absent://x")

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(filesystems._EXTRAS.values()) <= set(project["optional-dependencies"])


def test_the_environment_says_how_stubborn_requests_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "attempts=3, total_s=7")
    assert Retry.from_environment() == Retry(attempts=3, total_s=7.0)

    for bad in ("attempts=x", "tries=3", "attempts=0", "wait_s=-1"):
        monkeypatch.setenv(VARIABLE, bad)
        with pytest.raises(UsageError):
            Retry.from_environment()


def test_s3_without_credentials_is_told(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, by what to do, whatever asks first."""
    for name in [name for name in os.environ if name.startswith("AWS_") and name != "AWS_ENDPOINT_URL"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    fsspec.filesystem("s3").clear_instance_cache()
    try:
        with pytest.raises(
            CkptError, match="Give credentials in the way that the store's own library takes them"
        ) as caught:
            stores.open_store(f"{bucket}/x").files()
        assert caught.value.attempts == 1
    finally:
        fsspec.filesystem("s3").clear_instance_cache()


def test_libraries_with_one_connection_are_asked_one_thing_at_a_time() -> None:
    """Threads take turns, open files included; what an open file gives is not changed."""
    inside, most = [0], [0]

    class Single:
        size = 3

        def open(self, name: str) -> "Single":
            return self.read(name) or self

        def read(self, name: str = "") -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            threading.Event().wait(0.001)
            inside[0] -= 1
            return None

    files = filesystems._OneAtATime(Single(), threading.RLock())
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(lambda: files.open("a").read()) for _ in range(40)]:
            assert done.result() is None
    assert most == [1] and files.size == 3


def _with(error: Exception, cause: Exception | None = None, **facts: Any) -> Exception:
    for name, value in facts.items():
        setattr(error, name, value)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ConnectionResetError(), False),
        (TimeoutError(), False),
        (_with(RuntimeError(), status=429), False),
        (_with(RuntimeError(), status=408), False),
        (_with(RuntimeError(), status=503), False),
        (_with(RuntimeError(), status=404), True),
        (_with(RuntimeError(), code=403), True),  # gcsfs
        (_with(RuntimeError(), status_code=500), False),  # Azure
        (
            _with(OSError(), _with(RuntimeError(), response={"ResponseMetadata": {"HTTPStatusCode": 400}})),
            True,
        ),
        (
            _with(OSError(), _with(RuntimeError(), response={"ResponseMetadata": {"HTTPStatusCode": 503}})),
            False,
        ),
        (FileNotFoundError(), True),
        (_with(FileNotFoundError(), ConnectionResetError()), False),  # fsspec's HTTP calls every fault so
        (_with(FileNotFoundError(), _with(RuntimeError(), status=404)), True),
        (PermissionError(), True),
        (type("NoCredentialsError", (Exception,), {})(), True),
        (OSError(28, "no space"), True),
        (TypeError(), True),
    ],
)
def test_which_faults_may_pass(error: Exception, final: bool) -> None:
    """By kind, by the status that a library's error carries, or by its cause."""
    assert is_final(error) is final
