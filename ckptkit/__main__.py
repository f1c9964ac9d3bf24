"""`python -m ckptkit`: the command line, where the script is not on the PATH."""

from ckptkit.cli.main import cli

if __name__ == "__main__":
    cli()
