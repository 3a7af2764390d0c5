// fp8_swiglu_quantize on SM90a for many rows: gate and up, SwiGLU and quantization in one kernel.
//
// As cuda/fp8/large.cu with scales, but a warpgroup's two waves are the gate and the up columns of the
// same 64 rows: a CTA owns 64 * CONSUMERS rows and the 128 columns that share a scale of the output. A
// row's 128 results lie in the four lanes of a quad, so its maximum takes two shuffles, and nothing but
// codes and scales goes to memory.
#include "fp8_scales.cuh"
#include "fp8_swiglu.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kColumns = 128;  // of gate, and of up, in a tile

template <int ROWS, int STAGES>
struct Shared {
  static constexpr int a_bytes = ROWS * kDepth, b_bytes = 2 * kColumns * kDepth;
  static constexpr int scale_floats = kScaleBlocks * (ROWS + 2);  // of rows; of gate and up
  static constexpr int a = 0, b = a + STAGES * a_bytes;
  static constexpr int scales = b + STAGES * b_bytes;
  static constexpr int full = scales + kScaleStages * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES;
  static constexpr int scale_empty = scale_full + 8 * kScaleStages;
  static constexpr int bytes = scale_empty + 8 * kScaleStages;
};

// One row's share of a lane: SwiGLU in place of the gate, the quad's maximum, scale and codes. `half`
// is 0 for the row of the first two accumulators of each four, 2 for the row eight below.
__device__ __forceinline__ void finish_row(const Problem& p, const Output& o,
                                           float (&gate)[kColumns / 2],
                                           const float (&up)[kColumns / 2], int half, int row,
                                           int column_tile, int lane) {
  const int first = column_tile * kColumns + 4 * (lane % 4);
  u32 largest = 0;  // bits of magnitudes order as integers, NaN above all
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& v = gate[4 * j + half + i];
      v = swiglu(v, up[4 * j + half + i]);
      if (first + j / 2 * 16 < o.columns) largest = max(largest, __float_as_uint(v) & 0x7fffffff);
    }
  largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
  const float scale = scale_of(largest);
  const float inverse = inverse_of(scale);
  if (row >= p.m) return;
  if (lane % 4 == 0) o.scale[row * o.scale_row + column_tile * o.scale_block] = scale;
  u8* to = o.codes + row * o.codes_row + first;
#pragma unroll
  for (int j = 0; j < kColumns / 16; ++j) {
    const float* v = gate + 8 * j + half;
    if (first + 16 * j < o.columns)
      *reinterpret_cast<u32*>(to + 16 * j) = codes_of(v[0], v[1], v[4], v[5], inverse);
  }
}

