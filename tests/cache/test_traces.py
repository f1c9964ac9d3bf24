"""Random traces of the protocol with crashes, losses, lost, doubled and late messages, flips, pressure, zombies and clock jumps.

Every trace ends in a calm in which the job must come back, commit a save and copy it, without a stuck slot.
"""

import os

import pytest

from tests.cache.driver import Trace


def run(seeds: range) -> dict[str, int]:
    """Run a trace of 250 events for each seed; an error names its seed. Gives what happened, and how often."""
    seen: dict[str, int] = {}
    for seed in seeds:
        trace = Trace(seed)
        try:
            trace.run(250)
        except Exception as error:
            raise AssertionError(
                f"trace {seed}: {error}; its last events:\n" + "\n".join(trace.log[-30:])
            ) from error
        for name, count in trace.world.counts.items():
            seen[name] = seen.get(name, 0) + count
    return seen


def test_traces_hold_every_invariant() -> None:
    seen = run(range(250))

    print(seen)
    for name in (
        "commit",
        "abort",
        "level2",
        "durable",
        "hash_mismatch",
        "restore_failed",
        "pull_failed",
        "replica_degraded",
    ):
        assert seen[name], f"no trace met {name}"


@pytest.mark.long
def test_many_traces_hold_every_invariant() -> None:
    """100,000 of them, in processes that share no state. CKPTKIT_TRACES sets another number."""
    from concurrent.futures import ProcessPoolExecutor

    count, chunk = int(os.environ.get("CKPTKIT_TRACES", "100000")), 500
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(run, (range(at, min(at + chunk, count)) for at in range(0, count, chunk))))

    print(f"{count} traces, {sum(part.get('commit', 0) for part in parts)} commits")
