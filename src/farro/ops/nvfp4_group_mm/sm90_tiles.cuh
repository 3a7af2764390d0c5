// What the products of nvfp4_group_mm on SM90a share: sizes of a tile and of its rings, which tiles there
// are, and which part of K.
#pragma once

#include "experts.cuh"
#include "nvfp4.cuh"
#include "output.cuh"
#include "tiles.cuh"

namespace farro {

constexpr int kRows = 64;  // of a compressed tile, with a chunk of 128 of K
constexpr int kMeta = 2048, kScales = kMeta + 512, kTile = kScales + 256;  // its parts, and its size
constexpr int kExpanders = 3;  // warps
constexpr int kPitch = 144;    // bytes of a token's 64 sums, and 16 that spread them over the banks

// GATED: where a consumer's 32 rows of gate and 32 of up come from. Weights are compressed in blocks of 64
// rows, where 8 rows of gate and 8 of up alternate (mixed) or all of gate come first. These are copied as
// blocks of 64 where gate has whole ones and consumers are even (blocks: half of them of gate, then of up;
// consumers 2 i and 2 i + 1 take the first and the second half of the i-th of both), else as halves.
enum class Halves : int { mixed = 0, blocks = 1, halves = 2 };

struct Problem {
  const u8* codes;
  const u8* meta;
  const u8* scales;
  const float* alphas;
  const void* x;       // codes or BF16 values, as they were given
  const u8* x_scales;  // of codes
  BFloat16* out;
  int features;
  int raster;        // token tiles that are visited together
  int contiguous;    // whether a CTA takes neighbouring tiles
  int out_vector;    // 8-byte stores to out are aligned
  int scale_vector;  // x_scales of 128 of K are an aligned word
  int halves;        // GATED: how rows lie, see `Halves`
};

template <bool GATED_, bool BF16_, bool INSIDE_, int CONSUMERS_, int TOKENS_, int STEP_, int STAGES_, int CTAS_,
          int SPLIT_, int PAIR_ = 1>
struct Traits {
  static constexpr bool GATED = GATED_, BF16 = BF16_, INSIDE = INSIDE_;
  // How codes become FP16: by conversion from E4M3, or by shifts, each where it was the faster
  static constexpr bool CONVERT = TOKENS_ < 128;
  static constexpr int CONSUMERS = CONSUMERS_, TOKENS = TOKENS_, STEP = STEP_, STAGES = STAGES_;
  static constexpr int SPLIT = SPLIT_, PAIR = PAIR_, CLUSTER = SPLIT * PAIR;
  static constexpr int threads = 128 + 128 * CONSUMERS, rows = kRows * CONSUMERS;
  static constexpr int half = TOKENS * 128;              // bytes of 64 of K
  static constexpr int few = TOKENS > 32 ? TOKENS / 4 : 8;  // rows of the smaller boxes
  // Units of B are halves of 128 of K where tiles are wide: more of them are on their way
  static constexpr int PART = TOKENS >= 128 ? 1 : 2;
  static constexpr int UNITS = TOKENS == 64 && CTAS_ > 1 ? 4 : TOKENS == 64 || TOKENS > 128 ? 6 : 8;
  static constexpr int unit = PART * half, block = STEP * kTile, stage_a = CONSUMERS * block;
  // Activations of a stage as they were given: boxes of 128 bytes of each token, then scales
  static constexpr int boxes = !INSIDE ? 0 : BF16 ? 2 * STEP : 1;
  static constexpr int stage_raw = boxes * half, stage_scales = INSIDE && !BF16 ? TOKENS * 4 * STEP : 0;
  static_assert(!INSIDE || STEP == 2, "a box has the codes of 256 of K");
  static_assert(INSIDE || SPLIT == 1, "warps 2 and 3 would have to meet the cluster too");
  static_assert(PAIR == 1 || (!INSIDE && TOKENS > 64), "halves of boxes that were expanded before");
  // Shared memory
  static constexpr int b = 0, raw = UNITS * unit, a = raw + STAGES * stage_raw;
  static constexpr int raw_scales = a + STAGES * stage_a, sums = raw_scales + STAGES * stage_scales;
  // GATED: BF16 sums of some tokens of each consumer on their way to other threads
  static constexpr int pass = TOKENS < 32 ? TOKENS : TOKENS == 192 ? 16 : 32;
  static constexpr int staging = sums + (SPLIT > 1 ? rows * TOKENS * 4 : 0);
  static constexpr int full = staging + (GATED ? CONSUMERS * pass * kPitch : 0), empty = full + 8 * STAGES;
  static constexpr int b_full = empty + 8 * STAGES, b_empty = b_full + 8 * UNITS;
  static constexpr int table = b_empty + 8 * UNITS;  // int [3 * experts + 1]
  // Registers: of a thread at launch, and where warpgroups multiply wide tiles, after an exchange
  static constexpr bool exchange = TOKENS >= 64;
  static constexpr int most(int registers) { return registers < 240 ? registers / 8 * 8 : 240; }
  static constexpr int launched = most(65536 / (threads * CTAS_));
  static constexpr int given = INSIDE ? 64 : CTAS_ > 1 || CONSUMERS > 2 ? 32 : 40;
  static constexpr int taken = most((launched * (CONSUMERS + 1) - given) / CONSUMERS);
};

// ---- Tiles ----

struct Tile {
  int expert, row_tile, tokens;  // tokens that the expert has left, at most TOKENS
  i64 first_row;                 // of its tokens in memory
};

// The tiles of a launch, in shared memory: first[e] of all experts before e, their rows.
template <class T>
struct Tiles {
  int* first;
  int* start;
  int* count;
  int experts, capacity, ragged, row_tiles, raster;
  int expert = 0, next, end, stride;

