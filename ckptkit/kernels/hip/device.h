// What the kernels here need of a device, for three compilers: hipcc with its headers, a bare clang for AMD GPUs without
// any (no device libraries either: hence no libm), and nvcc. Waves may be 32 or 64 wide; nothing here assumes one.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Pair {  // loads and stores of 16 bytes
  u64 x, y;
};

#if defined(__CUDACC__) && !defined(__HIP__)

#define LANE_MASK(first, count) ((((count) == 32) ? 0xffffffffu : ((1u << (count)) - 1)) << (first))
// A grid's size is an argument where a kernel needs it: reading it takes AMD's device libraries.
static __device__ inline u32 thread_id() { return threadIdx.x; }
static __device__ inline u32 block_id() { return blockIdx.x; }
static __device__ inline u32 lane_id() { return threadIdx.x % 32; }
static __device__ inline u32 wave_width() { return 32; }
static __device__ inline void barrier() { __syncthreads(); }
static __device__ inline u32 from_lane(u32 value, u32 lane, u32 mask) { return __shfl_sync(mask, value, lane); }
static __device__ inline float inverse_sqrt(float x) { return 1.0f / sqrtf(x); }

#else

#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#endif
#define LANE_MASK(first, count) 0  // lanes of a wave that are off are never read here
#ifdef __HIP_DEVICE_COMPILE__
#define ON_DEVICE(expression) expression
#else
#define ON_DEVICE(expression) 0  // the host's pass only looks at declarations
#endif
static __device__ inline u32 thread_id() { return ON_DEVICE(__builtin_amdgcn_workitem_id_x()); }
static __device__ inline u32 block_id() { return ON_DEVICE(__builtin_amdgcn_workgroup_id_x()); }
static __device__ inline u32 lane_id() { return ON_DEVICE(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0))); }
static __device__ inline u32 wave_width() { return ON_DEVICE(__builtin_amdgcn_wavefrontsize()); }
static __device__ inline void barrier() {
#ifdef __HIP_DEVICE_COMPILE__
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
#endif
}
static __device__ inline u32 from_lane(u32 value, u32 lane, u32) {
  return ON_DEVICE(__builtin_amdgcn_ds_bpermute(lane << 2, value));
}
static __device__ inline float inverse_sqrt(float x) { return 1.0f / __builtin_sqrtf(x); }

#endif

static __device__ inline u64 from_lane64(u64 value, u32 lane, u32 mask) {
  return from_lane((u32)value, lane, mask) | (u64)from_lane((u32)(value >> 32), lane, mask) << 32;
}

static __device__ inline float as_float(u32 bits) {
  union { u32 u; float f; } both;
  both.u = bits;
  return both.f;
}

static __device__ inline u32 as_bits(float value) {
  union { u32 u; float f; } both;
  both.f = value;
  return both.u;
}

// bf16 as the upper half of an fp32; rounds to nearest, ties to even; NaN stays NaN.
static __device__ inline float from_bf16(u16 bits) { return as_float((u32)bits << 16); }
static __device__ inline u16 to_bf16(float value) {
  u32 bits = as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
