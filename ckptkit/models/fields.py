"""Reading configurations: fields that must be there, with errors that name them."""

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import LayoutError


def whole(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The first of the fields `names` that is set, as a whole number >= 0.

    A field set to null counts as absent, as libraries write defaults that way.

    Raises:
        LayoutError: none is set and there is no default, or it is no whole number.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise LayoutError(
                f"the configuration has {name}={value!r}, which must be a whole number", field=name
            )
        return value
    if default is None:
        raise LayoutError(f"the configuration lacks {' or '.join(names)}", field=names[0])
    return default


def truth(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """The field `name` as true or false. Raises LayoutError when it is something else."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LayoutError(f"the configuration has {name}={value!r}, which must be true or false", field=name)
    return value


def heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Sizes of the attention axes that most decoders share: `kv_head`, `group`, `head_dim`, `hidden`.

    `group` counts query heads per key-value head.

    Raises:
        LayoutError: a field is missing, or key-value heads do not divide query heads.
    """
    hidden = whole(config, "hidden_size")
    query = whole(config, "num_attention_heads")
    kv = whole(config, "num_key_value_heads", default=query)
    if not kv or query % kv:
        raise LayoutError(
            f"the configuration has {query} attention heads and {kv} key-value heads, which do not divide them",
            field="num_key_value_heads",
        )
    head_dim = whole(config, "head_dim", default=hidden // query)
    return {"hidden": hidden, "kv_head": kv, "group": query // kv, "head_dim": head_dim}
