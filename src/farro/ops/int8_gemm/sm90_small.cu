// int8_gemm on SM90a for few rows: operands swapped, K split over the CTAs of a cluster.
//
// Weights fill the 64-row side of wgmma, tokens the narrow one. The CTAs of a cluster take units of
// K in turn (a unit is max(G, 128)); each computes exact INT32 sums and sends every CTA its share of
// them through distributed shared memory. An owner therefore sees all groups of its outputs, in
// order, and its fused multiply-adds are the reference's, bit for bit.
#include "output.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kRows = 64;      // weight rows of a tile
constexpr int kDepth = 128;    // bytes of K in one stage
constexpr int kThreads = 192;  // four consumer warps, one for TMA, one for scales
constexpr int kScaleStages = 4;

struct Problem {
  const float* scale_a;  // of tokens
  const float* scale_b;  // of weights
  const void* bias;
  void* out;
  i64 scale_a_row, scale_a_group, scale_b_group, scale_b_column, out_row, out_column, bias_stride;
  int m, n, k;
  int bias_kind;
};

template <int GROUP, int TOKENS, int STAGES, int CLUSTER>
struct Layout {
  static constexpr int unit = GROUP > kDepth ? GROUP : kDepth;  // K of one turn of a CTA
  static constexpr int unit_blocks = unit / kDepth, unit_groups = unit / GROUP;
  static constexpr int step_groups = unit_groups * CLUSTER;  // groups finished in one step
  static constexpr int sums = TOKENS / 2;                    // of one thread and group
  static constexpr int owned = sums / CLUSTER;               // of these, finished by this CTA
  static constexpr int weight_bytes = kRows * kDepth, token_bytes = TOKENS * kDepth;
  static constexpr int step_scales = step_groups * (kRows + TOKENS);
  static constexpr int exchange_ints = CLUSTER > 1 ? step_groups * owned * 128 : 0;

  static constexpr int weights = 0, tokens = STAGES * weight_bytes;
  static constexpr int exchange = tokens + STAGES * token_bytes;  // two buffers
  static constexpr int scales = exchange + 2 * 4 * exchange_ints;
  static constexpr int full = scales + kScaleStages * step_scales * 4;
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES;
  static constexpr int scale_empty = scale_full + 8 * kScaleStages;
  static constexpr int received = scale_empty + 8 * kScaleStages;
  static constexpr int bytes = received + 16;
};

// Finish one step's groups for the sums this CTA owns: `sum_of(group, i)` gives the exact partial.
template <class L, int CLUSTER, class SumOf>
__device__ __forceinline__ void promote(float (&total)[L::owned], const float* scales, int rank,
                                        int thread, int valid_groups, SumOf sum_of) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int g = 0; g < L::step_groups; ++g) {
    if (g < valid_groups) {
      const float* of_rows = scales + g * kRows;
      const float* of_tokens = scales + L::step_groups * kRows + g * (2 * L::sums);
#pragma unroll
      for (int i = 0; i < L::owned; ++i) {
        const int index = (CLUSTER > 1 ? rank * L::owned : 0) + i;
        const int token = index / 4 * 8 + 2 * (lane % 4) + index % 2;
        const float weight_scale = of_rows[row + (index & 2) * 4];
        total[i] = __fmaf_rn(__int2float_rn(sum_of(g, i)),
                             __fmul_rn(of_tokens[token], weight_scale), total[i]);
      }
    }
  }
}

