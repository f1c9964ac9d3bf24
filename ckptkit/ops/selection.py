"""Which tensors a glob means: by canonical name, by `name/role`, or by the name they have in a family."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from ckptkit.core.plan import Key
from ckptkit.core.views import LocalTensor
from ckptkit.errors import UsageError


def select(
    keys: Iterable[Key], globs: Sequence[str], named: Mapping[str, LocalTensor] | None = None
) -> set[Key]:
    """The keys that any of `globs` matches.

    Args:
        keys: `(tensor, role)`.
        globs: `*`, `?` and `[...]`, against `tensor`, `tensor/role` or a name of `named`.
        named: A family's tensors; one that matches takes all canonical tensors that it is made of.

    Raises:
        UsageError: a glob matches nothing.
    """
    all_keys = list(keys)
    found: set[Key] = set()
    for glob in globs:
        parts = {
            s.tensor for key, local in (named or {}).items() if fnmatchcase(key, glob) for s in local.segments
        }
        hits = {
            (tensor, role)
            for tensor, role in all_keys
            if tensor in parts or fnmatchcase(tensor, glob) or fnmatchcase(f"{tensor}/{role}", glob)
        }
        if not hits:
            example = f"{all_keys[0][0]}/{all_keys[0][1]}" if all_keys else "there are no tensors"
            raise UsageError(
                f"{glob!r} matches no tensor; names look like {example} (`ckptkit inspect` lists them)"
            )
        found |= hits
    return found
