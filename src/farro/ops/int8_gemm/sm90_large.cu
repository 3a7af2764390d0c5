// int8_gemm on SM90a for many rows: persistent, warp-specialised, group sums promoted in registers.
//
// A CTA owns a tile of 128 * WAVES x COLUMNS outputs at a time. A producer warp streams 128-byte-wide
// boxes of A and B by TMA, a second one the group scales by cp.async; two consumer warpgroups each
// compute WAVES times 64 rows, one wave at a time through one INT32 accumulator. After a group's exact
// sum a wave does total = fma(float(partial), sA * sB, total). docs/int8-sm90.md draws the pipeline.
#include "output.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kDepth = 128;      // bytes of K in one stage
constexpr int kConsumers = 2;    // warpgroups that multiply
constexpr int kScaleGroups = 4;  // groups of one stage of scales: 16 bytes of a row of A's
constexpr int kScaleStages = 3;

struct Problem {
  const float* scale_a;
  const float* scale_b;
  const void* bias;
  void* out;
  i64 scale_a_row, scale_a_group, scale_b_group, scale_b_column, out_row, out_column, bias_stride;
  int m, n, k;
  int bias_kind;
  int raster;          // row tiles that are visited together, for L2
  int tile_rows;       // rows of a tile that are loaded and stored, a multiple of 8 up to ROWS
  int vector;          // 16-byte stores are aligned
  int scale_a_vector;  // how many scales of a row may be read together: 4, 2 or 1
  int scale_b_vector;  // the same of a group's: 4 or 1
};

template <int ROWS, int COLUMNS, int STAGES>
struct Shared {
  static constexpr int a_bytes = ROWS * kDepth, b_bytes = COLUMNS * kDepth;
  // [ROWS][groups], then [groups][COLUMNS]
  static constexpr int scale_floats = kScaleGroups * (ROWS + COLUMNS);
  static constexpr int a = 0, b = a + STAGES * a_bytes;
  static constexpr int scales = b + STAGES * b_bytes;
  static constexpr int full = scales + kScaleStages * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES;
  static constexpr int scale_empty = scale_full + 8 * kScaleStages;
};

template <class Out>
__device__ __forceinline__ void store_pair(const Problem& p, float x, float y, int row, int column) {
  Out* at = static_cast<Out*>(p.out) + row * p.out_row + column * p.out_column;
  if (column < p.n) at[0] = convert(x, Out{});
  if (column + 1 < p.n) at[p.out_column] = convert(y, Out{});
}

// kScaleGroups groups of A's scales from g on, as [ROWS][groups]; zero outside.
template <int ROWS>
__device__ __forceinline__ void load_row_scales(const Problem& p, u32 to, int first, int end, int g,
                                                int groups, int lane) {
  const bool whole = g + kScaleGroups <= groups;
#pragma unroll 2
  for (int i = lane; i < ROWS; i += 32) {
    const int row = first + i;
    const bool inside = row < end;
    const float* from = p.scale_a + g * p.scale_a_group + (inside ? row * p.scale_a_row : 0);
    const u32 at = to + 4 * kScaleGroups * i;
    if (p.scale_a_vector == 4 && whole) {
      cp_async<16>(at, from, inside);
    } else if (p.scale_a_vector >= 2 && whole) {
      cp_async<8>(at, from, inside);
      cp_async<8>(at + 8, from + 2, inside);
    } else {
#pragma unroll
      for (int j = 0; j < kScaleGroups; ++j) {
        const bool valid = inside && g + j < groups;
        cp_async<4>(at + 4 * j, from + (valid ? j * p.scale_a_group : 0), valid);
      }
    }
  }
}

// kScaleGroups groups of B's scales from g on, as [groups][COLUMNS]; zero outside.
template <int COLUMNS>
__device__ __forceinline__ void load_column_scales(const Problem& p, u32 to, int first, int g,
                                                   int groups, int lane) {
#pragma unroll 1
  for (int j = 0; j < kScaleGroups; ++j) {
    const bool real = g + j < groups;
    const float* from = p.scale_b + (real ? (g + j) * p.scale_b_group : 0);
    const u32 at = to + 4 * j * COLUMNS;
    if (p.scale_b_vector == 4) {
      const int i = 4 * lane, column = first + i;
      if (i < COLUMNS)
        cp_async<16>(at + 4 * i, from + (column < p.n ? column : 0), real && column < p.n);
    } else {
      for (int i = lane; i < COLUMNS; i += 32) {
        const int column = first + i;
        const bool valid = real && column < p.n;
        cp_async<4>(at + 4 * i, from + (valid ? column * p.scale_b_column : 0), valid);
      }
    }
  }
}

