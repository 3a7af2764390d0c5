// What the FP8 kernels for SM90a share: the problem, and the epilogue from FP32 sums to BF16.
#pragma once

#include "output.cuh"

namespace farro {

constexpr int kDepth = 128;  // bytes of K in one stage, and K of a scale block

// What happens to a sum before it is rounded, as bits of a template parameter.
constexpr int kBias = 1, kResidual = 2, kGelu = 4;

struct Problem {
  const float* alpha_at;  // on the device, or null
  const float* input_scale;
  const float* weight_scale;
  const void* bias;
  const BFloat16* residual;
  BFloat16* out;
  i64 input_scale_row, input_scale_block, weight_scale_row, weight_scale_block;
  i64 bias_stride, residual_row, residual_column, out_row, out_column;
  float alpha;
  int m, n, k;
  int bias_kind;
  int raster;              // row tiles that are visited together, for L2
  int out_vector;          // 16-byte stores along a row of out are aligned
  int residual_vector;     // the same of reads of the residual
  int bias_vector;         // the same of reads of the bias, which are not FP16
  int input_scale_vector;  // scales that may be read together: 4 of a row (1), 4 of a block (2), or 0
};

__device__ __forceinline__ float bf16_to_float(u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

// The tanh form: x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 x^3). The
// divisor is 1 or more: what is flushed, of it or of the exponential, is nothing beside it.
__device__ __forceinline__ float gelu_tanh(float x) {
  constexpr float first = -2.302208198f, third = -0.1029432397f;  // of -2 u / ln 2
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * fmaf(third, x * x, first)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return x * inverse;
}

// COUNT (4 or 8) neighbours of 16 bits, two a word, in one read or write of aligned 8 or 16 bytes.
template <int COUNT>
__device__ __forceinline__ void read_vector(const void* from, u32 (&to)[COUNT / 2]) {
  static_assert(COUNT == 4 || COUNT == 8, "8 or 16 bytes");
  if constexpr (COUNT == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  else *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
}

__device__ __forceinline__ void unpack2(u32 pair, float& low, float& high) {
  low = bf16_to_float(static_cast<u16>(pair)), high = bf16_to_float(static_cast<u16>(pair >> 16));
}

// Of PIECES pieces, STEP columns apart from `column` on, COUNT neighbouring biases each. All reads are
// under way before the first is waited for. n and columns are multiples of COUNT.
template <int COUNT, int PIECES, int STEP>
__device__ __forceinline__ void load_biases(const Problem& p, int column,
                                            float (&bias)[PIECES][COUNT]) {
  if (p.bias_vector && p.bias_kind == static_cast<int>(BiasKind::bf16)) {
    u32 pairs[PIECES][COUNT / 2] = {};
#pragma unroll
    for (int j = 0; j < PIECES; ++j) {
      const int at = column + j * STEP;
      if (at < p.n) read_vector<COUNT>(static_cast<const u16*>(p.bias) + at, pairs[j]);
    }
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) unpack2(pairs[j][i], bias[j][2 * i], bias[j][2 * i + 1]);
    return;
  }
  if (p.bias_vector) {
    const float* from = static_cast<const float*>(p.bias);
#pragma unroll
    for (int j = 0; j < PIECES; ++j)
#pragma unroll
      for (int i = 0; i < COUNT; i += 4) {
        const int at = column + j * STEP + i;
        const float4 v = at < p.n ? *reinterpret_cast<const float4*>(from + at) : float4{};
        bias[j][i] = v.x, bias[j][i + 1] = v.y, bias[j][i + 2] = v.z, bias[j][i + 3] = v.w;
      }
    return;
  }
#pragma unroll
  for (int j = 0; j < PIECES; ++j) {
    const int at = column + j * STEP;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      bias[j][i] = at < p.n ? load_bias(p.bias, static_cast<BiasKind>(p.bias_kind),
                                        (at + i) * p.bias_stride)
                            : 0.0f;
  }
}

// As load_biases, of the residual's row `row`, as pairs; zero past the end.
template <int COUNT, int PIECES, int STEP>
__device__ __forceinline__ void load_residual(const Problem& p, i64 row, int column,
                                              u32 (&pairs)[PIECES][COUNT / 2]) {
  const BFloat16* from = p.residual + row * p.residual_row;
#pragma unroll
  for (int j = 0; j < PIECES; ++j) {
    const int at = column + j * STEP;
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) pairs[j][i] = 0;
    if (row >= p.m || at >= p.n) continue;
    if (p.residual_vector) {
      read_vector<COUNT>(from + at, pairs[j]);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        const u32 low = from[(at + 2 * i) * p.residual_column].bits;
        pairs[j][i] = low | static_cast<u32>(from[(at + 2 * i + 1) * p.residual_column].bits) << 16;
      }
    }
  }
}

// Asks L2 for what the residual adds to a piece of a row, long before it is read.
__device__ __forceinline__ void expect_residual(const Problem& p, i64 row, int column) {
  if (p.residual_vector && row < p.m && column < p.n)
    prefetch_to_l2(p.residual + row * p.residual_row + column);
}

// The same for the biases of 8 columns.
__device__ __forceinline__ void expect_biases(const Problem& p, int column) {
  const int size = p.bias_kind == static_cast<int>(BiasKind::fp32) ? 4 : 2;
  if (p.bias_vector && column < p.n) prefetch_to_l2(static_cast<const u8*>(p.bias) + column * size);
}

// COUNT neighbouring results before they are rounded: alpha, bias, residual, GELU.
template <int EPILOGUE, int COUNT>
__device__ __forceinline__ void finish_values(const float (&sum)[COUNT], float alpha,
                                              const float (&bias)[COUNT],
                                              const u32 (&residual)[COUNT / 2],
                                              float (&value)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    value[i] = __fmul_rn(alpha, sum[i]);
    if constexpr (EPILOGUE & kBias) value[i] = __fadd_rn(value[i], bias[i]);
    if constexpr (EPILOGUE & kResidual) {
      float pair[2];
      unpack2(residual[i / 2], pair[0], pair[1]);
      value[i] = __fadd_rn(value[i], pair[i % 2]);
    }
    if constexpr (EPILOGUE & kGelu) value[i] = gelu_tanh(value[i]);
  }
}

// COUNT neighbouring results of a row, rounded once and stored.
template <int COUNT>
__device__ __forceinline__ void store_values(const Problem& p, const float (&value)[COUNT], i64 row,
                                             int column) {
  BFloat16* to = p.out + row * p.out_row + column * p.out_column;
  if (p.out_vector) {
    u32 pair[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) pair[i] = pack2(value[2 * i], value[2 * i + 1], BFloat16{});
    if constexpr (COUNT == 8) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(pair);
    else *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pair);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) to[i * p.out_column] = convert(value[i], BFloat16{});
  }
}

__device__ __forceinline__ float alpha_of(const Problem& p) {
  return p.alpha_at == nullptr ? p.alpha : *p.alpha_at;
}

}  // namespace farro