template <int CONSUMERS, int STAGES>
__global__ void __launch_bounds__(128 + 128 * CONSUMERS, 1)
    fp8_swiglu(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
               const __grid_constant__ Problem p, const __grid_constant__ Output o) {
  constexpr int ROWS = 64 * CONSUMERS;
  using S = Shared<ROWS, STAGES>;
  extern __shared__ __align__(1024) u8 shared[];  // the swizzle counts from multiples of 1024
  const u32 base = smem_address(shared);
  const int blocks = (p.k + kDepth - 1) / kDepth;
  const int row_tiles = (p.m + ROWS - 1) / ROWS, column_tiles = o.tiles;
  const int tiles = row_tiles * column_tiles;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&map_a);
    prefetch_tensor_map(&map_b);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(base + S::full + 8 * i, 1);
      mbarrier_init(base + S::empty + 8 * i, 4 * CONSUMERS);
    }
    for (int i = 0; i < kScaleStages; ++i) {
      mbarrier_init(base + S::scale_full + 8 * i, 32);
      mbarrier_init(base + S::scale_empty + 8 * i, 4 * CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  let_next_kernel_begin();  // the one for the last columns: it reads nothing from here

  if (warpgroup == 0) {
    if constexpr (CONSUMERS == 2) give_registers<40>();
    const int warp = threadIdx.x / 32;
    if (warp == 0 && lane == 0) {
      Ring<STAGES> ring(1);
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        int row_tile, column_tile;
        tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
        column_tile += o.first_tile;
        for (int block = 0; block < blocks; ++block) {
          mbarrier_wait(base + S::empty + 8 * ring.stage, ring.parity);
          const u32 full = base + S::full + 8 * ring.stage, b = base + S::b + ring.stage * S::b_bytes;
          const int group = column_tile * (kColumns / 16);
          mbarrier_expect(full, S::a_bytes + S::b_bytes);
          tma_load(base + S::a + ring.stage * S::a_bytes, &map_a, block * kDepth, row_tile * ROWS,
                   full);
          tma_load_groups(b, &map_b, block * kDepth, group, full);
          tma_load_groups(b + kColumns * kDepth, &map_b, block * kDepth, o.columns / 16 + group, full);
          ring.next();
        }
      }
    } else if (warp == 1) {
      Ring<kScaleStages> ring(1);
      const int up_scales = (o.columns + kColumns - 1) / kColumns;  // after those of the gate
      for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        int row_tile, column_tile;
        tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
        column_tile += o.first_tile;
        for (int block = 0; block < blocks; block += kScaleBlocks) {
          mbarrier_wait(base + S::scale_empty + 8 * ring.stage, ring.parity);
          const u32 to = base + S::scales + ring.stage * S::scale_floats * 4;
          load_row_scales<ROWS>(p, to, row_tile * ROWS, block, blocks, lane);
          const int j = lane / 2, of_weight = column_tile + lane % 2 * up_scales;
          const bool valid = block + j < blocks;
          if (j < kScaleBlocks)
            cp_async<4>(to + 4 * (kScaleBlocks * ROWS + lane),
                        p.weight_scale + (valid ? of_weight * p.weight_scale_row +
                                                      (block + j) * p.weight_scale_block
                                                : 0),
                        valid);
          cp_async_arrive(base + S::scale_full + 8 * ring.stage);
          ring.next();
        }
      }
      cp_async_wait_all();
    }
  } else {
    if constexpr (CONSUMERS == 2) take_registers<232>();
    const int consumer = warpgroup - 1, warp = threadIdx.x % 128 / 32;
    const int lane_row = consumer * 64 + warp * 16 + lane / 4;
    // Descriptors are 32-bit additions to these; from one lane to all, so that they stay in uniform
    // registers
    const u32 first_a =
        __shfl_sync(~0u, static_cast<u32>(wgmma_descriptor(base + S::a + consumer * 64 * kDepth)), 0);
    const u32 first_b = __shfl_sync(~0u, static_cast<u32>(wgmma_descriptor(base + S::b)), 0);
    const int by_row = p.input_scale_vector == 2 ? 1 : kScaleBlocks;
    const int by_block = p.input_scale_vector == 2 ? ROWS : 1;
    Ring<STAGES> ring(0);
    Ring<kScaleStages> scale_ring(0);
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      int row_tile, column_tile;
      tile_at(t, row_tiles, column_tiles, p.raster, row_tile, column_tile);
      column_tile += o.first_tile;
      float total[2][kColumns / 2];  // gate, up
#pragma unroll
      for (int w = 0; w < 2; ++w)
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) total[w][i] = 0.0f;

      mbarrier_wait(base + S::full + 8 * ring.stage, ring.parity);
      for (int block = 0; block < blocks; ++block) {
        const int slot = block % kScaleBlocks, stage = ring.stage;
        const u32 a = first_a + stage * (S::a_bytes / 16), b = first_b + stage * (S::b_bytes / 16);
        const float* scales = reinterpret_cast<const float*>(shared + S::scales) +
                              scale_ring.stage * S::scale_floats;
        const float* of_rows = scales + slot * by_block + lane_row * by_row;
        const float* of_weight = scales + kScaleBlocks * ROWS + 2 * slot;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          float partial[kColumns / 2];
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kDepth / 32; ++k)
            WgmmaFp8<kColumns>::run(partial, descriptor_of(a + 2 * k),
                                    descriptor_of(b + w * (kColumns * kDepth / 16) + 2 * k), k > 0);
          wgmma_commit();
          // What is needed next, while this half multiplies
          if (w == 0 && slot == 0)
            mbarrier_wait(base + S::scale_full + 8 * scale_ring.stage, scale_ring.parity);
          const float low = __fmul_rn(of_rows[0], of_weight[w]);
          const float high = __fmul_rn(of_rows[8 * by_row], of_weight[w]);
          if (w == 1) {
            if (slot == kScaleBlocks - 1 || block == blocks - 1) {
              __syncwarp();
              if (lane == 0) mbarrier_arrive(base + S::scale_empty + 8 * scale_ring.stage);
              scale_ring.next();
            }
            ring.next();
            if (block + 1 < blocks) mbarrier_wait(base + S::full + 8 * ring.stage, ring.parity);
          }
          wgmma_wait<0>();
          if (w == 1 && lane == 0) mbarrier_arrive(base + S::empty + 8 * stage);
          wgmma_hold(partial);
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            float* sum = total[w] + 4 * j;
            sum[0] = __fmaf_rn(partial[4 * j], low, sum[0]);
            sum[1] = __fmaf_rn(partial[4 * j + 1], low, sum[1]);
            sum[2] = __fmaf_rn(partial[4 * j + 2], high, sum[2]);
            sum[3] = __fmaf_rn(partial[4 * j + 3], high, sum[3]);
          }
        }
      }
      const int row = row_tile * ROWS + lane_row;
      finish_row(p, o, total[0], total[1], 0, row, column_tile, lane);
      finish_row(p, o, total[0], total[1], 2, row + 8, column_tile, lane);
    }
  }
}
