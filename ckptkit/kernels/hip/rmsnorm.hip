// Residual scaling and RMSNorm, forward and backward; the twin of ckptkit/kernels/rmsnorm_triton.py.
//
// 512 threads walk over rows, four neighbouring elements a thread and pass: 8 bytes of bf16, 16 of fp32. The five vectors (fp32 [5, d]: hidden scale and bias, residual scale and bias, weight) stay in registers.
#include "device.h"

constexpr int THREADS = 512, VECTOR = 4;

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

// Sum over the block, in a fixed order; every thread gets it. `room` alternates between two buffers so that one barrier does.
static __device__ inline float block_sum(float value, float* room) {
  for (u32 step = wave_width() / 2; step; step /= 2)
    value += as_float(from_lane(as_bits(value), lane_id() ^ step, 0xffffffffu));
  if (lane_id() == 0) room[thread_id() / wave_width()] = value;
  barrier();
  float total = 0;
  for (u32 i = 0; i < THREADS / wave_width(); ++i) total += room[i];
  return total;
}

template <typename T, int PASSES>
static __device__ inline void forward(const T* hidden, const float* residual, const float* vectors, float* merged, T* normed,
                                      float* rstd, u32 n, u32 d, float eps, u32 blocks) {
  __shared__ float room[2][THREADS / 32];
  float v[5][PASSES][VECTOR];
#pragma unroll
  for (int p = 0; p < PASSES; ++p) {
    const u32 column = (p * THREADS + thread_id()) * VECTOR;
    if (column < d)
#pragma unroll
      for (int k = 0; k < 5; ++k) unpack(fetch(vectors + k * d + column), v[k][p]);
  }
  u32 side = 0;
  for (u32 row = block_id(); row < n; row += blocks, side ^= 1) {
    float x[PASSES][VECTOR], h[PASSES][VECTOR], square = 0;
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const u32 column = (p * THREADS + thread_id()) * VECTOR;
      if (column >= d) continue;
      unpack(fetch(hidden + (u64)row * d + column), h[p]);
      unpack(fetch(residual + (u64)row * d + column), x[p]);
    }
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const u32 column = (p * THREADS + thread_id()) * VECTOR;
      if (column >= d) continue;
      const u64 at = (u64)row * d + column;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) x[p][i] = (h[p][i] + v[1][p][i]) * v[0][p][i] + (x[p][i] + v[3][p][i]) * v[2][p][i];
      store(merged + at, x[p]);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        x[p][i] = rounded(hidden, x[p][i]);
        square += x[p][i] * x[p][i];
      }
    }
    const float scale = inverse_sqrt(block_sum(square, room[side]) / d + eps);
    if (thread_id() == 0) rstd[row] = scale;
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const u32 column = (p * THREADS + thread_id()) * VECTOR;
      if (column >= d) continue;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) x[p][i] = v[4][p][i] * rounded(hidden, x[p][i] * scale);
      store(normed + (u64)row * d + column, x[p]);
    }
  }
}

