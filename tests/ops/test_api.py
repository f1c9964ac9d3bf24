"""The Python API: what is exported, and what it costs to import."""

import subprocess
import sys

import ckptkit
from ckptkit import ops


def test_importing_and_inspecting_need_no_torch(weights: str) -> None:
    """Neither `import ckptkit.ops` nor a look at a folder of safetensors files loads torch or transformers."""
    code = (
        "import sys; import ckptkit.ops as ops; assert 'numpy' not in sys.modules; "
        f"ops.inspect({weights!r}); ops.plan({weights!r}, '/nonexistent/x', to='native', probe=False); "
        "print([m for m in ('torch', 'transformers', 'fsspec', 'click', 'rich') if m in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout.strip() == "[]", done.stderr


def test_every_name_that_is_promised_is_there() -> None:
    """In `ckptkit` and in `ckptkit.ops`; names of modules do not hide functions."""
    for module in (ckptkit, ops):
        for name in module.__all__:
            assert getattr(module, name) is not None
            assert name in dir(module)
    assert all(callable(getattr(ops, name)) for name in ops.__all__)
    assert not hasattr(ops, "nothing_of_the_kind")
