"""With the node's cache daemon: saves go to memory, restores come from there, in the same layout or another."""

from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.faults.cluster.nodes import Cluster
from tests.hooks import jobs
from tests.hooks.models import differing
from tests.hooks.ranks import run_ranks
from tests.hooks.test_ranks import reference, weights


@pytest.mark.parametrize("after", [("fsdp", 2), ("tp", 2)], ids=["same", "other"])
def test_a_killed_run_goes_on_from_memory(after: tuple[str, int], tmp_path: Path) -> None:
    """Two ranks die without closing anything; new ones restore the last committed step from slots."""
    with Cluster(tmp_path, nodes=1, drain=True, scale=1.0) as cluster:
        socket, url = cluster.nodes[0].socket, str(cluster.durable)
        one = run_ranks(2, jobs.cached, "fsdp", url, socket, 3, 1)

        two = run_ranks(after[1], jobs.cached, after[0], url, socket, 5, 1)

        assert [result["first"] for result in two] == [3, 3]
        assert differing(weights(one[0]["state"]), weights(two[0]["restored"])) == []
        torch.testing.assert_close(one[0]["losses"] + two[0]["losses"], reference(5), rtol=1e-6, atol=0)


def test_a_durable_step_is_a_native_checkpoint_at_the_url(tmp_path: Path) -> None:
    """Level 3: the daemon has drained it; it can be restored without any cache."""
    with Cluster(tmp_path, nodes=1, drain=True, scale=1.0) as cluster:
        socket, url = cluster.nodes[0].socket, str(cluster.durable)
        one = run_ranks(2, jobs.cached, "ddp", url, socket, 2, 3)

        steps = jobs.steps_in(url)
        assert ckptkit.verify(f"{url}/{steps[-1]}").exit_code == 0

    two = run_ranks(1, jobs.train, "plain", url, 3, None, group=False)
    assert two[0]["first"] == 2
    assert differing(weights(one[0]["state"]), weights(two[0]["restored"])) == []


def test_saves_that_another_rank_gave_up_are_skipped_and_end_no_run(tmp_path: Path) -> None:
    """More in a row than failures are allowed: the cache may refuse saves, never end the training; `wait` says that there was no save."""
    with Cluster(tmp_path, nodes=1, ranks=2, scale=1.0) as cluster:
        (counts, said), _ = run_ranks(
            2, jobs.given_up, str(cluster.durable), cluster.nodes[0].socket, str(tmp_path)
        )

    assert counts["saves_skipped_total"] == 5 and counts.get("saves_failed_total", 0) == 0
    assert said[0] == "StoreError" and "step 5 was skipped" in said[1]
