// moe_ffn's two grouped INT8 products on SM90a, over routes sorted by expert.
//
// Weights fill the 64-row side of wgmma, routes the narrow one. Persistent over (expert, up to TOKENS
// routes, 64 * WARPGROUPS * WAVES weight rows): warpgroup 0 fills a ring of stages of 128 of K, its
// first warp with weights by TMA, the last ones with rows; its second fills a ring of scales. Each other
// warpgroup multiplies WAVES times 64 weight rows, by groups: total = fma(float(sum), sX * sW, total).
//
// GATED (gate/up): rows are gathered from the tokens' own, 16 bytes at a time. Of 16 weight rows 8 are
// gate and 8 up, so that a thread has both of a feature; SwiGLU and the quantizer follow in registers.
// Where a group has more features than a CTA, a cluster shares their maxima.
// docs/moe-sm90.md draws it.
#include "sm90_tiles.cuh"
#include "swiglu.cuh"
#include "wgmma.cuh"

using namespace farro;

constexpr int kDepth = 128;  // bytes of K in one stage

struct Problem {
  const u8* x;            // GATED: rows of tokens
  const float* x_scale;   // of tokens, or of routes
  const int* source;      // GATED: the token of a route
  const int* offsets;     // of experts, among routes
  const float* w_scale;
  void* out;              // GATED: codes, else BF16; a row for each route
  float* out_scale;       // GATED: [routes][ceil(features / G)]
  i64 x_pitch, x_scale_row, x_scale_group, w_scale_expert, w_scale_group, w_scale_column;
  int experts, features, k;
  int out_pitch;
  int interleaved;     // GATED: scales of gate and up lie beside each other
  int w_scale_vector;  // scales may be read four together
  int out_vector;      // not GATED: 8-byte stores are aligned
  int raster;          // row tiles that are visited together
};

