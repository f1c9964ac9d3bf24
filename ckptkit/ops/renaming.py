"""Renaming: rules from a file for tensors of a model without a schema, in either direction.

The file is TOML: one table, a pattern of each name on the left and what it becomes on the right. `{word}` stands for one part of a
name between dots, `{word*}` for one or more; both sides use the same words, so that rules can be read the other way round.

    [names]
    "model.layers.{i}.self_attn.{p}_proj.weight" = "layers.{i}.attn.{p}"
    "lm_head.weight" = "head"

The first rule that fits a whole name is used; a name that none fits stays as it is. What two names become must differ.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.errors import UsageError
from ckptkit.ops.sources import Source

_WORD = re.compile(r"\{([a-z_][a-z0-9_]*)(\*?)\}")


@dataclass(frozen=True)
class Rule:
    """One line: a pattern and what it becomes, with a matcher for each direction."""

    left: str
    right: str

    def __post_init__(self) -> None:
        words = [sorted(_WORD.findall(side)) for side in (self.left, self.right)]
        for side in (self.left, self.right):
            rest = _WORD.sub("", side)
            names = [name for name, _ in _WORD.findall(side)]
            if not side or "{" in rest or "}" in rest or len(set(names)) != len(names):
                raise UsageError(
                    f"{side!r} is no pattern: write {{word}} for one part of a name, {{word*}} for several, each word once"
                )
        if words[0] != words[1]:
            raise UsageError(
                f"{self.left!r} = {self.right!r}: both sides need the same words, so that the rule can be read both ways"
            )

    def turned(self) -> "Rule":
        return Rule(self.right, self.left)

    def apply(self, name: str) -> str | None:
        """What a name becomes; None where the rule does not fit it."""
        found = _matcher(self.left).fullmatch(name)
        if found is None:
            return None
        return _WORD.sub(lambda match: found[match[1]], self.right)


def _matcher(pattern: str) -> re.Pattern[str]:
    text, at = "", 0
    for word in _WORD.finditer(pattern):
        several = r"[^.]+(?:\.[^.]+)*" if word[2] else r"[^.]+"
        text += f"{re.escape(pattern[at : word.start()])}(?P<{word[1]}>{several})"
        at = word.end()
    return re.compile(text + re.escape(pattern[at:]))


def read_rules(rules: str | Mapping[str, str], *, back: bool = False) -> list[Rule]:
    """Rules from a file, or from a mapping; `back` turns them round.

    Raises UsageError for a file that cannot be read or is no table of names.
    """
    found: Any = rules
    where = "the rules"
    if isinstance(rules, str):
        where = rules
        try:
            plain = tomllib.loads(Path(rules).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--rename {rules}: cannot read it: {error.strerror}", file=rules) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"--rename {rules}: it is no TOML: {error}", file=rules) from error
        if set(plain) != {"names"}:
            raise UsageError(f"--rename {rules}: it needs one table, [names], and nothing else", file=rules)
        found = plain["names"]
    if not isinstance(found, Mapping) or not all(isinstance(value, str) for value in found.values()):
        raise UsageError(f'{where}: each rule is "pattern" = "name"')
    made = [Rule(left, right) for left, right in found.items()]
    return [rule.turned() for rule in made] if back else made


def new_names(names: Sequence[str], rules: Sequence[Rule]) -> tuple[dict[str, str], list[Rule]]:
    """What each name becomes, and the rules that fit none.

    Raises UsageError where two become the same.
    """
    found: dict[str, str] = {}
    owner: dict[str, str] = {}
    unused = set(rules)
    for name in names:
        made = name
        for rule in rules:
            other = rule.apply(name)
            if other is not None:
                made = other
                unused.discard(rule)
                break
        if made in owner:
            raise UsageError(
                f"{owner[made]} and {name} would both be called {made}; change the rules", tensor=name
            )
        owner[made] = name
        found[name] = made
    return found, [rule for rule in rules if rule in unused]


def renamed(source: Source, rules: Sequence[Rule]) -> Source:
    """A source whose tensors are called otherwise, optimizer groups included.

    Raises UsageError where the model has a schema, or two tensors would be called the same.
    """
    catalog = source.catalog
    if catalog.model is not None:
        raise UsageError(
            f"--rename is for models without a schema; {source.url} is {catalog.model.schema.id}, whose families of names --names "
            "takes"
        )
    names, unused = new_names(list(catalog.tensors), rules)
    changed = sum(new != old for old, new in names.items())
    notes = [f"{changed} of {len(names)} tensors are called otherwise (--rename)"]
    notes += [f"the rule {rule.left!r} fits no tensor" for rule in unused]
    locals_ = [
        item.renamed(names.get(item.key, item.key), [names[segment.tensor] for segment in item.segments])
        for item in catalog.locals
    ]
    prints = catalog.facts.get("fingerprints")
    facts = dict(catalog.facts)
    if prints:
        keys = {key: key.rpartition("/") for key in prints}
        facts["fingerprints"] = {
            f"{names[n]}/{role}": prints[k] for k, (n, _, role) in keys.items() if n in names
        }
    made = Catalog(
        format=catalog.format,
        where=catalog.where,
        tensors={names[name]: replace(tensor, name=names[name]) for name, tensor in catalog.tensors.items()},
        locals=locals_,
        files=catalog.files,
        entries=catalog.entries,
        layout=catalog.layout,
        names=catalog.names,
        extras=lambda: _extras(catalog.extras, names),
        facts=facts,
        leaves=catalog.leaves,
        identities=catalog.identities,
        derived=catalog.derived,
    )
    return replace(source, catalog=made, notes=[*source.notes, *notes])


def _extras(extras: Extras, names: Mapping[str, str]) -> Extras:
    """Extras whose optimizer groups list the new names."""
    groups = extras.common.get("groups")
    if not isinstance(groups, list):
        return extras
    made = [
        {**group, "tensors": [names.get(name, name) for name in group["tensors"]]}
        if isinstance(group, dict) and isinstance(group.get("tensors"), list)
        else group
        for group in groups
    ]
    return replace(extras, common={**extras.common, "groups": made})
