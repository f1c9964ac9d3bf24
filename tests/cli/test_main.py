"""The group: its commands, its help, and what is imported for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ckptkit.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "cli"
NAMES = [name for section in COMMANDS.values() for name in section]


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("name", NAMES)
def test_short_help_in_the_table_is_the_command_s_own(name: str) -> None:
    """The group's help is written without importing commands, so it could drift from them."""
    own = command(name).short_help

    assert own == next(section[name] for section in COMMANDS.values() if name in section)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_takes_json_and_debug(name: str) -> None:
    options = {opt for parameter in command(name).params for opt in parameter.opts}

    assert {"--json", "--debug"} <= options


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_every_option_has_its_place_in_the_docs(name: str) -> None:
    """docs/cli/NAME.md exists, the index links it, and it names each option."""
    page = (DOCS / f"{name}.md").read_text()
    spoken = set(re.findall(r"--[a-z][a-z-]*", page))
    options = {
        opt
        for p in command(name).params
        if isinstance(p, click.Option)
        for opt in p.opts
        if opt.startswith("--")
    }

    assert f"({name}.md)" in (DOCS / "index.md").read_text()
    assert options - {"--json", "--debug"} <= spoken


def test_docs_name_no_option_that_does_not_exist() -> None:
    """A page must not promise what the command refuses."""
    for name in NAMES:
        page = (DOCS / f"{name}.md").read_text()
        own = {opt for parameter in command(name).params for opt in parameter.opts}
        lines = [line for line in page.splitlines() if line.startswith(f"    ckptkit {name} ")]
        # What follows a bare -- is another program's.
        spoken = {opt for line in lines for opt in re.findall(r"--[a-z][a-z-]*", line.partition(" -- ")[0])}

        assert spoken <= own | {"--help"}, name


def test_there_is_a_module_and_a_row_for_each_command_and_no_page_too_many() -> None:
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index", "json", "completion"}

    assert pages == set(NAMES) - {"completion"}


def test_help_imports_neither_torch_nor_numpy_nor_a_command() -> None:
    """`ckptkit --help` must be quick: what is not imported costs nothing."""
    code = (
        "import sys; from ckptkit.cli.main import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'rich', 'fsspec'}))\n"
        "print('ckptkit.cli.reshard' in sys.modules)"
    )

    done = python(code)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "False"]


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command_does_not_import_torch(name: str) -> None:
    code = (
        "import sys; from ckptkit.cli.main import cli\n"
        f"try: cli([{name!r}, '--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'rich'}))"
    )

    done = python(code)

    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2() -> None:
    done = CliRunner().invoke(cli, [])

    assert done.exit_code == 2
    assert "Commands" not in done.stdout and "reshard" in done.stderr and done.stdout == ""


def test_an_unknown_command_is_wrong_use_and_names_the_near_one() -> None:
    done = CliRunner().invoke(cli, ["reshrad", "a", "b"])

    assert done.exit_code == 2
    assert "did you mean 'reshard'?" in done.stderr


def test_version_prints_one_line() -> None:
    done = CliRunner().invoke(cli, ["--version"])

    assert done.exit_code == 0
    assert re.fullmatch(r"ckptkit \d+\.\d+\S*\n", done.stdout)


@pytest.mark.parametrize(
    ("shell", "marker"), [("bash", "complete -o"), ("zsh", "#compdef ckptkit"), ("fish", "--command")]
)
def test_completion_prints_the_script_of_the_shell(shell: str, marker: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])

    assert done.exit_code == 0
    assert marker in done.stdout and "_CKPTKIT_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        ("ckptkit re", 1, ["plain,reshard"]),
        ("ckptkit reshard --drop-", 2, ["plain,--drop-optimizer", "plain,--drop-extras"]),
        ("ckptkit reshard --layout tp=2,z", 3, ["plain,tp=2,zero="]),
        ("ckptkit inspect ru", 2, ["dir,ru"]),
        ("ckptkit plan --to nat", 3, ["plain,native"]),
        ("ckptkit synth --model zay", 3, ["plain,zaya"]),
    ],
)
def test_a_shell_gets_what_can_follow(words: str, at: int, expected: list[str]) -> None:
    """The protocol of click's bash script: words and cursor in the environment, one candidate a line."""
    environment = {
        **os.environ,
        "_CKPTKIT_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(at),
    }

    done = subprocess.run(
        [sys.executable, "-c", "from ckptkit.cli.main import cli; cli(prog_name='ckptkit')"],
        capture_output=True, text=True, check=False, env=environment, cwd=ROOT,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert set(expected) <= set(done.stdout.split())