template <class Out, int GROUP, int TOKENS, int STAGES, int CLUSTER>
__global__ void __launch_bounds__(kThreads)
    int8_gemm_small(const __grid_constant__ TensorMap weight_map,
                    const __grid_constant__ TensorMap token_map, const __grid_constant__ Problem p) {
  using L = Layout<GROUP, TOKENS, STAGES, CLUSTER>;
  constexpr int kSteps = GROUP >= kDepth ? kDepth / 32 : GROUP / 32;  // wgmma of a group and stage
  static_assert(STAGES > L::unit_blocks, "a unit's stages, and one that is being filled");
  static_assert(L::weight_bytes % 1024 == 0 && L::token_bytes % 1024 == 0, "whole swizzle atoms");
  static_assert(L::owned > 0 && L::owned * CLUSTER == L::sums, "every CTA finishes as many sums");

  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int groups = (p.k + GROUP - 1) / GROUP;
  const int units = (p.k + L::unit - 1) / L::unit, steps = (units + CLUSTER - 1) / CLUSTER;
  const int rank = CLUSTER > 1 ? static_cast<int>(cluster_rank()) : 0;
  const int first_row = blockIdx.x / CLUSTER * kRows, first_token = blockIdx.y * TOKENS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Bytes that arrive here in a step: a share of each unit of the step
  auto received_bytes = [&](int step) {
    return static_cast<u32>(min(units - step * CLUSTER, CLUSTER) * L::unit_groups * L::owned * 512);
  };

  if (threadIdx.x == 0) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&token_map);
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(base + L::full + 8 * i, 1);
      mbarrier_init(base + L::empty + 8 * i, 4);
    }
    for (int i = 0; i < kScaleStages; ++i) {
      mbarrier_init(base + L::scale_full + 8 * i, 32);
      mbarrier_init(base + L::scale_empty + 8 * i, 4);
    }
    for (int i = 0; i < 2; ++i) mbarrier_init(base + L::received + 8 * i, 1);
    fence_mbarrier_init();
    if constexpr (CLUSTER > 1)
      for (int i = 0; i < 2 && i < steps; ++i)
        mbarrier_expect(base + L::received + 8 * i, received_bytes(i));
  }
  if constexpr (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  if (warp == 4) {
    if (lane == 0) {
      Ring<STAGES> ring(1);
      for (int unit = rank; unit < units; unit += CLUSTER)
#pragma unroll
        for (int block = 0; block < L::unit_blocks; ++block) {
          mbarrier_wait(base + L::empty + 8 * ring.stage, ring.parity);
          const u32 full = base + L::full + 8 * ring.stage;
          const int x = unit * L::unit + block * kDepth;
          mbarrier_expect(full, L::weight_bytes + L::token_bytes);
          tma_load(base + L::weights + ring.stage * L::weight_bytes, &weight_map, x, first_row, full);
          tma_load(base + L::tokens + ring.stage * L::token_bytes, &token_map, x, first_token, full);
          ring.next();
        }
    }
  } else if (warp == 5) {
    Ring<kScaleStages> ring(1);
    for (int step = 0; step < steps; ++step) {
      mbarrier_wait(base + L::scale_empty + 8 * ring.stage, ring.parity);
      const u32 to = base + L::scales + ring.stage * L::step_scales * 4;
      const int first = step * L::step_groups;
      for (int i = lane; i < L::step_groups * kRows; i += 32) {
        const int g = first + i / kRows, row = first_row + i % kRows;
        const bool valid = g < groups && row < p.n;
        cp_async<4>(to + 4 * i,
                   p.scale_b + (valid ? g * p.scale_b_group + row * p.scale_b_column : 0), valid);
      }
      for (int i = lane; i < L::step_groups * TOKENS; i += 32) {
        const int g = first + i / TOKENS, token = first_token + i % TOKENS;
        const bool valid = g < groups && token < p.m;
        cp_async<4>(to + 4 * (L::step_groups * kRows + i),
                   p.scale_a + (valid ? g * p.scale_a_group + token * p.scale_a_row : 0), valid);
      }
      cp_async_arrive(base + L::scale_full + 8 * ring.stage);
      ring.next();
    }
    cp_async_wait_all();
  } else {
    const int thread = threadIdx.x;
    float total[L::owned];
#pragma unroll
    for (int i = 0; i < L::owned; ++i) total[i] = 0.0f;
    int partial[L::unit_groups][L::sums];
    Ring<STAGES> ring(0);
    Ring<kScaleStages> scale_ring(0);

    // Wait for a step's scales (and, in a cluster, for everybody's sums), and add its groups.
    auto finish = [&](int step) {
      mbarrier_wait(base + L::scale_full + 8 * scale_ring.stage, scale_ring.parity);
      const float* scales = reinterpret_cast<const float*>(shared + L::scales) +
                            scale_ring.stage * L::step_scales;
      const int valid = groups - step * L::step_groups;
      if constexpr (CLUSTER == 1) {
        promote<L, 1>(total, scales, 0, thread, valid,
                      [&](int g, int i) { return partial[g][i]; });
      } else {
        const u32 barrier = base + L::received + 8 * (step % 2);
        mbarrier_wait_cluster(barrier, step / 2 % 2);
        const int* sums = reinterpret_cast<const int*>(shared + L::exchange) +
                          step % 2 * L::exchange_ints + thread;
        promote<L, CLUSTER>(total, scales, rank, thread, valid,
                            [&](int g, int i) { return sums[(g * L::owned + i) * 128]; });
        if (thread == 0 && step + 2 < steps) mbarrier_expect(barrier, received_bytes(step + 2));
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(base + L::scale_empty + 8 * scale_ring.stage);
      scale_ring.next();
    };

    for (int step = 0; step < steps; ++step) {
      const bool mine = step * CLUSTER + rank < units;
      if (mine) {
        Ring<STAGES> ahead = ring;
#pragma unroll
        for (int block = 0; block < L::unit_blocks; ++block) {
          mbarrier_wait(base + L::full + 8 * ahead.stage, ahead.parity);
          ahead.next();
        }
        Ring<STAGES> here = ring;
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < L::unit_blocks; ++block) {
          const u64 a = wgmma_descriptor(base + L::weights + here.stage * L::weight_bytes);
          const u64 b = wgmma_descriptor(base + L::tokens + here.stage * L::token_bytes);
#pragma unroll
          for (int g = 0; g < L::unit_groups; ++g)
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
              WgmmaInt8<TOKENS>::run(partial[g], a + 2 * (g * kSteps + k),
                                     b + 2 * (g * kSteps + k), block + k > 0);
          here.next();
        }
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int g = 0; g < L::unit_groups; ++g) wgmma_hold(partial[g]);
#pragma unroll
        for (int block = 0; block < L::unit_blocks; ++block) {
          if (lane == 0) mbarrier_arrive(base + L::empty + 8 * ring.stage);
          ring.next();
        }
      }
      if constexpr (CLUSTER == 1) {
        finish(step);
      } else {
        if (step > 0) finish(step - 1);  // its sums travelled while this step multiplied
        if (mine) {
          const u32 to = base + L::exchange + 4 * (step % 2 * L::exchange_ints +
                                                   rank * L::unit_groups * L::owned * 128 + thread);
          const u32 barrier = base + L::received + 8 * (step % 2);
#pragma unroll
          for (int owner = 0; owner < CLUSTER; ++owner) {
            const u32 remote = map_to_rank(to, owner), remote_barrier = map_to_rank(barrier, owner);
#pragma unroll
            for (int g = 0; g < L::unit_groups; ++g)
#pragma unroll
              for (int i = 0; i < L::owned; ++i)
                store_remote(remote + 4 * (g * L::owned + i) * 128,
                             static_cast<u32>(partial[g][owner * L::owned + i]), remote_barrier);
          }
        }
      }
    }
    if (CLUSTER > 1 && steps > 0) finish(steps - 1);

    const BiasKind kind = static_cast<BiasKind>(p.bias_kind);
    const int first = CLUSTER > 1 ? rank * L::owned : 0;
#pragma unroll
    for (int i = 0; i < L::owned; ++i) {
      const int index = first + i;
      const int token = first_token + index / 4 * 8 + 2 * (lane % 4) + index % 2;
      const int row = first_row + warp * 16 + lane / 4 + (index & 2) * 4;
      if (token < p.m && row < p.n) {
        if (kind != BiasKind::none)
          total[i] = __fadd_rn(total[i], load_bias(p.bias, kind, row * p.bias_stride));
        Out* at = static_cast<Out*>(p.out) + token * p.out_row + row * p.out_column;
        *at = convert(total[i], Out{});
      }
    }
  }
  __syncwarp();
  if constexpr (CLUSTER > 1) cluster_sync();  // shared memory must outlive the others' stores
}
