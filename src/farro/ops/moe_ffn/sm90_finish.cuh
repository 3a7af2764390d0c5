// What becomes of a tile's totals: codes and scales of the first product, BF16 rows of the second.
#pragma once

#include "sm90_multiply.cuh"
#include "swiglu.cuh"

namespace farro {

// Raise the table's maxima to this warpgroup's, in every CTA of the cluster, and wait for all others.
template <class T, int WIDTH>
__device__ __forceinline__ void share_maxima(u8* shared, u32 base, Consumer<T>& c,
                                             const float (&h)[T::WAVES][WIDTH / 2]) {
  constexpr int kWaves = T::WAVES / T::own_parts;  // of a part
  constexpr int kTable = T::parts * T::TOKENS;
  // The next table: who reads it has read, for all came to the barrier since
  u32* next = reinterpret_cast<u32*>(shared + T::maxima) + (c.turn + 1) % 3 * kTable;
  for (int i = c.which * 128 + c.warp * 32 + c.lane; i < kTable; i += 128 * T::WARPGROUPS) next[i] = 0;
#pragma unroll
  for (int part = 0; part < T::own_parts; ++part) {
    u32 largest[WIDTH / 4];
#pragma unroll
    for (int i = 0; i < WIDTH / 4; ++i) {
      largest[i] = 0;
#pragma unroll
      for (int w = 0; w < kWaves; ++w)
        largest[i] = max(largest[i],
                         __float_as_uint(h[part * kWaves + w][i / 2 * 4 + i % 2]) & 0x7fffffffu);
    }
    const int from = largest_over_lanes<WIDTH / 4>(largest, c.lane);
    const int place = c.turn * kTable + (c.which * T::WAVES * 32 / T::GROUP + part) * T::TOKENS;
    constexpr int kSame = WIDTH >= 32 ? 0 : WIDTH == 16 ? 4 : 12;  // lanes that differ by these agree
    if ((c.lane & kSame) == 0)
#pragma unroll
      for (int i = 0; i < (WIDTH >= 32 ? WIDTH / 32 : 1); ++i) {
        const int column = (from + i) / 2 * 8 + 2 * (c.lane % 4) + (from + i) % 2;
        const u32 at = base + T::maxima + 4 * (place + column);
        if constexpr (T::CLUSTER > 1)
#pragma unroll
          for (int rank = 0; rank < T::CLUSTER; ++rank) raise_remote_to(map_to_rank(at, rank), largest[i]);
        else
          raise_to(at, largest[i]);
      }
  }
  __syncwarp();
  if constexpr (T::CLUSTER > 1) {
    if (c.lane < T::CLUSTER) mbarrier_arrive_cluster(map_to_rank(base + T::ready, c.lane));
    mbarrier_wait_cluster(base + T::ready, c.parity);
  } else {
    if (c.lane == 0) mbarrier_arrive(base + T::ready);
    mbarrier_wait(base + T::ready, c.parity);
  }
}

// Where 16 codes of a row of 64 lie in shared memory, so that rows meet in no bank.
__device__ __forceinline__ int code_at(int row, int piece) {
  return row * 64 + (piece ^ (row / 2 % 4)) * 16;
}

// h = silu(gate) * up, its scales by groups and its codes. Staged codes of the tile before were read before
// the barrier of these maxima.
template <class T, int WIDTH>
__device__ __forceinline__ void activate(const Problem& p, const Tile& tile, u8* shared, u32 base,
                                         Consumer<T>& c, float (&total)[T::WAVES][WIDTH / 2]) {
#pragma unroll
  for (int w = 0; w < T::WAVES; ++w)
#pragma unroll
    for (int j = 0; j < WIDTH / 2; j += 4) {
      const float2 gate = rounded_to_bf16(total[w][j], total[w][j + 1]);
      const float2 up = rounded_to_bf16(total[w][j + 2], total[w][j + 3]);
      total[w][j] = __fmul_rn(silu(gate.x), up.x);
      total[w][j + 1] = __fmul_rn(silu(gate.y), up.y);
    }
  share_maxima<T, WIDTH>(shared, base, c, total);

  // Each warp works out the rates that it needs; the first of a group's tells them
  const int of_cta = first_feature<T>(tile), of_warpgroup = c.which * T::WAVES * 32;
  const int part = of_warpgroup / T::GROUP, groups = (p.features + T::GROUP - 1) / T::GROUP;
  const u32* largest = reinterpret_cast<const u32*>(shared + T::maxima) +
                       (c.turn * T::parts + part) * T::TOKENS;
  float2* rates = reinterpret_cast<float2*>(shared + T::rates) +
                  (c.which * 4 + c.warp) * T::own_parts * T::TOKENS;
  const bool tells = c.warp == 0 && (of_cta + of_warpgroup) % T::GROUP == 0;
#pragma unroll
  for (int i = c.lane; i < T::own_parts * WIDTH; i += 32) {
    const int own = i / WIDTH, column = i % WIDTH, group = (of_cta + of_warpgroup) / T::GROUP + own;
    const float2 rate = rate_of(largest[own * T::TOKENS + column]);
    rates[own * T::TOKENS + column] = rate;
    if (tells && column < tile.rows && group < groups)
      p.out_scale[static_cast<i64>(tile.first_row + column) * groups + group] = rate.x;
  }
  __syncwarp();
  c.turn = c.turn == 2 ? 0 : c.turn + 1, c.parity ^= 1;

  // A lane's codes are of one feature; turned around, of neighbouring ones
  u8* out = static_cast<u8*>(p.out) + static_cast<i64>(tile.first_row + c.lane / 4) * p.out_pitch;
  u8* staged = shared + T::results + c.which * T::out_bytes;
  const int quad = c.lane % 4, odd = quad & 1;
#pragma unroll
  for (int w = 0; w < T::WAVES; ++w) {
    const float2* of_columns = rates + w * 32 / T::GROUP * T::TOKENS + 2 * quad;
    auto pair_of = [&](int j) {
      const float4 two = *reinterpret_cast<const float4*>(of_columns + 8 * j);
      const u32 pair = code_of(total[w][4 * j], make_float2(two.x, two.y)) |
                       code_of(total[w][4 * j + 1], make_float2(two.z, two.w)) << 16;
      return __byte_perm(transposed(pair), 0, 0x4420);
    };
    const int local = w * 32 + c.warp * 8, feature = of_cta + of_warpgroup + local;
    if constexpr (WIDTH == 8) {
      const u32 two = pair_of(0);
      if (c.lane / 4 < tile.rows && feature < p.features)
        *reinterpret_cast<u16*>(out + feature + 2 * quad) = two;
    } else {
#pragma unroll
      for (int j = 0; j < WIDTH / 8; j += 2) {  // of one eight of rows to even lanes, of another to odd ones
        const u32 here = pair_of(j), there = pair_of(j + 1);
        const u32 get = __shfl_xor_sync(~0u, odd ? here : there, 1);
        const u32 four = odd ? get | there << 16 : here | get << 16;
        const int column = 8 * (j + odd);
        if constexpr (T::STAGED)
          *reinterpret_cast<u32*>(staged + code_at(column + c.lane / 4, local / 16) + local % 16 +
                                  2 * (quad - odd)) = four;
        else if (column + c.lane / 4 < tile.rows && feature < p.features)
          *reinterpret_cast<u32*>(out + static_cast<i64>(column) * p.out_pitch + feature + 2 * (quad - odd)) =
              four;
      }
    }
  }
  if constexpr (T::STAGED) {  // 64 bytes of a row together; pitches have room for 16 past the last feature
    named_barrier(1 + c.which, 128);
    const int thread = c.warp * 32 + c.lane, piece = thread % 4;
    const int feature = of_cta + of_warpgroup + 16 * piece;
    u8* to = static_cast<u8*>(p.out) + static_cast<i64>(tile.first_row) * p.out_pitch + feature;
#pragma unroll
    for (int row = thread / 4; row < WIDTH; row += 32)
      if (row < tile.rows && feature < p.features)
        *reinterpret_cast<uint4*>(to + static_cast<i64>(row) * p.out_pitch) =
            *reinterpret_cast<const uint4*>(staged + code_at(row, piece));
  }
}

// BF16 rows, 32 bytes of each.
template <class T, int WIDTH>
__device__ __forceinline__ void store(const Problem& p, const Tile& tile, const Consumer<T>& c,
                                      const float (&total)[T::WAVES][WIDTH / 2]) {
  const int quad = c.lane % 4, odd = quad & 1;
#pragma unroll
  for (int w = 0; w < T::WAVES; ++w) {
    const int feature = first_feature<T>(tile) + (c.which * T::WAVES + w) * 64 + c.warp * 16 +
                        (odd ? 8 + 2 * (quad - 1) : 2 * quad);
    BFloat16* to = static_cast<BFloat16*>(p.out) +
                   static_cast<i64>(tile.first_row + c.lane / 4) * p.out_pitch + feature;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; ++j) {
      const u32 upper = transposed(pack2(total[w][4 * j], total[w][4 * j + 1], BFloat16{}));
      const u32 lower = transposed(pack2(total[w][4 * j + 2], total[w][4 * j + 3], BFloat16{}));
      // Neighbouring lanes exchange halves, so that each has four neighbouring features
      const u32 get = __shfl_xor_sync(~0u, odd ? upper : lower, 1);
      if (8 * j + c.lane / 4 >= tile.rows) continue;
      BFloat16* at = to + static_cast<i64>(8 * j) * p.out_pitch;
      const uint2 four = odd ? make_uint2(get, lower) : make_uint2(upper, get);
      if (p.out_vector) {
        if (feature < p.features) *reinterpret_cast<uint2*>(at) = four;
      } else {
        if (feature < p.features) at[0].bits = static_cast<u16>(four.x);
        if (feature + 1 < p.features) at[1].bits = static_cast<u16>(four.x >> 16);
        if (feature + 2 < p.features) at[2].bits = static_cast<u16>(four.y);
        if (feature + 3 < p.features) at[3].bits = static_cast<u16>(four.y >> 16);
      }
    }
  }
}

