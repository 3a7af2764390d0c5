// int8_gemm on SM90a for few rows: operands swapped, so that weights fill the 64-row side of wgmma
// and tokens the narrow one.
//
// A CTA owns 64 weight rows and TOKENS tokens. One warp streams 128-byte-wide boxes of both by TMA,
// another the group scales by cp.async, into one ring; WARPGROUPS warpgroups share the tokens. With
// AHEAD, each multiplies the next groups while it promotes the sums of one; without, a unit of K
// (max(G, 128)) is multiplied and then promoted, and several CTAs of a multiprocessor do the one
// beside the other. docs/int8-sm90.md draws it.
#include "output.cuh"
#include "wgmma.cuh"

using namespace farro;

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
  int tile_tokens;     // tokens of a tile that are loaded and stored, a multiple of 8 up to TOKENS
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

// Scales of this thread's tokens, a pair of tokens for each 8 of the warpgroup's: of the COUNT groups from
// `of_tokens` on, where a token has those of all GROUPS beside each other.
template <int GROUPS, int COUNT, int TOKENS>
__device__ __forceinline__ void read_token_scales(float (&to)[COUNT][TOKENS / 4],
                                                  const float* of_tokens) {
#pragma unroll
  for (int i = 0; i < TOKENS / 4; ++i)
#pragma unroll
    for (int g = 0; g < COUNT; ++g) to[g][i] = of_tokens[(i / 2 * 8 + i % 2) * GROUPS + g];
}

// Add a group's sums to this thread's totals. A group past the end adds +0, which changes no total:
// none is -0, for all are multiples of the smallest subnormal.
template <int TOKENS>
__device__ __forceinline__ void promote(float (&total)[TOKENS / 2], const int (&exact)[TOKENS / 2],
                                        float low, float high, const float (&token)[TOKENS / 4]) {
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) {
    const float scale = __fmul_rn(token[i / 4 * 2 + i % 2], i / 2 % 2 ? high : low);
    total[i] = __fmaf_rn(__int2float_rn(exact[i]), scale, total[i]);
  }
}

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

