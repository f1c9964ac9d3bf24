"""Bad sources and destinations, through the command line.

Each ends with exit code 3 (a destination: 4) and one message without a traceback; nothing is written, nothing is lost.
"""

import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import ROOT, TINY_LLAMA, contents, invoke, settings

Break = Callable[[Path], object]


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def split(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    raw = file.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def join(file: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def tensors(header: dict[str, Any]) -> list[str]:
    """Names in the order of their data."""
    names = [name for name in header if name != "__metadata__"]
    return sorted(names, key=lambda name: header[name]["data_offsets"])


def truncated(folder: Path) -> None:
    file = shards(folder)[0]
    file.write_bytes(file.read_bytes()[:-100])


def cut_in_the_header(folder: Path) -> None:
    file = shards(folder)[0]
    file.write_bytes(file.read_bytes()[:40])


def empty(folder: Path) -> None:
    shards(folder)[0].write_bytes(b"")


def huge_header_length(folder: Path) -> None:
    file = shards(folder)[0]
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


def deep_json(folder: Path) -> None:
    _, data = split(shards(folder)[0])
    join(shards(folder)[0], b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", data)


def with_offsets(change: Callable[[list[int], int], list[int]]) -> Break:
    """A break that changes the offsets of a shard's last tensor; `change` gets them and the size of the data."""

    def apply(folder: Path) -> None:
        header, data = split(shards(folder)[0])
        entry = header[tensors(header)[-1]]
        entry["data_offsets"] = change(entry["data_offsets"], len(data))
        join(shards(folder)[0], header, data)

    return apply


def hole(folder: Path) -> None:
    header, data = split(shards(folder)[0])
    entry = header[tensors(header)[-1]]
    entry["data_offsets"] = [offset + 64 for offset in entry["data_offsets"]]
    join(shards(folder)[0], header, data + bytes(64))


def duplicate_name_in_a_header(folder: Path) -> None:
    header, data = split(shards(folder)[0])
    name = tensors(header)[0]
    text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
    join(shards(folder)[0], text.encode(), data)


def with_entry(**changes: Any) -> Break:
    """A break that changes fields of a shard's first tensor."""

    def apply(folder: Path) -> None:
        header, data = split(shards(folder)[0])
        header[tensors(header)[0]] |= changes
        join(shards(folder)[0], header, data)

    return apply


def nan_in_a_header(folder: Path) -> None:
    header, data = split(shards(folder)[0])
    header[tensors(header)[0]]["shape"] = [float("nan")]
    join(shards(folder)[0], header, data)


def index(folder: Path) -> Path:
    (found,) = folder.glob("*.index.json")
    return found


def with_index(change: Callable[[dict[str, Any]], Any]) -> Break:
    def apply(folder: Path) -> None:
        found = json.loads(index(folder).read_text())
        changed = change(found)
        index(folder).write_text(changed if isinstance(changed, str) else json.dumps(found))

    return apply


def traversal(found: dict[str, Any]) -> None:
    name = next(iter(found["weight_map"]))
    found["weight_map"][name] = "../outside.safetensors"


def path_traversal(folder: Path) -> None:
    shutil.copy(shards(folder)[0], folder.parent / "outside.safetensors")
    with_index(traversal)(folder)


def link_outside(folder: Path) -> None:
    file = shards(folder)[0]
    outside = folder.parent / "outside.safetensors"
    file.rename(outside)
    file.symlink_to(outside)


def missing_shard(folder: Path) -> None:
    shards(folder)[-1].unlink()


def directory_for_a_shard(folder: Path) -> None:
    shards(folder)[0].unlink()
    (folder / min(json.loads(index(folder).read_text())["weight_map"].values())).mkdir()


class Harmful:
    """What a pickle would run when loaded: it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return os.system, (f"touch {self.path}",)  # type: ignore[return-value]


def pickle_for_a_shard(folder: Path) -> None:
    shards(folder)[0].write_bytes(pickle.dumps(Harmful(folder.parent / "executed")))


def wrong_shape(folder: Path) -> None:
    """As many bytes, but no shape that the model has."""
    for file in shards(folder):
        header, data = split(file)
        for name in tensors(header):
            if name.endswith("q_proj.weight"):
                header[name]["shape"] = [32, 128]
                join(file, header, data)
                return


def missing_tensor(folder: Path) -> None:
    """A shard that is sound in itself, an index that agrees, and a model that needs one tensor more."""
    name = tensor_missing_from_its_shard(folder)
    found = json.loads(index(folder).read_text())
    del found["weight_map"][name]
    index(folder).write_text(json.dumps(found))


def tensor_missing_from_its_shard(folder: Path) -> str:
    """Takes the last tensor out of the first shard that holds several; returns its name."""
    for file in shards(folder):
        header, data = split(file)
        if len(tensors(header)) > 1:
            name = tensors(header)[-1]
            begin, _ = header.pop(name)["data_offsets"]
            join(file, header, data[:begin])
            return name
    raise AssertionError("no shard holds several tensors")


HF: dict[str, tuple[Break, str]] = {
    "a truncated shard": (truncated, r"safetensors"),
    "a shard cut in its header": (cut_in_the_header, r"safetensors"),
    "an empty shard": (empty, r"safetensors"),
    "a header length of 2^60": (huge_header_length, r"safetensors.*header"),
    "deep JSON": (deep_json, r"safetensors"),
    "overlapping offsets": (with_offsets(lambda at, size: [at[0] - 64, at[1] - 64]), r"safetensors"),
    "negative offsets": (with_offsets(lambda at, size: [-at[1] + at[0], 0]), r"safetensors"),
    "offsets out of range": (with_offsets(lambda at, size: [size, size + at[1] - at[0]]), r"safetensors"),
    "a hole": (hole, r"safetensors"),
    "a name twice in a header": (duplicate_name_in_a_header, r"safetensors.*twice"),
    "an unknown dtype": (with_entry(dtype="F33"), r"F33"),
    "a dtype that is no text": (with_entry(dtype=[]), r"safetensors"),
    "sizes whose product overflows": (with_entry(shape=[1 << 62, 1 << 62]), r"safetensors"),
    "a negative size": (with_entry(shape=[-1, -32]), r"safetensors"),
    "NaN in a header": (nan_in_a_header, r"safetensors"),
    "NaN in an index": (with_index(lambda found: '{"weight_map": NaN}'), r"index"),
    "an index that is no object": (with_index(lambda found: "[]"), r"index"),
    "a deep index": (with_index(lambda found: "[" * 200_000), r"index"),
    "a path out of the checkpoint": (path_traversal, r"\.\./outside\.safetensors"),
    "a link out of the checkpoint": (link_outside, r"link"),
    "a missing shard": (missing_shard, r"safetensors.*missing|missing.*safetensors"),
    "a directory for a shard": (directory_for_a_shard, r"directory"),
    "a pickle for a shard": (pickle_for_a_shard, r"safetensors"),
    "a tensor of the wrong shape": (wrong_shape, r"q_proj\.weight|attn\.q"),
    "a missing tensor": (missing_tensor, r"."),
    "a tensor that its shard lacks": (lambda folder: tensor_missing_from_its_shard(folder), r"."),
}


def flipped_byte(folder: Path) -> None:
    file = shards(folder)[0]
    raw = bytearray(file.read_bytes())
    raw[-200] ^= 1
    file.write_bytes(raw)


def manifest(text: str) -> Break:
    return lambda folder: (folder / "manifest.json").write_text(text)


NATIVE: dict[str, tuple[Break, str]] = {
    "a truncated rank": (truncated, r"rank-00000"),
    "a missing rank": (missing_shard, r"rank-00007"),
    "a changed byte": (flipped_byte, r"rank-00000"),
    "a pickle for a rank": (pickle_for_a_shard, r"rank-00000"),
    "a link out of the checkpoint": (link_outside, r"link"),
    "an empty manifest": (manifest(""), r"manifest"),
    "a manifest that is no object": (manifest("[]"), r"manifest"),
    "NaN in the manifest": (manifest('{"step": NaN}'), r"manifest"),
    "a deep manifest": (manifest("[" * 200_000), r"manifest"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), r"."),
}

CASES = [("hf", case) for case in HF] + [("native", case) for case in NATIVE]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_bad_source_is_exit_code_3_and_nothing_is_written(
    name: str, case: str, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """The message names the file or tensor; the source keeps its bytes; no destination, whole or unfinished, is left."""
    source = copy_of(name)
    break_, said = (HF if name == "hf" else NATIVE)[case]
    break_(source)
    before = contents(tmp_path)

    done = invoke("reshard", source, tmp_path / "out", "--to", "native")

    assert done.exit_code == 3, done.output
    assert done.stdout == ""
    assert (
        done.stderr.startswith("error: ") and "Traceback" not in done.stderr and "internal" not in done.stderr
    )
    assert re.search(said, done.stderr), done.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("name", "case"), CASES)
def test_verify_finds_what_reshard_refuses(name: str, case: str, copy_of: Callable[[str], Path]) -> None:
    """A fault in the report (1), or no checkpoint at all (3); never 0, never a traceback."""
    source = copy_of(name)
    (HF if name == "hf" else NATIVE)[case][0](source)

    done = invoke("verify", source)

    assert done.exit_code in (1, 3), done.output
    assert "Traceback" not in done.output and "internal" not in done.output


def test_the_sources_are_good_before_they_are_broken(made: Path, tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    for name in ("hf", "native"):
        assert invoke("verify", made / name).exit_code == 0
        assert invoke("reshard", made / name, tmp_path / name, "--to", "native").exit_code == 0


@pytest.mark.parametrize(
    "break_",
    [huge_header_length, lambda folder: (folder / "index.npz").write_bytes(b"PK\x03\x04 no zip")],
    ids=["a rank's header", "the index"],
)
def test_what_native_holds_twice_can_break_once_and_nothing_is_lost(
    break_: Break, made: Path, copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Index and headers say the same: `verify` names the broken one, and the values still come over, whole and equal."""
    source = copy_of("native")
    break_(source)

    assert invoke("verify", source).exit_code == 1
    assert invoke("reshard", source, tmp_path / "out").exit_code == 0
    assert invoke("verify", tmp_path / "out", "--against", made / "native").exit_code == 0


def test_a_pickle_is_not_run(copy_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy_of("hf")
    pickle_for_a_shard(source)

    for command in ("inspect", "verify", "stats"):
        assert invoke(command, source).exit_code in (1, 3)

    assert not (tmp_path / "executed").exists()


@contextmanager
def touched_all_the_time(file: Path) -> Iterator[None]:
    """Changes a file's time again and again from another thread, as a writer at work would."""
    stop = threading.Event()

    def touch() -> None:
        stamp = file.stat().st_mtime_ns
        while not stop.wait(0.0005):
            stamp += 1_000_000
            os.utime(file, ns=(stamp, stamp))

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_source_that_changes_while_it_is_read_is_refused(
    copy_of: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copy_of("hf")

    with touched_all_the_time(shards(source)[0]):
        done = invoke("reshard", source, tmp_path / "out", "--to", "native", "--layout", "dp=2,zero=3")

    assert done.exit_code == 3, done.output
    assert shards(source)[0].name in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "stats", "ls", "latest"])
def test_where_there_is_nothing_the_store_is_at_fault(command: str, tmp_path: Path) -> None:
    done = invoke(command, tmp_path / "absent")

    assert done.exit_code == 4, done.output
    assert "absent" in done.stderr


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")

    done = invoke("inspect", tmp_path / "file")

    assert done.exit_code == 3, done.output


def test_a_destination_that_is_there_is_kept(made: Path, tmp_path: Path) -> None:
    """Without --overwrite nothing of it is touched."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")

    done = invoke("reshard", made / "hf", tmp_path / "out")

    assert done.exit_code in (2, 4), done.output
    assert "--overwrite" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_destination_below_a_file_is_a_store_fault(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")

    done = invoke("reshard", made / "hf", tmp_path / "file" / "out")

    assert done.exit_code == 4, done.output
    assert (tmp_path / "file").read_text() == "text"


LISTED = """
mount -t tmpfs -o "$1" none "$2" || exit 99
place=$2; shift 2
"$@"; code=$?
find "$place" -mindepth 1 >&2
exit $code
"""


def in_a_small_file_system(
    options: str, folder: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    """Run `ckptkit` with a tmpfs at `folder`, in a mount namespace of its own; what is left there is listed after its errors.

    Skips the test where such namespaces are not allowed.
    """
    unshare = shutil.which("unshare") or pytest.skip("there is no unshare")
    code = "from ckptkit.cli.main import cli; cli(prog_name='ckptkit')"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", LISTED, "sh", options, str(folder), *command],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode == 99 or "unshare failed" in done.stderr:
        pytest.skip("mount namespaces are not allowed here")
    return done


@pytest.mark.parametrize(
    ("case", "options", "said"),
    [
        ("too small, seen before anything is written", "size=64k", r"free|space"),
        ("full in the middle: no inode is left", "size=100m,nr_inodes=4", r"[Nn]o space left"),
        ("read-only", "size=100m,ro", r"[Rr]ead-only"),
    ],
)
def test_a_destination_that_cannot_hold_it_is_exit_code_4_and_no_checkpoint_is_there(
    case: str, options: str, said: str, made: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()

    done = in_a_small_file_system(
        options,
        tmp_path / "disk",
        "reshard",
        made / "native",
        tmp_path / "disk" / "out",
        "--layout",
        "dp=8,zero=1",
    )

    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr and "internal" not in done.stderr
    first, *left = done.stderr.strip().splitlines()
    assert re.search(said, first), done.stderr
    assert not any(line.endswith("/out") for line in left), done.stderr
    assert ("again" in first) == any("unfinished" in line for line in left), (
        "what is kept is kept for the next run"
    )


def with_a_head(file: Path, change: bool) -> None:
    """Store the tied head of a model beside its embedding, as some exporters do: equal, or with one bit changed."""
    header, data = split(file)
    embedding = header["model.embed_tokens.weight"]
    first, last = embedding["data_offsets"]
    copy = bytearray(data[first:last])
    copy[-1] ^= change
    header["lm_head.weight"] = {**embedding, "data_offsets": [len(data), len(data) + len(copy)]}
    join(file, header, data + copy)


@pytest.mark.parametrize("change", [False, True])
def test_replicas_must_be_equal_unless_the_first_is_asked_for(change: bool, tmp_path: Path) -> None:
    """A tied head is a replica of the embedding. Where they differ, the message names both."""
    source = tmp_path / "source"
    llama = ("--model", "llama", *settings({**TINY_LLAMA, "tie_word_embeddings": True}))
    assert invoke("synth", source, *llama, "--to", "hf", "--optimizer", "none").exit_code == 0
    with_a_head(source / "model.safetensors", change)

    checked = invoke("reshard", source, tmp_path / "checked", "--to", "native")
    first = invoke("reshard", source, tmp_path / "first", "--to", "native", "--replicas", "first")

    assert first.exit_code == 0, first.output
    assert checked.exit_code == (3 if change else 0), checked.output
    assert invoke("verify", source).exit_code == (1 if change else 0)
    if change:
        assert "lm_head.weight" in checked.stderr and "embed_tokens.weight" in checked.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "source"]
