// The two products of moe_ffn: what a kernel is given and how a CTA is laid out.
#pragma once

#include "ptx.cuh"
#include "sm90_tiles.cuh"

namespace farro {

constexpr int kDepth = 128;  // bytes of K in one stage
constexpr int kOutRows = 32, kOutSlots = 3;  // BF16 rows that leave shared memory together, and their ring

struct Problem {
  const u8* x;            // GATHERS: rows of tokens
  const float* x_scale;   // of tokens, or of routes
  const int* source;      // GATHERS: the token of a route
  const int* offsets;     // of experts, among routes
  int* taken;             // HANDED: tiles that crews have taken after their first
  const float* w_scale;
  void* out;              // GATED: codes, else BF16; a row for each route
  float* out_scale;       // GATED: [routes][ceil(features / G)]
  i64 x_pitch, x_scale_row, x_scale_group, w_scale_expert, w_scale_group, w_scale_column;
  int experts, features, k;
  int out_pitch;
  int interleaved;     // GATED: scales of gate and up lie beside each other
  int w_scale_vector;  // scales may be read four together
  int out_vector;      // not GATED: 1 where 8-byte stores are aligned, 2 where TMA may store
  int raster;          // row tiles that are visited together
};

// GATHERS: rows are those of tokens, else of routes, by TMA.
template <bool GATED_, bool GATHERS_, int GROUP_, int TOKENS_, int WARPGROUPS_, int WAVES_, int STAGES_,
          int CTAS_>
struct Traits {
  static constexpr bool GATED = GATED_, GATHERS = GATHERS_;
  static constexpr int GROUP = GROUP_, TOKENS = TOKENS_, WARPGROUPS = WARPGROUPS_, WAVES = WAVES_;
  static constexpr int STAGES = STAGES_;
  static constexpr int threads = 128 + 128 * WARPGROUPS;
  static constexpr int rows = 64 * WARPGROUPS * WAVES, features = GATED ? rows / 2 : rows;
  static constexpr int CLUSTER = GATED && GROUP > features ? GROUP / features : 1;
  static constexpr int GATHERERS = TOKENS > 32 ? 2 : 1;  // warps
  static constexpr int BOX = TOKENS > 32 ? 32 : 8;       // rows that TMA brings together
  // K that is promoted together
  static constexpr int unit = GROUP > kDepth ? GROUP : kDepth, unit_blocks = unit / kDepth;
  static constexpr int unit_groups = unit / GROUP;
  // Groups of the results: of a CTA, and of a warpgroup
  static constexpr int parts = features > GROUP ? features / GROUP : 1;
  static constexpr int own_parts = 32 * WAVES > GROUP ? 32 * WAVES / GROUP : 1;
  // Shared memory
  static constexpr int weight_bytes = rows * kDepth, token_bytes = TOKENS * kDepth;
  static constexpr int scale_floats = unit_groups * (rows + TOKENS);  // [groups][rows], [groups][TOKENS]
  // Units whose scales there is room for: a stage is free before its sums are promoted, scales are after
  static constexpr int SLOTS = STAGES / unit_blocks > 3 ? STAGES / unit_blocks : 3;
  static constexpr int weights = 0, tokens = STAGES * weight_bytes;
  // Results on their way out, of each warpgroup: codes [TOKENS][64], or a ring of BF16 [kOutRows][64]
  static constexpr bool exchange = TOKENS * WAVES >= 128;
  // Crews take tiles as they come free
  static constexpr bool HANDED = TOKENS == 128 && !GATHERS;
  static constexpr bool STAGED = WAVES == 2 && exchange && (TOKENS == 128 || (GATED && !GATHERS));
  static constexpr int out_bytes = !STAGED ? 0 : GATED ? TOKENS * 64 : kOutSlots * kOutRows * 128;
  static constexpr int results = tokens + STAGES * token_bytes;
  static constexpr int scales = results + WARPGROUPS * out_bytes;
  static constexpr int rates = scales + SLOTS * scale_floats * 4;  // float2 [warps][own_parts][TOKENS]
  static constexpr int maxima = rates + (GATED ? 4 * WARPGROUPS * own_parts * TOKENS * 8 : 0);
  static constexpr int full = maxima + (GATED ? 3 * parts * TOKENS * 4 : 0);
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES, scale_empty = scale_full + 8 * SLOTS;
  static constexpr int ready = scale_empty + 8 * SLOTS;
  static constexpr int handed_full = ready + 8, handed_empty = ready + 16, handed = ready + 24;
  static constexpr int table = ready + (HANDED ? 32 : 16);  // int [2 * (experts + 1)]
  // Registers of a thread: at launch, and where tiles are wide, after an exchange
  static constexpr int most(int registers) { return registers < 240 ? registers / 8 * 8 : 240; }
  static constexpr int launched = most(65536 / (threads * CTAS_));
  static constexpr int given = GATHERS ? 56 : 40;  // a place for each row that is gathered
  static constexpr int taken = most((launched * (WARPGROUPS + 1) - given) / WARPGROUPS);
  static_assert(STAGES > unit_blocks && WARPGROUPS * WAVES <= 4);
};

// The first of this CTA's features of a tile.

template <class T>
__device__ __forceinline__ int first_feature(const Tile& tile) {
  const int rank = T::CLUSTER > 1 ? cluster_rank() : 0;
  return (tile.column_tile * T::CLUSTER + rank) * T::features;
}

template <class T>
__device__ __forceinline__ int stages_of(const Problem& p) {
  return (p.k + T::unit - 1) / T::unit * T::unit_blocks;
}

}  // namespace farro
