// What both kernels of fp8_swiglu_quantize share: where results go, SwiGLU, scales and codes.
#pragma once

#include "fp8_codes.cuh"
#include "fp8_problem.cuh"

namespace farro {

struct Output {
  u8* codes;
  float* scale;
  i64 codes_row, scale_row, scale_block;
  int columns;  // N: gate rows of the weight are [0, N), up rows [N, 2 N)
  int first_tile, tiles;  // of the tiles of 128 columns, those that this launch writes
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

// The end of a cluster that owns TOKENS tokens and 128 columns: CTA 2 s + h has left the sums of run s
// of K for half h of the columns at `totals`, as [gate, up][TOKENS][PITCH] floats. Every CTA takes some
// of the tokens and adds the runs in the order of K. A half warp for a token: eight columns a lane, the
// first half of the lanes on the first half.
template <int TOKENS, int PITCH, int THREADS, int SPLIT>
__device__ __forceinline__ void finish_cluster(const Problem& p, const Output& o, u32 totals,
                                               int first_token, int column_tile, int rank) {
  constexpr int kCluster = 2 * SPLIT;
  const int lane = threadIdx.x % 32, inner = lane % 16, column = column_tile * 128 + inner * 8;
  for (int token = (threadIdx.x / 16) * kCluster + rank; token < TOKENS;
       token += THREADS / 16 * kCluster) {
    const u32 at = totals + 4 * (token * PITCH + inner % 8 * 8);
    float gate[8] = {}, up[8] = {};
#pragma unroll
    for (int s = 0; s < SPLIT; ++s) {
      const u32 from = map_to_rank(at, 2 * s + inner / 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float4 g = load_remote(from + 16 * half);
        const float4 u = load_remote(from + 4 * TOKENS * PITCH + 16 * half);
        gate[4 * half] += g.x, gate[4 * half + 1] += g.y;
        gate[4 * half + 2] += g.z, gate[4 * half + 3] += g.w;
        up[4 * half] += u.x, up[4 * half + 1] += u.y;
        up[4 * half + 2] += u.z, up[4 * half + 3] += u.w;
      }
    }
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      gate[i] = swiglu(gate[i], up[i]);
      if (column < o.columns) largest = max(largest, __float_as_uint(gate[i]) & 0x7fffffff);
    }
    const u32 here = 0xffffu << (lane & 16);  // the other half may have no token left
#pragma unroll
    for (int step = 1; step < 16; step *= 2)
      largest = max(largest, __shfl_xor_sync(here, largest, step));
    const float scale = scale_of(largest), inverse = inverse_of(scale);
    const i64 row = first_token + token;
    if (row < p.m) {
      if (inner == 0) o.scale[row * o.scale_row + column_tile * o.scale_block] = scale;
      if (column < o.columns) {
        u32* to = reinterpret_cast<u32*>(o.codes + row * o.codes_row + column);
        to[0] = codes_of(gate[0], gate[1], gate[2], gate[3], inverse);
        to[1] = codes_of(gate[4], gate[5], gate[6], gate[7], inverse);
      }
    }
  }
}

}  // namespace farro
