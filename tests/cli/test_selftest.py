"""`ckptkit selftest`: kernels on this machine."""

from ckptkit.kernels.dispatch import operations
from tests.cli.helpers import invoke, invoke_json


def test_selftest_names_every_operation() -> None:
    """A line for each form: it agrees, or it says why it cannot run on a CPU."""
    done = invoke("selftest", "--device", "cpu")

    lines = done.stdout.splitlines()[1:]
    assert done.exit_code == 0
    assert {line.split()[1] for line in lines} >= set(operations())
    assert all(line.split()[0] in ("ok", "-", "not") for line in lines)
    assert any("restore, digests checked" in line for line in lines)


def test_selftest_in_json() -> None:
    """The same, for a report to send."""
    code, found = invoke_json("selftest", "--device", "cpu")

    torch_forms = [check for check in found["checks"] if check["backend"] == "torch"]
    assert code == 0 and len(torch_forms) == len(operations())
    assert all(check["passed"] and check["error"] == 0 for check in torch_forms)
    assert all(check["note"] for check in found["checks"] if check["passed"] is None)
    assert all(one["passed"] or one["note"] for one in found["copies"])


def test_selftest_refuses_a_device_that_does_not_exist() -> None:
    """One message, exit code 2."""
    done = invoke("selftest", "--device", "toaster")

    assert done.exit_code == 2 and "toaster" in done.stderr
