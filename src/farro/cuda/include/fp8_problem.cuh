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
  int input_scale_vector;  // scales that may be read together: 4 of a row (1), 4 of a block (2), or 0
};

__device__ __forceinline__ float bf16_to_float(u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

// The tanh form: x / 2 * (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_tanh(float x) {
  const float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return x * __fdividef(1.0f, 1.0f + __expf(-2.0f * u));
}

// COUNT neighbouring biases from `column` on (a multiple of COUNT); n is a multiple of COUNT too.
template <int COUNT>
__device__ __forceinline__ void load_biases(const Problem& p, int column, float (&bias)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    bias[i] = column + i < p.n
                  ? load_bias(p.bias, static_cast<BiasKind>(p.bias_kind), (column + i) * p.bias_stride)
                  : 0.0f;
}

// COUNT (4 or 8) neighbouring results of a row before they are rounded: alpha, bias, residual, GELU.
// Of a row past the end nothing is read.
template <int EPILOGUE, int COUNT>
__device__ __forceinline__ void finish_values(const Problem& p, const float (&sum)[COUNT],
                                              float alpha, const float (&bias)[COUNT], i64 row,
                                              int column, float (&value)[COUNT]) {
  static_assert(COUNT == 4 || COUNT == 8, "8 or 16 bytes");
  using Pieces = u32[COUNT / 2];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    value[i] = __fmul_rn(alpha, sum[i]);
    if constexpr (EPILOGUE & kBias) value[i] = __fadd_rn(value[i], bias[i]);
  }
  if ((EPILOGUE & kResidual) && row < p.m) {
    const BFloat16* from = p.residual + row * p.residual_row + column * p.residual_column;
    if (p.residual_vector) {
      Pieces pair;
      if constexpr (COUNT == 8) *reinterpret_cast<uint4*>(pair) = *reinterpret_cast<const uint4*>(from);
      else *reinterpret_cast<uint2*>(pair) = *reinterpret_cast<const uint2*>(from);
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) {
        value[2 * i] = __fadd_rn(value[2 * i], bf16_to_float(static_cast<u16>(pair[i])));
        value[2 * i + 1] = __fadd_rn(value[2 * i + 1], bf16_to_float(static_cast<u16>(pair[i] >> 16)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        value[i] = __fadd_rn(value[i], bf16_to_float(from[i * p.residual_column].bits));
    }
  }
  if constexpr (EPILOGUE & kGelu)
#pragma unroll
    for (int i = 0; i < COUNT; ++i) value[i] = gelu_tanh(value[i]);
}

// As finish_values, rounded once and stored.
template <int EPILOGUE, int COUNT>
__device__ __forceinline__ void finish(const Problem& p, const float (&sum)[COUNT], float alpha,
                                       const float (&bias)[COUNT], i64 row, int column) {
  using Pieces = u32[COUNT / 2];
  float value[COUNT];
  finish_values<EPILOGUE>(p, sum, alpha, bias, row, column, value);
  BFloat16* to = p.out + row * p.out_row + column * p.out_column;
  if (p.out_vector) {
    Pieces pair;
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
