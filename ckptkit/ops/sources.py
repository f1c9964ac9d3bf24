"""Opening: from a URL to a store, a format and a catalog."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ckptkit import models, stores
from ckptkit.core.catalog import Catalog, Checksum, Scaled
from ckptkit.core.layouts import Layout
from ckptkit.engine.derived import DerivedStore
from ckptkit.errors import FormatError, StoreError, UsageError
from ckptkit.formats import registry
from ckptkit.formats.base import Format, ReadOptions
from ckptkit.stores.base import Store
from ckptkit.stores.durable import UNFINISHED
from ckptkit.stores.folder import LOG, UNFINISHED_MARK

_AT = re.compile(r"(?P<run>.+)@(?P<which>latest|(?P<step>\d+)(?:\.e(?P<epoch>\d+))?)")


@dataclass
class Source:
    """An opened checkpoint.

    Attributes:
        url: The checkpoint's own URL or path (a step folder when a run was given).
        store: Where its bytes are.
        format: What it is stored as; None for values that exist only while they are read (`synth`).
        catalog: Its pieces.
        notes: What the user should hear: which step was taken, which newer ones were passed over.
    """

    url: str
    store: Store
    format: Format | None
    catalog: Catalog
    notes: list[str] = field(default_factory=list)

    @cached_property
    def checksums(self) -> list[Checksum]:
        """What its files state of themselves; empty where they state nothing."""
        return [] if self.format is None else list(self.format.checksums(self.store, self.catalog))

    @property
    def states_checksums(self) -> bool:
        """Whether its files state checksums; reads no more than the first where they are not loaded."""
        if "checksums" in self.__dict__:
            return bool(self.checksums)
        return self.format is not None and any(True for _ in self.format.checksums(self.store, self.catalog))


def open(  # the API's own word for it
    url: str,
    *,
    format: str | None = None,
    layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    dequantize: bool = False,
    fill_missing: bool = False,
) -> Source:
    """Open a checkpoint for reading: headers and metadata only.

    Args:
        url: A path (of a folder, or of one `.pt` file), a `file://` URL, `RUN@1200`, `RUN@1200.e3`,
            `RUN@latest`, or a run folder (its newest whole step).
        format, layout, model: Override what is detected: a format's name, a layout string, a model's name.
        config: A model configuration (or the folder or file that holds one) where the checkpoint has none.
        dequantize: Take block-scaled weights (float8 with `_scale_inv`) as the float32 values they stand for. Of models
            with a schema they always are.
        fill_missing: Take chunks that a zarr array lacks as its fill value, as zarr does: a loss looks the same.

    Raises:
        UsageError: the URL's scheme, the format or the model is not known, or a run has no such step.
        FormatError: it is no checkpoint of a known format, or a broken one.
        StoreError: there is nothing at `url`.
    """
    options = ReadOptions(
        model=models.named(model) if model is not None else None,
        layout=Layout.parse(layout) if isinstance(layout, str) else layout,
        config=read_config(config),
        dequantize=dequantize,
        fill_missing=fill_missing,
    )
    known = registry.by_name(format) if format is not None else None
    path, notes = resolve(url, known)
    store = stores.open_store(path)
    _refuse_unfinished(path, store)
    found = known or registry.detect(store)
    catalog = found.read(store, options)
    if catalog.derived:
        store = DerivedStore(store, catalog.derived)
        scaled = sum(isinstance(one, Scaled) for one in catalog.derived.values())
        if scaled:
            notes.append(f"{scaled} block-scaled weights are read as the float32 values they stand for")
    return Source(path, store, found, catalog, notes)


def _refuse_unfinished(url: str, store: Store) -> None:
    """Raise FormatError for a folder that a writer has not put in place. Formats without a marker cannot tell it themselves."""
    name = UNFINISHED.fullmatch(os.path.basename(os.path.abspath(stores.local_path(url) or url)))
    if (name is not None and not name["replaced"]) or store.exists(LOG) or store.exists(UNFINISHED_MARK):
        raise FormatError(
            f"{url} is unfinished: its writer has not ended, or was stopped. Run its command again to finish it",
            file=url,
        )


def resolve(url: str, format: Format | None = None) -> tuple[str, list[str]]:
    """The checkpoint that `url` means, and notes on how it was chosen (see `open`)."""
    at = _AT.fullmatch(url)
    if stores.is_weight_file(url):
        return url, []
    if at is None or stores.is_folder(url):
        if not stores.is_folder(url):
            path = stores.local_path(url)
            if path is not None and os.path.exists(path):
                raise FormatError(f"{url} is a file; give the folder that holds the checkpoint", file=url)
            raise StoreError(f"{url} does not exist", file=url)
        return _run_or_checkpoint(url, format)
    run, which = at["run"], at["which"]
    if which == "latest":
        return _newest(run)
    return _numbered(run, int(at["step"]), int(at["epoch"]) if at["epoch"] else None)


def _run_or_checkpoint(url: str, format: Format | None) -> tuple[str, list[str]]:
    from ckptkit.ops import runs

    if not runs.step_folders(url):
        return url, []
    store = stores.open_store(url)
    # Trainers put the final model beside its steps; what lies at the root is meant then.
    if format.detect(store) if format is not None else registry.looks_like(store):
        return url, []
    return _newest(url)


def _newest(run: str) -> tuple[str, list[str]]:
    from ckptkit.ops import runs

    found = runs.newest(run, quick=True)
    if found.path is None:
        raise FormatError(found.summary(), file=run)
    return found.path, [f"{run}: taking {found.step.name if found.step else found.path}", *found.reasons()]


def _numbered(run: str, step: int, epoch: int | None) -> tuple[str, list[str]]:
    from ckptkit.ops import runs

    rows = runs.steps(run).steps
    matching = [r for r in rows if r.step == step and epoch in (None, r.epoch) and not r.temporary]
    if not matching:
        there = ", ".join(str(n) for n in sorted({row.step for row in rows if not row.temporary})) or "none"
        raise UsageError(
            f"{run} has no step {step}{'' if epoch is None else f' of epoch {epoch}'}; its steps: {there}"
        )
    whole = [row for row in matching if row.state == "whole"]
    if not whole:
        raise FormatError(
            f"{matching[-1].path} is {matching[-1].state}: {matching[-1].why}", file=matching[-1].path
        )
    best = max(whole, key=lambda row: row.epoch)
    others = [
        f"{row.name} of the same step is {row.state}: {row.why}" for row in matching if row.state != "whole"
    ]
    return best.path, [f"{run}: taking {best.name}", *others]


def read_config(config: str | Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A configuration given as a mapping, a JSON file, or a folder that holds `config.json`."""
    if config is None or isinstance(config, Mapping):
        return config
    path = os.path.join(config, "config.json") if os.path.isdir(config) else config
    try:
        found = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise UsageError(f"--config {config}: cannot read {path}: {error.strerror}", file=path) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config {config}: {path} is no JSON: {error}", file=path) from error
    if not isinstance(found, dict):
        raise UsageError(f"--config {config}: {path} holds no object of configuration fields", file=path)
    return found
