"""`ckptkit doctor`."""

from pathlib import Path

from tests.cli.helpers import invoke, invoke_json


def test_the_doctor_says_what_it_looked_at(tmp_path: Path) -> None:
    """One line each, and the URL's last."""
    done = invoke("doctor", str(tmp_path / "run"))

    assert done.exit_code == 0
    assert "torch: " in done.stdout
    assert "can be written; it holds 0 step folders" in done.stdout.splitlines()[-1]


def test_a_url_that_cannot_be_written_is_exit_code_4(tmp_path: Path) -> None:
    """In JSON, too."""
    (tmp_path / "file").write_text("")

    code, found = invoke_json("doctor", str(tmp_path / "file" / "run"))

    assert code == 4
    assert [f["name"] for f in found["findings"] if f["state"] == "fault"] == ["url"]
