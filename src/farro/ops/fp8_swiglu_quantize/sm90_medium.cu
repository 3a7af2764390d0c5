// fp8_swiglu_quantize on SM90a where tiles of 128 columns are too few: halves of a tile, and runs of K,
// in a cluster.
//
// A cluster owns 64 * CONSUMERS rows and 128 columns of the output. Its CTAs are two halves of the
// columns times SPLIT runs of K; each multiplies its rows by 64 gate and 64 up rows of the weight, in
// one wgmma of 128 columns for each 64 rows. At the end every CTA finishes some of the rows
// (finish_cluster). A CTA has one tile: the kernel is for a round or two of them.
#include "fp8_scales.cuh"
#include "fp8_swiglu.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kHalf = 64;  // columns of gate, and of up, in a CTA

template <int ROWS, int STAGES>
struct Layout {
  static constexpr int a_bytes = ROWS * kDepth, b_bytes = 2 * kHalf * kDepth;
  static constexpr int scale_floats = kScaleBlocks * (ROWS + 2);  // of rows; of gate and up
  static constexpr int pitch = kHalf + 4;                         // floats of a row's totals

  static constexpr int a = 0, b = a + STAGES * a_bytes;
  static constexpr int scales = b + STAGES * b_bytes;
  static constexpr int full = scales + kScaleStages * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES;
  static constexpr int scale_empty = scale_full + 8 * kScaleStages;
  static constexpr int bytes = scale_empty + 8 * kScaleStages;
  static_assert(2 * ROWS * pitch * 4 <= scales, "totals are staged where the operands were");
};

