"""Checkpoints on URLs: read from them, written to them, listed and compared there, with the same bytes as on a disk."""

import functools
import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import CkptError, InterruptedRunError, StoreError, UsageError
from ckptkit.formats.registry import FORMATS
from ckptkit.ops import runs
from ckptkit.stores.folder import UNFINISHED_MARK
from tests.cli.helpers import invoke
from tests.ops.making import TRAINED, ZAYA, contents, make, values
from tests.stores.faulty_fs import World

URL = "faulty://runs/out"
LAYOUT = "tp=2,pp=2,ep=2,dp=2,zero=1"
OPTIONS: dict[str, dict[str, Any]] = {
    "hf": {"drop_optimizer": True, "drop_extras": True},
    "hub": {"drop_optimizer": True, "drop_extras": True},
    "torch": {"drop_extras": True},
    "zarr": {"drop_extras": True},
    "deepspeed": {"layout": "dp=3,zero=2"},
    "deepspeed-universal": {},
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ZAYA1 on 16 ranks with its optimizer's state. Do not write to it."""
    small = {**ZAYA, "num_hidden_layers": 2}
    return make(tmp_path_factory.mktemp("remote") / "trained", settings=small, layout=TRAINED)


@pytest.fixture(scope="session")
def local(trained: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a reshard to a local folder gives: path to digest."""
    folder = tmp_path_factory.mktemp("remote") / "local"
    ops.reshard(trained, str(folder), layout=LAYOUT, fingerprint=True)
    return contents(folder)


def remote_contents(url: str, to: Path) -> dict[str, str]:
    """The same of a URL, by way of a local copy made with fsspec alone."""
    fsspec.filesystem(url.split(":", 1)[0]).get(url, str(to), recursive=True)
    return contents(to)


def held(world: World) -> set[str]:
    return {name.removeprefix("runs/out/") for name in world.objects if name.startswith("runs/out/")}


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "peft"])
def test_every_format_is_written_to_a_url_as_to_a_disk_and_read_back(
    name: str, trained: str, tmp_path: Path
) -> None:
    options = (
        {"layout": LAYOUT} | OPTIONS[name]
        if name in ("deepspeed",)
        else OPTIONS.get(name, {"layout": LAYOUT})
    )
    url = f"memory://runs/{tmp_path.name}/{name}"

    ops.reshard(trained, url, to=name, fingerprint=True, **options)
    ops.reshard(trained, str(tmp_path / "disk"), to=name, fingerprint=True, **options)
    ops.reshard(url, str(tmp_path / "back"), to="native", drop_optimizer=name in ("hf", "hub"))

    assert remote_contents(url, tmp_path / "copy") == contents(tmp_path / "disk")
    found, expected = values(tmp_path / "back"), values(trained)
    assert found and all(np.array_equal(array, expected[key]) for key, array in found.items())
    assert ops.verify(url).exit_code == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_store_that_drops_delays_truncates_and_lies_gives_the_same_bytes_or_no_checkpoint(
    seed: int, trained: str, local: dict[str, str], world: World, tmp_path: Path
) -> None:
    """Written to it, then read from it; requests are bounded in either case."""
    world.set(seed=seed, drop=0.05, truncate=0.05, lie=0.05 if seed % 2 else 0.0, slow_s=0.002)
    try:
        ops.reshard(trained, URL, layout=LAYOUT, fingerprint=True)
    except CkptError:
        assert seed % 2, "faults that pass are overcome; only lies need not be"
        assert (
            "manifest.json" not in held(world)
            or UNFINISHED_MARK in held(world)
            or _same(world, local, tmp_path)
        )
        world.set()
        ops.reshard(
            trained, URL, layout=LAYOUT, fingerprint=True, overwrite=UNFINISHED_MARK not in held(world)
        )
    assert world.requests.total() < 8 * (20 * len(local) + 100)
    assert _same(world, local, tmp_path)

    world.set(seed=seed, drop=0.05, truncate=0.05, lie=0.01 if seed % 2 else 0.0, slow_s=0.002)
    try:
        ops.reshard(URL, str(tmp_path / "back"), layout=TRAINED)
    except CkptError:
        assert seed % 2 and not (tmp_path / "back").exists()
    else:
        found, expected = values(tmp_path / "back"), values(trained)
        assert all(np.array_equal(array, expected[key]) for key, array in found.items())


def _same(world: World, local: dict[str, str], tmp_path: Path) -> bool:
    """Whether the store holds what the disk does."""
    faults, world.faults = world.faults, type(world.faults)()
    try:
        return remote_contents(URL, tmp_path / f"copy-{len(os.listdir(tmp_path))}") == local
    finally:
        world.faults = faults


def test_a_server_that_dies_in_the_middle_leaves_nothing_and_a_rerun_keeps_whole_objects(
    trained: str, local: dict[str, str], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At places all over the run."""
    monkeypatch.setenv("CKPTKIT_RETRY", "attempts=1")
    ops.reshard(trained, URL, layout=LAYOUT, fingerprint=True)
    total = world.requests.total()
    reused = 0
    for dead in range(1, total, total // 9):
        world.objects.clear()
        world.set(dead_after=dead)
        with pytest.raises(CkptError) as caught:
            ops.reshard(trained, URL, layout=LAYOUT, fingerprint=True)
        assert caught.value.exit_code in (3, 4)
        world.set()
        if "manifest.json" in held(world) and UNFINISHED_MARK not in held(world):
            assert _same(world, local, tmp_path)  # died in the check after the commit
            continue
        with pytest.raises(CkptError):
            ops.open(URL)

        done = ops.reshard(trained, URL, layout=LAYOUT, fingerprint=True)

        assert _same(world, local, tmp_path)
        reused = max(reused, done.bytes_reused)
    assert reused > 0


def test_a_part_that_fails_for_good_leaves_no_checkpoint(trained: str, world: World) -> None:
    world.set(forbid=frozenset({"write"}))

    with pytest.raises(StoreError, match=r"cannot write faulty://runs/out/.*You may not do that there"):
        ops.reshard(trained, URL)
    assert not world.objects


def test_stopping_by_hand_leaves_what_is_whole_for_the_next_run(
    trained: str, world: World, local: dict[str, str], tmp_path: Path
) -> None:
    def stop(done: int, total: int) -> None:
        if len(held(world)) > 4:
            raise KeyboardInterrupt

    world.set(slow_s=0.02)
    with pytest.raises(InterruptedRunError, match="Run the same command to go on"):
        ops.reshard(trained, URL, layout=LAYOUT, fingerprint=True, progress=stop)
    assert UNFINISHED_MARK in held(world) and not world.uploads

    world.set()
    ops.reshard(trained, URL, layout=LAYOUT, fingerprint=True)
    assert _same(world, local, tmp_path)


def test_an_existing_checkpoint_or_another_folder_is_not_overwritten_by_accident(
    trained: str, world: World
) -> None:
    ops.reshard(trained, URL)
    before = dict(world.objects)
    with pytest.raises(StoreError, match="exists"):
        ops.reshard(trained, URL, layout=LAYOUT)
    world.objects["runs/other/notes"] = b"x"
    with pytest.raises(StoreError, match="is no checkpoint, so --overwrite does not replace it"):
        ops.reshard(trained, "faulty://runs/other", overwrite=True)
    assert world.objects == before | {"runs/other/notes": b"x"}

    ops.reshard(trained, URL, layout="tp=1", overwrite=True)
    assert "rank-00001.safetensors" not in held(world) and ops.open(URL).catalog.layout is not None


def test_source_and_destination_lie_apart(trained: str, world: World) -> None:
    ops.reshard(trained, URL)
    for other in (URL, f"{URL}/", f"{URL}/below", "faulty://runs"):
        with pytest.raises(UsageError, match=r"both|inside"):
            ops.reshard(URL, other, layout="tp=1", overwrite=True)


def test_a_run_on_a_url_is_listed_and_its_newest_whole_step_found(trained: str, world: World) -> None:
    ops.reshard(trained, "faulty://run/step-00000001.e0")
    ops.reshard(trained, "faulty://run/step-00000002.e0")
    ops.reshard(trained, "faulty://run/step-00000003.e0")
    del world.objects["run/step-00000003.e0/manifest.json"]
    world.objects[f"run/step-00000002.e0/{UNFINISHED_MARK}"] = b"{}"

    listed = runs.steps("faulty://run")
    newest = runs.newest("faulty://run")

    assert [row.state for row in listed.steps] == ["whole", "unfinished", "unfinished"]
    assert newest.path == "faulty://run/step-00000001.e0" and len(newest.passed_over) == 2
    assert ops.open("faulty://run@latest").url == newest.path
    with pytest.raises(CkptError, match="is unfinished: its writer has not ended"):
        ops.open("faulty://run/step-00000002.e0")


def test_commands_take_urls(trained: str, world: World) -> None:
    ops.reshard(trained, "faulty://run/step-00000001.e0")

    def run(*words: str) -> Any:
        done = invoke(*words, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    step = "faulty://run/step-00000001.e0"
    assert run("ls", "faulty://run")["steps"][0]["state"] == "whole"
    assert run("latest", "faulty://run")["path"] == step
    assert run("inspect", step)["format"] == "native"
    assert run("verify", step) and run("stats", step) and run("diff", trained, step)
    plan = run("plan", step, "faulty://elsewhere/out")
    assert plan["free"] is None and any("not estimated" in note for note in plan["notes"])
    assert not any(name.startswith("elsewhere/") for name in world.objects)


def test_s3_through_its_own_library(trained: str, local: dict[str, str], bucket: str, tmp_path: Path) -> None:
    """Native from and to a bucket, and one large object in parts, checksums inside."""
    ops.reshard(trained, f"{bucket}/run/native", layout=LAYOUT, fingerprint=True)
    assert remote_contents(f"{bucket}/run/native", tmp_path / "copy") == local
    again = ops.reshard(f"{bucket}/run/native", f"{bucket}/run/again", layout=LAYOUT, fingerprint=True)
    assert again.checked and set(remote_contents(f"{bucket}/run/again", tmp_path / "again")) == set(local)

    large = {"vocab_size": 60_000, "hidden_size": 64, "num_hidden_layers": 2}
    made = make(tmp_path / "large", settings={**large, "head_dim": 16, "num_experts": 4}, optimizer="none")
    ops.reshard(made, f"{bucket}/torch", to="torch", drop_extras=True)
    ops.reshard(made, str(tmp_path / "torch"), to="torch", drop_extras=True)
    assert max(path.stat().st_size for path in (tmp_path / "torch").iterdir()) > 6 << 20
    assert remote_contents(f"{bucket}/torch", tmp_path / "t") == contents(tmp_path / "torch")
    files = fsspec.filesystem("s3")
    assert not files.list_multipart_uploads(bucket.removeprefix("s3://"))


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """Python's own server: it ignores ranges."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


class _Ranged(_Quiet):
    def send_head(self) -> Any:
        path, asked = self.translate_path(self.path), self.headers.get("Range")
        if asked is None or not os.path.isfile(path):
            return super().send_head()
        start, stop = (int(number) for number in asked.removeprefix("bytes=").split("-"))
        data = Path(path).read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{stop}/{len(data)}")
        self.send_header("Content-Length", str(len(data[start : stop + 1])))
        self.end_headers()
        self.wfile.write(data[start : stop + 1])
        return None


@pytest.fixture
def web(request: pytest.FixtureRequest, trained: str) -> Iterator[str]:
    """The folder above `trained`, on loopback."""
    handler = functools.partial(request.param, directory=str(Path(trained).parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("web", [_Ranged], indirect=True)
def test_a_web_server_with_ranges_is_read(web: str, trained: str, tmp_path: Path) -> None:
    ops.reshard(f"{web}/trained", str(tmp_path / "out"), layout="tp=1")

    found, expected = values(tmp_path / "out"), values(trained)
    assert all(np.array_equal(array, expected[key]) for key, array in found.items())
    with pytest.raises(StoreError, match="does not exist"):
        ops.open(f"{web}/nothing")
    with pytest.raises(UsageError, match="read only"):
        ops.reshard(trained, f"{web}/new")


@pytest.mark.parametrize("web", [_Quiet], indirect=True)
def test_a_web_server_without_ranges_is_told_at_once(web: str, tmp_path: Path) -> None:
    with pytest.raises(
        StoreError, match=r"does not answer requests for ranges of bytes.*Download the checkpoint"
    ):
        ops.reshard(f"{web}/trained", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
