"""One checkpoint with optimizer state, made once and never changed."""

import pytest

from tests.ops.making import TRAINED, make


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A ZAYA1 on 16 ranks with Muon and AdamW state. Do not write to it."""
    return make(tmp_path_factory.mktemp("made") / "trained", layout=TRAINED)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model's weights in `hf`. Do not write to it."""
    return make(tmp_path_factory.mktemp("made") / "weights", to="hf", optimizer="none")
