"""`ckptkit selftest`: kernels and the copies of snapshots, on this machine."""

from dataclasses import asdict

import click

from ckptkit.cli.common import common, print_json


@click.command(short_help="Check kernels and the copies of snapshots, here.")
@click.option("--device", metavar="D", help="Like cuda:1 or cpu. [default: the GPU, where there is one]")
@common
def selftest(device: str | None, as_json: bool) -> int:
    """Run every form of every kernel on this machine, and compare it with the torch form. Then copy a snapshot to host memory and
    back, with digests, and measure how well copies run beside compute.

    What cannot run here is listed with the reason.

    Exits 1 when a result differs by more than rounding explains, or a byte was copied wrong.
    """
    from ckptkit.hooks import selftest as copies
    from ckptkit.kernels.selftest import machine, run

    checks = run(device)
    measures = copies.run(device)
    if as_json:
        found = {
            "checks": [asdict(check) for check in checks],
            "copies": [asdict(measure) for measure in measures],
        }
        print_json("SelfTest", {**machine(), **found})
    else:
        click.echo(" ".join(f"{name} {value}" for name, value in machine().items()))
        for check in checks:
            click.echo(check.line())
        for measure in measures:
            click.echo(measure.line())
    bad = [check.passed is False for check in checks] + [one.passed is False for one in measures]
    return int(any(bad))
