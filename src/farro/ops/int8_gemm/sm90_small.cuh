// What int8_gemm_small is made of beside its products: problem, layout of shared memory, scales, output.
#pragma once

#include "output.cuh"
#include "ptx.cuh"

namespace farro {

constexpr int kRows = 64;    // weight rows of a tile
constexpr int kDepth = 128;  // bytes of K in one stage

struct Problem {
  const float* scale_a;  // of tokens
  const float* scale_b;  // of weights
  const void* bias;
  void* out;
  i64 scale_a_row, scale_a_group, scale_b_group, scale_b_column, out_row, out_column, bias_stride;
  int m, n, k;
  int bias_kind;
  int raster;
  int tile_rows;       // tokens of a tile that are loaded and stored, a multiple of 8 up to TOKENS
  int vector;          // 16-byte stores along a row of out are aligned
  int scale_a_vector;  // how many scales of a token may be read together: 4, 2 or 1
  int scale_b_vector;  // the same of a group's: 4 or 1
};

template <class Out, int GROUP, int TOKENS, int STAGES>
struct Layout {
  static constexpr int unit = GROUP > kDepth ? GROUP : kDepth;  // K that is promoted together
  static constexpr int unit_blocks = unit / kDepth, unit_groups = unit / GROUP;
  static constexpr int weight_bytes = kRows * kDepth, token_bytes = TOKENS * kDepth;
  // [groups][kRows] of weights, then [TOKENS][groups]
  static constexpr int scale_floats = unit_groups * (kRows + TOKENS);
  static constexpr int pitch = kRows * sizeof(Out) + 16;  // of a token's results on their way out

  static constexpr int weights = 0, tokens = STAGES * weight_bytes;
  static constexpr int scales = tokens + STAGES * token_bytes;
  static constexpr int full = scales + STAGES * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int bytes = empty + 8 * STAGES;
  static_assert(TOKENS * pitch <= scales, "results are staged where the operands were");
};

// A unit's scales of the tile's weight rows, as [groups][kRows]; zero outside.
template <int GROUPS>
__device__ __forceinline__ void load_row_scales(const Problem& p, u32 to, int first_row, int first,
                                                int groups, int lane) {
#pragma unroll
  for (int i = lane; i < GROUPS * kRows / 4; i += 32) {
    const int g = first + i / (kRows / 4), row = first_row + i % (kRows / 4) * 4;
    const float* from = p.scale_b + (g < groups ? g * p.scale_b_group : 0);
    if (p.scale_b_vector == 4) {
      const bool valid = g < groups && row < p.n;
      cp_async<16>(to + 16 * i, from + (valid ? row : 0), valid);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool valid = g < groups && row + j < p.n;
        cp_async<4>(to + 16 * i + 4 * j, from + (valid ? (row + j) * p.scale_b_column : 0), valid);
      }
    }
  }
}

// A unit's scales of the tile's tokens, as [TOKENS][groups]; zero outside.
template <int GROUPS, int TOKENS>
__device__ __forceinline__ void load_token_scales(const Problem& p, u32 to, int first_token,
                                                  int end_token, int first, int groups, int lane) {
#pragma unroll
  for (int i = lane; i < TOKENS; i += 32) {
    const int token = first_token + i;
    const float* from = p.scale_a + (token < end_token ? token * p.scale_a_row : 0);
    const u32 at = to + 4 * GROUPS * i;
    if (GROUPS > 1 && p.scale_a_vector >= GROUPS && first + GROUPS <= groups) {
      cp_async<(GROUPS > 1 ? 4 * GROUPS : 4)>(at, from + first, token < end_token);
    } else {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const bool valid = token < end_token && first + g < groups;
        cp_async<4>(at + 4 * g, from + (valid ? (first + g) * p.scale_a_group : 0), valid);
      }
    }
  }
}

