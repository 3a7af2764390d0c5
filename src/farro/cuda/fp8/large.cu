// FP8 E4M3 products on SM90a for many rows: persistent, warp-specialised.
//
// A CTA owns a tile of 128 * WAVES x COLUMNS outputs at a time. One warp streams boxes of 128 bytes of
// K by TMA, with SCALED a second one the scales of the input's rows; two consumer warpgroups compute
// WAVES times 64 rows each. FAST: the tensor cores add everything. Else partial
// sums of UNIT blocks of K are promoted to FP32 totals, one wave at a time through one accumulator,
// while the other warpgroup multiplies.
//
// The box of the weight brings its rows in another order, in groups of 16: so each lane's accumulators
// are four neighbouring columns of the output, and leave as 8 bytes with no exchange between lanes.
#include "fp8_problem.cuh"
#include "fp8_scales.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kConsumers = 2;  // warpgroups that multiply

template <int ROWS, int COLUMNS, int STAGES, bool SCALED>
struct Shared {
  static constexpr int a_bytes = ROWS * kDepth, b_bytes = COLUMNS * kDepth;
  // [ROWS][blocks] or [blocks][ROWS] of the input, then [blocks][2] of the weight
  static constexpr int scale_floats = SCALED ? kScaleBlocks * (ROWS + 2) : 0;
  static constexpr int a = 0, b = a + STAGES * a_bytes;
  static constexpr int scales = b + STAGES * b_bytes;
  static constexpr int full = scales + kScaleStages * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES;
  static constexpr int scale_empty = scale_full + 8 * kScaleStages;
  static constexpr int bytes = scale_empty + 8 * kScaleStages;
};

// The weight's: the two blocks of 128 rows that a tile of at most 128 columns may lie in.
__device__ __forceinline__ void load_column_scales(const Problem& p, u32 to, int first, int block,
                                                   int blocks, int lane) {
  const int j = lane / 2, row = first / kDepth + lane % 2;
  const bool valid = block + j < blocks && row * kDepth < p.n;
  if (j < kScaleBlocks)
    cp_async<4>(to + 4 * lane,
                p.weight_scale +
                    (valid ? row * p.weight_scale_row + (block + j) * p.weight_scale_block : 0),
                valid);
}

// One wave of 64 rows: pairs of pieces hold four neighbouring columns of this lane each.
template <int EPILOGUE, int COLUMNS>
__device__ __forceinline__ void store_wave(const Problem& p, const float (&total)[COLUMNS / 2],
                                           float alpha, int row, int first_column, int lane) {
#pragma unroll
  for (int j = 0; j < COLUMNS / 16; ++j) {
    const int column = first_column + 16 * j + 4 * (lane % 4);
    if (column >= p.n) break;
    float bias[4] = {};
    if constexpr (EPILOGUE & kBias) load_biases(p, column, bias);
    const float* s = total + 8 * j;
    const float low[4] = {s[0], s[1], s[4], s[5]}, high[4] = {s[2], s[3], s[6], s[7]};
    if (row < p.m) finish<EPILOGUE>(p, low, alpha, bias, row, column);
    if (row + 8 < p.m) finish<EPILOGUE>(p, high, alpha, bias, row + 8, column);
  }
}

