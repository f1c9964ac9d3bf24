"""A located version written out as a native checkpoint: `ckptkit cache get`."""

from collections.abc import Callable, Iterator

from ckptkit import stores
from ckptkit.cache.store import LocatedStore
from ckptkit.formats.native_manifest import NAME

_PIECE = 8 << 20


def export(store: LocatedStore, url: str, moved: Callable[[int], None] = lambda nbytes: None) -> int:
    """Write every file of a located version to a folder that appears whole or not at all; gives its bytes.

    Args:
        url: A path or URL at which there is nothing yet.
        moved: Told the bytes of each piece.

    Raises:
        StoreError: the destination failed, or is there already.
        CorruptionError: some leaf is right in no copy; nothing was put in place.
    """
    version = store.version
    identity = f"{version.inc}{version.epoch:x}{version.step:x}"

    def pieces(path: str, size: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(_PIECE, max(size, 1))))
        with store.open(path) as reader:
            for at in range(0, size, _PIECE):
                part = buffer[: min(_PIECE, size - at)]
                reader.readinto(at, part)
                yield part
                moved(part.nbytes)

    total = 0
    with stores.create_folder(url, identity) as folder:
        for path in store.files():
            if path == NAME:
                continue
            size = store.size(path)
            total += size
            folder.write_file(path, size, pieces(path, size))
        manifest = store.read(NAME)
        folder.commit((NAME, manifest))
    return total + len(manifest)
