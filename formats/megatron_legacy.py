"""Megatron's checkpoints of before `torch_dist` (`--ckpt-format torch`): one folder for each model-parallel rank.

    latest_checkpointed_iteration.txt            (a run) which iteration is whole; written last
    iter_0001000/mp_rank_00_000/model_optim_rng.pt   a rank's weights and training state
                                distrib_optim.pt     state of the distributed optimizer, flat and without names

An iteration has no mark of its own: it is whole when every rank's files are there. Weights are whole local tensors, so that
data parallelism and ZeRO change nothing but where optimizer state lies.
Source: Megatron-LM, `megatron/training/checkpointing.py`.
"""

from collections.abc import Iterator
from typing import ClassVar

from ckptkit.core.catalog import Catalog, Checksum
from ckptkit.core.destination import Destination
from ckptkit.errors import ShardMissingError
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.megatron_folder import TRACKER, find_iteration, target_prefix, tracked, tracker_of
from ckptkit.formats.megatron_legacy_reader import Reader
from ckptkit.formats.megatron_legacy_writer import lay_out_parts
from ckptkit.formats.megatron_parts import STATE, folders
from ckptkit.formats.megatron_writer import small_files
from ckptkit.formats.torch_zip import file_checksums
from ckptkit.stores.base import Store


class MegatronLegacyFormat(Format):
    """Names are those of Megatron's modules, numbered anew on every rank."""

    name: ClassVar[str] = "megatron-legacy"
    names: ClassVar[str] = "megatron"
    parts: ClassVar[tuple[str, ...]] = ("base",)
    roles: ClassVar[tuple[str, ...]] = ("param", "buffer", "master", "exp_avg", "exp_avg_sq", "momentum")
    ranks: ClassVar[bool] = True
    extras: ClassVar[bool] = True

    def detect(self, store: Store) -> bool:
        folder = tracked(store)
        prefix = f"{folder}/" if folder else ""
        return bool(folders([p.removeprefix(prefix) for p in store.files() if p.startswith(prefix)]))

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        here, prefix = find_iteration(store)
        names = folders(here.files())
        if not names:
            raise ShardMissingError(f"{here.url} has no mp_rank folder with a {STATE}", file=STATE)
        return Reader(store, here, prefix, names, options).catalog()

    def uncommitted(self, run: Store, folder: str) -> str:
        """An iteration above the tracker's is one whose save has not ended."""
        known = tracked(run)
        if known is None or not known.startswith("iter_") or not folder.startswith("iter_"):
            return ""
        newest, step = int(known.removeprefix("iter_")), int(folder.removeprefix("iter_"))
        return f"{TRACKER} says {newest}: its save has not ended" if step > newest else ""

    def checksums(self, store: Store, catalog: Catalog) -> Iterator[Checksum]:
        return file_checksums(store, (file.path for file in catalog.files))

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """Every model-parallel rank's files, and a run around them, unless the destination is an iteration's folder."""
        step = shards.extras.common.get("step")
        prefix = target_prefix(shards.where, step if isinstance(step, int) else None)
        laid = lay_out_parts(shards, prefix, options.facts)
        finish = [(prefix + path, content) for path, content in small_files(shards, set())]
        finish += tracker_of(prefix)
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=laid.rows.locals.items, files=laid.files,
            entries=laid.rows.entries(), layout=shards.layout, model=shards.model, names=shards.names,
            extras=shards.extras, facts=shards.facts,
        )  # fmt: skip
        return Destination(
            catalog=catalog, literals=laid.literals, fixups=laid.fixups, finish=lambda written: finish
        )
