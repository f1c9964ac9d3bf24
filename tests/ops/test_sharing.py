"""`reshard --base`: files that did not change lie on the disk once, and never the wrong ones."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckptkit import ops
from ckptkit.errors import InterruptedRunError, UsageError
from tests.ops.making import contents, flip, make

LAYOUT = "pp=3"


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Weights, the same with one tensor of the last layer changed, and a native step of the first."""
    root = tmp_path_factory.mktemp("sharing")
    before = make(root / "hf", to="hf", optimizer="none", dtype="float32")
    shutil.copytree(before, root / "later")
    file = root / "later" / "model.safetensors"
    values = load_file(file)
    name = next(name for name in sorted(values) if "layers.2." in name)
    values[name] = values[name] + np.float32(1)
    save_file(values, file, {"format": "pt"})
    base = ops.reshard(before, str(root / "base"), to="native", layout=LAYOUT, fingerprint=True).url
    return {"hf": before, "later": str(root / "later"), "base": base}


def inodes(folder: str | Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in Path(folder).glob("*.safetensors")}


def shared(a: str | Path, b: str | Path) -> list[str]:
    there = inodes(b)
    return sorted(name for name, inode in inodes(a).items() if there.get(name) == inode)


def test_files_that_turn_out_equal_are_shared_and_the_others_written(
    steps: dict[str, str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"to": "native", "layout": LAYOUT, "fingerprint": True}
    plain = ops.reshard(steps["later"], str(tmp_path / "plain"), **options)

    result = ops.reshard(steps["later"], str(tmp_path / "b"), base=steps["base"], **options)

    assert contents(tmp_path / "b") == contents(tmp_path / "plain")
    assert shared(tmp_path / "b", steps["base"]) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert shared(tmp_path / "plain", steps["base"]) == []
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "b").iterdir()}
    assert result.bytes_shared == sizes["rank-00000.safetensors"] + sizes["rank-00001.safetensors"]
    assert result.digests == plain.digests


def test_files_that_are_known_to_be_equal_are_not_written_at_all(
    steps: dict[str, str], tmp_path: Path
) -> None:
    """A copy of the base, in its own layout: digests tell before."""
    source = ops.copy(steps["base"], str(tmp_path / "a")).url

    result = ops.reshard(source, str(tmp_path / "b"), base=steps["base"], fingerprint=True)

    assert contents(tmp_path / "b").keys() == contents(source).keys()
    assert len(shared(tmp_path / "b", steps["base"])) == 3
    assert result.bytes_read == 0 and result.bytes_written < 100_000
    assert ops.verify(str(tmp_path / "b"), against=source, bitwise=True).exit_code == 0
    prints = [ops.open(url).catalog.facts["fingerprints"] for url in (str(tmp_path / "b"), source)]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("offset", [-1, 9, 5000])
def test_a_base_that_is_damaged_is_not_shared(steps: dict[str, str], tmp_path: Path, offset: int) -> None:
    """Not even where its digests say that it is equal."""
    base = ops.copy(steps["base"], str(tmp_path / "base")).url
    flip(Path(base) / "rank-00001.safetensors", offset)

    ops.reshard(steps["later"], str(tmp_path / "b"), to="native", layout=LAYOUT, base=base)

    assert shared(tmp_path / "b", base) == ["rank-00000.safetensors"]
    assert ops.verify(str(tmp_path / "b")).exit_code == 0


def test_another_layout_has_nothing_to_share(steps: dict[str, str], tmp_path: Path) -> None:
    result = ops.reshard(
        steps["hf"], str(tmp_path / "b"), to="native", layout="dp=3,zero=3", base=steps["base"]
    )

    assert result.bytes_shared == 0 and shared(tmp_path / "b", steps["base"]) == []


def test_what_is_written_later_never_reaches_the_base(steps: dict[str, str], tmp_path: Path) -> None:
    """A run that was stopped after it had shared files, and starts over: links are broken, not written through."""
    before = contents(steps["base"])

    def stop(done: int, total: int) -> None:
        if done >= total:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        ops.reshard(steps["base"], str(tmp_path / "b"), base=steps["base"], progress=stop)
    (left,) = [path for path in tmp_path.iterdir() if path.name.endswith(".unfinished")]
    assert len(shared(left, steps["base"])) == 3
    os.link(
        Path(steps["base"]) / "rank-00000.safetensors", left / "rank-00000.safetensors.sharing"
    )  # killed there
    (left / ".journal").write_text(
        (left / ".journal").read_text().splitlines()[0] + "\n"
    )  # nothing is durable

    ops.reshard(steps["base"], str(tmp_path / "b"))

    assert contents(steps["base"]) == before
    assert contents(tmp_path / "b").keys() == before.keys()
    assert ops.verify(str(tmp_path / "b")).exit_code == 0


def test_parts_share_too(steps: dict[str, str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"to": "native", "layout": LAYOUT, "base": steps["base"]}

    results = [ops.reshard(steps["later"], str(tmp_path / "b"), part=f"{k}/3", **options) for k in (1, 2, 3)]

    assert results[-1].committed
    assert len(shared(tmp_path / "b", steps["base"])) == 2
    assert ops.verify(str(tmp_path / "b")).exit_code == 0


def test_a_shared_file_stays_when_the_base_goes(steps: dict[str, str], tmp_path: Path) -> None:
    base = ops.copy(steps["base"], str(tmp_path / "base")).url
    ops.reshard(steps["hf"], str(tmp_path / "b"), to="native", layout=LAYOUT, base=base)

    shutil.rmtree(base)

    assert ops.verify(str(tmp_path / "b")).exit_code == 0


def test_wrong_uses(steps: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="native"):
        ops.reshard(steps["base"], str(tmp_path / "b"), to="hf", layout="tp=1", base=steps["base"])
    with pytest.raises(UsageError, match="hf"):
        ops.reshard(steps["hf"], str(tmp_path / "b"), to="native", base=steps["hf"])

    assert not os.listdir(tmp_path)