template <bool GATED_, int GROUP_, int TOKENS_, int WARPGROUPS_, int WAVES_, int STAGES_, int CTAS_>
struct Traits {
  static constexpr bool GATED = GATED_;
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
  static constexpr int scales = tokens + STAGES * token_bytes;
  static constexpr int rates = scales + SLOTS * scale_floats * 4;  // float2 [warps][own_parts][TOKENS]
  static constexpr int maxima = rates + (GATED ? 4 * WARPGROUPS * own_parts * TOKENS * 8 : 0);
  static constexpr int full = maxima + (GATED ? 3 * parts * TOKENS * 4 : 0);
  static constexpr int empty = full + 8 * STAGES;
  static constexpr int scale_full = empty + 8 * STAGES, scale_empty = scale_full + 8 * SLOTS;
  static constexpr int ready = scale_empty + 8 * SLOTS;
  static constexpr int table = ready + 16;  // int [2 * (experts + 1)]
  // Registers of a thread: at launch, and where tiles are wide, after an exchange
  static constexpr bool exchange = TOKENS * WAVES >= 128;
  static constexpr int most(int registers) { return registers < 240 ? registers / 8 * 8 : 240; }
  static constexpr int launched = most(65536 / (threads * CTAS_));
  static constexpr int given = GATED ? 56 : 40;  // a place for each row that is gathered
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

// ---- Producers: a warp each ----

template <class T>
__device__ __forceinline__ void bring_weights(const TensorMap* map, const Problem& p, Tiles& tiles,
                                              u32 base, int lane) {
  Ring<T::STAGES> ring(1);
  const int blocks = stages_of<T>(p);
  Tile tile;
  while (tiles.take(tile)) {
    if (lane != 0) continue;
    const int feature = first_feature<T>(tile);
    for (int block = 0; block < blocks; ++block) {
      mbarrier_wait(base + T::empty + 8 * ring.stage, ring.parity);
      const u32 to = base + T::weights + ring.stage * T::weight_bytes;
      const u32 full = base + T::full + 8 * ring.stage;
      mbarrier_expect(full, T::weight_bytes);
      if constexpr (T::GATED)
        tma_load_pairs(to, map, block * kDepth, feature / 8, tile.expert, full);
      else
        tma_load_expert(to, map, block * kDepth, feature, tile.expert, full);
      ring.next();
    }
  }
}

// Rows of the first product's results, BOX together; those after the tile's are never looked at.
template <class T>
__device__ __forceinline__ void bring_rows(const TensorMap* map, const Problem& p, Tiles& tiles,
                                           u32 base, int lane) {
  Ring<T::STAGES> ring(1);
  const int blocks = stages_of<T>(p);
  Tile tile;
  while (tiles.take(tile)) {
    const int boxes = (tile.rows + T::BOX - 1) / T::BOX;
    for (int block = 0; block < blocks; ++block) {
      mbarrier_wait(base + T::empty + 8 * ring.stage, ring.parity);
      const u32 full = base + T::full + 8 * ring.stage;
      if (lane == 0) mbarrier_expect(full, boxes * T::BOX * kDepth);
      __syncwarp();
      if (lane < boxes)
        tma_load(base + T::tokens + ring.stage * T::token_bytes + lane * T::BOX * kDepth, map,
                 block * kDepth, tile.first_row + T::BOX * lane, full);
      ring.next();
    }
  }
}

// Rows of tokens, which lie anywhere: one of GATHERERS warps. Eight lanes copy 128 bytes of a row,
// where the swizzle that wgmma undoes wants them.
template <class T>
__device__ __forceinline__ void gather_rows(const Problem& p, Tiles& tiles, u32 base, int which,
                                            int lane) {
  constexpr int kStep = 4 * T::GATHERERS, kTurns = T::TOKENS / kStep;
  Ring<T::STAGES> ring(1);
  const int blocks = stages_of<T>(p), piece = lane % 8, own = 4 * which + lane / 8;
  Tile tile;
  while (tiles.take(tile)) {
    u32 place[kTurns];  // of rows, counted in pitches
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int row = own + i * kStep;
      place[i] = row < tile.rows ? __ldcg(p.source + tile.first_row + row) : 0;
    }
    for (int block = 0; block < blocks; ++block) {
      mbarrier_wait(base + T::empty + 8 * ring.stage, ring.parity);
      const u32 to = base + T::tokens + ring.stage * T::token_bytes;
      const int at = block * kDepth + 16 * piece, bytes = min(max(p.k - at, 0), 16);
      const u8* from = p.x + (bytes > 0 ? at : 0);
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int row = own + i * kStep;
        if (row < tile.rows)
          cp_async_16(to + row * kDepth + (piece ^ (row % 8)) * 16, from + place[i] * p.x_pitch, bytes);
      }
      cp_async_arrive(base + T::full + 8 * ring.stage);
      ring.next();
    }
  }
  cp_async_wait_all();
}

// Scales of a unit's groups for all weight rows of a tile, as they lie in memory; zero outside.
template <class T>
__device__ __forceinline__ void load_weight_scales(const Problem& p, const Tile& tile, int feature,
                                                   u32 to, int group, int groups, int lane) {
  const bool halves = T::GATED && !p.interleaved;  // first those of gate, then those of up
  const int factor = T::GATED && p.interleaved ? 2 : 1;
#pragma unroll 1
  for (int g = 0; g < T::unit_groups; ++g) {
    const bool real = group + g < groups;
    const float* from = p.w_scale + tile.expert * p.w_scale_expert +
                        (real ? (group + g) * p.w_scale_group : 0);
#pragma unroll 1
    for (int i = 4 * lane; i < T::rows; i += 128) {
      const bool up = halves && i >= T::features;
      const int local = factor * feature + (up ? i - T::features : i);
      const int column = local + (up ? p.features : 0), left = factor * p.features - local;
      const u32 at = to + 4 * (g * T::rows + i);
      if (p.w_scale_vector) {
        const bool valid = real && left > 0;
        cp_async<16>(at, from + (valid ? column : 0), valid);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const bool valid = real && j < left;
          cp_async<4>(at + 4 * j, from + (valid ? (column + j) * p.w_scale_column : 0), valid);
        }
      }
    }
  }
}

