// Residual scaling and RMSNorm, forward and backward; the twin of ckptkit/kernels/rmsnorm_triton.py.
//
// THREADS threads walk over rows, four neighbouring elements a thread and pass: 8 bytes of bf16, 16 of fp32; two passes
// make a row. The backward pass fetches its next rows while it works on these. The five vectors (fp32 [5, d]: hidden scale and bias, residual scale and bias, weight) stay in registers.
#include "device.h"

constexpr int PASSES = 2, VECTOR = 4;

struct Bf16 {
  u16 bits;
};

// Four neighbouring values as they lie in memory: fetched early, unpacked when they are needed.
template <typename T>
struct Four;
template <>
struct Four<float> {
  Pair bits;
};
template <>
struct Four<Bf16> {
  u64 bits;
};

static __device__ inline Four<float> fetch(const float* at) { return {*(const Pair*)at}; }
static __device__ inline Four<Bf16> fetch(const Bf16* at) { return {*(const u64*)at}; }

static __device__ inline void unpack(const Four<float>& from, float* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = as_float((u32)((i < 2 ? from.bits.x : from.bits.y) >> 32 * (i % 2)));
}

static __device__ inline void unpack(const Four<Bf16>& from, float* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = from_bf16((u16)(from.bits >> 16 * i));
}

static __device__ inline void store(float* at, const float* value) {
  *(Pair*)at = Pair{as_bits(value[0]) | (u64)as_bits(value[1]) << 32, as_bits(value[2]) | (u64)as_bits(value[3]) << 32};
}

static __device__ inline void store(Bf16* at, const float* value) {
  u64 word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= (u64)to_bf16(value[i]) << 16 * i;
  *(u64*)at = word;
}

static __device__ inline float rounded(const float*, float x) { return x; }
static __device__ inline float rounded(const Bf16*, float x) { return from_bf16(to_bf16(x)); }

// Sums over the block, of ROWS values at once and in a fixed order; every thread gets them. `room` alternates between two
// buffers, so that one barrier does.
template <int THREADS, int ROWS>
static __device__ inline void block_sum(float (&value)[ROWS], float (*room)[THREADS / 32]) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    for (u32 step = wave_width() / 2; step; step /= 2)
      value[r] += as_float(from_lane(as_bits(value[r]), lane_id() ^ step, 0xffffffffu));
    if (lane_id() == 0) room[r][thread_id() / wave_width()] = value[r];
  }
  barrier();
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    value[r] = 0;
    for (u32 i = 0; i < THREADS / wave_width(); ++i) value[r] += room[r][i];
  }
}

// Column of a thread's values in a pass.
template <int THREADS>
static __device__ inline u32 column_of(int pass) { return (pass * THREADS + thread_id()) * VECTOR; }

#define EACH(r, p)                     \
  _Pragma("unroll") for (int r = 0; r < ROWS; ++r) _Pragma("unroll") for (int p = 0; p < PASSES; ++p) \
      if (row + r < n && column_of<THREADS>(p) < d)

template <typename T, int THREADS, int ROWS>
static __device__ inline void forward(const T* hidden, const float* residual, const float* vectors, float* merged, T* normed,
                                      float* rstd, u32 n, u32 d, float eps, u32 blocks) {
  __shared__ float room[2][ROWS][THREADS / 32];
  float v[5][PASSES][VECTOR];
#pragma unroll
  for (int p = 0; p < PASSES; ++p)
    if (column_of<THREADS>(p) < d)
#pragma unroll
      for (int k = 0; k < 5; ++k) unpack(fetch(vectors + k * d + column_of<THREADS>(p)), v[k][p]);
  u32 side = 0;
  for (u32 row = block_id() * ROWS; row < n; row += blocks * ROWS, side ^= 1) {
    Four<T> raw_h[ROWS][PASSES];
    Four<float> raw_r[ROWS][PASSES];
    EACH(r, p) {
      raw_h[r][p] = fetch(hidden + (u64)(row + r) * d + column_of<THREADS>(p));
      raw_r[r][p] = fetch(residual + (u64)(row + r) * d + column_of<THREADS>(p));
    }
    float x[ROWS][PASSES][VECTOR], square[ROWS] = {};
    EACH(r, p) {
      float h[VECTOR];
      unpack(raw_h[r][p], h);
      unpack(raw_r[r][p], x[r][p]);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        x[r][p][i] = (h[i] + v[1][p][i]) * v[0][p][i] + (x[r][p][i] + v[3][p][i]) * v[2][p][i];
      store(merged + (u64)(row + r) * d + column_of<THREADS>(p), x[r][p]);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        x[r][p][i] = rounded(hidden, x[r][p][i]);
        square[r] += x[r][p][i] * x[r][p][i];
      }
    }
    block_sum<THREADS, ROWS>(square, room[side]);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      square[r] = inverse_sqrt(square[r] / d + eps);
      if (thread_id() == 0 && row + r < n) rstd[row + r] = square[r];
    }
    EACH(r, p) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) x[r][p][i] = v[4][p][i] * rounded(hidden, x[r][p][i] * square[r]);
      store(normed + (u64)(row + r) * d + column_of<THREADS>(p), x[r][p]);
    }
  }
}

