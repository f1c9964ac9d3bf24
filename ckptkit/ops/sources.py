"""Opening: from a URL to a store, a format and a catalog."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptkit.core.catalog import Catalog
from ckptkit.core.layouts import Layout
from ckptkit.formats.base import Format
from ckptkit.stores.base import Store


@dataclass
class Source:
    """An opened checkpoint.

    Attributes:
        url: The checkpoint's own URL or path (a step folder when a run was given).
        store: Where its bytes are.
        format: What it is stored as.
        catalog: Its pieces.
        notes: What the user should hear: which step was taken, which newer ones were passed over.
    """

    url: str
    store: Store
    format: Format
    catalog: Catalog
    notes: list[str] = field(default_factory=list)


def open(  # the API's own word for it
    url: str,
    *,
    format: str | None = None,
    layout: str | Layout | None = None,
    model: str | None = None,
    config: str | Mapping[str, Any] | None = None,
) -> Source:
    """Open a checkpoint for reading: headers and metadata only.

    Args:
        url: A path, a `file://` URL, `RUN@1200`, `RUN@latest`, or a run folder (its newest whole step).
        format, layout, model: Override what is detected: a format's name, a layout string, a model's name.
        config: A model configuration (or the folder or file that holds one) where the checkpoint has none.

    Raises:
        UsageError: the URL's scheme, the format or the model is not known, or a run has no such step.
        FormatError: it is no checkpoint of a known format, or a broken one.
        StoreError: there is nothing at `url`.
    """
    raise NotImplementedError
