"""Native checkpoints whose small files were changed by someone who also mended the digests: read or refused, never a crash."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.core.catalog import Extras
from ckptkit.errors import CkptError
from ckptkit.formats.base import ReadOptions
from ckptkit.formats.native import NativeFormat
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_ranks import columns_of_ranks
from ckptkit.formats.reference import TOY, gather, random_truth, toy, write
from ckptkit.stores.local import LocalStore

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 70, 0.5, "", "a", [], {}]),
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("native") / "c"
    truth = random_truth(toy(), "megatron", state=True)
    truth.extras = Extras(common={"step": 3})
    write(NativeFormat(), truth, root, "tp=2,dp=2,zero=1")
    return root


def mend(root: Path, **changes: Any) -> None:
    """Change the manifest and give it its right checksum."""
    plain = json.loads((root / "manifest.json").read_text()) | changes
    plain.pop("checksum")
    head = json.dumps(plain, indent=1, sort_keys=True)[:-2] + ',\n "checksum": "'
    digest = xxhash.xxh3_128_hexdigest((head + "0" * 32 + '"\n}\n').encode())
    (root / "manifest.json").write_text(f'{head}{digest}"\n}}\n')


def try_all(root: Path) -> None:
    """Open, load everything, put every tensor together."""
    store = LocalStore(root)
    try:
        found = NativeFormat().read(store, ReadOptions(model=TOY))
        assert found.leaves is not None
        for number in range(len(found.files)):
            found.leaves(number)
        assert found.extras is not None
        list(NativeFormat().problems(store, found))
        gather(root, found)
    except CkptError as error:
        assert str(error)
    except AssertionError as error:  # an incomplete or contradicting catalog, which the planner reports
        assert "no piece holds" in str(error) or "replicas" in str(error)


def altered(value: Any, draw: Any) -> Any:
    """A JSON value with one part of it replaced, removed or doubled."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 9)) == 0:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: altered(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        if draw(st.integers(0, 9)) == 0:
            return value[:at] + value[at + 1 :]
        return [*value[:at], altered(value[at], draw), *value[at + 1 :]]
    return draw(VALUES)


def restored(root: Path, name: str, content: bytes, use: Callable[[], None]) -> None:
    """Use a checkpoint with one file changed, then change it back."""
    kept = {path: (root / path).read_bytes() for path in (name, "manifest.json")}
    try:
        (root / name).write_bytes(content)
        use()
    finally:
        for path, before in kept.items():
            (root / path).write_bytes(before)


@settings(max_examples=100)
@given(data=st.data())
def test_any_manifest(checkpoint: Path, data: st.DataObject) -> None:
    """Fields of any type and value, with a right checksum."""
    plain = json.loads((checkpoint / "manifest.json").read_text())
    changed = altered(plain, data.draw)
    if not isinstance(changed, dict):
        changed = {"files": changed}

    def use() -> None:
        mend(checkpoint, **changed)
        try_all(checkpoint)

    restored(checkpoint, "manifest.json", b"", lambda: None)
    restored(checkpoint, "index.npz", (checkpoint / "index.npz").read_bytes(), use)


@settings(max_examples=150)
@given(data=st.data())
def test_any_index(checkpoint: Path, data: st.DataObject) -> None:
    """Bytes of any value anywhere in the index, and a manifest that names its digest."""
    content = bytearray((checkpoint / "index.npz").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
            st.sampled_from([0, 1, 2, 127, 128, 255])
        )

    def use() -> None:
        mend(checkpoint, index=xxhash.xxh3_128_hexdigest(bytes(content)))
        try_all(checkpoint)

    restored(checkpoint, "index.npz", bytes(content), use)


@settings(max_examples=150)
@given(data=st.data())
def test_any_metadata_of_a_rank(checkpoint: Path, data: st.DataObject) -> None:
    """Metadata of any form in a header, with no index to help."""
    name = f"rank-{data.draw(st.integers(0, 3)):05d}.safetensors"
    content = (checkpoint / name).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    plain = altered(json.loads(header["__metadata__"]["ckptkit"]), data.draw)
    header["__metadata__"]["ckptkit"] = json.dumps(plain)
    text = json.dumps(header).encode()

    def use() -> None:
        try:
            columns_of_ranks(
                LocalStore(checkpoint), [f"rank-{rank:05d}.safetensors" for rank in range(4)]
            ).locals()
        except CkptError as error:
            assert str(error)

    restored(checkpoint, name, struct.pack("<Q", len(text)) + text + content[8 + length :], use)


@settings(max_examples=100)
@given(data=st.data())
def test_any_digest_file(checkpoint: Path, data: st.DataObject) -> None:
    """Bytes of any value in a digest file, its checksum mended or not."""
    content = bytearray((checkpoint / "rank-00000.digests").read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content[144:160] = xxhash.xxh3_128_digest(bytes(content[:144]) + bytes(16) + bytes(content[160:]))
    content = content[: len(content) - data.draw(st.sampled_from([0, 0, 0, 1, 16, 40]))]

    try:
        RankDigests.parse("rank-00000.digests", bytes(content))
    except CkptError as error:
        assert "rank-00000.digests" in str(error)
