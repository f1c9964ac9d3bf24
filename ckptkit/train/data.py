"""The token loader: bytes of files or of a seeded text, in an order that depends on the seed alone.

A token is a byte. The text is cut into windows of `seq_len + 1` bytes that overlap by one; each epoch goes through
them in a new order. Sequence number n of the run is the same bytes whatever the layout: ranks take their share of each step's
sequences, and their chunks of each sequence. The loader's state is how many sequences are used up.
"""

import glob
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ckptkit.errors import UsageError
from ckptkit.train.config import DataTable

Bytes = npt.NDArray[np.uint8]


def synthetic(size: int, seed: int) -> Bytes:
    """`size` bytes of text with something to learn: 256 made-up words, each of which likes four others to follow it."""
    random = np.random.default_rng(seed)
    letters = np.frombuffer(b"etaoinshrdlcumwfgypbvk", np.uint8)
    words = [bytes(random.choice(letters, random.integers(2, 8))) + b" " for _ in range(256)]
    likes = random.integers(0, len(words), (len(words), 4))
    choice = random.choice(4, size // 2, p=[0.55, 0.25, 0.15, 0.05]).tolist()
    follows = likes.tolist()
    text, at, have = [], 0, 0
    for pick in choice:
        at = follows[at][pick]
        text.append(words[at])
        have += len(words[at])
        if have >= size:
            break
    return np.frombuffer(b"".join(text)[:size], np.uint8)


def paths_of(table: DataTable) -> list[str]:
    """The files of a configuration. Raises UsageError for those that are not there."""
    paths = []
    for pattern in table.files:
        found = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
        if not found:
            raise UsageError(
                f"[data] files: there is no file {pattern}; give paths or patterns of files to read"
            )
        paths += found
    return [path for path in paths if Path(path).stat().st_size]


def check(table: DataTable, seq_len: int) -> None:
    """Raise UsageError where a configuration's data is not there or too short, without reading it."""
    sizes = [Path(path).stat().st_size for path in paths_of(table)]
    _windows(sizes if table.files else [table.synthetic_bytes], seq_len)


def _windows(sizes: list[int], seq_len: int) -> npt.NDArray[np.int64]:
    """How many windows there are up to and with each text."""
    counts = [max(0, (size - 1) // seq_len) for size in sizes]
    if not sum(counts):
        raise UsageError(
            f"the data has {sum(sizes)} bytes in {len(sizes)} files, which hold no sequence of {seq_len} tokens and one more; "
            "give more data, or a smaller [train] seq_len"
        )
    return np.cumsum(counts, dtype=np.int64)


def sources(table: DataTable) -> list[Bytes]:
    """The texts of a configuration; files are mapped, not read. Raises UsageError for files that are not there."""
    if not table.files:
        return [synthetic(table.synthetic_bytes, table.seed)]
    return [np.memmap(path, np.uint8, "r") for path in paths_of(table)]


class Loader:
    """Sequences of a run in their order.

    Args:
        texts: What is read.
        seq_len: Tokens of a sequence.
        batch: Sequences of a step, over all ranks.
        seed: Of the order.

    Raises:
        UsageError: the texts hold no whole sequence.
    """

    def __init__(self, texts: list[Bytes], seq_len: int, batch: int, seed: int) -> None:
        self.texts, self.seq_len, self.batch, self.seed = texts, seq_len, batch, seed
        self.ends = _windows([len(text) for text in texts], seq_len)
        self.windows = int(self.ends[-1])
        self.used = 0
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None

    def _window(self, number: int) -> Bytes:
        epoch, index = divmod(number, self.windows)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(self.windows)
        window = int(self._order[1][index])
        text = int(np.searchsorted(self.ends, window, side="right"))
        first = (window - (int(self.ends[text - 1]) if text else 0)) * self.seq_len
        return self.texts[text][first : first + self.seq_len + 1]

    def next(self, share: int, shares: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next step's tokens and targets, int64 [sequences, positions], of one of `shares` equal parts of the batch."""
        each = self.batch // shares
        numbers = range(self.used + share * each, self.used + (share + 1) * each)
        tokens = (
            torch.from_numpy(np.stack([self._window(number) for number in numbers]))
            .to(positions.device)
            .long()
        )
        self.used += self.batch
        return tokens[:, positions], tokens[:, positions + 1]

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used, "seed": self.seed, "seq_len": self.seq_len, "windows": self.windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a run was. Raises UsageError where that run read something else."""
        for name in ("seed", "seq_len", "windows"):
            if state[name] != getattr(self, name):
                raise UsageError(
                    f"the checkpoint's run read data with {name}={state[name]}, this one has {getattr(self, name)}: the "
                    "sequences would not be the same; give the same [data] and seq_len, or start from the weights alone "
                    "([checkpoint] init)"
                )
        self.used = int(state["used"])