// The scale warp: the scales of all units of the tile at first_row and first_token, into the ring.
template <class L, int TOKENS, int STAGES>
__device__ __forceinline__ void load_scales(const Problem& p, u32 base, int first_row,
                                            int first_token, int end_token, int groups, int units,
                                            int lane) {
  Ring<STAGES> ring(1);
  auto more_stages = [&]() {  // no scales in the rest of a unit
#pragma unroll
    for (int block = 1; block < L::unit_blocks; ++block) {
      mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
      mbarrier_arrive(base + L::full + 8 * ring.stage);
      ring.next();
    }
  };
  int unit = 0;
  // Whole units whose scales may be read as vectors: addresses advance from one to the next
  if (p.scale_b_vector == 4 && p.scale_a_vector >= L::unit_groups) {
    constexpr int kGroups = L::unit_groups, kRowCopies = (kGroups * kRows / 4 + 31) / 32;
    constexpr int kTokenCopies = (TOKENS + 31) / 32;
    const float* of_rows[kRowCopies];
    const float* of_tokens[kTokenCopies];
    bool row_valid[kRowCopies], token_valid[kTokenCopies];
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int at = lane + 32 * i, at_row = first_row + at % (kRows / 4) * 4;
      row_valid[i] = at_row < p.n;
      of_rows[i] = p.scale_b + at / (kRows / 4) * p.scale_b_group + (row_valid[i] ? at_row : 0);
    }
#pragma unroll
    for (int i = 0; i < kTokenCopies; ++i) {
      const int token = first_token + lane + 32 * i;
      token_valid[i] = token < end_token;
      of_tokens[i] = p.scale_a + (token_valid[i] ? token * p.scale_a_row : 0);
    }
    const i64 row_step = kGroups * p.scale_b_group, token_step = kGroups * p.scale_a_group;
    for (; (unit + 1) * kGroups <= groups; ++unit) {
      mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
      const u32 to = base + L::scales + ring.stage * L::scale_floats * 4;
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        if (kGroups > 1 || lane < kRows / 4)
          cp_async<16>(to + 16 * (lane + 32 * i), of_rows[i], row_valid[i]);
        of_rows[i] += row_step;
      }
#pragma unroll
      for (int i = 0; i < kTokenCopies; ++i) {
        if (TOKENS % 32 == 0 || lane + 32 * i < TOKENS)
          cp_async<4 * kGroups>(to + 4 * kGroups * (kRows + lane + 32 * i), of_tokens[i],
                                token_valid[i]);
        of_tokens[i] += token_step;
      }
      cp_async_arrive(base + L::full + 8 * ring.stage);
      ring.next();
      more_stages();
    }
  }
  for (; unit < units; ++unit) {
    mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
    const u32 to = base + L::scales + ring.stage * L::scale_floats * 4;
    const int first = unit * L::unit_groups;
    load_row_scales<L::unit_groups>(p, to, first_row, first, groups, lane);
    load_token_scales<L::unit_groups, TOKENS>(p, to + 4 * L::unit_groups * kRows, first_token,
                                              end_token, first, groups, lane);
    cp_async_arrive(base + L::full + 8 * ring.stage);
    ring.next();
    more_stages();
  }
  cp_async_wait_all();
}

// COUNT floats from `from`, which is aligned to all of them.
template <int COUNT>
__device__ __forceinline__ void read_floats(float (&to)[COUNT], const float* from) {
  if constexpr (COUNT == 4) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (COUNT == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = from[0];
  }
}

// Results to shared memory, a token's 64 rows together, and out; every operand has been read by then.
template <class L, class Out, int TOKENS, int WARPGROUPS>
__device__ __forceinline__ void store_results(const Problem& p, u8* shared,
                                              float (&total)[TOKENS / WARPGROUPS / 2], int first_row,
                                              int row, int first_token, int end_token,
                                              int own_token, int lane) {
  constexpr int kTokens = TOKENS / WARPGROUPS;
  named_barrier(1, 128 * WARPGROUPS);
  const BiasKind kind = static_cast<BiasKind>(p.bias_kind);
  float bias[2] = {0.0f, 0.0f};
  if (kind != BiasKind::none)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (first_row + row + 8 * i < p.n)
        bias[i] = load_bias(p.bias, kind, (first_row + row + 8 * i) * p.bias_stride);
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) {
    const int token = own_token + i / 4 * 8 + 2 * (lane % 4) + i % 2;
    if (kind != BiasKind::none) total[i] = __fadd_rn(total[i], bias[i / 2 % 2]);
    *reinterpret_cast<Out*>(shared + token * L::pitch + (row + i / 2 % 2 * 8) * sizeof(Out)) =
        convert(total[i], Out{});
  }
  named_barrier(1, 128 * WARPGROUPS);
  constexpr int kPieces = kRows * sizeof(Out) / 16, kVector = 16 / sizeof(Out);
  for (int i = threadIdx.x; i < TOKENS * kPieces; i += 128 * WARPGROUPS) {
    const int token = i / kPieces, column = first_row + i % kPieces * kVector;
    const u8* from = shared + token * L::pitch + i % kPieces * 16;
    if (first_token + token >= end_token) break;
    Out* to = static_cast<Out*>(p.out) + (first_token + token) * p.out_row + column * p.out_column;
    if (p.vector && column + kVector <= p.n) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < kVector && column + j < p.n; ++j)
        to[j * p.out_column] = reinterpret_cast<const Out*>(from)[j];
    }
  }
}

}  // namespace farro
