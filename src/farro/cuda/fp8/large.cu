// FP8 E4M3 products on SM90a for many rows: persistent, warp-specialised.
//
// A CTA owns a tile of 128 * WAVES x COLUMNS outputs at a time. One warp streams boxes of 128 bytes of
// K by TMA, with SCALED a second one the scales; two consumer warpgroups compute WAVES times 64 rows
// each. FAST: the tensor cores add everything. Else partial sums of kUnit blocks of K are promoted to
// FP32 totals, one wave at a time through one accumulator, while the other warpgroup multiplies.
//
// STAGED (where the tensor cores add everything): results leave through shared memory by TMA, and
// nothing waits for them on their way.
//
// The box of the weight brings its rows in another order, in groups of GROUP: so each lane's
// accumulators are GROUP / 4 neighbouring columns of the output, and leave as 16 or 8 bytes with no
// exchange between lanes.
#include "fp8_problem.cuh"
#include "fp8_scales.cuh"
#include "results.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kConsumers = 2;  // warpgroups that multiply

constexpr int divisor(int a, int b) { return b == 0 ? a : divisor(b, a % b); }

// Blocks of 128 rows of the weight that a tile's columns may lie in, wherever it begins.
constexpr int across(int columns) { return columns <= kDepth + divisor(kDepth, columns) ? 2 : 3; }

template <int ROWS, int COLUMNS, int STAGES, bool SCALED, bool STAGED>
struct Shared {
  static constexpr int a_bytes = ROWS * kDepth, b_bytes = COLUMNS * kDepth;
  // [ROWS][blocks] or [blocks][ROWS] of the input, then [blocks][across] of the weight
  static constexpr int scale_floats = SCALED ? kScaleBlocks * (ROWS + across(COLUMNS)) : 0;
  static constexpr int a = 0, b = a + STAGES * a_bytes;
  static constexpr int out = b + STAGES * b_bytes;  // of each warp [groups][16 rows][GROUP]
  static constexpr int scales = out + (STAGED ? ROWS * COLUMNS * 2 : 0);
  static constexpr int full = scales + kScaleStages * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES;
  static constexpr int scale_empty = scale_full + 8 * kScaleStages;
  static constexpr int bytes = scale_empty + 8 * kScaleStages;
};

// The weight's: of the blocks of 128 rows that a tile's columns may lie in.
template <int ACROSS>
__device__ __forceinline__ void load_column_scales(const Problem& p, u32 to, int first, int block,
                                                   int blocks, int lane) {
  const int j = lane / ACROSS, row = first / kDepth + lane % ACROSS;
  const bool valid = block + j < blocks && row * kDepth < p.n;
  if (j < kScaleBlocks)
    cp_async<4>(to + 4 * lane,
                p.weight_scale +
                    (valid ? row * p.weight_scale_row + (block + j) * p.weight_scale_block : 0),
                valid);
}

template <int EPILOGUE, bool SCALED, bool FAST, int COLUMNS, int WAVES, int STAGES, int GROUP,
          bool STAGED>
