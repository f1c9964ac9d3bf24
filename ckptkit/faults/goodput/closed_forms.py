"""Closed forms of checkpointing under failures that arrive at random, at a constant rate.

Symbols as in the literature, all in seconds: C stall of one save, τ useful work between saves, R time from a failure until work
goes on (detection, restart, reading), M mean time between failures of the whole job. Failures may strike during saves and
restarts too.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval" (CACM 1974); J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps" (FGCS 2006).
"""

from math import exp, expm1, inf, sqrt

from ckptkit.errors import UsageError


def young_interval(stall_s: float, mtbf_s: float) -> float:
    """√(2CM): good while C is far below M."""
    _check(stall_s, mtbf_s)
    return sqrt(2 * stall_s * mtbf_s)


def daly_interval(stall_s: float, mtbf_s: float) -> float:
    """Daly's higher-order interval: √(2CM)·(1 + √(C/2M)/3 + (C/2M)/9) − C, and M where C ≥ 2M."""
    _check(stall_s, mtbf_s)
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return sqrt(2 * stall_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall_s


def best_interval(stall_s: float, mtbf_s: float) -> float:
    """The interval that makes `expected_wall` per useful second least; exact.

    With x = τ/M and c = C/M the derivative vanishes where (1 − x)·e^(x + c) = 1, which falls from e^c to 0 on [0, 1].
    """
    _check(stall_s, mtbf_s)
    c = stall_s / mtbf_s
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        # The logarithm's form would lose the digits of a small c.
        if (1 - middle) * expm1(middle + c) > middle:
            low = middle
        else:
            high = middle
    return (low + high) / 2 * mtbf_s


def expected_wall(interval_s: float, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected wall time of τ useful seconds and their save: M·e^(R/M)·(e^((τ+C)/M) − 1). Infinite where that overflows."""
    _check(stall_s, mtbf_s)
    if interval_s <= 0 or restart_s < 0:
        raise UsageError(f"an interval of {interval_s} s with a restart of {restart_s} s makes no sense")
    try:
        return mtbf_s * exp(restart_s / mtbf_s) * expm1((interval_s + stall_s) / mtbf_s)
    except OverflowError:
        return inf


def goodput(interval_s: float, stall_s: float, restart_s: float, mtbf_s: float) -> float:
    """Useful share of the time, in [0, 1]: τ over `expected_wall`."""
    return interval_s / expected_wall(interval_s, stall_s, restart_s, mtbf_s)


def mtbf_of_rate(failures_per_1000_node_days: float, nodes: float) -> float:
    """Mean time between failures of a job, in seconds, from a rate that fleets publish."""
    if failures_per_1000_node_days <= 0 or nodes <= 0:
        raise UsageError("failure rate and number of nodes must be above 0")
    return 86400 * 1000 / (failures_per_1000_node_days * nodes)


def rate_of_mtbf(mtbf_s: float, nodes: float) -> float:
    """Failures per 1000 node-days: the inverse of `mtbf_of_rate`."""
    return mtbf_of_rate(mtbf_s / 86400, nodes) / 86400 if mtbf_s > 0 else inf


def _check(stall_s: float, mtbf_s: float) -> None:
    if stall_s < 0 or mtbf_s <= 0:
        raise UsageError(
            f"a stall of {stall_s} s and an MTBF of {mtbf_s} s make no sense; give C ≥ 0 and M > 0"
        )
