"""Owners: which rank's pieces hold which elements."""

from collections.abc import Mapping

import numpy as np

from ckptkit.core.boxes import Ints
from ckptkit.core.catalog import ROLE_CODE, ROLES, Catalog
from ckptkit.core.plan import Key


class Owners:
    """Which rank's pieces hold which elements of a catalog's tensors; the first where several do."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._numbers = {name: number for number, name in enumerate(catalog.tensors)}
        self._ranks = np.asarray([file.rank for file in catalog.files], np.int64)
        order = np.argsort(catalog.piece_key, kind="stable")
        self._order, self._keys = order, catalog.piece_key[order]
        self.world = catalog.layout.world if catalog.layout is not None else 1

    def count(self, key: Key, shape: tuple[int, ...], where: Ints) -> dict[int, int]:
        """How many of the elements at row-major positions `where` lie in each rank's pieces."""
        if self.world == 1:
            return {}
        wanted = self._numbers[key[0]] * len(ROLES) + ROLE_CODE[key[1]]
        first, last = np.searchsorted(self._keys, [wanted, wanted + 1])
        pieces, files = self._catalog.pieces, self._catalog.entries.file
        index = (
            np.column_stack(np.unravel_index(where, shape)) if shape else np.zeros((len(where), 0), np.int64)
        )
        low, high = index.min(axis=0), index.max(axis=0)
        axes = len(shape)
        mine = self._order[first:last]
        near = np.all(pieces.lo[mine][:, :axes] <= high, axis=1) & np.all(
            pieces.hi[mine][:, :axes] > low, axis=1
        )
        found: dict[int, int] = {}
        for piece in mine[near].tolist():
            if not len(index):
                break
            inside = np.all((index >= pieces.lo[piece][:axes]) & (index < pieces.hi[piece][:axes]), axis=1)
            if inside.any():
                rank = int(self._ranks[files[pieces.entry[piece]]])
                found[rank] = found.get(rank, 0) + int(inside.sum())
                index = index[~inside]
        return found


def one_place(ranks: Mapping[str, Mapping[int, int]], worlds: Mapping[str, int]) -> str:
    """`all in rank 13's pieces of B`; empty where several ranks hold what differs, or there are none."""
    places = [
        f"rank {next(iter(owned))}'s pieces of {side}"
        for side, owned in ranks.items()
        if worlds[side] > 1 and len(owned) == 1
    ]
    return "all in " + " and ".join(places) if places else ""
