// Output types of the epilogues: FP32 totals to BF16, FP16 or FP32, and back for biases.
#pragma once

#include "ptx.cuh"

namespace farro {

// Bit patterns, so that no CUDA header is needed.
struct BFloat16 {
  u16 bits;
};
struct Float16 {
  u16 bits;
};

// Two neighbouring values as they lie in memory, `low` first.
__device__ __forceinline__ u32 pack2(float low, float high, BFloat16) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ u32 pack2(float low, float high, Float16) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ BFloat16 convert(float value, BFloat16 tag) {
  return {static_cast<u16>(pack2(value, 0.0f, tag))};
}
__device__ __forceinline__ Float16 convert(float value, Float16 tag) {
  return {static_cast<u16>(pack2(value, 0.0f, tag))};
}
__device__ __forceinline__ float convert(float value, float) { return value; }

enum class BiasKind : int { none = 0, bf16 = 1, fp16 = 2, fp32 = 3 };

__device__ __forceinline__ float load_bias(const void* bias, BiasKind kind, i64 index) {
  if (kind == BiasKind::fp32) return static_cast<const float*>(bias)[index];
  const u16 bits = static_cast<const u16*>(bias)[index];
  if (kind == BiasKind::bf16) return __uint_as_float(static_cast<u32>(bits) << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

}  // namespace farro
