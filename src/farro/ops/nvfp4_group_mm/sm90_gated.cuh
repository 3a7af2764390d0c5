// The gated activation and the quantizer as the result of nvfp4_group_mm on SM90a: the bytes of
// silu_mul_quant_act of the BF16 product, which is never in memory.
//
// 64 weight rows of a consumer are 32 of gate and the 32 of up that go with them, so that a consumer has
// whole blocks of 32 results. Their BF16 sums pass through shared memory, kPass tokens at a time, for a
// thread to have neighbouring gates of one token and their ups.
#pragma once

#include "nvfp4_gate.cuh"
#include "sm90_multiply.cuh"

namespace farro {

struct Gated {
  u8* codes;
  u8* scales;
  const float* gscale;
  int per_expert;   // gscale of each expert
  int blocks;       // of 32 results in a row
  int interleaved;  // 8 rows of gate, then 8 of up; else all of gate first
};

constexpr u32 kUnused = 0x38383838u;  // scales of rows that no token has

// e2m1 of a value: nearest even, saturating, -0 and NaN as 0. 2^22 times the power of two below, 1 at
// least, is added: the sum's last bit is worth the step there, its exponent counts the codes below.
__device__ __forceinline__ u32 code_of(float value) {
  const float size = fminf(fabsf(value), 6.0f);
  const u32 power = max(__float_as_uint(size), 0x3f800000u) & 0x7f800000u;
  const u32 bits = __float_as_uint(__fadd_rn(size, __uint_as_float(power + 0x0b000000u)));
  const u32 code = (bits & 7) + (bits >> 22) - 298 + (__float_as_uint(value) >> 28 & 8);
  return fabsf(value) > 0.25f ? code : 0;
}

// 8 x 8 BF16 matrices of which a lane holds two of row l / 4: to the 16 bytes of each column that lanes 8 i
// and on name, of matrix i.
__device__ __forceinline__ void store_columns(u32 smem, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem), "r"(a), "r"(b)
               : "memory");
}
__device__ __forceinline__ void store_columns(u32 smem, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a),
               "r"(b), "r"(c), "r"(d)
               : "memory");
}

// COUNT neighbouring results of one token; as many lanes as have a block's share it.
template <int COUNT>
__device__ __forceinline__ void quantize(const u8* row, int part, float gscale, bool there, u8* codes,
                                         u8* scale) {
  constexpr int kWords = COUNT / 2, kLanes = 32 / COUNT;
  u32 gate[kWords], up[kWords];
  if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(gate) = reinterpret_cast<const uint4*>(row)[part];
    *reinterpret_cast<uint4*>(up) = reinterpret_cast<const uint4*>(row + 64)[part];
  } else if constexpr (kWords == 2) {
    *reinterpret_cast<uint2*>(gate) = reinterpret_cast<const uint2*>(row)[part];
    *reinterpret_cast<uint2*>(up) = reinterpret_cast<const uint2*>(row + 64)[part];
  } else {
    gate[0] = reinterpret_cast<const u32*>(row)[part], up[0] = reinterpret_cast<const u32*>(row + 64)[part];
  }
  float2 y[kWords];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    y[i] = gated(gate[i], up[i]);
    largest = max(largest, max(__float_as_uint(y[i].x) & 0x7fffffffu, __float_as_uint(y[i].y) & 0x7fffffffu));
  }
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, bit));
  float ratio;
  const u32 byte = scale_of(largest, gscale, ratio);
  u32 packed = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    packed |= (code_of(__fmul_rn(y[i].x, ratio)) | code_of(__fmul_rn(y[i].y, ratio)) << 4) << 8 * i;
  if (!there) return;
  if constexpr (kWords == 4) reinterpret_cast<u32*>(codes)[part] = packed;
  else if constexpr (kWords == 2) reinterpret_cast<u16*>(codes)[part] = static_cast<u16>(packed);
  else codes[part] = static_cast<u8>(packed);
  if (part == 0) *scale = static_cast<u8>(byte);
}

struct Quantized {
  const Gated& g;

