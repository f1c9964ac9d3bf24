"""Newton–Schulz in Triton: symmetric products by halves, sums fused into the products' epilogues.

A step is three products:

    gram   = X X^T                              symmetric
    square = c gram gram^T + b gram + a I       symmetric
    X      = square X

The symmetric ones compute the tiles on and under the diagonal and store each twice, the second time transposed. The
last has no symmetry and, with `a` on the diagonal of `square`, no sum either: it is the vendor's own matmul.
Norm and cast before the first step are one kernel each. All take stacks of matrices.
"""

from typing import Any

import torch

from ckptkit.kernels._triton import tl, triton
from ckptkit.kernels.newton_schulz import COEFFICIENTS, EPS, STEPS, restore

# BLOCK is a tile's side, DEPTH what one step of the inner loop takes. Measured on an H200, see docs/kernels.md; on HIP
# two stages of the loop fill what a compute unit has of LDS.
SYMMETRIC = {"BLOCK": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 4}
SYMMETRIC_HIP = {"BLOCK": 128, "DEPTH": 64, "num_warps": 8, "num_stages": 2}
_NORM_CHUNK = 4096
_TILE = 64  # of the cast, which may transpose


@triton.jit
def norm_kernel(u, sums, size, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """sums[matrix, program] = sum of squares of CHUNKS runs of CHUNK elements of the stack's matrix."""
    matrix = tl.program_id(1)
    u += matrix.to(tl.int64) * size
    acc = tl.zeros([CHUNK], tl.float32)
    first = tl.program_id(0) * (CHUNK * CHUNKS)
    for chunk in range(CHUNKS):
        at = first + chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(u + at, mask=at < size, other=0).to(tl.float32)
        acc += x * x
    tl.store(sums + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(acc, 0))


@triton.jit
def scale_kernel(
    u,  # [stack, rows, columns]
    sums,  # fp32 [stack, parts]: parts of the squared norm
    out,  # [stack, rows, columns], or transposed
    rows,
    columns,
    parts,
    eps,
    TRANSPOSE: tl.constexpr,
    PARTS: tl.constexpr,  # at least `parts`, a power of two
    TILE: tl.constexpr,
):
    matrix = tl.program_id(2)
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums + matrix * parts + part, mask=part < parts, other=0), 0)
    norm = tl.maximum(tl.sqrt(total), eps)
    base = matrix.to(tl.int64) * rows * columns
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(u + base + row[:, None] * columns + column[None, :], mask=here, other=0).to(tl.float32)
    x = (x / norm).to(out.dtype.element_ty)
    if TRANSPOSE:
        tl.store(out + base + column[:, None] * rows + row[None, :], x.T, mask=here.T)
    else:
        tl.store(out + base + row[:, None] * columns + column[None, :], x, mask=here)


