"""Checks of a native checkpoint beyond its tensors: do the small files belong to the rank files, and are they whole."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import xxhash

from ckptkit.core.catalog import Catalog, File, Leaves
from ckptkit.errors import CkptError, CorruptionError, FormatError
from ckptkit.formats.native_columns import RANK_FILE, file_name
from ckptkit.formats.native_digests import RankDigests
from ckptkit.formats.native_manifest import INDEX, Manifest, RankFile, digests_name, read_extras
from ckptkit.stores.base import Store


def check_sizes(store: Store, manifest: Manifest) -> dict[str, str]:
    """The identities of all rank files, whose sizes are as the manifest says."""

    def look(file: RankFile) -> str:
        size = store.size(file.path)
        if size != file.size:
            raise FormatError(
                f"{file.path} in {store.url} has {size} bytes, its manifest says {file.size}: it was cut short or replaced. "
                "Load an older step or another copy",
                file=file.path,
            )
        return store.identity(file.path)

    with ThreadPoolExecutor(max(1, min(store.parallel, len(manifest.files)))) as pool:
        return dict(zip((f.path for f in manifest.files), pool.map(look, manifest.files), strict=True))


def leaves_of(store: Store, manifest: Manifest) -> Callable[[int], Leaves | None]:
    """Loads and checks `.digests` files when asked for."""

    @lru_cache(maxsize=256)
    def load(number: int) -> Leaves | None:
        return read_digests(store, manifest.files[number], manifest).as_leaves()

    return load


def read_digests(store: Store, file: RankFile, manifest: Manifest) -> RankDigests:
    """The checked digests of one rank file.

    Raises:
        ShardMissingError: the digest file is absent.
        CorruptionError: it does not match its checksum, or belongs to other bytes than the manifest's.
    """
    path = digests_name(file.path)
    found = RankDigests.parse(path, store.read(path))
    stated = (
        found.index.hex(),
        found.world,
        found.data_start + found.data_size,
        found.content.hex(),
        found.extras.hex(),
    )
    if stated != (manifest.index, len(manifest.files), file.size, file.digest, file.extras):
        raise CorruptionError(
            f"{path} in {store.url} belongs to another checkpoint (rank {found.rank}, step {found.step}) than its manifest; "
            "it was replaced",
            file=path,
        )
    return found


def problems_of(store: Store, catalog: Catalog) -> Iterator[CkptError]:
    manifest = Manifest.read(store)
    try:
        if xxhash.xxh3_128_hexdigest(store.read(INDEX)) != manifest.index:
            yield CorruptionError(
                f"{INDEX} is not what was written: its digest differs from the manifest's", file=INDEX
            )
    except CkptError as error:
        yield error

    def look(pair: tuple[RankFile, File]) -> list[CkptError]:
        found: list[CkptError] = []
        listed, file = pair
        try:
            digests = read_digests(store, listed, manifest)
            header = xxhash.xxh3_128_digest(store.read(listed.path, 0, file.data_start))
            if header != digests.header:
                found.append(
                    CorruptionError(f"the header of {listed.path} is not what was written", file=listed.path)
                )
        except CkptError as error:
            found.append(error)
        try:
            read_extras(store, [listed])
        except CkptError as error:
            found.append(error)
        return found

    with ThreadPoolExecutor(max(1, min(store.parallel, len(manifest.files)))) as pool:
        for errors in pool.map(look, zip(manifest.files, catalog.files, strict=True)):
            yield from errors


def missing_ranks_of(store: Store) -> list[int]:
    files = set(store.files())
    ranks = sorted(int(path[5:].partition(".")[0]) for path in files if RANK_FILE.fullmatch(path))
    world = ranks[-1] + 1 if ranks else 0
    for rank in ranks:
        path = digests_name(file_name(rank))
        if path in files:
            try:
                world = RankDigests.parse(path, store.read(path)).world
                break
            except CkptError:
                continue
    return [r for r in range(world) if not {file_name(r), digests_name(file_name(r))} <= files]