template <class T>
__device__ __forceinline__ void bring_scales(const Problem& p, Tiles& tiles, u32 base, int lane) {
  constexpr int kTurns = (T::TOKENS + 31) / 32;
  Ring<T::SLOTS> ring(1);
  const int groups = (p.k + T::GROUP - 1) / T::GROUP, units = (p.k + T::unit - 1) / T::unit;
  Tile tile;
  while (tiles.take(tile)) {
    const int feature = first_feature<T>(tile);
    int row[kTurns];  // of x_scale
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      row[i] = tile.first_row + min(lane + 32 * i, tile.rows - 1);
      if constexpr (T::GATED) row[i] = __ldcg(p.source + row[i]);
    }
    for (int unit = 0; unit < units; ++unit) {
      mbarrier_wait(base + T::scale_empty + 8 * ring.stage, ring.parity);
      const u32 to = base + T::scales + ring.stage * T::scale_floats * 4;
      const int first = unit * T::unit_groups;
      load_weight_scales<T>(p, tile, feature, to, first, groups, lane);
#pragma unroll 1
      for (int g = 0; g < T::unit_groups; ++g) {
        const bool real = first + g < groups;
        const float* from = p.x_scale + (real ? (first + g) * p.x_scale_group : 0);
        const u32 at = to + 4 * (T::unit_groups * T::rows + g * T::TOKENS + lane);
#pragma unroll
        for (int i = 0; i < kTurns; ++i)
          if (lane + 32 * i < tile.rows) cp_async<4>(at + 128 * i, from + row[i] * p.x_scale_row, real);
      }
      cp_async_arrive(base + T::scale_full + 8 * ring.stage);
      ring.next();
    }
  }
  cp_async_wait_all();
}

// ---- Consumers ----

template <class T>
struct Consumer {
  Ring<T::STAGES> ring{0};
  Ring<T::SLOTS> scale_ring{0};
  int which, warp, lane;
  int turn = 0;    // of three tables of maxima
  u32 parity = 0;  // of the barrier that tells that one is complete
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
    if constexpr (T::GATED) fence_async_proxy();  // cp.async wrote for wgmma to read
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

// h = silu(gate) * up, its scales by groups and its codes.
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
    const int feature = of_cta + of_warpgroup + w * 32 + c.warp * 8;
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
        if (column + c.lane / 4 < tile.rows && feature < p.features)
          *reinterpret_cast<u32*>(out + static_cast<i64>(column) * p.out_pitch + feature + 2 * (quad - odd)) =
              four;
      }
    }
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

template <class T, int WIDTH>
__device__ __forceinline__ void compute(const Problem& p, const Tile& tile, u8* shared, u32 base,
                                        Consumer<T>& c) {
  float total[T::WAVES][WIDTH / 2];
  multiply_tile<T, WIDTH>(p, shared, base, c, total);
  if constexpr (T::GATED) activate<T, WIDTH>(p, tile, shared, base, c, total);
  else store<T, WIDTH>(p, tile, c, total);
}

template <class T>
__device__ __forceinline__ void consume(const Problem& p, Tiles& tiles, u8* shared, u32 base,
                                        Consumer<T>& c) {
  constexpr int W = T::TOKENS;
  Tile tile;
  while (tiles.take(tile)) {  // in the narrowest product that holds the tile's rows
    if constexpr (W == 128)
      if (tile.rows > W / 2 && tile.rows <= W / 4 * 3) {
        compute<T, W / 4 * 3>(p, tile, shared, base, c);
        continue;
      }
    if constexpr (W >= 32)
      if (tile.rows <= W / 4) {
        compute<T, W / 4>(p, tile, shared, base, c);
        continue;
      }
    if constexpr (W >= 16)
      if (tile.rows <= W / 2) {
        compute<T, W / 2>(p, tile, shared, base, c);
        continue;
      }
    compute<T, W>(p, tile, shared, base, c);
  }
}

