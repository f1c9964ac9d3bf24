"""The one table of element types.

Names are torch's. Bytes of types that numpy lacks (bfloat16, float8) are only ever moved as unsigned
integers of the same width; `ckptkit.engine.convert` is the one place that interprets them.
"""

from dataclasses import dataclass

from ckptkit.errors import FormatError


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: torch's name, safetensors' code, bytes per stored element."""

    name: str
    safetensors: str
    itemsize: int
    kind: str  # f float, i signed, u unsigned, b bool, c complex
    code: int  # position in TABLE; fits the u8 columns of a catalog

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    def __str__(self) -> str:
        return self.name


_ROWS = (
    ("float64", "F64", 8, "f"),
    ("float32", "F32", 4, "f"),
    ("float16", "F16", 2, "f"),
    ("bfloat16", "BF16", 2, "f"),
    ("int64", "I64", 8, "i"),
    ("int32", "I32", 4, "i"),
    ("int16", "I16", 2, "i"),
    ("int8", "I8", 1, "i"),
    ("uint64", "U64", 8, "u"),
    ("uint32", "U32", 4, "u"),
    ("uint16", "U16", 2, "u"),
    ("uint8", "U8", 1, "u"),
    ("bool", "BOOL", 1, "b"),
    ("complex64", "C64", 8, "c"),
    ("float8_e4m3fn", "F8_E4M3", 1, "f"),
    ("float8_e5m2", "F8_E5M2", 1, "f"),
    ("float8_e4m3fnuz", "F8_E4M3FNUZ", 1, "f"),
    ("float8_e5m2fnuz", "F8_E5M2FNUZ", 1, "f"),
    ("float8_e8m0fnu", "F8_E8M0", 1, "f"),
    # Two 4-bit elements a byte: stored elements are bytes, shapes count bytes (as torch does).
    ("float4_e2m1fn_x2", "F4", 1, "f"),
    ("complex128", "C128", 16, "c"),
)
TABLE: tuple[DType, ...] = tuple(DType(*row, code) for code, row in enumerate(_ROWS))
BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in TABLE}
BY_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in TABLE}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "half": "float16"}


def dtype_named(name: str) -> DType:
    """The type called `name` (torch's name, with or without `torch.`, or a short form such as bf16)."""
    plain = name.removeprefix("torch.")
    found = BY_NAME.get(_ALIASES.get(plain, plain))
    if found is None:
        known = ", ".join(BY_NAME)
        raise FormatError(f"unknown dtype {name!r}; known: {known}")
    return found
