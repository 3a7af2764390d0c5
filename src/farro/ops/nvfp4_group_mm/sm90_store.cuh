// The product itself as the result: BF16 rows, and infinities among BF16 activations.
#pragma once

#include "sm90_multiply.cuh"

namespace farro {

// The first of a warp's 16 features.
template <class T>
__device__ __forceinline__ int first_feature_of(const Tile& tile, const Consumer<T>& c) {
  return tile.row_tile * T::rows + c.which * kRows + c.warp * 16;
}

// Whether a lane of this warp stored what is not finite, of BF16 activations.
template <class T, int WIDTH>
__device__ __forceinline__ bool store(const Problem& p, const Tile& tile, const Consumer<T>& c,
                                      const float (&sum)[WIDTH / 2]) {
  const int first_feature = first_feature_of<T>(tile, c);
  if (first_feature >= p.features) return false;
  u32 spoilt = 0;  // +-0, or NaN
  const float alpha = __fmul_rn(p.alphas[tile.expert], kUnscale<T::BF16, T::CONVERT>);
  const int quad = c.lane % 4, odd_lane = quad & 1;
  const int feature = first_feature + (odd_lane ? 8 + 2 * (quad - 1) : 2 * quad);
  BFloat16* to = p.out + (tile.first_row + c.lane / 4) * p.features + feature;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j) {
    u32 part[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const u32 pair = pack2(__fmul_rn(sum[4 * j + 2 * h], alpha),
                             __fmul_rn(sum[4 * j + 2 * h + 1], alpha), BFloat16{});
      asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(part[h]) : "r"(pair));
    }
    // Neighbouring lanes exchange halves, so that each has four neighbouring features
    const u32 get = __shfl_xor_sync(~0u, odd_lane ? part[0] : part[1], 1);
    if (8 * j + c.lane / 4 >= tile.tokens) continue;
    BFloat16* at = to + static_cast<i64>(8 * j) * p.features;
    const uint2 four = odd_lane ? make_uint2(get, part[1]) : make_uint2(part[0], get);
    if (p.out_vector) {
      *reinterpret_cast<uint2*>(at) = four;
    } else {
      at[0].bits = static_cast<u16>(four.x), at[1].bits = static_cast<u16>(four.x >> 16);
      at[2].bits = static_cast<u16>(four.y), at[3].bits = static_cast<u16>(four.y >> 16);
    }
    if constexpr (T::BF16) spoilt = add_zero_times(four.y, add_zero_times(four.x, spoilt));
  }
  return T::BF16 && __any_sync(~0u, (spoilt & 0x7fff7fffu) != 0);
}

// A warp's 16 features of tokens that came out NaN, as the formula has them. Expansion made NaN of all
// that share a choice with what is not finite, for a pruned weight times it is NaN. Where weights
// that were kept meet infinities alone, and never with 0, the sum is an infinity.
template <class T>
__device__ __forceinline__ void repair(const Problem& p, const Rows& rows, const Tile& tile,
                                       const Consumer<T>& c) {
  const int steps = rows.k / 32, feature = first_feature_of<T>(tile, c) + c.lane % 16;
  const int top = feature / kRows * kRows, height = min(p.features - top, kRows);
  const int row = feature - top, high = row / 8 % 2;
  const i64 tiles = (static_cast<i64>(tile.expert) * p.features + top) * steps;
  const float alpha = p.alphas[tile.expert];
  __syncwarp();  // each lane reads what others stored
#pragma unroll 1
  for (int token = 0; token < tile.tokens; ++token) {
    volatile u16* at = &p.out[(tile.first_row + token) * p.features + feature].bits;
    const bool nan = (*at & 0x7fff) > 0x7f80;
    if (!__any_sync(~0u, nan)) continue;
    const u16* x = static_cast<const u16*>(p.x) + (tile.first_row + token) * rows.k + c.lane;
    float sum = 0.0f;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const u32 own = x[32 * step];
      const int here = min(steps - step / 4 * 4, 4), s = step % 4;
      const i64 block = tiles + height * (step - s);
      const int scale = p.scales[block + row * here + s];
      if (scale == 0x7f) sum = __int_as_float(0x7fc00000);
      u32 places = __ballot_sync(~0u, (own & 0x7f80) == 0x7f80);
      if (places == 0) continue;
      const int line = row / 16 * 8 + row % 8;  // of two rows, 8 apart
      const u32 meta = reinterpret_cast<const u16*>(p.meta + 2 * block)[2 * (line * here + s) + high];
      for (; places != 0; places &= places - 1) {
        const int place = __ffs(places) - 1, group = place / 8, pair = place / 2 % 4;
        const float value = __uint_as_float(__shfl_sync(~0u, own, place) << 16);
        const u32 choice = meta >> 4 * group & 15;
        u32 code = 0;
        if (pair == (choice & 3) || pair == choice >> 2)
          code = p.codes[8 * block + 4 * ((line * 4 + group) * here + s) + 2 * high +
                         (pair == choice >> 2)] >> place % 2 * 4 & 15;
        const bool zero = scale == 0 || (code & 7) == 0;
        sum += (zero ? 0.0f : code & 8 ? -1.0f : 1.0f) * value;
      }
    }
    if (nan && c.lane < 16 && fabsf(sum) == __int_as_float(0x7f800000))
      *at = static_cast<u16>(pack2(__fmul_rn(sum, alpha), 0.0f, BFloat16{}));
  }
}

struct Stored {
  template <class T, int WIDTH>
  __device__ __forceinline__ bool finish(const Problem& p, const Tile& tile, u8*, u32, const Consumer<T>& c,
                                         const float (&sum)[WIDTH / 2]) const {
    return store<T, WIDTH>(p, tile, c, sum);
  }
  template <class T>
  __device__ __forceinline__ void repair(const Problem& p, const Rows& rows, const Tile& tile,
                                         const Consumer<T>& c) const {
    if constexpr (T::BF16) farro::repair<T>(p, rows, tile, c);
  }
};

}  // namespace farro