  // Scales of rows that no token has, in pieces of 512 bytes, by the consumers of all CTAs, who have
  // nothing to do before weights arrive.
  template <class T>
  __device__ __forceinline__ void begin(const Tiles<T>& tiles, const Consumer<T>& c) const {
    const i64 all = static_cast<i64>(tiles.capacity) * g.blocks;  // bytes of an expert
    const int pieces = static_cast<int>((all + 511) / 512);
    const int warps = 4 * T::CONSUMERS * gridDim.x;
    const i64 items = static_cast<i64>(pieces) * tiles.experts;
    for (i64 item = blockIdx.x * 4 * T::CONSUMERS + c.which * 4 + c.warp; item < items; item += warps) {
      const int expert = static_cast<int>(item / pieces);
      const i64 low = static_cast<i64>(tiles.count[expert]) * g.blocks;
      const i64 from = (item - static_cast<i64>(expert) * pieces) * 512 + 16 * c.lane;
      u8* to = g.scales + expert * all + from;
      if (from >= low && from + 16 <= all && reinterpret_cast<u64>(to) % 16 == 0) {
        *reinterpret_cast<uint4*>(to) = make_uint4(kUnused, kUnused, kUnused, kUnused);
        continue;
      }
      for (int i = 0; i < 16; ++i)
        if (from + i >= low && from + i < all) to[i] = static_cast<u8>(kUnused);
    }
  }

  template <class T, int WIDTH>
  __device__ __forceinline__ bool finish(const Problem& p, const Tile& tile, u8* shared, u32 base,
                                         const Consumer<T>& c, const float (&sum)[WIDTH / 2]) const {
    constexpr int kPass = T::pass < WIDTH ? T::pass : WIDTH, kCount = kPass / 4, kLanes = 32 / kCount;
    const int block = tile.row_tile * T::CONSUMERS + c.which;
    if (block >= g.blocks) return false;
    const float alpha = __fmul_rn(p.alphas[tile.expert], kUnscale<T::BF16, T::CONVERT>);
    const float gscale = g.gscale[g.per_expert ? tile.expert : 0];
    const int own = T::staging + c.which * T::pass * kPitch;
    // The warp's two groups of 8 rows, as columns of a token's 32 gates and 32 ups
    const int first = g.interleaved ? 8 * c.warp : 16 * c.warp, next = g.interleaved ? 32 : 8;
    const u32 to = base + own + (c.lane / 16 * 8 + c.lane % 8) * kPitch + 2 * (first + c.lane / 8 % 2 * next);
    const int thread = c.warp * 32 + c.lane, token = thread / kLanes, part = thread % kLanes;
    const u8* from = shared + own + token * kPitch;
#pragma unroll 1
    for (int pass = 0; pass * kPass < tile.tokens; ++pass) {
      named_barrier(1 + c.which, 128);  // what was there has been read
#pragma unroll
      for (int q = 0; q < WIDTH / kPass; ++q) {
        if (pass != q) continue;
        u32 pair[kPass / 4];
#pragma unroll
        for (int i = 0; i < kPass / 4; ++i) {
          const int at = q * kPass / 2 + 2 * i;
          pair[i] = pack2(__fmul_rn(sum[at], alpha), __fmul_rn(sum[at + 1], alpha), BFloat16{});
        }
        if constexpr (kPass == 8) store_columns(to, pair[0], pair[1]);
        else
#pragma unroll
          for (int i = 0; i < kPass / 4; i += 4)
            store_columns(to + i * 4 * kPitch, pair[i], pair[i + 1], pair[i + 2], pair[i + 3]);
      }
      named_barrier(1 + c.which, 128);
      const int row = pass * kPass + token;
      const i64 at = (tile.first_row + row) * g.blocks + block;
      quantize<kCount>(from, part, gscale, row < tile.tokens, g.codes + 16 * at, g.scales + at);
    }
    return false;
  }

  // Blocks with what is not finite have the scale NaN and codes 0, be it NaN or an infinity.
  template <class T>
  __device__ __forceinline__ void repair(const Problem&, const Rows&, const Tile&, const Consumer<T>&) const {}
};

}  // namespace farro
