"""On-disk formats: one module each, and the suite that every one of them passes."""

if __name__ != "ckptkit.formats":
    raise ImportError(f"import ckptkit.formats, not {__name__}: a second copy would break isinstance")
