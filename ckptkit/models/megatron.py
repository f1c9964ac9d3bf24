"""What Megatron-style families of all models share."""

from dataclasses import replace

from ckptkit.core.schema import Family, Name


def grouped(family: Family) -> Family:
    """The family with experts named as grouped linear layers name them: `experts.linear_fc1.weight{e}`.

    Its name is that of `family` and `_grouped`. `family` names them `experts.local_experts.{e}.linear_fc1.weight`.
    Grouped layers hold the first matrices of all experts, then the second ones, which is the order of their parameters.
    """

    def renamed(name: Name) -> Name:
        before, expert, after = name.key.partition("local_experts.{e}.")
        return replace(name, key=f"{before}{after}{{e}}") if expert else name

    return replace(family, name=f"{family.name}_grouped", layer=tuple(map(renamed, family.layer)))
