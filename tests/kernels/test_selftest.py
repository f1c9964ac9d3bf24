"""The check that users run on their own machine."""

import json

import pytest

from ckptkit.errors import UsageError
from ckptkit.kernels import dispatch, selftest
from tests.kernels.forms import ON_GPU


def test_every_operation_is_checked_in_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    """What runs here agrees; what cannot run says why."""
    code = selftest.main(["--json"])

    checks = json.loads(capsys.readouterr().out)["checks"]
    told = {(check["operation"], check["backend"]) for check in checks}
    assert code == 0
    assert told == {
        (operation, b) for operation in dispatch.operations() for b in dispatch.backends(operation)
    }
    assert all(check["passed"] or check["note"] for check in checks)
    assert sum(check["passed"] is True for check in checks) >= len(dispatch.operations())


@pytest.mark.skipif(ON_GPU, reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_said_so() -> None:
    """One line, no traceback."""
    with pytest.raises(UsageError, match="sees no GPU"):
        selftest.run("cuda")
