// Leaf digests: XXH3-128 (seed 0, default secret) of every leaf; the twin of ckptkit/kernels/digest_triton.py.
//
// A stripe of 64 bytes is four lanes wide, two words a lane, so that the words XXH3 swaps lie in one thread. LANES lanes
// share a leaf: with 4 no lane ever talks to another before the end; with 16 or 32 they split a block's sixteen stripes
// and add up by shuffles. More lanes fill the device with fewer leaves.
#include "device.h"

#define P32_1 0x9E3779B1ull
#define P32_2 0x85EBCA77ull
#define P64_1 0x9E3779B185EBCA87ull
#define P64_2 0xC2B2AE3D27D4EB4Full
#define P64_3 0x165667B19E3779F9ull
#define P64_4 0x85EBCA77C2B2AE63ull
#define MX1 0x165667919E3779F9ull
#define MX2 0x9FB21C651E98DF25ull

struct Hash {
  u64 low, high;
};

static __device__ inline u64 multiply_high(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
static __device__ inline u64 fold(u64 a, u64 b) { return a * b ^ multiply_high(a, b); }

static __device__ inline u64 avalanche(u64 x) {
  x = (x ^ x >> 37) * MX1;
  return x ^ x >> 32;
}

static __device__ inline u64 avalanche64(u64 x) {
  x = (x ^ x >> 33) * P64_2;
  x = (x ^ x >> 29) * P64_3;
  return x ^ x >> 32;
}

static __device__ inline u64 swap_bytes(u64 x) {
  x = (x & 0x00FF00FF00FF00FFull) << 8 | (x >> 8 & 0x00FF00FF00FF00FFull);
  x = (x & 0x0000FFFF0000FFFFull) << 16 | (x >> 16 & 0x0000FFFF0000FFFFull);
  return x << 32 | x >> 32;
}

static __device__ inline u64 read(const u8* at, int bytes) {
  u64 value = 0;
  for (int i = 0; i < bytes; ++i) value |= (u64)at[i] << 8 * i;
  return value;
}

static __device__ inline u64 mix16(const u8* at, const u8* key) {
  return fold(read(at, 8) ^ read(key, 8), read(at + 8, 8) ^ read(key + 8, 8));
}

static __device__ inline void mix32(Hash& h, const u8* first, const u8* second, const u8* key) {
  h.low = (h.low + mix16(first, key)) ^ (read(second, 8) + read(second + 8, 8));
  h.high = (h.high + mix16(second, key + 16)) ^ (read(first, 8) + read(first + 8, 8));
}

// Up to 240 bytes: one thread, no hurry.
static __device__ Hash short_hash(const u8* at, int n, const u8* key) {
  Hash h = {0, 0};
  if (n > 16) {
    h.low = n * P64_1;
    if (n > 128) {
      for (int i = 0; i < 4; ++i) mix32(h, at + 32 * i, at + 32 * i + 16, key + 32 * i);
      h.low = avalanche(h.low);
      h.high = avalanche(h.high);
      for (int i = 4; i < n / 32; ++i) mix32(h, at + 32 * i, at + 32 * i + 16, key + 3 + 32 * (i - 4));
      mix32(h, at + n - 16, at + n - 32, key + 103);
    } else {
      for (int i = (n - 1) / 32; i >= 0; --i) mix32(h, at + 16 * i, at + n - 16 * (i + 1), key + 32 * i);
    }
    return {avalanche(h.low + h.high), 0 - avalanche(h.low * P64_1 + h.high * P64_4 + n * P64_2)};
  }
  if (n > 8) {
    u64 last = read(at + n - 8, 8);
    u64 mixed = read(at, 8) ^ last ^ read(key + 32, 8) ^ read(key + 40, 8);
    last ^= read(key + 48, 8) ^ read(key + 56, 8);
    h.low = mixed * P64_1 + ((u64)(n - 1) << 54);
    h.high = multiply_high(mixed, P64_1) + last + (last & 0xFFFFFFFFull) * (P32_2 - 1);
    h.low ^= swap_bytes(h.high);
    return {avalanche(h.low * P64_2), avalanche(multiply_high(h.low, P64_2) + h.high * P64_2)};
  }
  if (n > 3) {
    u64 mixed = (read(at, 4) + (read(at + n - 4, 4) << 32)) ^ read(key + 16, 8) ^ read(key + 24, 8);
    u64 factor = P64_1 + ((u64)n << 2);
    h.low = mixed * factor;
    h.high = multiply_high(mixed, factor) + (h.low << 1);
    h.low ^= h.high >> 3;
    h.low = (h.low ^ h.low >> 35) * MX2;
    return {h.low ^ h.low >> 28, avalanche(h.high)};
  }
  h.low = (u64)at[0] << 16 | (u64)at[n / 2] << 24 | at[n - 1] | (u64)n << 8;
  h.high = swap_bytes(h.low) >> 32;
  h.high = (h.high << 13 | h.high >> 19) & 0xFFFFFFFFull;
  return {avalanche64(h.low ^ read(key, 4) ^ read(key + 4, 4)), avalanche64(h.high ^ read(key + 8, 4) ^ read(key + 12, 4))};
}

// `constants`: 24 words of secret, 8 to start from, 8 each of the secret at offsets 121, 11 and 117.
template <int LANES, int AHEAD>
static __device__ inline void leaf_digest(const u8* data, u64 nbytes, u64 leaf_nbytes, const u64* constants, u64* digests) {
  constexpr int PARTS = LANES / 4, EACH = 16 / PARTS;
  const u64 leaf = ((u64)block_id() * 256 + thread_id()) / LANES;
  if (leaf * leaf_nbytes >= nbytes) return;
  const u32 lane = thread_id() % LANES, column = lane % 4, part = lane / 4;
  const u32 first = lane_id() - lane, mask = LANE_MASK(first, LANES);
  const u64 left = nbytes - leaf * leaf_nbytes, n = left < leaf_nbytes ? left : leaf_nbytes;
  const u8* at = data + leaf * leaf_nbytes;
  Hash h;
  if (n <= 240) {
    h = short_hash(at, (int)n, (const u8*)constants);
  } else {
    const Pair* words = (const Pair*)at + lane;  // stripe `part`, words 2 column and 2 column + 1
    u64 key[EACH][2];
    for (int i = 0; i < EACH; ++i) {
      key[i][0] = constants[part + PARTS * i + 2 * column];
      key[i][1] = constants[part + PARTS * i + 2 * column + 1];
    }
    const u64 scramble0 = constants[16 + 2 * column], scramble1 = constants[17 + 2 * column];
    u64 a0 = constants[24 + 2 * column], a1 = constants[25 + 2 * column];
    const u32 blocks = (u32)((n - 1) / 1024);
    auto add = [&](const Pair* v, u64& s0, u64& s1, u32 stripes) {
      for (int i = 0; i < EACH; ++i) {
        if (part + PARTS * i >= stripes) break;
        const u64 m0 = v[i].x ^ key[i][0], m1 = v[i].y ^ key[i][1];
        s0 += v[i].y + (u64)(u32)m0 * (u32)(m0 >> 32);
        s1 += v[i].x + (u64)(u32)m1 * (u32)(m1 >> 32);
      }
    };
    auto gather = [&](u64& s0, u64& s1) {
      for (u32 step = 4; step < LANES; step *= 2) {
        s0 += from_lane64(s0, first + (lane ^ step), mask);
        s1 += from_lane64(s1, first + (lane ^ step), mask);
      }
    };
    auto fold_in = [&](const Pair* v) {
      u64 s0 = 0, s1 = 0;
      add(v, s0, s1, 16);
      gather(s0, s1);
      a0 += s0;
      a1 += s1;
      a0 = (a0 ^ a0 >> 47 ^ scramble0) * P32_1;
      a1 = (a1 ^ a1 >> 47 ^ scramble1) * P32_1;
    };
    u32 block = 0;
    for (; block + AHEAD <= blocks; block += AHEAD) {
      Pair v[AHEAD][EACH];
#pragma unroll
      for (int b = 0; b < AHEAD; ++b)
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[b][i] = words[(block + b) * 64 + 4 * PARTS * i];
#pragma unroll
      for (int b = 0; b < AHEAD; ++b) fold_in(v[b]);
    }
    for (; block < blocks; ++block) {
      Pair v[EACH];
#pragma unroll
      for (int i = 0; i < EACH; ++i) v[i] = words[block * 64 + 4 * PARTS * i];
      fold_in(v);
    }
    // The last block: whole stripes but the last, then the leaf's last 64 bytes, which may begin anywhere.
    const u32 stripes = (u32)((n - 1 - (u64)blocks * 1024) / 64);
    Pair v[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      v[i] = Pair{0, 0};
      if (part + PARTS * i < stripes) v[i] = words[blocks * 64 + 4 * PARTS * i];
    }
    u64 s0 = 0, s1 = 0;
    add(v, s0, s1, stripes);
    if (part == 0) {
      const u64 x = read(at + n - 64 + 16 * column, 8), y = read(at + n - 56 + 16 * column, 8);
      const u64 m0 = x ^ constants[32 + 2 * column], m1 = y ^ constants[33 + 2 * column];
      s0 += y + (u64)(u32)m0 * (u32)(m0 >> 32);
      s1 += x + (u64)(u32)m1 * (u32)(m1 >> 32);
    }
    gather(s0, s1);
    a0 += s0;
    a1 += s1;
    h.low = fold(a0 ^ constants[40 + 2 * column], a1 ^ constants[41 + 2 * column]);
    h.high = fold(a0 ^ constants[48 + 2 * column], a1 ^ constants[49 + 2 * column]);
    for (u32 step = 1; step < 4; step *= 2) {
      h.low += from_lane64(h.low, first + (lane ^ step), mask);
      h.high += from_lane64(h.high, first + (lane ^ step), mask);
    }
    h.low = avalanche(h.low + n * P64_1);
    h.high = avalanche(h.high + ~(n * P64_2));
  }
  if (lane == 0) {  // xxhash's canonical order: big-endian, high half first
    digests[2 * leaf] = swap_bytes(h.high);
    digests[2 * leaf + 1] = swap_bytes(h.low);
  }
}

#define KERNEL(NAME, LANES, AHEAD)                                                                              \
  extern "C" __global__ __attribute__((used)) void __launch_bounds__(256)                                       \
      NAME(const u8* data, u64 nbytes, u64 leaf_nbytes, const u64* constants, u64* digests) {                   \
    leaf_digest<LANES, AHEAD>(data, nbytes, leaf_nbytes, constants, digests);                                   \
  }

KERNEL(leaf_digest_4, 4, 1)
KERNEL(leaf_digest_16, 16, 2)
KERNEL(leaf_digest_32, 32, 4)
