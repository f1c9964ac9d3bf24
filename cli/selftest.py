"""`ckptkit selftest`: every kernel against its torch form on this machine."""

from dataclasses import asdict

import click

from ckptkit.cli.common import common, print_json


@click.command(short_help="Check every kernel against its torch form, here.")
@click.option("--device", metavar="D", help="Like cuda:1 or cpu. [default: the GPU, where there is one]")
@common
def selftest(device: str | None, as_json: bool) -> int:
    """Run every form of every kernel on this machine, and compare it with the torch form.

    Forms that cannot run here are listed with the reason.

    Exits 1 when a form's results differ by more than rounding explains.
    """
    from ckptkit.kernels.selftest import machine, run

    checks = run(device)
    if as_json:
        print_json("SelfTest", {**machine(), "checks": [asdict(check) for check in checks]})
    else:
        click.echo(" ".join(f"{name} {value}" for name, value in machine().items()))
        for check in checks:
            click.echo(check.line())
    return int(any(check.passed is False for check in checks))