// Every block leaves its sums of g, g * hidden, g * residual and d_normed * x, for g = d(stream), in sums[block].
template <typename T, int PASSES>
static __device__ inline void backward(const float* d_merged, const T* d_normed, const T* hidden, const float* residual,
                                       const float* vectors, const float* rstd, T* d_hidden, float* d_residual, float* sums,
                                       u32 n, u32 d, u32 blocks) {
  __shared__ float room[2][THREADS / 32];
  float v[5][PASSES][VECTOR], s[4][PASSES][VECTOR];
#pragma unroll
  for (int p = 0; p < PASSES; ++p) {
    const u32 column = (p * THREADS + thread_id()) * VECTOR;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) s[0][p][i] = s[1][p][i] = s[2][p][i] = s[3][p][i] = 0;
    if (column < d)
#pragma unroll
      for (int k = 0; k < 5; ++k) unpack(fetch(vectors + k * d + column), v[k][p]);
  }
  Four<T> next_h[PASSES], next_dy[PASSES];
  Four<float> next_r[PASSES], next_g[PASSES];
  float next_scale = 0;
  auto fetch_row = [&](u32 row) {
    if (row < n) next_scale = rstd[row];
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const u32 column = (p * THREADS + thread_id()) * VECTOR;
      if (column >= d || row >= n) continue;
      const u64 at = (u64)row * d + column;
      next_h[p] = fetch(hidden + at);
      next_r[p] = fetch(residual + at);
      next_dy[p] = fetch(d_normed + at);
      next_g[p] = fetch(d_merged + at);
    }
  };
  u32 side = 0;
  fetch_row(block_id());
  for (u32 row = block_id(); row < n; row += blocks, side ^= 1) {
    float h[PASSES][VECTOR], r[PASSES][VECTOR], g[PASSES][VECTOR], dy[PASSES][VECTOR], dot = 0;
    const float scale = next_scale;
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      unpack(next_h[p], h[p]);
      unpack(next_r[p], r[p]);
      unpack(next_dy[p], dy[p]);
      unpack(next_g[p], g[p]);
    }
    fetch_row(row + blocks);  // under way while this row is worked on
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const u32 column = (p * THREADS + thread_id()) * VECTOR;
      if (column >= d) continue;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float total = (h[p][i] + v[1][p][i]) * v[0][p][i] + (r[p][i] + v[3][p][i]) * v[2][p][i];
        const float x = rounded(hidden, total) * scale;
        s[3][p][i] += dy[p][i] * rounded(hidden, x);
        dot += dy[p][i] * v[4][p][i] * x;
      }
    }
    const float mean = block_sum(dot, room[side]) / d;
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const u32 column = (p * THREADS + thread_id()) * VECTOR;
      if (column >= d) continue;
      const u64 at = (u64)row * d + column;
      float out[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const float total = (h[p][i] + v[1][p][i]) * v[0][p][i] + (r[p][i] + v[3][p][i]) * v[2][p][i];
        const float x = rounded(hidden, total) * scale;
        g[p][i] += scale * (dy[p][i] * v[4][p][i] - x * mean);
        s[0][p][i] += g[p][i];
        s[1][p][i] += g[p][i] * h[p][i];
        s[2][p][i] += g[p][i] * r[p][i];
        out[i] = g[p][i] * v[0][p][i];
        g[p][i] *= v[2][p][i];
      }
      store(d_hidden + at, out);
      store(d_residual + at, g[p]);
    }
  }
#pragma unroll
  for (int p = 0; p < PASSES; ++p) {
    const u32 column = (p * THREADS + thread_id()) * VECTOR;
    if (column >= d) continue;
#pragma unroll
    for (int k = 0; k < 4; ++k) store(sums + ((u64)block_id() * 4 + k) * d + column, s[k][p]);
  }
}

#define KERNELS(T, NAME, PASSES)                                                                                            \
  extern "C" __global__ __attribute__((used)) void __launch_bounds__(THREADS)                                               \
      rmsnorm_forward_##NAME##_##PASSES(const T* hidden, const float* residual, const float* vectors, float* merged,        \
                                        T* normed, float* rstd, u32 n, u32 d, float eps, u32 blocks) {                      \
    forward<T, PASSES>(hidden, residual, vectors, merged, normed, rstd, n, d, eps, blocks);                                 \
  }                                                                                                                         \
  extern "C" __global__ __attribute__((used)) void __launch_bounds__(THREADS)                                               \
      rmsnorm_backward_##NAME##_##PASSES(const float* d_merged, const T* d_normed, const T* hidden, const float* residual,  \
                                         const float* vectors, const float* rstd, T* d_hidden, float* d_residual,           \
                                         float* sums, u32 n, u32 d, u32 blocks) {                                           \
    backward<T, PASSES>(d_merged, d_normed, hidden, residual, vectors, rstd, d_hidden, d_residual, sums, n, d, blocks);     \
  }

KERNELS(Bf16, bf16, 1)
KERNELS(Bf16, bf16, 2)
KERNELS(float, fp32, 1)
KERNELS(float, fp32, 2)

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
