"""Opening: paths, URLs, runs and what they mean."""

import json
import shutil
from pathlib import Path

import pytest

from ckptkit import ops
from ckptkit.errors import FormatError, StoreError, UsageError
from tests.ops.making import make


@pytest.fixture
def run(tmp_path: Path, weights: str) -> Path:
    """Steps 9, 100 (in two epochs), and 200, which has no commit record."""
    folder = tmp_path / "run"
    make(folder / "step-9", optimizer="none")
    for name in ("step-100", "step-100.e2", "step-200"):
        shutil.copytree(folder / "step-9", folder / name)
    (folder / "step-200" / "manifest.json").unlink()
    return folder


def test_a_path_and_its_file_url_are_one(weights: str) -> None:
    """Both open the same checkpoint; percent signs stand for bytes in a URL only."""
    opened = ops.open(f"file://{weights}")

    assert opened.url == f"file://{weights}" and opened.format is not None
    assert opened.format.name == "hf" and opened.catalog.held == ops.open(weights).catalog.held


@pytest.mark.parametrize("url", ["s4://bucket/x", "nfs://host/x", "bucket://b"])
def test_an_unknown_scheme_is_refused_by_name(url: str) -> None:
    """Nothing is taken for a local path that is none."""
    with pytest.raises(UsageError, match=f"no store for {url.partition(':')[0]}://"):
        ops.open(url)


def test_a_file_url_of_another_host_is_refused() -> None:
    """`file://host/path` is a common slip for `file:///host/path`."""
    with pytest.raises(UsageError, match="no other host"):
        ops.open("file://server/data")


def test_nothing_there_and_a_file_are_told_apart(tmp_path: Path) -> None:
    """Each message says what to give instead."""
    (tmp_path / "x.txt").write_bytes(b"")

    with pytest.raises(StoreError, match="does not exist"):
        ops.open(str(tmp_path / "absent"))
    with pytest.raises(FormatError, match="is a file; give the folder"):
        ops.open(str(tmp_path / "x.txt"))


def test_a_run_means_its_newest_whole_step_and_says_so(run: Path) -> None:
    """The bare folder and @latest are the same; what was passed over is a note."""
    for url in (str(run), f"{run}@latest"):
        opened = ops.open(url)

        assert opened.url.endswith("step-100.e2")
        assert any("taking step-100.e2" in note for note in opened.notes)
        assert not any("step-200" in note for note in opened.notes)  # of an older epoch than what was taken


def test_a_step_is_chosen_by_number(run: Path) -> None:
    """The number is enough; with several epochs the last whole one is meant, unless one is named."""
    assert ops.open(f"{run}@9").url.endswith("step-9")
    assert ops.open(f"{run}@100").url.endswith("step-100.e2")
    assert ops.open(f"{run}@100.e0").url.endswith("step-100")


def test_a_step_that_is_absent_or_broken_says_what_there_is(run: Path) -> None:
    """The steps of the run are listed; a broken one says what it lacks."""
    with pytest.raises(UsageError, match="no step 7; its steps: 9, 100, 200"):
        ops.open(f"{run}@7")
    with pytest.raises(FormatError, match=r"step-200 is unfinished: manifest\.json is missing"):
        ops.open(f"{run}@200")


def test_a_folder_whose_name_has_an_at_sign_is_itself(tmp_path: Path) -> None:
    """What exists is never parsed."""
    made = make(tmp_path / "model@latest", optimizer="none")

    assert ops.open(made).url == made


def test_weights_beside_steps_are_meant(tmp_path: Path, weights: str) -> None:
    """Trainers put the final model into the folder that holds its steps."""
    shutil.copytree(weights, tmp_path / "out")
    shutil.copytree(weights, tmp_path / "out" / "checkpoint-500")

    assert ops.open(str(tmp_path / "out")).url == str(tmp_path / "out")
    assert ops.open(f"{tmp_path}/out@500").url.endswith("checkpoint-500")


def test_a_configuration_may_come_from_elsewhere(tmp_path: Path, weights: str) -> None:
    """A mapping, a file and a folder all stand in for a configuration that is missing."""
    bare = shutil.copytree(weights, tmp_path / "bare")
    given = bare / "config.json"
    config = json.loads(given.read_text())
    given.unlink()
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))

    assert ops.open(str(bare)).catalog.model is None
    for form in (config, str(tmp_path / "c"), str(tmp_path / "c" / "config.json")):
        model = ops.open(str(bare), config=form).catalog.model
        assert model is not None and model.schema.name == "zaya"


@pytest.mark.parametrize(
    ("text", "says"), [("[1", "is no JSON"), ("[1]", "holds no object"), (None, "cannot read")]
)
def test_a_configuration_that_makes_no_sense_is_refused(
    tmp_path: Path, weights: str, text: str, says: str
) -> None:
    """Wrong use, with the file's name; never a traceback."""
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(UsageError, match=says):
        ops.open(weights, config=str(path))


def test_sizes_that_no_tensor_can_have_are_the_source_s_fault(tmp_path: Path, weights: str) -> None:
    """A product of sizes that overflows makes the source unusable, not the command wrong."""
    broken = shutil.copytree(weights, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 10**30}))

    with pytest.raises(FormatError, match=r"config.json does not fit: .*cannot have shape"):
        ops.open(str(broken))


@pytest.mark.parametrize("name", [".weights.00ff.unfinished", "renamed"])
def test_a_folder_that_is_not_in_place_is_refused(tmp_path: Path, weights: str, name: str) -> None:
    """`hf` has no marker, so that a folder of preallocated files would open; its name or its journal says what it is."""
    folder = shutil.copytree(weights, tmp_path / name)
    if name == "renamed":
        (folder / ".journal").write_text("")

    with pytest.raises(FormatError, match="is unfinished"):
        ops.open(str(folder))


def test_a_whole_folder_that_had_to_make_room_opens(tmp_path: Path, weights: str) -> None:
    """What --overwrite set aside when it was stopped may be the only copy."""
    aside = shutil.copytree(weights, tmp_path / ".weights.00ff.replaced.unfinished")

    assert ops.open(str(aside)).catalog.model is not None
