"""The command line: one module per command, which parses, calls one function and prints."""

if __name__ != "ckptkit.cli":
    raise ImportError(f"import ckptkit.cli, not {__name__}: a second copy would break isinstance")
