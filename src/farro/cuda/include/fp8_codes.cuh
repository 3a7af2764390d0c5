// Scales and codes of FP8 E4M3, as formats/fp8.py has them.
#pragma once

#include "ptx.cuh"

namespace farro {

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
