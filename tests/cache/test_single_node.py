"""One node with real processes: rows of the failure matrix that need no second node."""

from pathlib import Path

from tests.cache.cluster import Cluster


def test_a_step_is_committed_and_restored(tmp_path: Path) -> None:
    """Saved by two ranks, restored by new processes: every element and every extra."""
    with Cluster(tmp_path, ranks=2) as cluster:
        cluster.launch()
        assert cluster.start() is None
        cluster.save(1)
        cluster.save(2)

        assert cluster.restart() == 2
        cluster.save(3)
        assert cluster.restart() == 3
