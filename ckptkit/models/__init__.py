"""Models, declared: one file each. `find` gives the schema that a configuration belongs to."""

from collections.abc import Mapping
from typing import Any

from ckptkit.core.schema import Schema
from ckptkit.errors import UsageError


def schemas() -> dict[str, Schema]:
    """Every known schema, by name."""
    from ckptkit.models import llama, mixtral, qwen_moe, zaya

    return {module.SCHEMA.name: module.SCHEMA for module in (zaya, llama, mixtral, qwen_moe)}


def find(config: Mapping[str, Any]) -> Schema | None:
    """The schema for a configuration's `model_type`, or None."""
    kind = config.get("model_type")
    for schema in schemas().values():
        if kind in schema.model_types:
            return schema
    return None


def named(name: str) -> Schema:
    """The schema called `name`. Raises UsageError that lists the known ones."""
    known = schemas()
    if name not in known:
        raise UsageError(f"unknown model {name!r}; known: {', '.join(known)}")
    return known[name]