// ---- The kernels ----

template <class T>
__device__ __forceinline__ void run(const TensorMap* weights, const TensorMap* rows, const Problem& p) {
  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(weights);
    if constexpr (!T::GATED) prefetch_tensor_map(rows);
    for (int i = 0; i < T::STAGES; ++i) {
      // weights, and rows
      mbarrier_init(base + T::full + 8 * i, 1 + (T::GATED ? 32 * T::GATHERERS : 1));
      mbarrier_init(base + T::empty + 8 * i, 4 * T::WARPGROUPS);
    }
    for (int i = 0; i < T::SLOTS; ++i) {
      mbarrier_init(base + T::scale_full + 8 * i, 32);
      mbarrier_init(base + T::scale_empty + 8 * i, 4 * T::WARPGROUPS);
    }
    mbarrier_init(base + T::ready, 4 * T::WARPGROUPS * T::CLUSTER);
    fence_mbarrier_init();
  }
  if constexpr (T::GATED) {
    for (int i = threadIdx.x; i < 3 * T::parts * T::TOKENS; i += T::threads)
      reinterpret_cast<u32*>(shared + T::maxima)[i] = 0;
    wait_for_kernel_before();  // routes
  }
  // The kernel after this one may rely on routes, and on these alone without waiting
  if (threadIdx.x == 0) let_next_kernel_begin();
  constexpr int kTogether = T::features * T::CLUSTER;
  Tiles tiles(reinterpret_cast<int*>(shared + T::table), p.experts,
              (p.features + kTogether - 1) / kTogether, T::TOKENS, p.raster);
  tiles.read(p.offsets);
  __syncthreads();
  tiles.add_up();
  if constexpr (T::CLUSTER > 1) cluster_sync();
  else __syncthreads();
  tiles.begin(blockIdx.x / T::CLUSTER, gridDim.x / T::CLUSTER);

  if (warp < 4) {
    if constexpr (T::exchange) give_registers<T::given>();
    if (warp == 0) {
      bring_weights<T>(weights, p, tiles, base, lane);
    } else if (warp == 1) {
      if constexpr (!T::GATED) wait_for_kernel_before();
      bring_scales<T>(p, tiles, base, lane);
    } else if constexpr (!T::GATED) {
      if (warp == 2) {
        wait_for_kernel_before();
        bring_rows<T>(rows, p, tiles, base, lane);
      }
    } else if (warp < 2 + T::GATHERERS) {
      gather_rows<T>(p, tiles, base, warp - 2, lane);
    }
  } else {
    if constexpr (T::exchange) take_registers<T::taken>();
    Consumer<T> c;
    c.which = warp / 4 - 1, c.warp = warp % 4, c.lane = lane;
    consume<T>(p, tiles, shared, base, c);
  }
  if constexpr (T::CLUSTER > 1) {  // the others may still raise maxima here
    __syncwarp();
    cluster_leave();
  }
}

template <int GROUP, int TOKENS, int WARPGROUPS, int WAVES, int STAGES, int CTAS>
__global__ void __launch_bounds__(128 + 128 * WARPGROUPS, CTAS)
    moe_gate_up(const __grid_constant__ TensorMap weights, const __grid_constant__ Problem p) {
  run<Traits<true, GROUP, TOKENS, WARPGROUPS, WAVES, STAGES, CTAS>>(&weights, nullptr, p);
}

template <int GROUP, int TOKENS, int WARPGROUPS, int WAVES, int STAGES, int CTAS>
__global__ void __launch_bounds__(128 + 128 * WARPGROUPS, CTAS)
    moe_down(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows,
             const __grid_constant__ Problem p) {
  run<Traits<false, GROUP, TOKENS, WARPGROUPS, WAVES, STAGES, CTAS>>(&weights, &rows, p);
}
