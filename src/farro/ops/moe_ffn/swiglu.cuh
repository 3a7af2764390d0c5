// SwiGLU and the quantizer of moe_ffn's first product: numbers, and maxima over the lanes of a warp.
#pragma once

#include "output.cuh"

namespace farro {

// Two values rounded to BF16, as FP32.
__device__ __forceinline__ float2 rounded_to_bf16(float a, float b) {
  const u32 pair = pack2(a, b, BFloat16{});
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// x / (1 + exp(-x)) within some units in the last place; -Inf gives NaN. exp is taken of -|x|, which does not
// overflow, as 2^r * 2^(n + 64) * 2^-64: none of the three is below the normal numbers where the result is not, and
// x comes before the last. n is added to a number whose unit is 1, with 127 + 64, so that its bits, moved, are
// 2^(n + 64). Below -120 the result is 0, and so is 2^r in the end. The divisor is 1 to 2: its reciprocal is
// within a unit, and that of 1 is 1.
__device__ __forceinline__ float silu(float x) {
  constexpr float kLog2E = 1.4426950408889634f, kUnit = 12582912.0f + 127 + 64, kLast = 0x1p-64f;
  const float t = -fabsf(x);
  const float shifted = __fmaf_rn(fmaxf(t, -120.0f), kLog2E, kUnit), n = __fsub_rn(shifted, kUnit);
  // ln(2) in two parts, of which n times the first is exact
  const float remainder = __fmaf_rn(n, 2.1219444005469057e-4f, __fmaf_rn(n, -0.693359375f, t));
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(remainder, kLog2E)));
  power = __fmul_rn(power, __uint_as_float(__float_as_uint(shifted) << 23));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fmaf_rn(power, kLast, 1.0f)));
  return __fmul_rn(x < 0.0f ? __fmul_rn(__fmul_rn(x, power), kLast) : x, inverse);
}

// A group's scale, and what its codes are made with: the scale's inverse, or -1 where all are 0. From the
// bits of the largest magnitude: as integers they order as values do, NaN above Inf.
__device__ __forceinline__ float2 rate_of(u32 largest) {
  const float scale = __fdiv_rn(__uint_as_float(largest), 127.0f);
  const float floored = scale < 1e-12f ? 1e-12f : scale;  // NaN stays
  return {floored, largest < 0x7f800000u ? __frcp_rn(floored) : -1.0f};
}

// round-half-even(value / scale) in the low byte. The quotient is correctly rounded: a reciprocal and
// two of Markstein's corrections, as in int8_quantize/triton_kernel.py.
__device__ __forceinline__ u32 code_of(float value, float2 rate) {
  float ratio = __fmul_rn(value, rate.y);
  ratio = __fmaf_rn(__fmaf_rn(ratio, -rate.x, value), rate.y, ratio);
  ratio = __fmaf_rn(__fmaf_rn(ratio, -rate.x, value), rate.y, ratio);
  return rate.y < 0.0f ? 0 : __float_as_uint(__fadd_rn(ratio, 12582912.0f)) & 0xff;
}

// The largest of each of COUNT values over the eight lanes l % 4, l % 4 + 4, ... Each lane ends with
// COUNT / 8 of them (at least one) in v[0] and on: those from the one that is returned on.
template <int COUNT, int BIT = 16>
__device__ __forceinline__ int largest_over_lanes(u32* v, int lane) {
  if constexpr (BIT < 4) {
    return 0;
  } else if constexpr (COUNT > 1) {
    constexpr int kHalf = COUNT / 2;
    const bool upper = lane & BIT;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const u32 give = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
      v[i] = max(keep, __shfl_xor_sync(~0u, give, BIT));
    }
    return (upper ? kHalf : 0) + largest_over_lanes<kHalf, BIT / 2>(v, lane);
  } else {
    v[0] = max(v[0], __shfl_xor_sync(~0u, v[0], BIT));
    return largest_over_lanes<1, BIT / 2>(v, lane);
  }
}

// An 8 x 8 matrix of 16-bit elements, of which lane l holds two of row l / 4, turned around.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 turned;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}

// Four of these, turned around, to shared memory: lane l says where the 16 bytes of row l % 8 of matrix
// l / 8 go.
__device__ __forceinline__ void store_transposed(u32 smem, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace farro