@triton.jit
def _triangle(t):
    """Row and column of tile t of a triangle whose row i has i + 1 tiles."""
    i = ((tl.sqrt(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The float root may be one off near squares; this makes it exact.
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit
def symmetric_kernel(
    p,  # [stack, m, k], of one dtype with the others
    c,  # [stack, m, m], symmetric; read where ADD
    out,  # [stack, m, m]: alpha p p^T + beta c + shift I
    m,
    k,
    alpha,
    beta,
    shift,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,  # whether BLOCK divides m and DEPTH divides k
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile a program, by pointers: for any GPU and any size."""
    i, j = _triangle(tl.program_id(0))
    matrix = tl.program_id(1).to(tl.int64)
    row = i * BLOCK + tl.arange(0, BLOCK)
    column = j * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    left = p + matrix * m * k + row[:, None] * k + depth[None, :]
    right = p + matrix * m * k + column[:, None] * k + depth[None, :]
    for first in range(0, k, DEPTH):
        if EVEN:
            x = tl.load(left)
            y = tl.load(right)
        else:
            inside = (first + depth < k)[None, :]
            x = tl.load(left, mask=(row < m)[:, None] & inside, other=0)
            y = tl.load(right, mask=(column < m)[:, None] & inside, other=0)
        acc = tl.dot(x, y.T, acc)
        left += DEPTH
        right += DEPTH
    at = row[:, None] * m + column[None, :]
    here = (row < m)[:, None] & (column < m)[None, :]
    c += matrix * m * m
    out += matrix * m * m
    acc *= alpha
    if ADD:
        if EVEN:
            acc += beta * tl.load(c + at).to(tl.float32)
        else:
            acc += beta * tl.load(c + at, mask=here, other=0).to(tl.float32)
        acc += tl.where(row[:, None] == column[None, :], shift, 0.0)
    value = acc.to(out.dtype.element_ty)
    mirrored = column[:, None] * m + row[None, :]
    if EVEN:
        tl.store(out + at, value)
        if i != j:
            tl.store(out + mirrored, value.T)
    else:
        tl.store(out + at, value, mask=here)
        if i != j:
            tl.store(out + mirrored, value.T, mask=here.T)


@triton.jit(do_not_specialize=["full", "total"])  # one build serves all counts
def symmetric_tma_kernel(
    p,  # descriptors of stacks as [stack * m, k] and [stack * m, m], tiles of BLOCK x DEPTH and BLOCK x BLOCK
    c,
    out,
    p_half,  # the same with tiles of half the side; used where TAIL
    c_half,
    out_half,
    m,
    k,
    full,  # tiles done whole; those after them in quarters
    total,  # tiles of all matrices
    alpha,
    beta,
    shift,
    ADD: tl.constexpr,
    TAIL: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    HALF_DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """As `symmetric_kernel`, for devices whose copy engine fetches tiles, and sizes that tiles divide.

    Programs stay for many tiles, so that one tile's epilogue hides behind the next one's loads. When a few tiles
    are left over after all programs have had the same number, quarters of them go round: 136 tiles on 132
    multiprocessors would otherwise take twice the time of 132.
    """
    side = m // BLOCK
    each = side * (side + 1) // 2
    for tile in tl.range(tl.program_id(0), full, PROGRAMS, flatten=True):
        matrix = tile // each
        i, j = _triangle(tile % each)
        up = matrix * m + i * BLOCK
        low = matrix * m + j * BLOCK
        acc = tl.zeros([BLOCK, BLOCK], tl.float32)
        for step in range(k // DEPTH):
            acc = tl.dot(p.load([up, step * DEPTH]), p.load([low, step * DEPTH]).T, acc)
        acc *= alpha
        if ADD:
            acc += beta * c.load([up, j * BLOCK]).to(tl.float32)
            lane = tl.arange(0, BLOCK)
            acc += tl.where((i * BLOCK + lane)[:, None] == (j * BLOCK + lane)[None, :], shift, 0.0)
        value = acc.to(KIND)
        out.store([up, j * BLOCK], value)
        # On the diagonal this stores the same values again, which is cheaper than a branch in this loop.
        out.store([low, i * BLOCK], value.T)
    if TAIL:
        HALF: tl.constexpr = BLOCK // 2
        for quarter in tl.range(tl.program_id(0), (total - full) * 4, PROGRAMS):
            tile = full + quarter // 4
            matrix = tile // each
            i, j = _triangle(tile % each)
            i = 2 * i + quarter % 4 // 2
            j = 2 * j + quarter % 2
            if j <= i:
                up = matrix * m + i * HALF
                low = matrix * m + j * HALF
                small = tl.zeros([HALF, HALF], tl.float32)
                for step in range(k // HALF_DEPTH):
                    small = tl.dot(
                        p_half.load([up, step * HALF_DEPTH]), p_half.load([low, step * HALF_DEPTH]).T, small
                    )
                small *= alpha
                if ADD:
                    small += beta * c_half.load([up, j * HALF]).to(tl.float32)
                    lane = tl.arange(0, HALF)
                    small += tl.where((i * HALF + lane)[:, None] == (j * HALF + lane)[None, :], shift, 0.0)
                value = small.to(KIND)
                out_half.store([up, j * HALF], value)
                out_half.store([low, i * HALF], value.T)


def _fetches_tiles(x: torch.Tensor) -> bool:
    """Whether the device has a copy engine for tiles (Hopper and later) that Triton's descriptors use."""
    return x.is_cuda and not torch.version.hip and torch.cuda.get_device_capability(x.device) >= (9, 0)


class Operand:
    """A contiguous stack of matrices, and its descriptors by tile shape, each made once."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self._made: dict[tuple[int, int], Any] = {}

    def tiles(self, rows: int, columns: int) -> Any:
        """A descriptor of the stack's rows, in tiles."""
        if (rows, columns) not in self._made:
            from triton.tools.tensor_descriptor import TensorDescriptor

            flat = self.x.view(-1, self.x.shape[-1])
            self._made[rows, columns] = TensorDescriptor.from_tensor(flat, [rows, columns])
        return self._made[rows, columns]


def symmetric(
    p: Operand,
    c: Operand | None,
    out: Operand,
    alpha: float,
    beta: float = 0.0,
    shift: float = 0.0,
    tuning: dict[str, int] | None = None,
) -> None:
    """out = alpha p p^T + beta c + shift I; stacks of one dtype, `c` symmetric, [stack, m, k] and [stack, m, m]."""
    stack, m, k = p.x.shape
    options = tuning or (SYMMETRIC_HIP if torch.version.hip else SYMMETRIC)
    block, depth = options["BLOCK"], options["DEPTH"]
    side = triton.cdiv(m, block)
    each = side * (side + 1) // 2
    even = m % block == 0 and k % depth == 0
    add = c is not None
    if not (even and _fetches_tiles(p.x)):
        matrices = (p.x, (c or out).x, out.x)
        flags = {"ADD": add, "EVEN": even}
        symmetric_kernel[(each, stack)](*matrices, m, k, alpha, beta, shift, **flags, **options)
        return
    programs = torch.cuda.get_device_properties(p.x.device).multi_processor_count
    rest = each * stack % programs
    full = each * stack - rest if 4 * rest <= programs else each * stack
    tail = full != each * stack
    half, half_depth = block // 2, 2 * depth if k % (2 * depth) == 0 else depth
    arguments = [
        p.tiles(block, depth),
        c.tiles(block, block) if c else None,
        out.tiles(block, block),
        p.tiles(half, half_depth) if tail else None,
        c.tiles(half, half) if c and tail else None,
        out.tiles(half, half) if tail else None,
        m,
        k,
        full,
        each * stack,
        alpha,
        beta,
        shift,
    ]
    kind = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[p.x.dtype]
    constants = {"ADD": add, "TAIL": tail, "KIND": kind, "BLOCK": block, "DEPTH": depth}
    constants |= {"HALF_DEPTH": half_depth, "PROGRAMS": programs}
    # With only a round of tiles there is little to hide behind, and narrow programs wait less.
    warps = options["num_warps"] if full >= 2 * programs else 4
    symmetric_tma_kernel[(min(programs, max(full, 4 * rest)),)](
        *arguments, **constants, num_warps=warps, num_stages=options["num_stages"]
    )


def prepare(update: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Fills `out`, [matrices, rows, columns], with `update` divided by its norms, transposed where that is tall."""
    rows, columns = update.shape[-2:]
    u = update.reshape(-1, rows, columns).contiguous()
    chunks = 8
    parts = triton.cdiv(rows * columns, _NORM_CHUNK * chunks)
    sums = torch.empty(len(u), parts, dtype=torch.float32, device=u.device)
    norm_kernel[(parts, len(u))](u, sums, rows * columns, CHUNK=_NORM_CHUNK, CHUNKS=chunks, num_warps=8)
    grid = (triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE), len(u))
    shape = {"TRANSPOSE": rows > columns, "PARTS": triton.next_power_of_2(parts), "TILE": _TILE}
    scale_kernel[grid](u, sums, out, rows, columns, parts, eps, **shape, num_warps=4)


class _Run:
    """All steps on buffers of their own, recorded as a graph where that is worth its memory.

    A step of a small matrix takes the device less time than its launches take the host. A recording keeps its four
    buffers for as long as the process lives: 24 bytes an element of a square, up to 400 MB at the limit below.
    """

    LIMIT = 1 << 24  # elements; beyond, launches hide behind the products

    def __init__(
        self, shape: tuple[int, ...], like: torch.Tensor, steps: int, coefficients: tuple[float, float, float]
    ) -> None:
        stack, m, _ = shape
        self.steps, self.coefficients = steps, coefficients
        self.x, self.spare = (Operand(like.new_empty(shape)) for _ in range(2))
        self.gram, self.square = (Operand(like.new_empty(stack, m, m)) for _ in range(2))
        self.graph: torch.cuda.CUDAGraph | None = None

    def go(self) -> torch.Tensor:
        """Does all steps on what `x` holds, and returns the buffer that has the result."""
        a, b, c = self.coefficients
        x, spare = self.x, self.spare
        for _ in range(self.steps):
            symmetric(x, None, self.gram, 1.0)
            symmetric(self.gram, self.gram, self.square, c, b, a)
            torch.bmm(self.square.x, x.x, out=spare.x)
            x, spare = spare, x
        return x.x

    def record(self) -> None:
        """Records `go`. What runs once before it compiles and allots whatever it needs."""
        self.x.x.zero_()
        self.go()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.result = self.go()


_RECORDED: dict[Any, _Run] = {}


def newton_schulz(
    update: torch.Tensor,
    steps: int = STEPS,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """See `ckptkit.kernels.newton_schulz.newton_schulz`. Not for several threads of one stream at a time."""
    rows, columns = update.shape[-2:]
    like = torch.empty(0, dtype=dtype, device=update.device)
    shape = (update.numel() // max(rows * columns, 1), min(rows, columns), max(rows, columns))
    if not update.numel():
        return like.new_empty(update.shape)
    recording = (
        update.is_cuda and update.numel() <= _Run.LIMIT and not torch.cuda.is_current_stream_capturing()
    )
    if not recording:
        run = _Run(shape, like, steps, coefficients)
        prepare(update, eps, run.x.x)
        return restore(run.go(), update.shape)
    key = (
        torch.cuda.current_stream(update.device).cuda_stream,
        update.device,
        shape,
        dtype,
        steps,
        coefficients,
    )
    if key not in _RECORDED:
        with torch.cuda.device(update.device):
            run = _Run(shape, like, steps, coefficients)
            run.record()
        _RECORDED[key] = run
    run = _RECORDED[key]
    prepare(update, eps, run.x.x)
    assert run.graph is not None
    run.graph.replay()
    return restore(run.result.clone(), update.shape)
