"""Bytes of many files, asked for in parallel: on a network each question is a round trip."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptkit.errors import CkptError
from ckptkit.stores.base import Store

_FEW = 64


def total_nbytes(store: Store, files: Sequence[str]) -> int:
    """The sum of all sizes. Files that cannot be looked at (gone, or links out of the folder) count as nothing."""

    def add(part: Sequence[str]) -> int:
        nbytes = 0
        for path in part:
            try:
                nbytes += store.size(path)
            except CkptError:  # reading it tells
                continue
        return nbytes

    if len(files) <= _FEW:
        return add(files)
    workers = max(1, store.parallel)
    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(add, [files[k::workers] for k in range(workers)]))