// Four lanes of a quad hold 4 bytes each of four 16-byte pieces; afterwards lane i holds piece i.
__device__ __forceinline__ void transpose_quad(u32 (&x)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  u32 give = odd ? x[0] : x[1], get = __shfl_xor_sync(~0u, give, 1);
  (odd ? x[0] : x[1]) = get;
  give = odd ? x[2] : x[3], get = __shfl_xor_sync(~0u, give, 1);
  (odd ? x[2] : x[3]) = get;
  give = upper ? x[0] : x[2], get = __shfl_xor_sync(~0u, give, 2);
  (upper ? x[0] : x[2]) = get;
  give = upper ? x[1] : x[3], get = __shfl_xor_sync(~0u, give, 2);
  (upper ? x[1] : x[3]) = get;
}

// One row of a wave: pieces of 8 columns, of which this lane holds two columns each.
template <class Out, int COLUMNS>
__device__ __forceinline__ void store_row(const Problem& p, const float (&total)[COLUMNS / 2],
                                          int half, int row, int end, int first_column, int lane) {
  constexpr int pieces = COLUMNS / 8;
  const int quad = lane & 3;
  if constexpr (sizeof(Out) == 2) {
    if (p.vector && first_column + COLUMNS <= p.n) {
      Out* of_row = static_cast<Out*>(p.out) + row * p.out_row + first_column;
#pragma unroll
      for (int j = 0; j + 4 <= pieces; j += 4) {
        u32 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          x[i] = pack2(total[4 * (j + i) + half], total[4 * (j + i) + half + 1], Out{});
        transpose_quad(x, lane);
        if (row < end)
          *reinterpret_cast<uint4*>(of_row + (j + quad) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
      }
      if (row < end)
#pragma unroll
        for (int j = pieces / 4 * 4; j < pieces; ++j)
          *reinterpret_cast<u32*>(of_row + 8 * j + 2 * quad) =
              pack2(total[4 * j + half], total[4 * j + half + 1], Out{});
      return;
    }
  }
  if (row >= end) return;
#pragma unroll
  for (int j = 0; j < pieces; ++j)
    store_pair<Out>(p, total[4 * j + half], total[4 * j + half + 1], row,
                    first_column + 8 * j + 2 * quad);
}

template <class Out, int GROUP, int COLUMNS, int WAVES, int STAGES>
__global__ void __launch_bounds__(128 + 128 * kConsumers, 1)
    int8_gemm_large(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                    const __grid_constant__ Problem p) {
  constexpr int ROWS = 64 * WAVES * kConsumers;
  constexpr int kBlocks = GROUP > kDepth ? GROUP / kDepth : 1;  // stages of one group
  constexpr int kGroups = GROUP < kDepth ? kDepth / GROUP : 1;  // groups of one stage
  constexpr int kSteps = GROUP / kBlocks / 32;                  // wgmma of one group and stage
  constexpr int kPieces = COLUMNS / 8;
  // Both waves use the same column scales: narrower tiles have registers to keep them
  constexpr bool kKeep = WAVES == 1 || COLUMNS <= 112;
  using S = Shared<ROWS, COLUMNS, STAGES>;
  static_assert(STAGES >= 2 * kBlocks && STAGES > 1, "a group's stages, and the next one's");
  static_assert(S::a_bytes % 1024 == 0 && S::b_bytes % 1024 == 0, "whole atoms of the swizzle");
  static_assert(COLUMNS % 16 == 0, "16-byte copies of scales and stores of BF16 rows");

  extern __shared__ __align__(1024) u8 shared[];  // the swizzle counts from multiples of 1024
  const u32 base = smem_address(shared);
  const int groups = (p.k + GROUP - 1) / GROUP;
  const int blocks = GROUP > kDepth ? groups * kBlocks : (p.k + kDepth - 1) / kDepth;
  // Tiles share the rows evenly, for the copy engine takes its time for rows outside of a matrix as
  // well; what is in shared memory behind them goes into sums that nobody stores
  const int row_tiles = (p.m + ROWS - 1) / ROWS, column_tiles = (p.n + COLUMNS - 1) / COLUMNS;
  const int tiles = row_tiles * column_tiles;
  // From one lane to all: the compiler then knows it for uniform, and descriptors with it
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
        for (int block = 0; block < blocks; ++block) {
          mbarrier_wait(base + S::empty + 8 * ring.stage, ring.parity);
          const u32 full = base + S::full + 8 * ring.stage;
          mbarrier_expect(full, p.tile_rows * kDepth + S::b_bytes);
          tma_load(base + S::a + ring.stage * S::a_bytes, &map_a, block * kDepth,
                   row_tile * p.tile_rows, full);
          tma_load(base + S::b + ring.stage * S::b_bytes, &map_b, block * kDepth,
                   column_tile * COLUMNS, full);
          ring.next();
        }
      }
    } else if (warp == 1) {
      Ring<kScaleStages> ring(1);
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        int row_tile, column_tile;
        tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
        const int first_row = row_tile * p.tile_rows, end_row = min(first_row + p.tile_rows, p.m);
        for (int g = 0; g < groups; g += kScaleGroups) {
          mbarrier_wait(base + S::scale_empty + 8 * ring.stage, ring.parity);
          const u32 to = base + S::scales + ring.stage * S::scale_floats * 4;
          load_row_scales<ROWS>(p, to, first_row, end_row, g, groups, lane);
          load_column_scales<COLUMNS>(p, to + 4 * kScaleGroups * ROWS, column_tile * COLUMNS, g,
                                      groups, lane);
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
    // Descriptors count in 16 bytes; a sum never leaves the field of the address
    const u64 first_a = wgmma_descriptor(base + S::a + wave_row * kDepth);
    const u64 first_b = wgmma_descriptor(base + S::b);
    Ring<STAGES> ring(0);
    Ring<kScaleStages> scale_ring(0);
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      int row_tile, column_tile;
      tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
      float total[WAVES][COLUMNS / 2];
#pragma unroll
      for (int w = 0; w < WAVES; ++w)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) total[w][i] = 0.0f;

      // A group's stages are waited for before it, while the last wave of the one before multiplies
      auto wait_for_stages = [&](Ring<STAGES> ahead) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          mbarrier_wait(base + S::full + 8 * ahead.stage, ahead.parity);
          ahead.next();
        }
      };
      wait_for_stages(ring);
      for (int g = 0; g < groups; ++g) {
        const int inside = g % kGroups, slot = g % kScaleGroups;  // of a stage, and of its scales
        const float* scales = reinterpret_cast<const float*>(shared + S::scales) +
                              scale_ring.stage * S::scale_floats;
        const float* of_rows = scales + lane_row * kScaleGroups + slot;
        const float2* of_columns =
            reinterpret_cast<const float2*>(scales + ROWS * kScaleGroups + slot * COLUMNS) +
            lane % 4;
        float2 kept[kKeep ? kPieces : 1];
#pragma unroll
        for (int w = 0; w < WAVES; ++w) {
          int partial[COLUMNS / 2];
          Ring<STAGES> here = ring;
          wgmma_fence();
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const u64 a = first_a + here.stage * (S::a_bytes / 16) + w * (64 * kDepth / 16) +
                          2 * kSteps * inside;
            const u64 b = first_b + here.stage * (S::b_bytes / 16) + 2 * kSteps * inside;
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
              WgmmaInt8<COLUMNS>::run(partial, a + 2 * k, b + 2 * k, block + k > 0);
            here.next();
          }
          wgmma_commit();
          if (w == 0) {
            mbarrier_wait(base + S::scale_full + 8 * scale_ring.stage, scale_ring.parity);
            if constexpr (kKeep)
#pragma unroll
              for (int j = 0; j < kPieces; ++j) kept[j] = of_columns[4 * j];
          }
          const float low = of_rows[64 * w * kScaleGroups];
          const float high = of_rows[(64 * w + 8) * kScaleGroups];
          if (w == WAVES - 1 && inside == kGroups - 1 && g + 1 < groups) wait_for_stages(here);
          wgmma_wait<0>();
          wgmma_hold(partial);
          if (w == WAVES - 1 && (inside == kGroups - 1 || g == groups - 1)) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
              if (lane == 0) mbarrier_arrive(base + S::empty + 8 * ring.stage);
              ring.next();
            }
          }
