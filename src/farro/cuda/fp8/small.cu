// FP8 E4M3 products on SM90a for few rows: operands swapped, so that weights fill the 64-row side of
// wgmma and tokens the narrow one; K split over the CTAs of a cluster where there are few tiles.
//
// A CTA owns 64 weight rows, TOKENS tokens and a run of blocks of K. One warp streams both operands by
// TMA, with SCALED a second one the scales. With AHEAD a warpgroup multiplies one block while it
// promotes the partial sums of the block before; without, one after the other, and several CTAs of a
// multiprocessor do the one beside the other (FAST: the tensor cores add everything). At the end each
// CTA of the cluster adds the totals of all, in the order of K, for its share of the tokens.
//
// MULTICAST: instead, CTAs of a cluster have the same weight rows, other tokens and all of K, and each
// brings its part of the weight rows to all.
#include "fp8_problem.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kRows = 64;  // weight rows of a tile

template <int TOKENS, int STAGES, bool SCALED>
struct Layout {
  static constexpr int weight_bytes = kRows * kDepth, token_bytes = TOKENS * kDepth;
  static constexpr int scale_floats = SCALED ? TOKENS + 4 : 0;  // of tokens, then the weight's
  static constexpr int pitch = kRows + 4;                       // floats of a token's totals

  static constexpr int weights = 0, tokens = STAGES * weight_bytes;
  static constexpr int scales = tokens + STAGES * token_bytes;
  static constexpr int full = scales + STAGES * scale_floats * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int bytes = empty + 8 * STAGES;
  static_assert(TOKENS * pitch * 4 <= scales, "totals are staged where the operands were");
};

// One block's scales: of TOKENS tokens, zero past the end, then the weight's.
template <int TOKENS>
__device__ __forceinline__ void load_scales(const Problem& p, u32 to, int first_token, i64 block,
                                            const float* of_weight, int lane) {
  const float* from = p.input_scale + block * p.input_scale_block;
  if (p.input_scale_vector == 2) {
    const int token = first_token + 4 * lane;
    if (lane < TOKENS / 4) cp_async<16>(to + 16 * lane, from + (token < p.m ? token : 0), token < p.m);
  } else {
#pragma unroll
    for (int j = lane; j < TOKENS; j += 32) {
      const int token = first_token + j;
      cp_async<4>(to + 4 * j, from + (token < p.m ? token * p.input_scale_row : 0), token < p.m);
    }
  }
  if (lane == 0) cp_async<4>(to + 4 * TOKENS, of_weight + block * p.weight_scale_block, true);
}

template <int EPILOGUE, bool SCALED, bool FAST, int TOKENS, int STAGES, int CLUSTER, bool AHEAD,
          int MULTICAST>
