// Consumers of nvfp4_group_mm on SM90a: weights to 16 bits in registers, sparse products, the sums of
// CTAs that share K.
#pragma once

#include "sm90_tiles.cuh"
#include "wgmma_sparse.cuh"

namespace farro {

// A warp's operand of 128 of K: 16 rows, and which of four are kept.
struct Operand {
  u32 a[4][4], meta[4];
};

// One 32 of K: four bytes of codes (row r: 0, 1; row r + 8: 2, 3), and their scales in one half of two
// pairs. FP16 comes out times 2^-6 (2^-14 by shifts), BF16 times 2^-8.
template <bool BF16, bool CONVERT, bool HIGH>
__device__ __forceinline__ void decode(u32 bytes, u32 scales, u32 scales8, u32 (&a)[4]) {
  u32 raw[4];
  if constexpr (BF16) {  // exponent and mantissa at bits 8..6: times 2^-126
    const u32 low = __byte_perm(bytes, 0, 0x1404), high = __byte_perm(bytes, 0, 0x3424);
    const u32 from[4] = {low << 4, high << 4, low, high};
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = (from[i] & 0x80008000u) | (from[i] >> 6 & 0x01c001c0u);
  } else if constexpr (!CONVERT) {  // at bits 11..9: times 2^-14
    const u32 low = __byte_perm(bytes, 0, 0x1404), high = __byte_perm(bytes, 0, 0x3424);
    const u32 from[4] = {low << 4, high << 4, low, high};
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = (from[i] & 0x80008000u) | (from[i] >> 3 & 0x0e000e00u);
  } else {
    const u32 low = low_codes(bytes), high = high_codes(bytes);
    raw[0] = low_to_halves(low), raw[1] = high_to_halves(low);
    raw[2] = low_to_halves(high), raw[3] = high_to_halves(high);
  }
  a[0] = multiply_by<BF16, HIGH>(raw[0], scales), a[2] = multiply_by<BF16, HIGH>(raw[2], scales);
  a[1] = multiply_by<BF16, HIGH>(raw[1], scales8), a[3] = multiply_by<BF16, HIGH>(raw[3], scales8);
}

constexpr float kBrainScale = 0x1p118f;  // what scales are multiplied with before BF16's codes
template <bool BF16, bool CONVERT>
constexpr float kUnscale = BF16 ? 256.0f : CONVERT ? 64.0f : 16384.0f;

template <class T>
struct Consumer {
  Ring<T::STAGES> ring{0};
  Ring<T::UNITS> unit{0}, done{0};  // of B: read, given back
  int which, warp, lane;
  int slot, part;  // GATED: its rows, as a block of 64 of the stage and 16 of that
};

// FP16 (or BF16) of a chunk of 128 of K: four words of codes, and four scales of each of two rows.
template <bool BF16, bool CONVERT>
__device__ __forceinline__ void decode(const u32 (&codes)[4], u32 scales, u32 scales8, u32 (&a)[4][4]) {
  u32 low[2] = {low_to_halves(scales), high_to_halves(scales)};
  u32 high[2] = {low_to_halves(scales8), high_to_halves(scales8)};
  if constexpr (BF16)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      low[i] = halves_to_brains(low[i], kBrainScale), high[i] = halves_to_brains(high[i], kBrainScale);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    decode<BF16, CONVERT, false>(codes[2 * i], low[i], high[i], a[2 * i]);
    decode<BF16, CONVERT, true>(codes[2 * i + 1], low[i], high[i], a[2 * i + 1]);
  }
}

