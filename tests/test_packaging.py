"""What an installation contains, what it leaves alone, and what a start imports."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
in_checkout = pytest.mark.skipif(
    not (ROOT / "formats").is_dir(), reason="an unpacked sdist: folders instead of links"
)


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What `command` prints; a failure shows what it said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    env["PIP_CONFIG_FILE"] = os.devnull
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exits {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our wheel, built without a network."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    [path] = folder.glob("*.whl")
    return path


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel asks for, extras included."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = HeaderParser().parsestr(archive.read(name).decode())
    return [Requirement(line) for line in headers.get_all("Requires-Dist", [])]


def dummy_wheel(folder: Path, name: str, version: str, requires: Iterable[str] = ()) -> Path:
    """A wheel that holds nothing but its name, version and requirements."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {line}\n" for line in requires),
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{stem}.dist-info/{file},,\n" for file in [*files, "RECORD"])
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**files, "RECORD": record}.items():
            archive.writestr(f"{stem}.dist-info/{file}", text)
    return path


@in_checkout
@pytest.mark.parametrize("name", ["formats", "cli"])
def test_the_link_in_the_package_leads_to_the_folder_at_the_root(name: str) -> None:
    assert (ROOT / "ckptkit" / name).resolve() == ROOT / name


@in_checkout
@pytest.mark.parametrize("name", ["formats", "cli"])
def test_a_second_copy_of_a_linked_folder_cannot_be_imported(name: str) -> None:
    """An editable install puts the root on the path; `import formats` would double every class."""
    code = f"try: import {name}\nexcept ImportError as error: print(error)"

    assert f"import ckptkit.{name}, not {name}" in run(sys.executable, "-c", code)


def test_no_installed_module_lies_outside_the_package() -> None:
    files = metadata.distribution("ckptkit").files or []

    assert [str(file) for file in files if file.suffix == ".py" and file.parts[0] != "ckptkit"] == []


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    """Both linked folders come along as folders, at their place in the package."""
    expected = {
        (Path("ckptkit") / file.relative_to(ROOT / "ckptkit")).as_posix()
        for top in (ROOT / "ckptkit", ROOT / "ckptkit/formats", ROOT / "ckptkit/cli")
        for file in top.rglob("*.py")
    }

    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {"ckptkit/formats/__init__.py", "ckptkit/cli/__init__.py", "ckptkit/py.typed"} <= names
    assert {name for name in names if name.endswith(".py")} == expected
    assert {name.split("/")[0] for name in names} == {
        "ckptkit",
        f"ckptkit-{metadata.version('ckptkit')}.dist-info",
    }


def test_no_extra_and_no_lock_names_triton(wheel: Path) -> None:
    """ROCm ships it as pytorch-triton-rocm: to ask for `triton` would put a second one over it."""
    asked = {requirement.name for requirement in requirements(wheel)}
    locked = (
        {
            match[0].lower()
            for line in (ROOT / "requirements.lock").read_text().splitlines()
            if (match := re.match(r"[A-Za-z0-9._-]+", line))
        }
        if (ROOT / "requirements.lock").exists()
        else set()
    )

    assert "torch" in asked
    assert {name for name in asked | locked if re.search("triton|nvidia|cuda", name)} == set()


def test_the_torch_requirement_takes_any_build_of_any_later_version(wheel: Path) -> None:
    [torch] = [requirement for requirement in requirements(wheel) if requirement.name == "torch"]

    assert {specifier.operator for specifier in torch.specifier} == {">="}
    assert all(torch.specifier.contains(v) for v in ("2.4.0", "2.9.1+rocm6.4", "2.13.0+cpu", "3.0.0"))


def test_installing_ckptkit_replaces_neither_a_rocm_torch_nor_its_triton(wheel: Path, tmp_path: Path) -> None:
    """Even where newer ones are on offer, and even with --upgrade, pip would install ckptkit alone."""
    offers, have = tmp_path / "offers", tmp_path / "have"
    offers.mkdir()
    have.mkdir()
    for requirement in requirements(wheel):
        here = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if here and requirement.name != "torch":
            oldest = next(s.version for s in requirement.specifier if s.operator == ">=")
            dummy_wheel(have, requirement.name, oldest)
            dummy_wheel(offers, requirement.name, "9999.0")
    dummy_wheel(have, "torch", "2.9.1+rocm6.4", ["pytorch-triton-rocm==3.5.1"])
    dummy_wheel(have, "pytorch-triton-rocm", "3.5.1")
    dummy_wheel(offers, "torch", "9999.0", ["triton"])
    dummy_wheel(offers, "pytorch-triton-rocm", "9999.0")
    dummy_wheel(offers, "triton", "9999.0")
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
    ]
    run(*pip, "--no-deps", *have.glob("*.whl"))

    def would_install(*arguments: str | Path) -> set[str]:
        report = tmp_path / "report.json"
        run(*pip, "--dry-run", "--report", report, "--find-links", offers, *arguments)
        return {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}

    assert would_install(wheel) == {"ckptkit"}
    assert would_install("--upgrade", wheel) == {"ckptkit"}
    # The trap is armed: a package that asks for a newer torch gets it, and triton with it.
    assert would_install(dummy_wheel(offers, "greedy", "1.0", ["torch>=3"])) == {"greedy", "torch", "triton"}


# What a start of each may not load. torch alone takes seconds, and pulls in most of the others.
HEAVY = {"torch", "transformers", "triton", "zarr", "ray"}


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import ckptkit; ckptkit.__version__; dir(ckptkit)", HEAVY | {"numpy", "click", "rich", "fsspec"}),
        ("import ckptkit.core, ckptkit.models, ckptkit.stores, ckptkit.engine", HEAVY),
        ("import ckptkit.formats, ckptkit.ops", HEAVY),
        ("from ckptkit.cli.main import cli; cli(['--help'], standalone_mode=False)", HEAVY),
    ],
)
def test_a_start_does_not_load_what_it_does_not_need(code: str, heavy: set[str], tmp_path: Path) -> None:
    marker = "loaded: "
    show = f"import sys, json; print({marker!r} + json.dumps(sorted(sys.modules)))"

    printed = run(sys.executable, "-c", f"{code}\n{show}", cwd=tmp_path)

    [line] = [line for line in printed.splitlines() if line.startswith(marker)]
    assert heavy & set(json.loads(line.removeprefix(marker))) == set()


def test_every_name_of_the_python_api_can_be_had() -> None:
    import ckptkit

    assert [name for name in ckptkit.__all__ if getattr(ckptkit, name) is None] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ckptkit.nothing


def test_the_version_is_the_one_that_is_installed() -> None:
    """After a change of the version, `touch pyproject.toml` lets make renew the editable install."""
    import ckptkit

    assert ckptkit.__version__ == metadata.version("ckptkit")