__global__ void __launch_bounds__(192)
    fp8_small(const __grid_constant__ TensorMap weight_map,
              const __grid_constant__ TensorMap token_map, const __grid_constant__ Problem p) {
  using L = Layout<TOKENS, STAGES, SCALED>;
  constexpr int kThreads = 192, kLoader = 4;  // a warpgroup, and two warps of which this is the first
  static_assert(STAGES > 2 && !(SCALED && FAST) && (AHEAD || !FAST));
  static_assert(TOKENS % 8 == 0 && (CLUSTER == 1 || MULTICAST == 1));

  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int blocks = (p.k + kDepth - 1) / kDepth;
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
  // Even runs: the first `blocks % CLUSTER` have one block more
  const int most = blocks / CLUSTER, more = blocks % CLUSTER;
  const int first_block = rank * most + min(rank, more), count = most + (rank < more ? 1 : 0);
  const int part = blockIdx.x % MULTICAST;
  const int first_row = blockIdx.x / (CLUSTER * MULTICAST) * kRows;
  const int first_token = (blockIdx.y * MULTICAST + part) * TOKENS;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&token_map);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(base + L::full + 8 * i, SCALED ? 1 + 32 : 1);
      mbarrier_init(base + L::empty + 8 * i, MULTICAST * 4);
    }
    fence_mbarrier_init();
  }
  if constexpr (MULTICAST > 1) cluster_sync();
  else __syncthreads();

  if (warp == kLoader) {
    if (lane == 0) {
      Ring<STAGES> ring(1);
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
        const u32 full = base + L::full + 8 * ring.stage;
        const int x = (first_block + i) * kDepth;
        mbarrier_expect(full, L::weight_bytes + L::token_bytes);
        const u32 weights = base + L::weights + ring.stage * L::weight_bytes;
        if constexpr (MULTICAST > 1) {
          constexpr int kPart = kRows / MULTICAST;
          tma_load_multicast(weights + part * kPart * kDepth, &weight_map, x,
                             first_row + part * kPart, full, (1 << MULTICAST) - 1);
        } else {
          tma_load(weights, &weight_map, x, first_row, full);
        }
        tma_load(base + L::tokens + ring.stage * L::token_bytes, &token_map, x, first_token, full);
        ring.next();
      }
    }
    __syncwarp();
  } else if (warp > kLoader) {
    if constexpr (SCALED) {
      Ring<STAGES> ring(1);
      const float* of_weight = p.weight_scale + first_row / kDepth * p.weight_scale_row;
      for (int i = 0; i < count; ++i) {
        mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
        const u32 to = base + L::scales + ring.stage * L::scale_floats * 4;
        load_scales<TOKENS>(p, to, first_token, first_block + i, of_weight, lane);
        cp_async_arrive(base + L::full + 8 * ring.stage);
        ring.next();
      }
      cp_async_wait_all();
    }
  } else {
    // What the end adds is on its way from memory meanwhile
    if constexpr (EPILOGUE & (kBias | kResidual))
      for (int i = threadIdx.x; i < TOKENS * (kRows / 8); i += 128) {
        const int column = first_row + i % (kRows / 8) * 8;
        if ((EPILOGUE & kBias) && i < kRows / 8) expect_biases(p, column);
        if constexpr (EPILOGUE & kResidual) expect_residual(p, first_token + i / (kRows / 8), column);
      }
    const int row = warp * 16 + lane / 4;
    float total[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) total[i] = 0.0f;
    Ring<STAGES> ring(0), done(0);

    using Sums = float[TOKENS / 2];
    auto multiply = [&](Sums& sums, bool add) {
      mbarrier_wait(base + L::full + 8 * ring.stage, ring.parity);
      const u64 a = wgmma_descriptor(base + L::weights + ring.stage * L::weight_bytes);
      const u64 b = wgmma_descriptor(base + L::tokens + ring.stage * L::token_bytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / 32; ++k)
        WgmmaFp8<TOKENS>::run(sums, a + 2 * k, b + 2 * k, add || k > 0);
      wgmma_commit();
      ring.next();
    };
    auto give_back = [&] {
      __syncwarp();
      const u32 empty = base + L::empty + 8 * done.stage;
      if constexpr (MULTICAST > 1) {  // every CTA writes here
        if (lane < MULTICAST) mbarrier_arrive_remote(map_to_rank(empty, lane));
      } else {
        if (lane == 0) mbarrier_arrive(empty);
      }
      done.next();
    };
    auto promote = [&](Sums& partial) {
      wgmma_hold(partial);
      if constexpr (SCALED) {
        const float* scales = reinterpret_cast<const float*>(shared + L::scales) +
                              done.stage * L::scale_floats;
        const float of_weight = scales[TOKENS];
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
      } else {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) total[i] = __fadd_rn(total[i], partial[i]);
      }
      if constexpr (!AHEAD) wgmma_hold(total);  // all sums are read before the next product's
      give_back();
    };

    if constexpr (FAST) {
      for (int i = 0; i < count; ++i) {
        multiply(total, true);
        if (i > 0) {
          wgmma_wait<1>();
          give_back();
        }
      }
      wgmma_wait<0>();
      wgmma_hold(total);
    } else if constexpr (!AHEAD) {
      for (int i = 0; i < count; ++i) {
        Sums partial;
        multiply(partial, false);
        wgmma_wait<0>();
        promote(partial);
      }
    } else if (count > 0) {
      // Straight lines, peeled at the end: ptxas serializes wgmma where it loses sight of who waits
      Sums even, odd;
      multiply(even, false);
      int i = 0;
      for (; i + 2 < count; i += 2) {
        multiply(odd, false);
        wgmma_wait<1>();
        promote(even);
        multiply(even, false);
        wgmma_wait<1>();
        promote(odd);
      }
      if (i + 1 < count) {
        multiply(odd, false);
        wgmma_wait<1>();
        promote(even);
        wgmma_wait<0>();
        promote(odd);
      } else {
        wgmma_wait<0>();
        promote(even);
      }
    }

    named_barrier(1, 128);  // every operand has been read
    float* staged = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) {
      const int token = i / 4 * 8 + 2 * (lane % 4) + i % 2;
      staged[token * L::pitch + row + i / 2 % 2 * 8] = total[i];
    }
  }
  if constexpr (MULTICAST > 1) cluster_arrive_relaxed();  // nothing goes to others from here on
  if constexpr (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  // Eight neighbouring outputs of a token a thread; a CTA of the cluster takes every CLUSTER-th piece
  constexpr int kPieces = kRows / 8;
  const float alpha = SCALED ? 1.0f : alpha_of(p);
  for (int i = threadIdx.x * CLUSTER + rank; i < TOKENS * kPieces; i += kThreads * CLUSTER) {
    const int token = i / kPieces, column = first_row + i % kPieces * 8;
    if (first_token + token >= p.m || column >= p.n) continue;
    const u32 at = base + 4 * (token * L::pitch + i % kPieces * 8);
    float sum[8] = {}, bias[1][8] = {};
    u32 residual[1][4] = {};
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 v;
        if constexpr (CLUSTER > 1) v = load_remote(map_to_rank(at, r) + 16 * half);
        else v = *reinterpret_cast<const float4*>(shared + (at - base) + 16 * half);
        sum[4 * half] += v.x, sum[4 * half + 1] += v.y;
        sum[4 * half + 2] += v.z, sum[4 * half + 3] += v.w;
      }
    }
    const i64 out_row = first_token + token;
    if constexpr (EPILOGUE & kBias) load_biases<8, 1, 8>(p, column, bias);
    if constexpr (EPILOGUE & kResidual) load_residual<8, 1, 8>(p, out_row, column, residual);
    float value[8];
    finish_values<EPILOGUE>(sum, alpha, bias[0], residual[0], value);
    store_values(p, value, out_row, column);
  }
  if constexpr (CLUSTER > 1) cluster_leave();   // the others may still read the totals here
  if constexpr (MULTICAST > 1) cluster_wait();  // or write to, or arrive, here
}
