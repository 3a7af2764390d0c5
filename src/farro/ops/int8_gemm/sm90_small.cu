// int8_gemm on SM90a for few rows: operands swapped, so that weights fill the 64-row side of wgmma
// and tokens the narrow one.
//
// A CTA owns 64 weight rows and TOKENS tokens. One warp streams 128-byte-wide boxes of both by TMA,
// another the group scales by cp.async, into one ring; WARPGROUPS warpgroups share the tokens. They
// multiply CHUNK groups at a time and promote the sums in one of three orders. docs/int8-sm90.md
// draws it.
#include "output.cuh"
#include "sm90_small.cuh"
#include "wgmma.cuh"

using namespace farro;

// When the sums of a chunk (CHUNK groups) are promoted
constexpr int after = 0;  // when they are there; other warps of the multiprocessor fill the gap
constexpr int ahead = 1;  // while the next chunk multiplies into a second set of sums
constexpr int early = 2;  // made floats first, so that the next chunk may multiply into the same set

template <class Out, int GROUP, int TOKENS, int WARPGROUPS, int STAGES, int ORDER, int CHUNK,
          int TOKEN_TILES, int ROW_TILES, int RESIDENT>
__global__ void __launch_bounds__(128 * WARPGROUPS + 64, RESIDENT)
    int8_gemm_small(const __grid_constant__ TensorMap weight_map,
                    const __grid_constant__ TensorMap token_map, const __grid_constant__ Problem p) {
  using L = Layout<Out, GROUP, TOKENS, STAGES>;
  constexpr int kSteps = GROUP >= kDepth ? kDepth / 32 : GROUP / 32;  // wgmma of a group and stage
  constexpr int kTokens = TOKENS / WARPGROUPS;                        // of one warpgroup
  // A cluster is ROW_TILES tiles of weights by TOKEN_TILES of tokens
  constexpr int kCluster = TOKEN_TILES * ROW_TILES;
  constexpr int kChunks = L::unit_groups / CHUNK;
  // groups whose token scales are read together, as far as registers allow
  constexpr int kRead = RESIDENT > 2                    ? CHUNK
                        : CHUNK > 2 || kTokens <= 32    ? L::unit_groups
                        : CHUNK > 1 || kChunks == 1     ? CHUNK
                                                        : 2;
  static_assert(L::unit_groups % CHUNK == 0, "whole chunks in a unit");
  static_assert(STAGES > (ORDER == after ? 1 : 2) * L::unit_blocks, "units in use, and a stage to fill");
  static_assert(kTokens % 8 == 0, "whole swizzle atoms");

  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int groups = (p.k + GROUP - 1) / GROUP, units = (p.k + L::unit - 1) / L::unit;
  const int rank = blockIdx.x % kCluster;
  const int row_tile = rank % ROW_TILES, token_tile = rank / ROW_TILES;  // in the cluster
  const int first_row = (blockIdx.x / kCluster * ROW_TILES + row_tile) * kRows;
  // The engine takes its time for rows outside of a matrix as well: tiles share the tokens evenly, and
  // what is in shared memory behind them goes into sums that nobody stores
  const int first_token = (blockIdx.y * TOKEN_TILES + token_tile) * p.tile_rows;
  const int end_token = min(first_token + p.tile_rows, p.m);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&token_map);
    for (int i = 0; i < STAGES; ++i) {
      // the copy engine's, and each lane of the scale warp where the stage brings scales
      mbarrier_init(base + L::full + 8 * i, 1 + 32);
      // of those that read what this CTA loads: its own row of tiles and its own column
      mbarrier_init(base + L::empty + 8 * i, (TOKEN_TILES + ROW_TILES - 1) * 4 * WARPGROUPS);
    }
    fence_mbarrier_init();
  }
  if constexpr (kCluster > 1)
    cluster_sync();
  else
    __syncthreads();

  if (warp == 4 * WARPGROUPS) {
    if (lane == 0) {
      Ring<STAGES> ring(1);
      for (int block = 0; block < units * L::unit_blocks; ++block) {
        mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
        const u32 full = base + L::full + 8 * ring.stage;
        mbarrier_expect(full, L::weight_bytes + p.tile_rows * kDepth);
        const u32 weights = base + L::weights + ring.stage * L::weight_bytes;
        const u32 tokens = base + L::tokens + ring.stage * L::token_bytes;
        if constexpr (TOKEN_TILES > 1) {  // each CTA brings its part of the rows to all
          constexpr int kPart = kRows / TOKEN_TILES;
          constexpr int kMask = TOKEN_TILES == 1 ? 1 : 1 | 1 << ROW_TILES;
          tma_load_multicast(weights + token_tile * kPart * kDepth, &weight_map, block * kDepth,
                             first_row + token_tile * kPart, full, kMask << row_tile);
        } else {
          tma_load(weights, &weight_map, block * kDepth, first_row, full);
        }
        if constexpr (ROW_TILES > 1) {  // and of the tokens
          const int part = p.tile_rows / ROW_TILES;
          tma_load_multicast(tokens + row_tile * part * kDepth, &token_map, block * kDepth,
                             first_token + row_tile * part, full,
                             ((1 << ROW_TILES) - 1) << (token_tile * ROW_TILES));
        } else {
          tma_load(tokens, &token_map, block * kDepth, first_token, full);
        }
        ring.next();
      }
    }
    __syncwarp();
    if constexpr (kCluster > 1) cluster_arrive_relaxed();
  } else if (warp > 4 * WARPGROUPS) {
    load_scales<L, TOKENS, STAGES>(p, base, first_row, first_token, end_token, groups, units, lane);
    if constexpr (kCluster > 1) cluster_arrive_relaxed();
  } else {
    const int warpgroup = warp / 4, row = warp % 4 * 16 + lane / 4;
    const int own_token = warpgroup * kTokens;  // the warpgroup's first in the tile
    float total[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) total[i] = 0.0f;
    Ring<STAGES> ring(0);
    int done = 0;  // stage of the unit that is promoted
    using Sums = int[CHUNK][kTokens / 2];
    // The low halves of descriptors; stages and steps along K are added to them
    const u64 first_a = wgmma_descriptor(base + L::weights);
    const u64 first_b = wgmma_descriptor(base + L::tokens + own_token * kDepth);
    auto along = [](u64 descriptor, u32 by) {
      return (descriptor & ~u64{0xFFFFFFFF}) | (static_cast<u32>(descriptor) + by);
    };
    // Chunk c of the unit at `ring`: its first waits for the unit's stages, its last moves on
    auto multiply = [&](Sums& sums, int c) {
      Ring<STAGES> at = ring;
#pragma unroll
      for (int block = 0; block < L::unit_blocks; ++block) {
        if (c == 0) mbarrier_wait(base + L::full + 8 * at.stage, at.parity);
        wgmma_fence();
        const u32 a = at.stage * (L::weight_bytes / 16), b = at.stage * (L::token_bytes / 16);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            const int step = 2 * ((c * CHUNK + i) * kSteps + k);
            WgmmaInt8<kTokens>::run(sums[i], along(first_a, a + step), along(first_b, b + step),
                                    block + k > 0);
          }
        at.next();
      }
      wgmma_commit();
      if (c == kChunks - 1) ring = at;
    };
    // This thread's scales of chunk c of the unit at `done`
    u32 of_rows = L::scales + 4 * row;
    u32 of_tokens = L::scales + 4 * L::unit_groups * (kRows + own_token + 2 * (lane % 4));
    asm volatile("" : "+r"(of_rows), "+r"(of_tokens));  // not computed anew at each use
    float of_row[CHUNK][2], of_token[kTokens / 4][kRead];
    auto read_scales = [&](int c) {
      const u8* unit = shared + done * (L::scale_floats * 4);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        const float* rows = reinterpret_cast<const float*>(unit + of_rows) + (c * CHUNK + i) * kRows;
        of_row[i][0] = rows[0], of_row[i][1] = rows[8];
      }
      if (c * CHUNK % kRead == 0) {
        const float* tokens = reinterpret_cast<const float*>(unit + of_tokens) + c * CHUNK;
#pragma unroll
        for (int i = 0; i < kTokens / 4; ++i)
          read_floats(of_token[i], tokens + (i / 2 * 8 + i % 2) * L::unit_groups);
      }
    };
    // The unit's stages are given back
    auto release = [&]() {
      __syncwarp();
#pragma unroll
      for (int block = 0; block < L::unit_blocks; ++block) {
        const u32 empty = base + L::empty + 8 * done;
        if constexpr (kCluster > 1) {  // these write here
          const bool writes = lane % ROW_TILES == row_tile || lane / ROW_TILES == token_tile;
          if (lane < kCluster && writes) mbarrier_arrive_remote(map_to_rank(empty, lane));
        } else {
          if (lane == 0) mbarrier_arrive(empty);
        }
        if (++done == STAGES) done = 0;
      }
    };
    // A group past the end adds +0, which changes no total: none is -0, for all are multiples of the
    // smallest subnormal
    auto add = [&](int c, int i, int j, float sum) {
      const float scale = __fmul_rn(of_token[j / 4 * 2 + j % 2][(c * CHUNK + i) % kRead],
                                    of_row[i][j / 2 % 2]);
      total[j] = __fmaf_rn(sum, scale, total[j]);
    };
    // Chunk c of the unit at `done`, whose last gives the stages back
    auto finish = [&](Sums& sums, int c) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) wgmma_hold(sums[i]);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i)
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) add(c, i, j, __int2float_rn(sums[i][j]));
      wgmma_hold(total);  // all sums are read before the next product takes their registers
      if (c == kChunks - 1) release();
    };
    float exact[CHUNK][kTokens / 2];
    auto to_floats = [&](Sums& sums) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) wgmma_hold(sums[i]);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) exact[i][j] = __int2float_rn(sums[i][j]);
        wgmma_hold(exact[i]);  // all sums are read before the next product takes their registers
      }
    };
    auto add_all = [&](int c) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i)
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) add(c, i, j, exact[i][j]);
    };

    // Straight lines, peeled at the end, the end under a condition though there always is a unit: ptxas
    // serializes wgmma where it loses sight of who waits, and it does where it can fold an end into
    // the loop before it
    if constexpr (ORDER == early) {
      Sums sums;
      multiply(sums, 0);
      for (int unit = 1; unit < units; ++unit) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          read_scales(c);
          wgmma_wait<0>();
          to_floats(sums);
          if (c == kChunks - 1) release();
          multiply(sums, (c + 1) % kChunks);
          add_all(c);
        }
      }
      if (units > 0) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          read_scales(c);
          wgmma_wait<0>();
          to_floats(sums);
          if (c == kChunks - 1)
            release();
          else
            multiply(sums, c + 1);
          add_all(c);
        }
      } else {
        wgmma_wait<0>();
      }
    } else if constexpr (ORDER == ahead && kChunks > 1) {
      Sums sums[2];
      multiply(sums[0], 0);
      for (int unit = 1; unit < units; ++unit) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          multiply(sums[(c + 1) % 2], (c + 1) % kChunks);
          read_scales(c);
          wgmma_wait<1>();
          finish(sums[c % 2], c);
        }
      }
      if (units > 0) {
#pragma unroll
        for (int c = 0; c < kChunks - 1; ++c) {
          multiply(sums[(c + 1) % 2], c + 1);
          read_scales(c);
          wgmma_wait<1>();
          finish(sums[c % 2], c);
        }
        read_scales(kChunks - 1);
        wgmma_wait<0>();
        finish(sums[1], kChunks - 1);
      } else {
        wgmma_wait<0>();
      }
    } else if constexpr (ORDER == ahead) {
      Sums sums[2];
      multiply(sums[0], 0);
      int unit = 0;
      for (; unit + 2 < units; unit += 2) {
        multiply(sums[1], 0);
        read_scales(0);
        wgmma_wait<1>();
        finish(sums[0], 0);
        multiply(sums[0], 0);
        read_scales(0);
        wgmma_wait<1>();
        finish(sums[1], 0);
      }
      if (unit + 1 < units) {
        multiply(sums[1], 0);
        read_scales(0);
        wgmma_wait<1>();
        finish(sums[0], 0);
        read_scales(0);
        wgmma_wait<0>();
        finish(sums[1], 0);
      } else {
        read_scales(0);
        wgmma_wait<0>();
        finish(sums[0], 0);
      }
    } else {
      Sums sums;
      for (int unit = 0; unit < units; ++unit) {
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          multiply(sums, c);
          read_scales(c);
          wgmma_wait<0>();
          finish(sums, c);
        }
      }
    }

    if constexpr (kCluster > 1) cluster_arrive_relaxed();
    store_results<L, Out, TOKENS, WARPGROUPS>(p, shared, total, first_row, row, first_token, end_token,
                                              own_token, lane);
  }
  if constexpr (kCluster > 1) cluster_wait();  // the others may still write to, or arrive, here
}
