"""The loader: what ranks get adds up to what one rank gets, and goes on where it was."""

from pathlib import Path

import numpy as np
import pytest
import torch

from ckptkit.errors import UsageError
from ckptkit.train.config import DataTable
from ckptkit.train.data import Loader, sources, synthetic

ALL = torch.arange(8)


def _loader(texts: list[bytes], batch: int = 4, seed: int = 0) -> Loader:
    return Loader([np.frombuffer(text, np.uint8) for text in texts], 8, batch, seed)


def test_an_epoch_has_every_window_once_and_the_next_another_order() -> None:
    """Windows overlap by one byte: the last target of one is the first token of the next."""
    texts = [bytes(range(33)), bytes(range(100, 117)), b"short"]
    loader = _loader(texts, batch=6)

    first, second = loader.next(0, 1, ALL), loader.next(0, 1, ALL)

    windows = sorted(first[0].tolist())
    assert windows == [list(range(k, k + 8)) for k in (0, 8, 16, 24, 100, 108)]
    assert torch.equal(first[1], first[0] + 1)
    assert sorted(second[0].tolist()) == windows
    assert second[0].tolist() != first[0].tolist()


def test_shares_and_chunks_add_up_to_the_whole() -> None:
    texts = [bytes(range(200))]
    whole = _loader(texts).next(0, 1, ALL)

    parts = [_loader(texts).next(share, 2, ALL[half : half + 4]) for share in (0, 1) for half in (0, 4)]

    for k in (0, 1):
        rows = [torch.cat([parts[2 * share][k], parts[2 * share + 1][k]], 1) for share in (0, 1)]
        assert torch.equal(torch.cat(rows), whole[k])


def test_a_restored_loader_goes_on_where_it_was() -> None:
    """Also over the end of an epoch, which is 24 windows here."""
    loader = _loader([bytes(range(200))])
    for _ in range(5):
        loader.next(0, 1, ALL)
    state = loader.state_dict()
    expected = [loader.next(0, 1, ALL)[0].tolist() for _ in range(4)]

    again = _loader([bytes(range(200))])
    again.load_state_dict(state)

    assert [again.next(0, 1, ALL)[0].tolist() for _ in range(4)] == expected


def test_other_data_than_the_checkpoints_is_refused() -> None:
    state = _loader([bytes(range(200))]).state_dict()

    with pytest.raises(UsageError, match="windows=24, this one has 2"):
        _loader([bytes(range(20))]).load_state_dict(state)
    with pytest.raises(UsageError, match="seed=0, this one has 1"):
        _loader([bytes(range(200))], seed=1).load_state_dict(state)


def test_the_synthetic_text_is_text_that_can_be_learned_and_depends_on_its_seed() -> None:
    a, b = synthetic(20_000, 0), synthetic(20_000, 1)

    assert len(a) == len(b) == 20_000
    assert set(bytes(a)) <= set(b"etaoinshrdlcumwfgypbvk ")
    assert bytes(a) != bytes(b)
    assert bytes(a) == bytes(synthetic(20_000, 0))
    pairs = np.unique(np.stack([a[:-1], a[1:]]), axis=1).shape[1]
    assert pairs < 23 * 23, "not every pair of letters occurs"


def test_files_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, text in (("b.txt", b"second"), ("a.txt", b"first"), ("c.txt", b"")):
        (tmp_path / name).write_bytes(text)

    found = sources(DataTable(files=[str(tmp_path / "*.txt")]))

    assert [bytes(text) for text in found] == [b"first", b"second"]