template <class Out, int GROUP, int TOKENS, int WARPGROUPS, int STAGES, bool AHEAD, int CLUSTER>
__global__ void __launch_bounds__(128 * WARPGROUPS + 64)
    int8_gemm_small(const __grid_constant__ TensorMap weight_map,
                    const __grid_constant__ TensorMap token_map, const __grid_constant__ Problem p) {
  using L = Layout<Out, GROUP, TOKENS, STAGES>;
  constexpr int kSteps = GROUP >= kDepth ? kDepth / 32 : GROUP / 32;  // wgmma of a group and stage
  constexpr int kTokens = TOKENS / WARPGROUPS;                        // of one warpgroup
  constexpr int kSets = AHEAD ? 2 : L::unit_groups;                   // groups whose sums are held
  constexpr int kRead = AHEAD && L::unit_groups > 2 ? 2 : L::unit_groups;  // scales read together
  static_assert(STAGES > (AHEAD ? 2 : 1) * L::unit_blocks, "units in use, and a stage to fill");
  static_assert(kTokens % 8 == 0, "whole swizzle atoms");

  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int groups = (p.k + GROUP - 1) / GROUP, units = (p.k + L::unit - 1) / L::unit;
  const int rank = blockIdx.x % CLUSTER;  // CTAs of a cluster: the same weights, other tokens
  const int first_row = blockIdx.x / CLUSTER * kRows;
  // The engine takes its time for rows outside of a matrix as well: tiles share the tokens evenly, and
  // what is in shared memory behind them goes into sums that nobody stores
  const int first_token = (blockIdx.y * CLUSTER + rank) * p.tile_tokens;
  const int end_token = min(first_token + p.tile_tokens, p.m);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&token_map);
    for (int i = 0; i < STAGES; ++i) {
      // the copy engine's, and each lane of the scale warp where the stage brings scales
      mbarrier_init(base + L::full + 8 * i, 1 + 32);
      mbarrier_init(base + L::empty + 8 * i, CLUSTER * 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
  }
  if constexpr (CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();

  if (warp == 4 * WARPGROUPS) {
    if (lane == 0) {
      Ring<STAGES> ring(1);
      for (int block = 0; block < units * L::unit_blocks; ++block) {
        mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
        const u32 full = base + L::full + 8 * ring.stage;
        mbarrier_expect(full, L::weight_bytes + p.tile_tokens * kDepth);
        const u32 weights = base + L::weights + ring.stage * L::weight_bytes;
        if constexpr (CLUSTER > 1) {  // each CTA brings its part of the rows to all
          constexpr int kPart = kRows / CLUSTER;
          tma_load_multicast(weights + rank * kPart * kDepth, &weight_map, block * kDepth,
                             first_row + rank * kPart, full, (1 << CLUSTER) - 1);
        } else {
          tma_load(weights, &weight_map, block * kDepth, first_row, full);
        }
        tma_load(base + L::tokens + ring.stage * L::token_bytes, &token_map, block * kDepth,
                 first_token, full);
        ring.next();
      }
    }
    __syncwarp();
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
  } else if (warp > 4 * WARPGROUPS) {
    Ring<STAGES> ring(1);
    for (int unit = 0; unit < units; ++unit) {
      mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
      const u32 to = base + L::scales + ring.stage * L::scale_floats * 4;
      const int first = unit * L::unit_groups;
      load_row_scales<L::unit_groups>(p, to, first_row, first, groups, lane);
      load_token_scales<L::unit_groups, TOKENS>(p, to + 4 * L::unit_groups * kRows, first_token,
                                                end_token, first, groups, lane);
      cp_async_arrive(base + L::full + 8 * ring.stage);
      ring.next();
#pragma unroll
      for (int block = 1; block < L::unit_blocks; ++block) {  // no scales in the rest of a unit
        mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
        mbarrier_arrive(base + L::full + 8 * ring.stage);
        ring.next();
      }
    }
    cp_async_wait_all();
    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
  } else {
    const int warpgroup = warp / 4, row = warp % 4 * 16 + lane / 4;
    const int own_token = warpgroup * kTokens;  // the warpgroup's first in the tile
    float total[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) total[i] = 0.0f;
    Ring<STAGES> ring(0), done(0);

    using Sums = int[kTokens / 2];
    // Group g of the unit at `ring`: its first waits for the unit's stages, its last moves on
    auto multiply = [&](Sums& sums, int g) {
      Ring<STAGES> at = ring;
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < L::unit_blocks; ++block) {
        if (g == 0) mbarrier_wait(base + L::full + 8 * at.stage, at.parity);
        const u64 a = wgmma_descriptor(base + L::weights + at.stage * L::weight_bytes);
        const u64 b = wgmma_descriptor(base + L::tokens + at.stage * L::token_bytes +
                                       own_token * kDepth);
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
          WgmmaInt8<kTokens>::run(sums, a + 2 * (g * kSteps + k), b + 2 * (g * kSteps + k),
                                  block + k > 0);
        at.next();
      }
      wgmma_commit();
      if (g == L::unit_groups - 1) ring = at;
    };
    float of_token[kRead][kTokens / 4];
    // The same of the unit at `done`: some groups' scales are read together, the last gives the stages back
    auto finish = [&](Sums& sums, int g) {
      wgmma_hold(sums);
      const float* scales = reinterpret_cast<const float*>(shared + L::scales) +
                            done.stage * L::scale_floats;
      if (g % kRead == 0)
        read_token_scales<L::unit_groups, kRead, kTokens>(
            of_token, scales + L::unit_groups * (kRows + own_token + 2 * (lane % 4)) + g);
      const float* of_rows = scales + g * kRows + row;
      promote<kTokens>(total, sums, of_rows[0], of_rows[8], of_token[g % kRead]);
      wgmma_hold(total);  // all sums are read before the next product takes their registers
      if (g < L::unit_groups - 1) return;
      __syncwarp();
#pragma unroll
      for (int block = 0; block < L::unit_blocks; ++block) {
        const u32 empty = base + L::empty + 8 * done.stage;
        if constexpr (CLUSTER > 1) {  // every CTA writes here
          if (lane < CLUSTER) mbarrier_arrive_remote(map_to_rank(empty, lane));
        } else {
          if (lane == 0) mbarrier_arrive(empty);
        }
        done.next();
      }
    };

    // Straight lines, peeled at the end, the end under a condition though there always is a unit: ptxas
    // serializes wgmma where it loses sight of who waits, and it does where it can fold an end into
    // the loop before it
    Sums sums[kSets];
    if constexpr (AHEAD && L::unit_groups > 1) {
      constexpr int kGroups = L::unit_groups;
      multiply(sums[0], 0);
      for (int unit = 1; unit < units; ++unit) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          multiply(sums[(g + 1) % 2], (g + 1) % kGroups);
          wgmma_wait<1>();
          finish(sums[g % 2], g);
        }
      }
      if (units > 0) {
#pragma unroll
        for (int g = 0; g < kGroups - 1; ++g) {
          multiply(sums[(g + 1) % 2], g + 1);
          wgmma_wait<1>();
          finish(sums[g % 2], g);
        }
        wgmma_wait<0>();
        finish(sums[1], kGroups - 1);
      } else {
        wgmma_wait<0>();
      }
    } else if constexpr (AHEAD) {
      multiply(sums[0], 0);
      int unit = 0;
      for (; unit + 2 < units; unit += 2) {
        multiply(sums[1], 0);
        wgmma_wait<1>();
        finish(sums[0], 0);
        multiply(sums[0], 0);
        wgmma_wait<1>();
        finish(sums[1], 0);
      }
      if (unit + 1 < units) {
        multiply(sums[1], 0);
        wgmma_wait<1>();
        finish(sums[0], 0);
        wgmma_wait<0>();
        finish(sums[1], 0);
      } else {
        wgmma_wait<0>();
        finish(sums[0], 0);
      }
    } else {
      for (int unit = 0; unit < units; ++unit) {
#pragma unroll
        for (int g = 0; g < kSets; ++g) multiply(sums[g], g);
        wgmma_wait<0>();
#pragma unroll
        for (int g = 0; g < kSets; ++g) finish(sums[g], g);
      }
    }

    if constexpr (CLUSTER > 1) cluster_arrive_relaxed();
    // Results to shared memory, a token's 64 rows together; every operand has been read by then
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
  if constexpr (CLUSTER > 1) cluster_wait();  // the others may still write to, or arrive, here
}