  __device__ Tiles(u8* shared, const Problem& p, const Rows& rows)
      : experts(rows.experts), capacity(rows.capacity), ragged(rows.ragged), raster(p.raster) {
    first = reinterpret_cast<int*>(shared + T::table);
    start = first + experts + 1, count = start + experts;
    row_tiles = (p.features + T::rows * T::PAIR - 1) / (T::rows * T::PAIR);
  }

  // By all threads, with a barrier after each of the two.
  __device__ __forceinline__ void read_counts(const Rows& rows) {
    for (int e = threadIdx.x; e < experts; e += T::threads) rows_of(rows, e, start[e], count[e]);
  }
  __device__ __forceinline__ void add_up() {
    add_up_tiles(first, experts, [&](int e) { return row_tiles * ((count[e] + T::TOKENS - 1) / T::TOKENS); });
  }

  __device__ __forceinline__ void begin(int contiguous) {
    const int all = first[experts], crews = gridDim.x / T::CLUSTER, crew = blockIdx.x / T::CLUSTER;
    if (contiguous) {
      next = uniform(static_cast<int>(static_cast<i64>(all) * crew / crews));
      end = uniform(static_cast<int>(static_cast<i64>(all) * (crew + 1) / crews));
      stride = 1;
    } else {
      next = crew, end = uniform(all), stride = crews;
    }
  }

  __device__ __forceinline__ bool take(Tile& tile) {
    if (next >= end) return false;
    to_expert_of(next, first, experts, expert);
    const int there = uniform(count[expert]);
    const int token_tiles = (there + T::TOKENS - 1) / T::TOKENS;
    // Tiles share the rows evenly where there is a product for each width
    const int width = T::TOKENS == 192 ? ((there + token_tiles - 1) / token_tiles + 15) / 16 * 16 : T::TOKENS;
    int token_tile;
    tile_at(next - first[expert], token_tiles, row_tiles, raster, token_tile, tile.row_tile);
    if constexpr (T::PAIR > 1) tile.row_tile = tile.row_tile * T::PAIR + cluster_rank();
    tile.expert = expert, tile.tokens = min(there - token_tile * width, width);
    tile.first_row = (ragged ? 0 : static_cast<i64>(expert) * capacity) + start[expert] +
                     token_tile * width;
    next += stride;
    return true;
  }
};

// The stages of K, in units of STEP chunks, that this CTA of a cluster multiplies.
template <class T>
struct Span {
  int steps, chunks, first, last;  // chunks [first, last)
  __device__ __forceinline__ explicit Span(int k) {
    steps = k / 32, chunks = (steps + 3) / 4, first = 0, last = chunks;
    if constexpr (T::SPLIT > 1) {
      const int units = (chunks + T::STEP - 1) / T::STEP, rank = cluster_rank();
      first = min(units * rank / T::SPLIT * T::STEP, chunks);
      last = min(units * (rank + 1) / T::SPLIT * T::STEP, chunks);
    }
  }
};

}  // namespace farro
