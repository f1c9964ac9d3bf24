"""Mistakes that a writer of checkpoints makes, as patches of the real code: each must be found by an exploration."""

import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from ckptkit.cache.durable import DurableRun
from ckptkit.engine.journal import Journal
from ckptkit.engine.writer import Outputs, Writer
from ckptkit.formats.native import NativeFormat
from ckptkit.formats.native_columns import file_name
from ckptkit.formats.native_manifest import NAME
from ckptkit.ops import collecting
from ckptkit.stores import durable, shared
from ckptkit.stores.durable import OutFile, UnfinishedFolder

Patch = Callable[[pytest.MonkeyPatch], None]


def no_sync_of_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OutFile, "sync", lambda self: None)


def no_sync_of_names(patch: pytest.MonkeyPatch) -> None:
    for module, name in ((durable, "sync_folder"), (shared, "_sync")):
        patch.setattr(module, name, lambda path: None)


def rename_not_synced(patch: pytest.MonkeyPatch) -> None:
    original = durable.sync_folder

    def sync(path: str) -> None:
        if ".unfinished" in path:
            original(path)

    patch.setattr(durable, "sync_folder", sync)


def renamed_before_its_files_are_durable(patch: pytest.MonkeyPatch) -> None:
    late: list[OutFile] = []
    sync, commit = OutFile.sync, UnfinishedFolder.commit

    def put_in_place(self: UnfinishedFolder, marker: tuple[str, bytes] | None = None) -> None:
        commit(self, marker)
        for folder, _, names in os.walk(self.target):
            for name in names:
                file = OutFile(
                    os.path.join(folder, name),
                    os.path.getsize(os.path.join(folder, name)),
                    direct=False,
                    memory=False,
                )
                sync(file)
                file.close()

    patch.setattr(OutFile, "sync", lambda self: late.append(self))
    patch.setattr(UnfinishedFolder, "commit", put_in_place)


def old_step_removed_first(patch: pytest.MonkeyPatch) -> None:
    commit = UnfinishedFolder.commit

    def remove_and_commit(self: UnfinishedFolder, marker: tuple[str, bytes] | None = None) -> None:
        shutil.rmtree(self.target, ignore_errors=True)
        commit(self, marker)

    patch.setattr(UnfinishedFolder, "commit", remove_and_commit)


def new_folders_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(durable, "make_folders", lambda path: os.makedirs(path, exist_ok=True))


def journal_before_data(patch: pytest.MonkeyPatch) -> None:
    original = Writer.make_durable

    def make_durable(self: Writer, journal: Journal) -> int:
        journal.append(self.outputs.durable(segment) for segment in self.complete)
        return original(self, journal)

    patch.setattr(Writer, "make_durable", make_durable)
    patch.setattr(Outputs, "sync", lambda self, numbers: None)


def journal_vouches_for_lost_files(patch: pytest.MonkeyPatch) -> None:
    original = Outputs.restore

    def restore(self: Outputs, rows: list[Any]) -> list[Any]:
        original(self, rows)
        return rows

    patch.setattr(Outputs, "restore", restore)


def old_journal_may_come_back(patch: pytest.MonkeyPatch) -> None:
    original = UnfinishedFolder.start_log

    def start_log(self: UnfinishedFolder, lines: Iterable[str]) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(durable, "sync_folder", lambda path: None)
            original(self, lines)

    patch.setattr(UnfinishedFolder, "start_log", start_log)


def shards_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared, "OutFile", type("Lazy", (OutFile,), {"sync": lambda self: None}))


def manifest_before_the_shards(patch: pytest.MonkeyPatch) -> None:
    """The drain writes a rank's digests, by which the manifest is made, before the rank's file."""
    original = shared._Local.write_file

    def write_file(self: Any, path: str, size: int, chunks: Iterable[memoryview]) -> None:
        if not path.endswith(".safetensors"):
            original(self, path, size, chunks)
            return
        data = b"".join(bytes(chunk) for chunk in chunks)
        full = os.path.join(self.url, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as file:  # in place; durable some time later
            file.write(data)

    patch.setattr(shared._Local, "write_file", write_file)


def retention_removes_data_first(patch: pytest.MonkeyPatch) -> None:
    def remove(self: DurableRun, name: str) -> None:
        below = shared.shared_folder(f"{self.url}/{name}")
        for path in sorted(below.files(), key=lambda path: path == NAME):
            below.remove(path)
        below.remove_empty()

    patch.setattr(DurableRun, "remove", remove)


def gc_removes_in_any_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(collecting, "remove_folder", lambda url, marker: shutil.rmtree(url))


def only_rank_0_tells_a_native_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        NativeFormat, "detect", lambda self, store: store.exists(NAME) or store.exists(file_name(0))
    )


BUGS: dict[str, tuple[Patch, str]] = {
    f"{patch.__name__.replace(chr(95), chr(32))} ({scenario})": (patch, scenario)
    for patch, scenario in (
        (no_sync_of_data, "save"),
        (no_sync_of_names, "save"),
        (rename_not_synced, "save"),
        (renamed_before_its_files_are_durable, "save"),
        (journal_before_data, "save"),
        (old_step_removed_first, "overwrite"),
        (new_folders_not_synced, "save-new-run"),
        (journal_vouches_for_lost_files, "resume-after-loss"),
        (old_journal_may_come_back, "restart"),
        (shards_not_synced, "drain"),
        (shards_not_synced, "hook-save"),
        (manifest_before_the_shards, "drain"),
        (only_rank_0_tells_a_native_step, "drain"),
        (retention_removes_data_first, "retention"),
        (gc_removes_in_any_order, "gc"),
        (gc_removes_in_any_order, "gc-hf"),
    )
}
"""Name of the mistake → its patch and a scenario that it spoils."""
