// What the native kernels of nvfp4_group_mm share: rows of experts, codes and scales to 16 bits,
// activations in the order of K that the sparse tensor cores want.
#pragma once

#include "ptx.cuh"

namespace farro {

struct Rows {
  const int* counts;  // rows of each expert, or with `ragged` its first row and the next one's
  int experts, capacity, k, ragged;
};

// First row (of an expert's own where padded) and number of rows; what only the device knows is
// clamped.
__device__ __forceinline__ void rows_of(const Rows& p, int expert, int& first, int& count) {
  if (p.ragged) {
    first = min(max(p.counts[expert], 0), p.capacity);
    count = max(min(p.counts[expert + 1], p.capacity) - first, 0);
  } else {
    first = 0;
    count = min(max(p.counts[expert], 0), p.capacity);
  }
}

__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Both halves of `a` times one half of `pair`; moves (and not a permutation) let the multiplication pick
// it. For BF16 or FP16.
template <bool BF16, bool HIGH>
__device__ __forceinline__ u32 multiply_by(u32 a, u32 pair) {
  u32 product;
  if constexpr (BF16 && HIGH)
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {h, h};\nmul.rn.bf16x2 %0, %1, s;\n}" : "=r"(product) : "r"(a), "r"(pair));
  else if constexpr (BF16)
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {l, l};\nmul.rn.bf16x2 %0, %1, s;\n}" : "=r"(product) : "r"(a), "r"(pair));
  else if constexpr (HIGH)
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {h, h};\nmul.rn.f16x2 %0, %1, s;\n}" : "=r"(product) : "r"(a), "r"(pair));
  else
    asm("{\n.reg .b16 l, h;\n.reg .b32 s;\nmov.b32 {l, h}, %2;\nmov.b32 s, {l, l};\nmul.rn.f16x2 %0, %1, s;\n}" : "=r"(product) : "r"(a), "r"(pair));
  return product;
}

// Two E4M3 bytes, the low (or high) 16 bits, to FP16: exact.
__device__ __forceinline__ u32 low_to_halves(u32 bytes) {
  u32 halves;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}"
      : "=r"(halves)
      : "r"(bytes));
  return halves;
}
__device__ __forceinline__ u32 high_to_halves(u32 bytes) {
  u32 halves;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}"
      : "=r"(halves)
      : "r"(bytes));
  return halves;
}

// The e2m1 codes in the high (or low) nibbles of four bytes as E4M3 of 2^-6 times their values: sign
// at bit 7, exponent and mantissa at bits 4..2 (E4M3's subnormals hold what e2m1's do).
__device__ __forceinline__ u32 high_codes(u32 bytes) {
  return (bytes & 0x80808080u) | (bytes >> 2 & 0x1c1c1c1cu);
}
__device__ __forceinline__ u32 low_codes(u32 bytes) { return high_codes(bytes << 4); }

// NaN where a half of `a` is not finite or `so_far` is NaN, else 0: for BF16.
__device__ __forceinline__ u32 add_zero_times(u32 a, u32 so_far) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0u), "r"(so_far));
  return sum;
}

// FP16 halves to BF16, each times `factor`: exact for scales (4 significant bits).
__device__ __forceinline__ u32 halves_to_brains(u32 halves, float factor) {
  float low, high;
  u32 brains;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "r"(halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
      : "=r"(brains)
      : "f"(__fmul_rn(high, factor)), "f"(__fmul_rn(low, factor)));
  return brains;
}

// Of 32 K of a row, unit u (0..3) is 8 values: even positions first (u < 2), then odd ones; u % 2 is
// the half of the 32 that they come from.

// Codes (8 bytes) and their scale to FP16, exactly: a code has 2 significant bits, a scale 4.
__device__ __forceinline__ uint4 expand_unit(uint2 codes, u32 scale_byte, int unit) {
  // 2^6, that codes lack, fits into the scale: 448 * 64 is below FP16's end
  const u32 scale = multiply_halves(low_to_halves(scale_byte * 0x0101u), 0x54005400u);
  const int shift = unit < 2 ? 4 : 0;
  const u32 x = high_codes(codes.x << shift), y = high_codes(codes.y << shift);
  return make_uint4(multiply_halves(low_to_halves(x), scale), multiply_halves(high_to_halves(x), scale),
                    multiply_halves(low_to_halves(y), scale), multiply_halves(high_to_halves(y), scale));
}

// All four units of 32 K at once: 16 bytes of codes, x first.
__device__ __forceinline__ void expand_block(uint4 codes, u32 scale_byte, uint4 (&units)[4]) {
  const u32 scale = multiply_halves(low_to_halves(scale_byte * 0x0101u), 0x54005400u);
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  u32 halves[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = low_codes(words[i]), high = high_codes(words[i]);
    u32 *even = halves[i / 2] + i % 2 * 2, *odd = halves[2 + i / 2] + i % 2 * 2;
    even[0] = multiply_halves(low_to_halves(low), scale);
    even[1] = multiply_halves(high_to_halves(low), scale);
    odd[0] = multiply_halves(low_to_halves(high), scale);
    odd[1] = multiply_halves(high_to_halves(high), scale);
  }
#pragma unroll
  for (int u = 0; u < 4; ++u)
    units[u] = make_uint4(halves[u][0], halves[u][1], halves[u][2], halves[u][3]);
}

// All NaN where one of four BF16 values is not finite: a weight's zeros times it would be NaN, and
// sparse products skip them.
__device__ __forceinline__ void spread_nan(u32& a, u32& b) {
  u32 zero = add_zero_times(b, add_zero_times(a, 0));
  asm("{\n.reg .b32 one;\nmov.b32 one, 0x3f803f80;\nfma.rn.bf16x2 %0, %1, one, %2;\n}"
      : "=r"(zero)
      : "r"(zero), "r"(__byte_perm(zero, 0, 0x1032)));
  a |= zero, b |= zero;
}

// 16 BF16 values (their half of the 32) to the unit's 8.
__device__ __forceinline__ uint4 reorder_unit(uint4 low, uint4 high, int unit) {
  const u32 which = unit < 2 ? 0x5410 : 0x7632;
  u32 x[4] = {__byte_perm(low.x, low.y, which), __byte_perm(low.z, low.w, which),
              __byte_perm(high.x, high.y, which), __byte_perm(high.z, high.w, which)};
  spread_nan(x[0], x[1]);
  spread_nan(x[2], x[3]);
  return make_uint4(x[0], x[1], x[2], x[3]);
}

// A unit from memory; `at` counts 32s of K over all rows.
template <bool BF16>
__device__ __forceinline__ uint4 unit_of(const void* x, const u8* scales, i64 at, int unit) {
  if constexpr (BF16) {
    const uint4* from = static_cast<const uint4*>(x) + at * 4 + unit % 2 * 2;
    return reorder_unit(__ldg(from), __ldg(from + 1), unit);
  } else {
    return expand_unit(__ldg(static_cast<const uint2*>(x) + at * 2 + unit % 2), __ldg(scales + at),
                       unit);
  }
}

}  // namespace farro