// Every block leaves its sums of g, g * hidden, g * residual and d_normed * x, for g = d(stream), in sums[block].
template <typename T, int THREADS, int ROWS>
static __device__ inline void backward(const float* d_merged, const T* d_normed, const T* hidden, const float* residual,
                                       const float* vectors, const float* rstd, T* d_hidden, float* d_residual, float* sums,
                                       u32 n, u32 d, u32 blocks) {
  __shared__ float room[2][ROWS][THREADS / 32];
  float v[5][PASSES][VECTOR], s[4][PASSES][VECTOR] = {};
#pragma unroll
  for (int p = 0; p < PASSES; ++p)
    if (column_of<THREADS>(p) < d)
#pragma unroll
      for (int k = 0; k < 5; ++k) unpack(fetch(vectors + k * d + column_of<THREADS>(p)), v[k][p]);
  Four<T> next_h[ROWS][PASSES], next_dy[ROWS][PASSES];
  Four<float> next_r[ROWS][PASSES], next_g[ROWS][PASSES];
  float next_scale[ROWS] = {};
  auto fetch_rows = [&](u32 row) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (row + r < n) next_scale[r] = rstd[row + r];
    EACH(r, p) {
      const u64 at = (u64)(row + r) * d + column_of<THREADS>(p);
      next_h[r][p] = fetch(hidden + at);
      next_r[r][p] = fetch(residual + at);
      next_dy[r][p] = fetch(d_normed + at);
      next_g[r][p] = fetch(d_merged + at);
    }
  };
  u32 side = 0;
  fetch_rows(block_id() * ROWS);
  for (u32 row = block_id() * ROWS; row < n; row += blocks * ROWS, side ^= 1) {
    float h[ROWS][PASSES][VECTOR], rs[ROWS][PASSES][VECTOR], g[ROWS][PASSES][VECTOR], dy[ROWS][PASSES][VECTOR];
    float scale[ROWS], mean[ROWS] = {};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) scale[r] = next_scale[r];
    EACH(r, p) {
      unpack(next_h[r][p], h[r][p]);
      unpack(next_r[r][p], rs[r][p]);
      unpack(next_dy[r][p], dy[r][p]);
      unpack(next_g[r][p], g[r][p]);
    }
    fetch_rows(row + blocks * ROWS);  // under way while these rows are worked on
    EACH(r, p) {
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float total = (h[r][p][i] + v[1][p][i]) * v[0][p][i] + (rs[r][p][i] + v[3][p][i]) * v[2][p][i];
        const float x = rounded(hidden, total) * scale[r];
        s[3][p][i] += dy[r][p][i] * rounded(hidden, x);
        mean[r] += dy[r][p][i] * v[4][p][i] * x;
      }
    }
    block_sum<THREADS, ROWS>(mean, room[side]);
    EACH(r, p) {
      float out[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float total = (h[r][p][i] + v[1][p][i]) * v[0][p][i] + (rs[r][p][i] + v[3][p][i]) * v[2][p][i];
        const float x = rounded(hidden, total) * scale[r];
        g[r][p][i] += scale[r] * (dy[r][p][i] * v[4][p][i] - x * (mean[r] / d));
        s[0][p][i] += g[r][p][i];
        s[1][p][i] += g[r][p][i] * h[r][p][i];
        s[2][p][i] += g[r][p][i] * rs[r][p][i];
        out[i] = g[r][p][i] * v[0][p][i];
        g[r][p][i] *= v[2][p][i];
      }
      store(d_hidden + (u64)(row + r) * d + column_of<THREADS>(p), out);
      store(d_residual + (u64)(row + r) * d + column_of<THREADS>(p), g[r][p]);
    }
  }
#pragma unroll
  for (int p = 0; p < PASSES; ++p)
    if (column_of<THREADS>(p) < d)
#pragma unroll
      for (int k = 0; k < 4; ++k) store(sums + ((u64)block_id() * 4 + k) * d + column_of<THREADS>(p), s[k][p]);
}

// For rows of up to 2 * 4 * THREADS values.
#define KERNELS(T, NAME, THREADS, ROWS)                                                                                     \
  extern "C" __global__ __attribute__((used)) void __launch_bounds__(THREADS)                                               \
      rmsnorm_forward_##NAME##_##THREADS(const T* hidden, const float* residual, const float* vectors, float* merged,       \
                                         T* normed, float* rstd, u32 n, u32 d, float eps, u32 blocks) {                     \
    forward<T, THREADS, ROWS>(hidden, residual, vectors, merged, normed, rstd, n, d, eps, blocks);                          \
  }                                                                                                                         \
  extern "C" __global__ __attribute__((used)) void __launch_bounds__(THREADS)                                               \
      rmsnorm_backward_##NAME##_##THREADS(const float* d_merged, const T* d_normed, const T* hidden, const float* residual, \
                                          const float* vectors, const float* rstd, T* d_hidden, float* d_residual,          \
                                          float* sums, u32 n, u32 d, u32 blocks) {                                          \
    backward<T, THREADS, ROWS>(d_merged, d_normed, hidden, residual, vectors, rstd, d_hidden, d_residual, sums, n, d,       \
                               blocks);                                                                                     \
  }

KERNELS(Bf16, bf16, 256, 2)
KERNELS(Bf16, bf16, 512, 1)
KERNELS(float, fp32, 256, 2)
KERNELS(float, fp32, 512, 1)

// Adds the blocks' sums, in their order: gradients of the five vectors, fp32 [5, d]. One thread a column.
extern "C" __global__ __attribute__((used)) void __launch_bounds__(64)
    rmsnorm_reduce(const float* sums, const float* vectors, float* out, u32 blocks, u32 d) {
  const u32 column = block_id() * 64 + thread_id();
  if (column >= d) return;
  float s[4] = {0, 0, 0, 0};
  for (u32 b = 0; b < blocks; ++b)
    for (int k = 0; k < 4; ++k) s[k] += sums[((u64)b * 4 + k) * d + column];
  out[column] = s[1] + vectors[d + column] * s[0];
  out[d + column] = vectors[column] * s[0];
  out[2 * d + column] = s[2] + vectors[3 * d + column] * s[0];
  out[3 * d + column] = vectors[2 * d + column] * s[0];
  out[4 * d + column] = s[3];
}
