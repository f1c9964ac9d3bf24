"""Who keeps copies for whom: nodes in small groups (cliques), each as spread over failure domains as can be.

With cliques a second lost node is fatal only inside its clique: of 16 nodes with one copy, 8 of 120 pairs, where a ring has 16.
A pure function of the members, so that every node computes the same without asking.

>>> Cliques({"a": "rack1", "b": "rack1", "c": "rack2", "d": "rack2"}, copies=1).groups
(('a', 'c'), ('b', 'd'))
"""

from collections.abc import Collection, Mapping


class Cliques:
    """The cliques of some nodes.

    Nodes sorted by (domain, name) are dealt out to as many cliques as give each at least copies + 1 nodes, so that the nodes of one
    domain go to different cliques: two copies share a domain only where a domain has more nodes than there are cliques.

    Args:
        domains: The failure domain of each node.
        copies: On how many further nodes each shard is kept. Fewer than that, where there are not so many nodes.

    Attributes:
        groups: The cliques. Inside one, a node's copies go to the next ones, in a ring.
        copies: How many copies there can be.
    """

    def __init__(self, domains: Mapping[str, str], copies: int) -> None:
        self.copies = max(0, min(copies, len(domains) - 1))
        nodes = sorted(domains, key=lambda node: (domains[node], node))
        count = max(1, len(nodes) // (self.copies + 1))
        self.groups = tuple(tuple(nodes[start::count]) for start in range(count))
        self._group = {node: index for index, group in enumerate(self.groups) for node in group}
        self._domains = dict(domains)

    def mates(self, node: str) -> tuple[str, ...]:
        """The others of its clique, from the next one on; empty for a node that is no member."""
        if node not in self._group:
            return ()
        group = self.groups[self._group[node]]
        at = group.index(node)
        return group[at + 1 :] + group[:at]

    def targets(self, node: str) -> tuple[str, ...]:
        """The nodes that keep copies of its shards."""
        return self.mates(node)[: self.copies]

    def replicated(self, holders: Collection[str]) -> bool:
        """Whether a shard on these nodes outlives the loss of any `copies` nodes of every clique."""
        counts: dict[int, int] = {}
        for node in holders:
            if (group := self._group.get(node)) is not None:
                counts[group] = counts.get(group, 0) + 1
        return any(count > self.copies for count in counts.values())

    def collisions(self) -> int:
        """How many copies lie in the failure domain of their node (nodes of unknown domain apart)."""
        return sum(
            self._domains[node] == self._domains[target] != ""
            for group in self.groups for node in group for target in self.targets(node)
        )  # fmt: skip