// The same through shared memory, where p.out_vector allows: kOutRows rows of 64 features together, by TMA
// while the next ones multiply. An eight of rows that is not whole is stored by lanes: the next rows may be
// another expert's.
template <class T, int WIDTH>
__device__ __forceinline__ void send(const TensorMap* map, const Problem& p, const Tile& tile,
                                     const u8* shared, u32 base, Consumer<T>& c,
                                     const float (&total)[T::WAVES][WIDTH / 2]) {
  constexpr int kRows = WIDTH < kOutRows ? WIDTH : kOutRows;
  // stmatrix: lane l tells where row l % 8 of matrix l / 8 goes; matrices are two eights of features of
  // one eight of rows, then of the next
  const int row = c.lane / 16 * 8 + c.lane % 8, piece = 2 * c.warp + c.lane / 8 % 2;
  const u32 place = row * 128 + (piece ^ (c.lane % 8)) * 16;
#pragma unroll
  for (int w = 0; w < T::WAVES; ++w) {
    const int feature = first_feature<T>(tile) + (c.which * T::WAVES + w) * 64;
#pragma unroll
    for (int first = 0; first < WIDTH; first += kRows) {
      if (first >= tile.rows) break;
      const int slot = T::results + c.which * T::out_bytes + c.slot * (kOutRows * 128);
#pragma unroll
      for (int j = 0; j < kRows / 8; j += 2) {
        const float* sum = total[w] + (first / 8 + j) * 4;
        store_transposed(base + slot + place + j * 1024, pack2(sum[0], sum[1], BFloat16{}),
                         pack2(sum[2], sum[3], BFloat16{}), pack2(sum[4], sum[5], BFloat16{}),
                         pack2(sum[6], sum[7], BFloat16{}));
      }
      fence_async_proxy();
      // All slots but this one and that before it are free after the barrier
      if (c.warp == 0) tma_store_wait<1>();
      named_barrier(1 + c.which, 128);
      const int rows = tile.rows - first;
      if (c.warp == 0) {
        if (c.lane < kRows / 8)
          tma_store(map, 2 * feature, tile.first_row + first + 8 * c.lane, base + slot + c.lane * 1024,
                    8 * c.lane + 8 <= rows);
      } else if (rows < kRows) {
        const int thread = c.warp * 32 + c.lane - 32, left = rows / 8 * 8 + thread / 8, of_row = thread % 8;
        if (left < rows && feature + 8 * of_row < p.features)
          *reinterpret_cast<uint4*>(static_cast<BFloat16*>(p.out) +
                                    static_cast<i64>(tile.first_row + first + left) * p.out_pitch + feature +
                                    8 * of_row) =
              *reinterpret_cast<const uint4*>(shared + slot + left * 128 + (of_row ^ (left % 8)) * 16);
      }
      c.slot = c.slot == kOutSlots - 1 ? 0 : c.slot + 1;
    }
  }
}

}  // namespace farro
