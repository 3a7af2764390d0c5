// What both kernels of fp8_swiglu_quantize share: where results go, SwiGLU, scales and codes.
#pragma once

#include "fp8_problem.cuh"

namespace farro {

struct Output {
  u8* codes;
  float* scale;
  i64 codes_row, scale_row, scale_block;
  int columns;  // N: gate rows of the weight are [0, N), up rows [N, 2 N)
};

// x / (1 + exp(-x)); -Inf gives NaN. By the root of exp(-|x|): nothing overflows or vanishes, and
// __fdividef, which gives 0 for divisors above 2^126, has none above 2.
__device__ __forceinline__ float silu(float x) {
  const float root = __expf(-0.5f * fabsf(x));
  return (x < 0.0f ? x * root * root : x) * __fdividef(1.0f, 1.0f + root * root);
}

__device__ __forceinline__ float rounded(float x) {
  return bf16_to_float(convert(x, BFloat16{}).bits);
}

__device__ __forceinline__ float swiglu(float gate, float up) {
  return rounded(__fmul_rn(rounded(silu(gate)), up));
}

// From the bits of the largest magnitude: as integers they order as values do, NaN above all.
__device__ __forceinline__ float scale_of(u32 largest) {
  const float scale = __fdiv_rn(__uint_as_float(largest), 448.0f);
  return scale < 1e-12f ? 1e-12f : scale;  // NaN stays
}

// What values are multiplied by; NaN where the scale is not finite, so that all codes are.
__device__ __forceinline__ float inverse_of(float scale) {
  const float infinity = __uint_as_float(0x7f800000);
  return scale < infinity ? __fdiv_rn(1.0f, scale) : __uint_as_float(0x7fffffff);
}

// Four codes of neighbouring columns; beyond +-448 they saturate, NaN stays NaN.
__device__ __forceinline__ u32 codes_of(float a, float b, float c, float d, float inverse) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(low)
      : "f"(__fmul_rn(b, inverse)), "f"(__fmul_rn(a, inverse)));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(high)
      : "f"(__fmul_rn(d, inverse)), "f"(__fmul_rn(c, inverse)));
  return low | static_cast<u32>(high) << 16;
}

}  // namespace farro
