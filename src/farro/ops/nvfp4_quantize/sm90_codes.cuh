// BF16 values to e2m1 codes and UE4M3 scales: what formats/nvfp4.py defines, few instructions a value.
//
// A warp takes 32 blocks of 32 values, 8 values of a lane at each of four steps, so that its loads adjoin; and
// each lane works out the scale of one block.
#pragma once

#include "nvfp4_gate.cuh"

namespace farro {

constexpr int kSteps = 4;                // of a warp's 32 blocks, 8 at a time
constexpr u32 kInfinity = 0x7f800000u;

__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
  u32 most;
  asm("max.u16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// The code of 0 <= value < 7 in the low byte. 2^22 times the power of two below, 1 at least, has a last bit
// that is worth the codes' step there; 2 k at its end, for a power of 2^k, counts the codes below. 256 more
// is above the byte.
__device__ __forceinline__ u32 code_byte(float value) {
  const u32 power = (__float_as_uint(fmaxf(value, 1.0f)) & kInfinity) | 2u;
  return __float_as_uint(__fmaf_rn(__uint_as_float(power + (power >> 22)), 4194304.0f, value));
}

// Any value: saturating, NaN as 0.
__device__ __forceinline__ float within(float value) { return value > 0.25f ? fminf(value, 6.0f) : 0.0f; }

// Eight values times `ratio` to eight codes, the first lowest; -0 as 0. TAME: no value comes to 7 or more, and
// ratio is no NaN and not negative.
template <bool TAME>
__device__ __forceinline__ u32 codes_of(const u32 (&pairs)[4], float ratio) {
  const float factor = TAME ? ratio : fabsf(ratio);
  u32 bytes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 size = pairs[i] & 0x7fff7fffu;
    float low = __fmul_rn(low_of(size), factor), high = __fmul_rn(high_of(size), factor);
    if constexpr (!TAME) low = within(low), high = within(high);
    bytes[i] = code_byte(low) + 16 * code_byte(high);
  }
  const u32 codes = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
  // signs lie above even values in the second byte of a pair, above odd ones in the fourth
  const u32 first = __byte_perm(pairs[0], pairs[1], 0x7531), last = __byte_perm(pairs[2], pairs[3], 0x7531);
  const u32 even = __byte_perm(first, last, 0x6420), odd = __byte_perm(first, last, 0x7531);
  u32 signs = (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
  if constexpr (!TAME) signs ^= ratio < 0.0f ? 0x88888888u : 0u;
  return codes | (signs & (codes + 0x77777777u));  // the sum has a nibble's first bit unless its code is 0
}

// Of each four neighbouring lanes, which share a block at each step, lane j gets the largest magnitude of
// step j, as FP32 bits.
__device__ __forceinline__ u32 largest_of(const u32 (&pairs)[kSteps][4]) {
  u32 most[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const u32 a = max_halves(pairs[s][0] & 0x7fff7fffu, pairs[s][1] & 0x7fff7fffu);
    const u32 b = max_halves(pairs[s][2] & 0x7fff7fffu, pairs[s][3] & 0x7fff7fffu);
    most[s] = max_halves(a, b);
  }
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
  const u32 a = max_halves(upper ? most[2] : most[0], __shfl_xor_sync(~0u, upper ? most[0] : most[2], 2));
  const u32 b = max_halves(upper ? most[3] : most[1], __shfl_xor_sync(~0u, upper ? most[1] : most[3], 2));
  const u32 c = max_halves(odd ? b : a, __shfl_xor_sync(~0u, odd ? a : b, 1));
  return max(c << 16, c & 0xffff0000u);
}

// 32 blocks of a warp, of which `count` are there: codes to `codes`, 16 bytes a block, scales to `scales`.
__device__ __forceinline__ void quantize_blocks(const u32 (&pairs)[kSteps][4], float gscale, int count, u8* codes,
                                                u8* scales) {
  const int lane = threadIdx.x % 32, block = lane % 4 * 8 + lane / 4;
  const u32 largest = largest_of(pairs);
  float ratio;
  const u32 scale = scale_of(largest, gscale, ratio);
  if (block < count) scales[block] = static_cast<u8>(scale);
  const bool tame = ratio >= 0.0f && __fmul_rn(__uint_as_float(largest), ratio) < 7.0f;
  u32 words[kSteps];
  if (__all_sync(~0u, tame)) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) words[s] = codes_of<true>(pairs[s], __shfl_sync(~0u, ratio, lane / 4 * 4 + s));
  } else {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) words[s] = codes_of<false>(pairs[s], __shfl_sync(~0u, ratio, lane / 4 * 4 + s));
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    if (s * 8 + lane / 4 < count) reinterpret_cast<u32*>(codes)[s * 32 + lane] = words[s];
}

}  // namespace farro
