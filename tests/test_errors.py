"""The error tree: exit codes, facts, pickling."""

import pickle

import pytest

from ckptkit import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.LayoutError, 2),
        (errors.FormatError, 3),
        (errors.ShardMissingError, 3),
        (errors.CoverageError, 3),
        (errors.CorruptionError, 3),
        (errors.UnsafeError, 3),
        (errors.StoreError, 4),
        (errors.InterruptedRunError, 5),
        (errors.TrainingError, 6),
    ],
)
def test_every_kind_has_the_exit_code_of_the_design_and_stands_in_the_docstring(
    kind: type[errors.CkptError], code: int
) -> None:
    assert issubclass(kind, errors.CkptError)
    assert kind.exit_code == code
    assert kind.__name__ in (errors.__doc__ or "")


def test_facts_are_attributes_and_survive_pickling() -> None:
    """Workers send their errors to the parent process by pickle."""
    error = errors.ShardMissingError("a.safetensors is absent", file="a.safetensors", tensor="w")

    back = pickle.loads(pickle.dumps(error))

    assert type(back) is errors.ShardMissingError
    assert str(back) == "a.safetensors is absent"
    assert (back.file, back.tensor) == ("a.safetensors", "w")
    assert back.facts == {"file": "a.safetensors", "tensor": "w"}


def test_a_missing_shard_is_a_file_not_found_error() -> None:
    """Callers who know only the builtin still catch it."""
    with pytest.raises(FileNotFoundError, match="absent"):
        raise errors.ShardMissingError("a.safetensors is absent")


def test_a_fact_that_was_not_given_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = errors.StoreError("disk full").tensor