template <int EPILOGUE, bool SCALED, bool FAST, int COLUMNS, int WAVES, int STAGES>
__global__ void __launch_bounds__(128 + 128 * kConsumers, 1)
    fp8_large(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
              const __grid_constant__ Problem p) {
  constexpr int ROWS = 64 * WAVES * kConsumers;
  constexpr int kUnit = SCALED || FAST ? 1 : 2;  // blocks of K between promotions
  constexpr bool kAhead = !FAST && WAVES == 1 && COLUMNS <= 128;  // else registers are too few
  using S = Shared<ROWS, COLUMNS, STAGES, SCALED>;
  static_assert(STAGES > (kAhead ? 2 : 1) * kUnit && COLUMNS % 16 == 0 && !(SCALED && (FAST || COLUMNS > 128)));
  static_assert(S::a_bytes % 1024 == 0 && S::b_bytes % 1024 == 0, "whole atoms of the swizzle");

  extern __shared__ __align__(1024) u8 shared[];  // the swizzle counts from multiples of 1024
  const u32 base = smem_address(shared);
  const int blocks = (p.k + kDepth - 1) / kDepth, units = (blocks + kUnit - 1) / kUnit;
  const int row_tiles = (p.m + ROWS - 1) / ROWS, column_tiles = (p.n + COLUMNS - 1) / COLUMNS;
  const int tiles = row_tiles * column_tiles;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&map_a);
    prefetch_tensor_map(&map_b);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(base + S::full + 8 * i, 1);
      mbarrier_init(base + S::empty + 8 * i, 4 * kConsumers);
    }
    for (int i = 0; i < kScaleStages; ++i) {
      mbarrier_init(base + S::scale_full + 8 * i, 32);
      mbarrier_init(base + S::scale_empty + 8 * i, 4 * kConsumers);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    give_registers<40>();
    const int warp = threadIdx.x / 32;
    if (warp == 0 && lane == 0) {
      Ring<STAGES> ring(1);
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        int row_tile, column_tile;
        tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
        for (int block = 0; block < units * kUnit; ++block) {
          mbarrier_wait(base + S::empty + 8 * ring.stage, ring.parity);
          const u32 full = base + S::full + 8 * ring.stage;
          mbarrier_expect(full, S::a_bytes + S::b_bytes);
          tma_load(base + S::a + ring.stage * S::a_bytes, &map_a, block * kDepth, row_tile * ROWS,
                   full);
          tma_load_groups(base + S::b + ring.stage * S::b_bytes, &map_b, block * kDepth,
                          column_tile * (COLUMNS / 16), full);
          ring.next();
        }
      }
    } else if (SCALED && warp == 1) {
      Ring<kScaleStages> ring(1);
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        int row_tile, column_tile;
        tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
        for (int block = 0; block < blocks; block += kScaleBlocks) {
          mbarrier_wait(base + S::scale_empty + 8 * ring.stage, ring.parity);
          const u32 to = base + S::scales + ring.stage * S::scale_floats * 4;
          load_row_scales<ROWS>(p, to, row_tile * ROWS, block, blocks, lane);
          load_column_scales(p, to + 4 * kScaleBlocks * ROWS, column_tile * COLUMNS, block, blocks,
                             lane);
          cp_async_arrive(base + S::scale_full + 8 * ring.stage);
          ring.next();
        }
      }
      cp_async_wait_all();
    }
  } else {
    take_registers<232>();
    const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32;
    const int wave_row = consumer * 64 * WAVES, lane_row = wave_row + warp * 16 + lane / 4;
    const u64 first_a = wgmma_descriptor(base + S::a + wave_row * kDepth);
    const u64 first_b = wgmma_descriptor(base + S::b);
    const int by_row = p.input_scale_vector == 2 ? 1 : kScaleBlocks;
    const int by_block = p.input_scale_vector == 2 ? ROWS : 1;
    const float alpha = SCALED ? 1.0f : alpha_of(p);
    Ring<STAGES> ring(0);
    Ring<kScaleStages> scale_ring(0);
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      int row_tile, column_tile;
      tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
      const int first_column = column_tile * COLUMNS;
      float total[WAVES][COLUMNS / 2];

      if constexpr (FAST) {
        Ring<STAGES> done = ring;
        for (int block = 0; block < blocks; ++block) {
          mbarrier_wait(base + S::full + 8 * ring.stage, ring.parity);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kDepth / 32; ++k)
#pragma unroll
            for (int w = 0; w < WAVES; ++w)
              WgmmaFp8<COLUMNS>::run(
                  total[w], first_a + ring.stage * (S::a_bytes / 16) + w * (64 * kDepth / 16) + 2 * k,
                  first_b + ring.stage * (S::b_bytes / 16) + 2 * k, block + k > 0);
          wgmma_commit();
          ring.next();
          if (block > 0) {  // the block before has been multiplied
            wgmma_wait<1>();
            if (lane == 0) mbarrier_arrive(base + S::empty + 8 * done.stage);
            done.next();
          }
        }
        wgmma_wait<0>();
#pragma unroll
        for (int w = 0; w < WAVES; ++w) wgmma_hold(total[w]);
        if (lane == 0) mbarrier_arrive(base + S::empty + 8 * done.stage);
      } else {
#pragma unroll
        for (int w = 0; w < WAVES; ++w)
#pragma unroll
          for (int i = 0; i < COLUMNS / 2; ++i) total[w][i] = 0.0f;
        // Columns from here on have the second of the weight's scales (multiples of 16)
        const int border = (first_column / kDepth + 1) * kDepth - first_column;
        using Sums = float[COLUMNS / 2];
        Ring<STAGES> done = ring;

        auto wait_for_stage = [&] {
          mbarrier_wait(base + S::full + 8 * ring.stage, ring.parity);
        };
        // One unit of K for a wave, from stages `from` on
        auto multiply = [&](Sums& partial, int w, Ring<STAGES> from) {
          wgmma_fence();
#pragma unroll
          for (int block = 0; block < kUnit; ++block) {
            if (block > 0) mbarrier_wait(base + S::full + 8 * from.stage, from.parity);
            const u64 a = first_a + from.stage * (S::a_bytes / 16) + w * (64 * kDepth / 16);
            const u64 b = first_b + from.stage * (S::b_bytes / 16);
#pragma unroll
            for (int k = 0; k < kDepth / 32; ++k)
              WgmmaFp8<COLUMNS>::run(partial, a + 2 * k, b + 2 * k, block + k > 0);
            from.next();
          }
          wgmma_commit();
        };
        auto skip_unit = [&](Ring<STAGES>& at) {
#pragma unroll
          for (int block = 0; block < kUnit; ++block) at.next();
        };
        auto give_back = [&] {
#pragma unroll
          for (int block = 0; block < kUnit; ++block) {
            if (lane == 0) mbarrier_arrive(base + S::empty + 8 * done.stage);
            done.next();
          }
        };
        // Before a unit's sums are added: the scales of `unit` are there
        auto wait_for_scales = [&](int unit) {
          if (SCALED && unit % kScaleBlocks == 0)
            mbarrier_wait(base + S::scale_full + 8 * scale_ring.stage, scale_ring.parity);
        };
        auto scales_at = [&](int unit, int w) {
          const float* scales = reinterpret_cast<const float*>(shared + S::scales) +
                                scale_ring.stage * S::scale_floats;
          const int slot = unit % kScaleBlocks;
          const float* of_rows = scales + slot * by_block + (lane_row + 64 * w) * by_row;
          const float* of_weight = scales + kScaleBlocks * ROWS + 2 * slot;
          return make_float4(of_rows[0], of_rows[8 * by_row], of_weight[0], of_weight[1]);
        };
        auto add = [&](Sums& partial, int w, float4 scales) {
          wgmma_hold(partial);
#pragma unroll
          for (int j = 0; j < COLUMNS / 8; ++j) {
            float* sum = total[w] + 4 * j;
            const float* part = partial + 4 * j;
            if constexpr (SCALED) {
              // one block of the weight's scales for all columns where COLUMNS divides 128
              const float s = 128 % COLUMNS == 0 || 8 * j < border ? scales.z : scales.w;
              const float low = __fmul_rn(scales.x, s), high = __fmul_rn(scales.y, s);
              sum[0] = __fmaf_rn(part[0], low, sum[0]);
              sum[1] = __fmaf_rn(part[1], low, sum[1]);
              sum[2] = __fmaf_rn(part[2], high, sum[2]);
              sum[3] = __fmaf_rn(part[3], high, sum[3]);
            } else {
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
            }
          }
        };
        auto give_back_scales = [&](int unit) {
          if (SCALED && (unit % kScaleBlocks == kScaleBlocks - 1 || unit == units - 1)) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(base + S::scale_empty + 8 * scale_ring.stage);
            scale_ring.next();
          }
        };

        wait_for_stage();
        if constexpr (kAhead) {
          // A unit multiplies while the one before is added. Straight lines, peeled at the end: ptxas
          // serializes wgmma where it loses sight of who waits
          Sums even, odd;
          auto start = [&](Sums& partial) {
            wait_for_stage();
            multiply(partial, 0, ring);
            skip_unit(ring);
          };
          auto end = [&](Sums& partial, int unit) {
            give_back();
            wait_for_scales(unit);
            add(partial, 0, SCALED ? scales_at(unit, 0) : float4{});
            give_back_scales(unit);
          };
          start(even);
          int unit = 0;
          for (; unit + 2 < units; unit += 2) {
            start(odd);
            wgmma_wait<1>();
            end(even, unit);
            start(even);
            wgmma_wait<1>();
            end(odd, unit + 1);
          }
          if (unit + 1 < units) {
            start(odd);
            wgmma_wait<1>();
            end(even, unit);
            wgmma_wait<0>();
            end(odd, unit + 1);
          } else {
            wgmma_wait<0>();
            end(even, unit);
          }
        } else {
          for (int unit = 0; unit < units; ++unit) {
#pragma unroll
            for (int w = 0; w < WAVES; ++w) {
              Sums partial;
              multiply(partial, w, ring);
              if (w == 0) wait_for_scales(unit);
              const float4 scales = SCALED ? scales_at(unit, w) : float4{};
              if (w == WAVES - 1) {  // the next unit's first stage, while this wave multiplies
                skip_unit(ring);
                if (unit + 1 < units) wait_for_stage();
              }
              wgmma_wait<0>();
              if (w == WAVES - 1) give_back();
              add(partial, w, scales);
            }
            give_back_scales(unit);
          }
        }
      }
#pragma unroll
      for (int w = 0; w < WAVES; ++w)
        store_wave<EPILOGUE, COLUMNS>(p, total[w], alpha, row_tile * ROWS + lane_row + 64 * w,
                                      first_column, lane);
    }
  }
}
