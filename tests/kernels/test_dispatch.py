"""Which form of an operation runs, and what importing the package costs."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.resources import files

import pytest

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch
from tests.kernels.forms import needs_triton


def python(code: str) -> str:
    """What a fresh interpreter prints, without what PYTHONPATH adds (`make kernels` adds triton)."""
    env = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_choosing_a_form_loads_neither_torch_nor_triton() -> None:
    """The command line may ask what there is without paying for torch."""
    code = (
        "import sys; from ckptkit.kernels import dispatch; dispatch.resolve('pack', 'cpu'); "
        "print(sorted({'torch', 'triton', 'triton.language'} & set(sys.modules)))"
    )

    assert python(code).strip() == "[]"


def test_every_module_imports_where_triton_is_absent() -> None:
    """Kernels are defined at import; without triton a stand-in takes the decorator's place."""
    code = (
        "import importlib, pkgutil, sys, ckptkit.kernels as k\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'triton': raise ModuleNotFoundError(name, name=name)\n"
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'triton' else real(name, package)\n"
        "sys.meta_path.insert(0, Block())\n"
        "names = [m.name for m in pkgutil.iter_modules(k.__path__, 'ckptkit.kernels.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "from ckptkit.kernels.dispatch import INSTALLED\n"
        "print(len(names), INSTALLED)"
    )

    count, installed = python(code).split()

    assert int(count) >= 15 and installed == "False"


def test_cpu_tensors_get_the_torch_form() -> None:
    """Without a GPU and without a wish, everything works."""
    chosen = {dispatch.resolve(operation, "cpu") for operation in dispatch.operations()}

    assert chosen == {"torch"}


@needs_triton
def test_every_form_takes_the_arguments_of_the_torch_form() -> None:
    """A caller may swap forms: same names, same order, same defaults; further arguments have defaults."""
    for operation in dispatch.operations():
        plain = [*inspect.signature(form_of(operation, "torch")).parameters.values()]
        for backend in dispatch.backends(operation):
            have = [*inspect.signature(form_of(operation, backend)).parameters.values()]
            told = [(p.name, p.default) for p in have[: len(plain)]]
            assert told == [(p.name, p.default) for p in plain], (operation, backend)
            assert all(p.default is not p.empty for p in have[len(plain) :]), (operation, backend)


def form_of(operation: str, backend: str) -> Callable[..., object]:
    """The function itself, on whatever device it would run."""
    module, _, name = dispatch._FORMS[operation][backend].partition(":")
    form: Callable[..., object] = getattr(import_module(f"ckptkit.kernels.{module}"), name)
    return form


def test_an_unknown_operation_is_refused_by_name() -> None:
    """The message lists what there is."""
    with pytest.raises(UsageError, match=r"'rmsnrom'.*leaf_digests"):
        dispatch.choose("rmsnrom", "cpu")


def test_a_form_that_does_not_exist_is_refused() -> None:
    """Asking for a HIP router says which forms it has."""
    with pytest.raises(UsageError, match="route has no 'hip' form; it has torch, triton"):
        dispatch.choose("route", "cuda", backend="hip")


def test_hip_forms_refuse_cpu_tensors() -> None:
    """A wish that cannot be met is an error, not silently another form."""
    with pytest.raises(UsageError, match="needs a GPU, not cpu"):
        dispatch.choose("leaf_digests", "cpu", backend="hip")


@pytest.mark.parametrize("name", ["digest.hip", "rmsnorm.hip", "device.h"])
def test_sources_of_hip_kernels_are_package_data(name: str) -> None:
    """They are compiled on the user's machine, so they must be there."""
    assert (files("ckptkit.kernels") / "hip" / name).is_file()
