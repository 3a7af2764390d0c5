// fp8_swiglu_quantize on SM90a for few rows: operands swapped, K split over a cluster.
//
// A cluster owns 128 columns of the output and TOKENS tokens. Its CTAs are two halves of the columns
// times SPLIT runs of K; each multiplies 64 gate and 64 up rows of the weight, a warpgroup for each,
// as cuda/fp8/small.cu does. At the end every CTA takes some of the tokens and reads the totals of
// all, in the order of K: a token's 128 results lie in 16 lanes, which share its scale.
#include "fp8_swiglu.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kRows = 64;  // of gate, and of up, in a CTA
constexpr int kThreads = 2 * 128 + 64;

template <int TOKENS, int STAGES>
struct Layout {
  static constexpr int weight_bytes = kRows * kDepth;  // of gate, and of up
  static constexpr int token_bytes = TOKENS * kDepth;
  static constexpr int scale_floats = TOKENS + 4;  // of tokens, then of gate and up
  static constexpr int pitch = kRows + 4;          // floats of a token's totals

  static constexpr int weights = 0, tokens = STAGES * 2 * weight_bytes;
  static constexpr int scales = tokens + STAGES * token_bytes;
  static constexpr int full = scales + STAGES * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int bytes = empty + 8 * STAGES;
  static_assert(2 * TOKENS * pitch * 4 <= scales, "totals are staged where the operands were");
};

template <int TOKENS, int STAGES, int SPLIT>
__global__ void __launch_bounds__(kThreads)
    fp8_swiglu_small(const __grid_constant__ TensorMap weight_map,
                     const __grid_constant__ TensorMap token_map,
                     const __grid_constant__ Problem p, const __grid_constant__ Output o) {
  using L = Layout<TOKENS, STAGES>;
  constexpr int kCluster = 2 * SPLIT;
  static_assert(STAGES > 2);

  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int blocks = (p.k + kDepth - 1) / kDepth;
  const int rank = static_cast<int>(cluster_rank()), side = rank % 2, part = rank / 2;
  // Even runs: the first `blocks % SPLIT` have one block more
  const int most = blocks / SPLIT, more = blocks % SPLIT;
  const int first_block = part * most + min(part, more), count = most + (part < more ? 1 : 0);
  const int column_tile = blockIdx.x / kCluster, first_row = column_tile * 128 + side * kRows;
  const int first_token = blockIdx.y * TOKENS;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&token_map);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(base + L::full + 8 * i, 1 + 32);
      mbarrier_init(base + L::empty + 8 * i, 8);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warp == 8) {
    if (lane == 0) {
      Ring<STAGES> ring(1);
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
        const u32 full = base + L::full + 8 * ring.stage;
        const u32 gate = base + L::weights + ring.stage * 2 * L::weight_bytes;
        const int x = (first_block + i) * kDepth;
        mbarrier_expect(full, 2 * L::weight_bytes + L::token_bytes);
        tma_load(gate, &weight_map, x, first_row, full);
        tma_load(gate + L::weight_bytes, &weight_map, x, o.columns + first_row, full);
        tma_load(base + L::tokens + ring.stage * L::token_bytes, &token_map, x, first_token, full);
        ring.next();
      }
    }
  } else if (warp == 9) {
    Ring<STAGES> ring(1);
    const int column_tiles = (o.columns + 127) / 128;
    for (int i = 0; i < count; ++i) {
      mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
      const u32 to = base + L::scales + ring.stage * L::scale_floats * 4;
      const i64 block = first_block + i;
#pragma unroll
      for (int j = lane; j < TOKENS; j += 32) {
        const int token = first_token + j;
        const i64 at = token * p.input_scale_row + block * p.input_scale_block;
        cp_async<4>(to + 4 * j, p.input_scale + (token < p.m ? at : 0), token < p.m);
      }
      if (lane < 2)
        cp_async<4>(to + 4 * (TOKENS + lane),
                    p.weight_scale + (column_tile + lane * column_tiles) * p.weight_scale_row +
                        block * p.weight_scale_block,
                    true);
      cp_async_arrive(base + L::full + 8 * ring.stage);
      ring.next();
    }
    cp_async_wait_all();
  } else {
    const int which = warp / 4, row = warp % 4 * 16 + lane / 4;  // 0 gate, 1 up
    float total[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) total[i] = 0.0f;
    Ring<STAGES> ring(0), done(0);

    using Sums = float[TOKENS / 2];
    auto multiply = [&](Sums& sums) {
      mbarrier_wait(base + L::full + 8 * ring.stage, ring.parity);
      const u64 a =
          wgmma_descriptor(base + L::weights + (2 * ring.stage + which) * L::weight_bytes);
      const u64 b = wgmma_descriptor(base + L::tokens + ring.stage * L::token_bytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k)
        WgmmaFp8<TOKENS>::run(sums, a + 2 * k, b + 2 * k, k > 0);
      wgmma_commit();
      ring.next();
    };
    auto promote = [&](Sums& partial) {
      wgmma_hold(partial);
      const float* scales = reinterpret_cast<const float*>(shared + L::scales) +
                            done.stage * L::scale_floats;
      const float of_weight = scales[TOKENS + which];
      const float2* of_tokens = reinterpret_cast<const float2*>(scales) + lane % 4;
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        const float2 s = of_tokens[4 * j];
        const float even = __fmul_rn(s.x, of_weight), odd = __fmul_rn(s.y, of_weight);
        float* sum = total + 4 * j;
        sum[0] = __fmaf_rn(partial[4 * j], even, sum[0]);
        sum[1] = __fmaf_rn(partial[4 * j + 1], odd, sum[1]);
        sum[2] = __fmaf_rn(partial[4 * j + 2], even, sum[2]);
        sum[3] = __fmaf_rn(partial[4 * j + 3], odd, sum[3]);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(base + L::empty + 8 * done.stage);
      done.next();
    };
    if (count > 0) {
      // Straight lines, peeled at the end: ptxas serializes wgmma where it loses sight of who waits
      Sums even, odd;
      multiply(even);
      int i = 0;
      for (; i + 2 < count; i += 2) {
        multiply(odd);
        wgmma_wait<1>();
        promote(even);
        multiply(even);
        wgmma_wait<1>();
        promote(odd);
      }
      if (i + 1 < count) {
        multiply(odd);
        wgmma_wait<1>();
        promote(even);
        wgmma_wait<0>();
        promote(odd);
      } else {
        wgmma_wait<0>();
        promote(even);
      }
    }
    named_barrier(1, 256);  // every operand has been read
    float* staged = reinterpret_cast<float*>(shared) + which * TOKENS * L::pitch;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int token = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      staged[token * L::pitch + row + i / 2 % 2 * 8] = total[i];
    }
  }
  cluster_sync();

  finish_cluster<TOKENS, L::pitch, kThreads, SPLIT>(p, o, base, first_token, column_tile, rank);
  cluster_leave();  // the others may still read the totals here
}
