"""Which tensors go into which file of a folder of safetensors files, and which cannot."""

import numpy as np

from ckptkit.core.catalog import ROLES, Catalog
from ckptkit.core.dtypes import TABLE
from ckptkit.errors import LayoutError
from ckptkit.formats.base import Format
from ckptkit.formats.safetensors_file import check_writable, entry_text, written_shape

_FURTHEST = 1 << 50
"""An offset with as many digits as any, to bound a header's size before offsets are known."""


def check_holds(format: Format, accepted: bool, shards: Catalog) -> None:
    """Raise LayoutError for what whole tensors of this format cannot say."""
    entries, layout = shards.entries, shards.layout
    if layout is not None and layout.world != 1:
        raise LayoutError(
            f"format {format.name} holds whole tensors, not those of {layout.world} ranks; leave out --layout"
        )
    beyond = sorted({ROLES[code] for code in np.unique(entries.role)} - set(format.roles))
    if beyond:
        raise LayoutError(
            f"format {format.name} cannot hold {', '.join(beyond)}; leave them behind (--drop-optimizer)"
        )
    if shards.model is not None and not accepted:
        raise LayoutError(
            f"format {format.name} has the names called {format.names}, not {shards.names}; leave out --names"
        )
    check_writable({TABLE[code] for code in np.unique(entries.dtype)}, format.name)
    sizes = np.asarray([item.size for item in shards.locals], np.int64)
    if len(entries) and (entries.first.any() or (entries.last != sizes[entries.local]).any()):
        raise LayoutError(f"format {format.name} holds whole tensors, not runs of them")
    for item in shards.locals:
        if item.real_size != item.size:
            raise LayoutError(
                f"{item.key} is padded ({item.size} elements for {item.real_size}), which format {format.name} never is"
            )
    for row in range(len(entries)):
        shape, dtype = shards.locals[entries.local[row]].shape, TABLE[entries.dtype[row]]
        if not shape and written_shape(shape, dtype):
            raise LayoutError(
                f"{shards.locals[entries.local[row]].key} is one byte of {dtype}, which safetensors cannot hold alone"
            )


def split(shards: Catalog, largest: int, header_limit: int) -> list[list[int]]:
    """Entries of each file, each in the order of its data: widest types first, then by name.

    Tensors are taken in module order; one that is larger than `largest` has a file of its own.
    """
    entries = shards.entries
    closed: list[list[int]] = []
    current: list[int] = []
    room, text = largest, 0
    for row in np.argsort(entries.local, kind="stable").tolist():
        item, dtype = shards.locals[entries.local[row]], TABLE[entries.dtype[row]]
        nbytes = item.size * dtype.itemsize
        member = len(entry_text(item.key, item.shape, dtype, _FURTHEST).encode()) + 1
        if member + 64 > header_limit:
            raise LayoutError(
                f"the name {item.key[:60]}... needs a header above {header_limit} bytes", tensor=item.key
            )
        if nbytes > largest:
            closed.append([row])
            continue
        if current and (nbytes > room or text + member + 64 > header_limit):
            closed.append(current)
            current, room, text = [], largest, 0
        current.append(row)
        room, text = room - nbytes, text + member
    if current or not closed:
        closed.append(current)

    def order(row: int) -> tuple[int, str]:
        return -TABLE[entries.dtype[row]].itemsize, shards.locals[entries.local[row]].key

    return [sorted(rows, key=order) for rows in closed]