template <int CONSUMERS, int STAGES, int SPLIT>
__global__ void __launch_bounds__(128 * CONSUMERS + 64, 1)
    fp8_swiglu_medium(const __grid_constant__ TensorMap map_a,
                      const __grid_constant__ TensorMap map_b, const __grid_constant__ Problem p,
                      const __grid_constant__ Output o) {
  constexpr int ROWS = 64 * CONSUMERS, kThreads = 128 * CONSUMERS + 64, kCluster = 2 * SPLIT;
  using L = Layout<ROWS, STAGES>;
  extern __shared__ __align__(1024) u8 shared[];  // the swizzle counts from multiples of 1024
  const u32 base = smem_address(shared);
  const int blocks = (p.k + kDepth - 1) / kDepth;
  const int rank = static_cast<int>(cluster_rank()), side = rank % 2, part = rank / 2;
  // Runs of whole stages of scales
  const int groups = (blocks + kScaleBlocks - 1) / kScaleBlocks;
  const int first_block = groups * part / SPLIT * kScaleBlocks;
  const int count = max(0, min(groups * (part + 1) / SPLIT * kScaleBlocks, blocks) - first_block);
  // All rows of some columns one after the other, so that their weights are read once
  const int row_tiles = (p.m + ROWS - 1) / ROWS, tile = blockIdx.x / kCluster;
  const int column_tile = o.first_tile + tile / row_tiles, first_row = tile % row_tiles * ROWS;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&map_a);
    prefetch_tensor_map(&map_b);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(base + L::full + 8 * i, 1);
      mbarrier_init(base + L::empty + 8 * i, 4 * CONSUMERS);
    }
    for (int i = 0; i < kScaleStages; ++i) {
      mbarrier_init(base + L::scale_full + 8 * i, 32);
      mbarrier_init(base + L::scale_empty + 8 * i, 4 * CONSUMERS);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warp == 4 * CONSUMERS) {
    if (lane == 0) {
      Ring<STAGES> ring(1);
      const int column = column_tile * 2 * kHalf + side * kHalf;
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
        const u32 full = base + L::full + 8 * ring.stage, b = base + L::b + ring.stage * L::b_bytes;
        const int x = (first_block + i) * kDepth;
        mbarrier_expect(full, L::a_bytes + L::b_bytes);
        tma_load(base + L::a + ring.stage * L::a_bytes, &map_a, x, first_row, full);
        tma_load(b, &map_b, x, column, full);
        tma_load(b + kHalf * kDepth, &map_b, x, o.columns + column, full);
        ring.next();
      }
    }
    __syncwarp();
  } else if (warp > 4 * CONSUMERS) {
    Ring<kScaleStages> ring(1);
    const int up_scales = (o.columns + 2 * kHalf - 1) / (2 * kHalf);  // after those of the gate
    for (int i = 0; i < count; i += kScaleBlocks) {
      mbarrier_wait(base + L::scale_empty + 8 * ring.stage, ring.parity);
      const u32 to = base + L::scales + ring.stage * L::scale_floats * 4;
      const int block = first_block + i;
      load_row_scales<ROWS>(p, to, first_row, block, blocks, lane);
      const int j = lane / 2, of_weight = column_tile + lane % 2 * up_scales;
      const bool valid = block + j < blocks;
      if (j < kScaleBlocks)
        cp_async<4>(to + 4 * (kScaleBlocks * ROWS + lane),
                    p.weight_scale + (valid ? of_weight * p.weight_scale_row +
                                                  (block + j) * p.weight_scale_block
                                            : 0),
                    valid);
      cp_async_arrive(base + L::scale_full + 8 * ring.stage);
      ring.next();
    }
    cp_async_wait_all();
  } else {
    const int consumer = warp / 4, lane_row = warp * 16 + lane / 4;
    const u32 first_a =
        __shfl_sync(~0u, static_cast<u32>(wgmma_descriptor(base + L::a + consumer * 64 * kDepth)), 0);
    const u32 first_b = __shfl_sync(~0u, static_cast<u32>(wgmma_descriptor(base + L::b)), 0);
    const int by_row = p.input_scale_vector == 2 ? 1 : kScaleBlocks;
    const int by_block = p.input_scale_vector == 2 ? ROWS : 1;
    Ring<STAGES> ring(0);
    Ring<kScaleStages> scale_ring(0);
    float total[kHalf];  // 32 of gate, 32 of up
#pragma unroll
    for (int i = 0; i < kHalf; ++i) total[i] = 0.0f;
    if (count > 0) mbarrier_wait(base + L::full + 8 * ring.stage, ring.parity);
    for (int block = 0; block < count; ++block) {
      const int slot = block % kScaleBlocks, stage = ring.stage;
      const u32 a = first_a + stage * (L::a_bytes / 16), b = first_b + stage * (L::b_bytes / 16);
      const float* scales = reinterpret_cast<const float*>(shared + L::scales) +
                            scale_ring.stage * L::scale_floats;
      const float* of_rows = scales + slot * by_block + lane_row * by_row;
      const float* of_weight = scales + kScaleBlocks * ROWS + 2 * slot;
      float partial[kHalf];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k)
        WgmmaFp8<2 * kHalf>::run(partial, descriptor_of(a + 2 * k), descriptor_of(b + 2 * k), k > 0);
      wgmma_commit();
      // What is needed next, while this block multiplies
      if (slot == 0) mbarrier_wait(base + L::scale_full + 8 * scale_ring.stage, scale_ring.parity);
      float low[2], high[2];
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        low[w] = __fmul_rn(of_rows[0], of_weight[w]);
        high[w] = __fmul_rn(of_rows[8 * by_row], of_weight[w]);
      }
      if (slot == kScaleBlocks - 1 || block == count - 1) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(base + L::scale_empty + 8 * scale_ring.stage);
        scale_ring.next();
      }
      ring.next();
      if (block + 1 < count) mbarrier_wait(base + L::full + 8 * ring.stage, ring.parity);
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(base + L::empty + 8 * stage);
      wgmma_hold(partial);
#pragma unroll
      for (int j = 0; j < kHalf / 4; ++j) {
        const int w = j / (kHalf / 8);
        float* sum = total + 4 * j;
        sum[0] = __fmaf_rn(partial[4 * j], low[w], sum[0]);
        sum[1] = __fmaf_rn(partial[4 * j + 1], low[w], sum[1]);
        sum[2] = __fmaf_rn(partial[4 * j + 2], high[w], sum[2]);
        sum[3] = __fmaf_rn(partial[4 * j + 3], high[w], sum[3]);
      }
    }
    named_barrier(1, 128 * CONSUMERS);  // every operand has been read
    float* staged = reinterpret_cast<float*>(shared) + lane_row * L::pitch + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < kHalf / 4; ++j) {
      float* to = staged + j / (kHalf / 8) * (ROWS * L::pitch) + j % (kHalf / 8) * 8;
      *reinterpret_cast<float2*>(to) = {total[4 * j], total[4 * j + 1]};
      *reinterpret_cast<float2*>(to + 8 * L::pitch) = {total[4 * j + 2], total[4 * j + 3]};
    }
  }
  cluster_sync();
  finish_cluster<ROWS, L::pitch, kThreads, SPLIT>(p, o, base, first_row, column_tile, rank);
  cluster_leave();  // the others may still read the totals here
  // Where this one began before the kernel ahead had ended: who comes next waits for both
  wait_for_kernel_before();
}