template <class T, int WIDTH>
__device__ __forceinline__ void multiply_tile(const Rows& rows, int valid, const u8* shared, u32 base,
                                              Consumer<T>& c, float (&sum)[WIDTH / 2]) {
  const Span<T> k(rows.k);
  const int part = T::GATED ? c.part : c.warp, thread = part * 32 + c.lane, row = part * 16 + c.lane / 4;
  const u8* own = shared + T::a + (T::GATED ? c.slot : c.which) * T::block;
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) sum[i] = 0.0f;

  // `place` is a chunk's within its stage
  auto load = [&](Operand& o, int place) {
    const u8* block = own + c.ring.stage * T::stage_a;
    u32 codes[4];
    *reinterpret_cast<uint4*>(codes) = reinterpret_cast<const uint4*>(block + place * kMeta)[thread];
    block += T::STEP * kMeta;
    *reinterpret_cast<uint4*>(o.meta) = reinterpret_cast<const uint4*>(block + place * 512)[thread / 4];
    block += T::STEP * 512;
    const u32* scales = reinterpret_cast<const u32*>(block + place * 256) + row;
    decode<T::BF16, T::CONVERT>(codes, scales[0], scales[8], o.a);
  };
  auto load_partly = [&](Operand& o, int place, int here) {  // zeros, in a legal pattern, elsewhere
    const bool mine = c.warp * 16 < valid;
    const int height = valid < kRows ? 32 : 64;  // of the compressed tile
    const u8* block = own + c.ring.stage * T::stage_a;
    const u32* at_codes = reinterpret_cast<const u32*>(block + place * height * 32);
    const u32* at_meta = reinterpret_cast<const u32*>(block + T::STEP * kMeta + place * height * 8);
    const u8* at_scales = block + T::STEP * kScales + place * height * 4;
    u32 codes[4], scales = 0, scales8 = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      codes[s] = 0, o.meta[s] = 0x44444444u;
      if (mine && s < here) {
        codes[s] = at_codes[thread * here + s];
        o.meta[s] = at_meta[thread / 4 * here + s];
        scales |= at_scales[row * here + s] << 8 * s;
        scales8 |= at_scales[(row + 8) * here + s] << 8 * s;
      }
    }
    decode<T::BF16, T::CONVERT>(codes, scales, scales8, o.a);
  };
  auto read = [&](Operand& o, int place, int here) {
    if (place == 0) mbarrier_wait(base + T::full + 8 * c.ring.stage, c.ring.parity);
    if (here == 0) load(o, place);
    else load_partly(o, place, here);
  };
  // Once products with all that was read are issued, and not before: bulk copies that refill the stage
  // overtake reads of shared memory whose values nothing has used yet.
  auto give_back_weights = [&](bool last) {
    if (!last) return;
    __syncwarp();
    if (c.lane == 0) mbarrier_arrive(base + T::empty + 8 * c.ring.stage);
    c.ring.next();
  };
  auto multiply = [&](Operand& o, int part) {
    mbarrier_wait(base + T::b_full + 8 * c.unit.stage, c.unit.parity);
    const u64 b = wgmma_descriptor(base + T::b) + c.unit.stage * (T::unit / 16);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2 * T::PART; ++i) {
      const int s = part * 2 * T::PART + i;
      const u64 at = b + i / 2 * (T::half / 16) + i % 2 * 4;
      if constexpr (T::BF16) WgmmaSparse<WIDTH>::bf16(sum, o.a[s], at, o.meta[s], true);
      else WgmmaSparse<WIDTH>::fp16(sum, o.a[s], at, o.meta[s], true);
    }
    wgmma_commit();
    c.unit.next();
  };
  auto free_operand = [&](Operand& o) {  // its product has ended
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      asm volatile("" : "+r"(o.meta[s])::"memory");
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(o.a[s][i])::"memory");
    }
  };
  auto give_back = [&] {
    const u32 empty = base + T::b_empty + 8 * c.done.stage;
    if constexpr (T::PAIR > 1) {
      if (c.lane < T::PAIR) mbarrier_arrive_remote(map_to_rank(empty, c.lane));
    } else {
      if (c.lane == 0) mbarrier_arrive(empty);
    }
    c.done.next();
  };
  constexpr int kParts = 2 / T::PART;
  auto alone = [&](Operand& o, bool last) {  // nothing else is in flight
#pragma unroll
    for (int part = 0; part < kParts; ++part) multiply(o, part);
    give_back_weights(last);
    if constexpr (kParts == 2) wgmma_wait<1>(), give_back();
    wgmma_wait<0>();
    free_operand(o);
    give_back();
  };

  int chunk = k.first;
  if (valid >= kRows) {  // whole rows: pairs of whole chunks
    const int pairs = (min(k.last, k.steps / 4) - k.first) / 2;
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Operand o;
        read(o, T::STEP == 1 ? 0 : i, 0);
        alone(o, T::STEP == 1 || i == 1);
      }
    }
    chunk += 2 * pairs;
  }
#pragma unroll 1
  for (; chunk < k.last; ++chunk) {
    const int place = T::STEP == 1 ? 0 : chunk % T::STEP;
    Operand o;
    read(o, place, min(k.steps - 4 * chunk, 4));
    alone(o, place == T::STEP - 1 || chunk == k.last - 1);
  }
  wgmma_hold(sum);
}

// The cluster's sums, added by its first CTA in the order of K.
template <class T, int WIDTH>
__device__ __forceinline__ void add_splits(u8* shared, u32 base, const Consumer<T>& c,
                                           float (&sum)[WIDTH / 2]) {
  constexpr int kThreads = 128 * T::CONSUMERS;
  const int thread = c.which * 128 + c.warp * 32 + c.lane;
  const u32 rank = cluster_rank();
  if (rank > 0)
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i)
      reinterpret_cast<float4*>(shared + T::sums)[i * kThreads + thread] =
          make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  cluster_sync();
  if (rank == 0)
#pragma unroll
    for (int other = 1; other < T::SPLIT; ++other)
#pragma unroll
      for (int i = 0; i < WIDTH / 8; ++i) {
        const float4 part =
            load_remote(map_to_rank(base + T::sums + 16 * (i * kThreads + thread), other));
        sum[4 * i] += part.x, sum[4 * i + 1] += part.y;
        sum[4 * i + 2] += part.z, sum[4 * i + 3] += part.w;
      }
  cluster_sync();
}

}  // namespace farro
