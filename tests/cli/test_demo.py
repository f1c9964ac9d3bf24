"""`ckptkit demo`: the tour ends well and leaves nothing behind."""

from pathlib import Path

from tests.cli.helpers import invoke


def test_the_demo_holds_and_keeps_what_it_wrote_only_where_asked(tmp_path: Path) -> None:
    done = invoke("demo", tmp_path / "demo")

    assert done.exit_code == 0, done.output
    assert any(line.startswith("$ ckptkit ") for line in done.stdout.splitlines())
    assert done.stdout.splitlines()[-1].startswith("all as it should be: ")
    assert list((tmp_path / "demo").iterdir())
