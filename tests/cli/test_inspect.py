"""`ckptkit inspect`: what is there, and where."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import ROOT, invoke, invoke_json

LAYOUT = "tp=2,pp=2,dp=2,zero=1"


def test_the_layout_is_what_the_layout_option_took(made: Path) -> None:
    done = invoke("inspect", made / "native")

    assert done.exit_code == 0, done.output
    assert f"layout   {LAYOUT}  (8 ranks)" in done.stdout


@pytest.mark.parametrize("name", ["hf", "native"])
def test_nothing_that_reads_headers_or_moves_bytes_imports_torch(
    name: str, made: Path, tmp_path: Path
) -> None:
    """torch takes seconds to import, and a storage node need not have it."""
    code = (
        "import sys; from ckptkit.cli.main import cli\n"
        "try: cli()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print('torch' in sys.modules)"
    )
    out = str(tmp_path / "out")
    for arguments in (
        ["inspect"],
        ["verify"],
        ["stats"],
        ["reshard", "--to", "native", "--layout", "dp=2,zero=3"],
    ):
        words = [
            arguments[0],
            str(made / name),
            *([out] if arguments[0] == "reshard" else []),
            *arguments[1:],
        ]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=ROOT
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "False", arguments


def test_tensors_that_differ_in_numbers_share_a_row(made: Path) -> None:
    rows = [
        line.split()[0]
        for line in invoke("inspect", made / "native").stdout.splitlines()
        if "layers." in line
    ]

    assert rows and all("{0,1}" in row or "{0..1}" in row for row in rows)


def test_all_gives_a_row_for_each_tensor(made: Path) -> None:
    rows = [
        line.split()[0]
        for line in invoke("inspect", made / "native", "--all").stdout.splitlines()
        if "layers." in line
    ]

    assert rows and not any("{" in row for row in rows)


def test_inspect_in_json_has_layout_and_world(made: Path) -> None:
    code, found = invoke_json("inspect", made / "native")

    assert code == 0
    assert (found["layout"], found["world"], found["format"]) == (LAYOUT, 8, "native")
    assert found["step"] == 1000


def test_what_one_rank_stores_is_what_its_file_holds(made: Path) -> None:
    """Entries against the header of the rank's own safetensors file."""
    file = made / "native" / "rank-00003.safetensors"
    raw = file.read_bytes()
    (size,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + size])
    stored = sorted(entry["data_offsets"][0] for name, entry in header.items() if not name.startswith("__"))

    code, found = invoke_json("inspect", made / "native", "--rank", 3)

    assert code == 0
    assert {entry["file"] for entry in found["entries"]} == {file.name}
    offsets = sorted(entry["offset"] for entry in found["entries"])
    assert [offset - offsets[0] for offset in offsets] == [offset - stored[0] for offset in stored]


def test_a_rank_that_is_not_there_is_wrong_use(made: Path) -> None:
    done = invoke("inspect", made / "native", "--rank", 8)

    assert done.exit_code == 2, done.output


def test_values_are_those_at_the_place_that_where_names(made: Path) -> None:
    """Bytes at the file and offset of --where, read by hand, are what --values prints."""
    _, found = invoke_json("inspect", made / "native", "--where", "norm/master[0:4]")
    piece = next(piece for piece in found["pieces"] if not piece["replica"])
    with (made / "native" / piece["file"]).open("rb") as file:
        file.seek(piece["offset"])
        by_hand = list(struct.unpack("<4f", file.read(16)))

    _, found = invoke_json("inspect", made / "native", "--values", "norm/master[0:4]")

    assert found["values"]["data"] == by_hand


@pytest.mark.parametrize("box", ["nowhere", "norm[1000]", "norm[0, 0]", "norm[a]", "norm/nothing"])
@pytest.mark.parametrize("option", ["--where", "--values"])
def test_a_box_that_is_not_there_is_wrong_use(option: str, box: str, made: Path) -> None:
    done = invoke("inspect", made / "native", option, box)

    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.stderr and "internal" not in done.stderr


def test_extras_are_json(made: Path) -> None:
    done = invoke("inspect", made / "native", "--extras")

    assert json.loads(done.stdout)["common"]["step"] == 1000


def test_text_of_pieces_and_entries_names_files(made: Path) -> None:
    assert "rank-0000" in invoke("inspect", made / "native", "--where", "norm").stdout
    assert "rank-00003.safetensors" in invoke("inspect", made / "native", "--rank", 3).stdout
    assert invoke("inspect", made / "native", "--values", "norm[0:3]").stdout.startswith("[")


def test_fingerprints_are_printed_one_a_line(made: Path, tmp_path: Path) -> None:
    """Those that are stored and those that are computed are the same ones, in whatever layout."""
    invoke("reshard", made / "native", tmp_path / "with", "--layout", "dp=2,zero=3", "--fingerprint")
    invoke("reshard", made / "native", tmp_path / "without", "--no-fingerprint")

    stored, computed = (
        invoke("inspect", tmp_path / "with", "--fingerprint"),
        invoke("inspect", tmp_path / "without", "--fingerprint"),
    )
    code, found = invoke_json("inspect", tmp_path / "without", "--fingerprint")

    assert sorted(stored.stdout.splitlines()) == sorted(computed.stdout.splitlines())
    assert stored.stderr.rstrip().endswith("as stored, 0 computed")
    assert code == 0 and found["fingerprints_computed"] == len(found["fingerprints"]) == len(
        stored.stdout.splitlines()
    )
