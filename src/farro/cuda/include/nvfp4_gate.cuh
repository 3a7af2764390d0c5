// silu and product of BF16 gates and ups, and the scale of a block of 32 values: bit for bit what
// ops/nvfp4_quantize/activation.py and formats/nvfp4.py define.
#pragma once

#include "nvfp4.cuh"
#include "output.cuh"

namespace farro {

// x / (1 + exp(-x)) of a BF16 value to within some FP32 units: after rounding to BF16 the same as the
// exact value (a test compares all of them). By the root of exp(-|x|), which neither overflows nor vanishes.
// Below -88.73 exp(-x) is infinite in FP32 and the result 0. Near 0, where exact values lie next to the middle of
// two BF16 values, x / 2 + x^2 / 4 has less error than exp.
__device__ __forceinline__ float silu_of_bf16(float x) {
  float root, inverse;
  const float t = __fmul_rn(fabsf(x), -0.72134752f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(t));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(__fmaf_rn(root, root, 1.0f)));
  const float over = x < 0.0f ? __fmul_rn(__fmul_rn(x, root), root) : x;
  const float far = x < -88.75f ? __fmul_rn(x, 0.0f) : __fmul_rn(over, inverse);
  return fabsf(x) <= 0x1p-7f ? __fmul_rn(x, __fmaf_rn(x, 0.25f, 0.5f)) : far;
}

__device__ __forceinline__ float2 rounded_to_bf16(float a, float b) {
  const u32 pair = pack2(a, b, BFloat16{});
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Two results, from pairs of BF16 gates and ups.
__device__ __forceinline__ u32 gated_pair(u32 gate, u32 up) {
  const float2 s = rounded_to_bf16(silu_of_bf16(__uint_as_float(gate << 16)),
                                   silu_of_bf16(__uint_as_float(gate & 0xffff0000u)));
  return pack2(__fmul_rn(s.x, __uint_as_float(up << 16)), __fmul_rn(s.y, __uint_as_float(up & 0xffff0000u)),
               BFloat16{});
}
__device__ __forceinline__ float2 gated(u32 gate, u32 up) {
  const u32 pair = gated_pair(gate, up);
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// A block's UE4M3 byte, from the bits of its largest magnitude (as integers they order as values do, NaN
// above infinity), and what its values are multiplied with.
__device__ __forceinline__ u32 scale_of(u32 largest, float gscale, float& ratio) {
  float scale = __fmul_rn(__fdiv_rn(__uint_as_float(largest), 6.0f), gscale);
  scale = largest == 0 ? gscale : scale;
  const bool finite = largest < 0x7f800000u && fabsf(gscale) < __uint_as_float(0x7f800000u);
  scale = scale > 0x1p-9f ? scale : 0x1p-9f;
  scale = scale < 448.0f ? scale : 448.0f;
  u16 code;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(code) : "f"(scale));
  float value;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(value) : "r"(low_to_halves(code)));
  ratio = finite ? __fdiv_rn(gscale, value) : __uint_as_float(0x7fffffffu);
  return finite ? code & 0xffu : 0x7fu;
}

}  // namespace farro