__global__ void __launch_bounds__(128 + 128 * kConsumers, 1)
    fp8_large(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
              const __grid_constant__ TensorMap map_out, const __grid_constant__ Problem p) {
  constexpr int ROWS = 64 * WAVES * kConsumers;
  constexpr int kUnit = SCALED || FAST ? 1 : 2;  // blocks of K between promotions
  using S = Shared<ROWS, COLUMNS, STAGES, SCALED, STAGED>;
  static_assert(STAGES > kUnit && !(SCALED && FAST) && (!STAGED || (FAST && WAVES == 1)));
  static_assert(COLUMNS % GROUP == 0 && (GROUP == 16 || GROUP == 32));
  static_assert(!SCALED || COLUMNS <= 2 * kDepth, "in three blocks of scales");
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
    if constexpr (STAGED) prefetch_tensor_map(&map_out);
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
    give_registers<56>();
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
                          column_tile * (COLUMNS / GROUP), full);
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
          load_column_scales<across(COLUMNS)>(p, to + 4 * kScaleBlocks * ROWS, column_tile * COLUMNS,
                                              block, blocks, lane);
          cp_async_arrive(base + S::scale_full + 8 * ring.stage);
          ring.next();
        }
      }
      cp_async_wait_all();
    }
    return;
  }

  take_registers<224>();
  const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32;
  const int wave_row = consumer * 64 * WAVES, lane_row = wave_row + warp * 16 + lane / 4;
  // Descriptors are 32-bit additions to these; from one lane to all, so that they stay in uniform
  // registers
  const u32 first_a =
      __shfl_sync(~0u, static_cast<u32>(wgmma_descriptor(base + S::a + wave_row * kDepth)), 0);
  const u32 first_b = __shfl_sync(~0u, static_cast<u32>(wgmma_descriptor(base + S::b)), 0);
  const float alpha = SCALED ? 1.0f : alpha_of(p);
  Ring<STAGES> ring(0);
  Ring<kScaleStages> scale_ring(0);

  auto wait_for_stage = [&] { mbarrier_wait(base + S::full + 8 * ring.stage, ring.parity); };
  auto give_back = [&](int stage) {
    if (lane == 0) mbarrier_arrive(base + S::empty + 8 * stage);
  };

  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    int row_tile, column_tile;
    tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
    const int first_column = column_tile * COLUMNS;
    float total[WAVES][COLUMNS / 2];
    if constexpr (EPILOGUE & (kBias | kResidual)) {
      const int column = first_column + GROUP / 4 * (lane % 4);
#pragma unroll
      for (int g = 0; g < COLUMNS / GROUP; ++g) {
        if constexpr (EPILOGUE & kBias)
          if (warp == 0 && lane < 4) expect_biases(p, column + GROUP * g);
        if constexpr (EPILOGUE & kResidual)
#pragma unroll
          for (int w = 0; w < 2 * WAVES; ++w)
            if (lane % 2 == 0)
              expect_residual(p, row_tile * ROWS + lane_row + w % 2 * 8 + w / 2 * 64,
                              column + GROUP * g);
      }
    }

    if constexpr (FAST) {
      Ring<STAGES> done = ring;
      for (int block = 0; block < blocks; ++block) {
        wait_for_stage();
        const u32 a = first_a + ring.stage * (S::a_bytes / 16);
        const u32 b = first_b + ring.stage * (S::b_bytes / 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kDepth / 32; ++k)
#pragma unroll
          for (int w = 0; w < WAVES; ++w)
            WgmmaFp8<COLUMNS>::run(total[w], descriptor_of(a + w * (64 * kDepth / 16) + 2 * k),
                                   descriptor_of(b + 2 * k), block + k > 0);
        wgmma_commit();
        ring.next();
        if (block > 0) {  // the block before has been multiplied
          wgmma_wait<1>();
          give_back(done.stage);
          done.next();
        }
      }
      wgmma_wait<0>();
#pragma unroll
      for (int w = 0; w < WAVES; ++w) wgmma_hold(total[w]);
      give_back(done.stage);
    } else {
#pragma unroll
      for (int w = 0; w < WAVES; ++w)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) total[w][i] = 0.0f;
      const int by_row = p.input_scale_vector == 2 ? 1 : kScaleBlocks;
      const int by_block = p.input_scale_vector == 2 ? ROWS : 1;

      // All of K, where columns from BORDER on have the second of the weight's scales, then the third
      auto all = [&]<int BORDER>() {
        wait_for_stage();
        for (int unit = 0; unit < units; ++unit) {
          Ring<STAGES> second = ring;
          second.next();
          const u32 a = first_a + ring.stage * (S::a_bytes / 16);
          const u32 b = first_b + ring.stage * (S::b_bytes / 16);
          const int slot = unit % kScaleBlocks, stage = ring.stage;
          const float* scales = reinterpret_cast<const float*>(shared + S::scales) +
                                scale_ring.stage * S::scale_floats;
          const float* of_rows = scales + slot * by_block + lane_row * by_row;
          const float* of_weight = scales + kScaleBlocks * ROWS + across(COLUMNS) * slot;
#pragma unroll
          for (int w = 0; w < WAVES; ++w) {
            float partial[COLUMNS / 2];
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kDepth / 32; ++k)
              WgmmaFp8<COLUMNS>::run(partial, descriptor_of(a + w * (64 * kDepth / 16) + 2 * k),
                                     descriptor_of(b + 2 * k), k > 0);
            if constexpr (kUnit == 2) {
              const u32 more_a = first_a + second.stage * (S::a_bytes / 16);
              const u32 more_b = first_b + second.stage * (S::b_bytes / 16);
              if (w == 0) mbarrier_wait(base + S::full + 8 * second.stage, second.parity);
#pragma unroll
              for (int k = 0; k < kDepth / 32; ++k)
                WgmmaFp8<COLUMNS>::run(partial,
                                       descriptor_of(more_a + w * (64 * kDepth / 16) + 2 * k),
                                       descriptor_of(more_b + 2 * k), true);
            }
            wgmma_commit();
            // What is needed next, while this wave multiplies
            float low = 0.0f, high = 0.0f, next_low = 0.0f, next_high = 0.0f;
            float last_low = 0.0f, last_high = 0.0f;
            if constexpr (SCALED) {
              if (w == 0 && slot == 0)
                mbarrier_wait(base + S::scale_full + 8 * scale_ring.stage, scale_ring.parity);
              const float x = of_rows[64 * w * by_row], y = of_rows[(64 * w + 8) * by_row];
              low = __fmul_rn(x, of_weight[0]), high = __fmul_rn(y, of_weight[0]);
              if constexpr (BORDER < COLUMNS)
                next_low = __fmul_rn(x, of_weight[1]), next_high = __fmul_rn(y, of_weight[1]);
              if constexpr (BORDER + kDepth < COLUMNS)
                last_low = __fmul_rn(x, of_weight[2]), last_high = __fmul_rn(y, of_weight[2]);
              if (w == WAVES - 1 && (slot == kScaleBlocks - 1 || unit == units - 1)) {
                __syncwarp();
                if (lane == 0) mbarrier_arrive(base + S::scale_empty + 8 * scale_ring.stage);
                scale_ring.next();
              }
            }
            if (w == WAVES - 1) {
#pragma unroll
              for (int i = 0; i < kUnit; ++i) ring.next();
              if (unit + 1 < units) wait_for_stage();
            }
            wgmma_wait<0>();
            if (w == WAVES - 1) {
              give_back(stage);
              if constexpr (kUnit == 2) give_back(second.stage);
            }
            wgmma_hold(partial);
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
              float* sum = total[w] + 4 * j;
              const float* part = partial + 4 * j;
              if constexpr (SCALED) {
                const bool second = 8 * j >= BORDER, third = 8 * j >= BORDER + kDepth;
                const float l = third ? last_low : second ? next_low : low;
                const float h = third ? last_high : second ? next_high : high;
                sum[0] = __fmaf_rn(part[0], l, sum[0]);
                sum[1] = __fmaf_rn(part[1], l, sum[1]);
                sum[2] = __fmaf_rn(part[2], h, sum[2]);
                sum[3] = __fmaf_rn(part[3], h, sum[3]);
              } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], part[i]);
              }
            }
          }
        }
      };
      constexpr int step = divisor(kDepth, COLUMNS);  // borders are multiples of it
      if constexpr (!SCALED || step == COLUMNS || COLUMNS == kDepth) {
        all.template operator()<COLUMNS>();
      } else {
        const int border = kDepth - first_column % kDepth;
        auto choose = [&]<int BORDER>(auto self) {
          if constexpr (BORDER >= COLUMNS || BORDER > kDepth) {
            all.template operator()<COLUMNS>();
          } else {
            if (border == BORDER) all.template operator()<BORDER>();
            else self.template operator()<BORDER + step>(self);
          }
        };
        choose.template operator()<step>(choose);
      }
    }
    if (STAGED && p.out_vector) {
      stage_wave<EPILOGUE, COLUMNS, GROUP>(
          p, &map_out, total[0], alpha, shared + S::out + (4 * consumer + warp) * (32 * COLUMNS),
          row_tile * ROWS + wave_row + 16 * warp, first_column, lane);
    } else {
#pragma unroll
      for (int w = 0; w < WAVES; ++w)
        store_wave<EPILOGUE, SCALED, COLUMNS, GROUP>(
            p, total[w], alpha, row_tile * ROWS + lane_row + 64 * w, first_column, lane);
    }
  }
  if constexpr (STAGED)
    if (lane == 0) tma_store_wait<0>();
}