#pragma unroll
          for (int j = 0; j < kPieces; ++j) {
            const float2 s = kKeep ? kept[kKeep ? j : 0] : of_columns[4 * j];
            float* sum = total[w] + 4 * j;
            const int* exact = partial + 4 * j;
            sum[0] = __fmaf_rn(__int2float_rn(exact[0]), __fmul_rn(low, s.x), sum[0]);
            sum[1] = __fmaf_rn(__int2float_rn(exact[1]), __fmul_rn(low, s.y), sum[1]);
            sum[2] = __fmaf_rn(__int2float_rn(exact[2]), __fmul_rn(high, s.x), sum[2]);
            sum[3] = __fmaf_rn(__int2float_rn(exact[3]), __fmul_rn(high, s.y), sum[3]);
          }
        }
        if (slot == kScaleGroups - 1 || g == groups - 1) {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(base + S::scale_empty + 8 * scale_ring.stage);
          scale_ring.next();
        }
      }

      const int first_column = column_tile * COLUMNS, first_row = row_tile * p.tile_rows;
      const int end_row = min(first_row + p.tile_rows, p.m);
      const BiasKind kind = static_cast<BiasKind>(p.bias_kind);
      if (kind != BiasKind::none) {
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int column = first_column + 8 * j + 2 * (lane % 4) + i;
            const float bias = column < p.n ? load_bias(p.bias, kind, column * p.bias_stride) : 0.0f;
#pragma unroll
            for (int w = 0; w < WAVES; ++w) {
              total[w][4 * j + i] = __fadd_rn(total[w][4 * j + i], bias);
              total[w][4 * j + 2 + i] = __fadd_rn(total[w][4 * j + 2 + i], bias);
            }
          }
      }
#pragma unroll
      for (int w = 0; w < WAVES; ++w) {
        const int row = first_row + lane_row + 64 * w;
        store_row<Out, COLUMNS>(p, total[w], 0, row, end_row, first_column, lane);
        store_row<Out, COLUMNS>(p, total[w], 2, row + 8, end_row, first_column, lane);
      }
    }
  }
}
