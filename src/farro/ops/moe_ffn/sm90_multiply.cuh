// The warpgroups of moe_ffn's products that multiply: sums of groups, promoted.
#pragma once

#include "sm90_layout.cuh"
#include "wgmma.cuh"

namespace farro {

template <class T>
struct Consumer {
  Ring<T::STAGES> ring{0};
  Ring<T::SLOTS> scale_ring{0};
  int which, warp, lane;
  int turn = 0;    // of three tables of maxima
  u32 parity = 0;  // of the barrier that tells that one is complete
  int slot = 0;    // of results that leave
};

// WIDTH rows' totals: of wave w, rows l / 4 (and 8 more) of the warp's 16 weight rows, and of each eight
// columns 2 (l % 4) and the next.
template <class T, int WIDTH>
__device__ __forceinline__ void multiply_tile(const Problem& p, const u8* shared, u32 base,
                                              Consumer<T>& c, float (&total)[T::WAVES][WIDTH / 2]) {
  constexpr int kSteps = (T::GROUP < kDepth ? T::GROUP : kDepth) / 32;  // wgmma of a group and stage
  // Groups that multiply together, as far as their sums have registers
  constexpr int kRoom = T::WAVES > 1 || WIDTH > 32 ? 1 : 64 / WIDTH;
  constexpr int kTogether = kRoom < T::unit_groups ? kRoom : T::unit_groups;
  const int units = (p.k + T::unit - 1) / T::unit;
  // Where scales of this lane's first weight row, and of the other one, lie among a group's
  const int row = c.which * T::WAVES * 64 + c.warp * 16 + c.lane / 4;
  const int feature = c.which * T::WAVES * 32 + c.warp * 8 + c.lane / 4;
  const int first = !T::GATED ? row : p.interleaved ? 2 * feature : feature;
  const int second = first + (!T::GATED ? 8 : p.interleaved ? 1 : T::features);
  const int next_wave = !T::GATED || p.interleaved ? 64 : 32;
#pragma unroll
  for (int w = 0; w < T::WAVES; ++w)
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) total[w][i] = 0.0f;
  const u64 first_a = wgmma_descriptor(base + T::weights + c.which * T::WAVES * 64 * kDepth);
  const u64 first_b = wgmma_descriptor(base + T::tokens);

  // A unit's stages are waited for before it, while the last sums of the one before multiply
  auto wait_for_unit = [&](Ring<T::STAGES> at) {
#pragma unroll
    for (int block = 0; block < T::unit_blocks; ++block) {
      mbarrier_wait(base + T::full + 8 * at.stage, at.parity);
      at.next();
    }
  };
  if (units > 0) wait_for_unit(c.ring);
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    if constexpr (T::GATHERS) fence_async_proxy();  // cp.async wrote for wgmma to read
    const float* scales = reinterpret_cast<const float*>(shared + T::scales) +
                          c.scale_ring.stage * T::scale_floats;
#pragma unroll
    for (int g = 0; g < T::unit_groups; g += kTogether) {
#pragma unroll
      for (int w = 0; w < T::WAVES; ++w) {
        const bool last = g + kTogether == T::unit_groups && w == T::WAVES - 1;  // of the unit
        int sums[kTogether][WIDTH / 2];
        Ring<T::STAGES> at = c.ring;
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          at = c.ring;
#pragma unroll
          for (int block = 0; block < T::unit_blocks; ++block) {
            const u64 a = first_a + at.stage * (T::weight_bytes / 16) + w * (64 * kDepth / 16) +
                          2 * kSteps * (g + t);
            const u64 b = first_b + at.stage * (T::token_bytes / 16) + 2 * kSteps * (g + t);
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
              WgmmaInt8<WIDTH>::run(sums[t], a + 2 * k, b + 2 * k, block + k > 0);
            at.next();
          }
        }
        wgmma_commit();
        if (g == 0 && w == 0)
          mbarrier_wait(base + T::scale_full + 8 * c.scale_ring.stage, c.scale_ring.parity);
        float low[kTogether], high[kTogether];
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          low[t] = scales[(g + t) * T::rows + first + w * next_wave];
          high[t] = scales[(g + t) * T::rows + second + w * next_wave];
        }
        if (last && unit + 1 < units) wait_for_unit(at);
        wgmma_wait<0>();
#pragma unroll
        for (int t = 0; t < kTogether; ++t) wgmma_hold(sums[t]);
        if (last) {
#pragma unroll
          for (int block = 0; block < T::unit_blocks; ++block) {
            if (c.lane == 0) mbarrier_arrive(base + T::empty + 8 * c.ring.stage);
            c.ring.next();
          }
        }
#pragma unroll
        for (int t = 0; t < kTogether; ++t) {
          const float2* of_columns = reinterpret_cast<const float2*>(
              scales + T::unit_groups * T::rows + (g + t) * T::TOKENS) + c.lane % 4;
#pragma unroll
          for (int j = 0; j < WIDTH / 8; ++j) {
            const float2 s = of_columns[4 * j];
            float* sum = total[w] + 4 * j;
            const int* exact = sums[t] + 4 * j;
            sum[0] = __fmaf_rn(__int2float_rn(exact[0]), __fmul_rn(s.x, low[t]), sum[0]);
            sum[1] = __fmaf_rn(__int2float_rn(exact[1]), __fmul_rn(s.y, low[t]), sum[1]);
            sum[2] = __fmaf_rn(__int2float_rn(exact[2]), __fmul_rn(s.x, high[t]), sum[2]);
            sum[3] = __fmaf_rn(__int2float_rn(exact[3]), __fmul_rn(s.y, high[t]), sum[3]);
          }
        }
      }
    }
    __syncwarp();
    if (c.lane == 0) mbarrier_arrive(base + T::scale_empty + 8 * c.scale_ring.stage);
    c.scale_ring.next();
  }
}

}  // namespace farro
