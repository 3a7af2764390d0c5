// nvfp4_group_mm on SM90a: grouped products with paired-4:8 sparse weights through wgmma.sp.
//
// Persistent over (expert, 64 * CONSUMERS weight rows, up to TOKENS tokens). Two rings in shared memory:
// A, stages of STEP * 128 of K, holds compressed weights, which warp 0 brings by bulk copies; B, units
// of PART * 64 of K, activations as 16-bit operands. INSIDE, A also holds activations as they were given,
// and three warps expand them from there to B (never from memory: a load waits behind all the weights that
// are on their way); else TMA brings to B what sm90_expand.cu wrote. Each other warpgroup decodes 64
// weight rows to 16 bits in registers, 128 of K at a time, and multiplies them. A cluster of SPLIT CTAs
// shares K; the first adds their sums in order.
#include "experts.cuh"
#include "nvfp4.cuh"
#include "output.cuh"
#include "tiles.cuh"
#include "wgmma_sparse.cuh"

using namespace farro;

constexpr int kRows = 64;  // of a compressed tile, with a chunk of 128 of K
constexpr int kMeta = 2048, kScales = kMeta + 512, kTile = kScales + 256;  // its parts, and its size
constexpr int kExpanders = 3;  // warps

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
};

template <bool BF16_, bool INSIDE_, int CONSUMERS_, int TOKENS_, int STEP_, int STAGES_, int CTAS_, int SPLIT_>
struct Traits {
  static constexpr bool BF16 = BF16_, INSIDE = INSIDE_;
  // How codes become FP16: by conversion from E4M3, or by shifts, each where it was the faster
  static constexpr bool CONVERT = TOKENS_ < 128;
  static constexpr int CONSUMERS = CONSUMERS_, TOKENS = TOKENS_, STEP = STEP_, STAGES = STAGES_;
  static constexpr int SPLIT = SPLIT_;
  static constexpr int threads = 128 + 128 * CONSUMERS, rows = kRows * CONSUMERS;
  static constexpr int half = TOKENS * 128;              // bytes of 64 of K
  static constexpr int few = TOKENS > 32 ? TOKENS / 4 : 8;  // rows of the smaller boxes
  // Units of B are halves of 128 of K where tiles are wide: more of them are on their way
  static constexpr int PART = TOKENS >= 128 ? 1 : 2;
  static constexpr int UNITS = TOKENS == 64 && CTAS_ > 1 ? 4 : TOKENS == 64 || TOKENS == 256 ? 6 : 8;
  static constexpr int unit = PART * half, block = STEP * kTile, stage_a = CONSUMERS * block;
  // Activations of a stage as they were given: boxes of 128 bytes of each token, then scales
  static constexpr int boxes = !INSIDE ? 0 : BF16 ? 2 * STEP : 1;
  static constexpr int stage_raw = boxes * half, stage_scales = INSIDE && !BF16 ? TOKENS * 4 * STEP : 0;
  static_assert(!INSIDE || STEP == 2, "a box has the codes of 256 of K");
  static_assert(INSIDE || SPLIT == 1, "warps 2 and 3 would have to meet the cluster too");
  // Shared memory
  static constexpr int b = 0, raw = UNITS * unit, a = raw + STAGES * stage_raw;
  static constexpr int raw_scales = a + STAGES * stage_a, sums = raw_scales + STAGES * stage_scales;
  static constexpr int full = sums + (SPLIT > 1 ? rows * TOKENS * 4 : 0), empty = full + 8 * STAGES;
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
    row_tiles = (p.features + T::rows - 1) / T::rows;
  }

  // By all threads, with a barrier after each of the two.
  __device__ __forceinline__ void read_counts(const Rows& rows) {
    for (int e = threadIdx.x; e < experts; e += T::threads) rows_of(rows, e, start[e], count[e]);
  }
  __device__ __forceinline__ void add_up() {
    add_up_tiles(first, experts, [&](int e) { return row_tiles * ((count[e] + T::TOKENS - 1) / T::TOKENS); });
  }

  __device__ __forceinline__ void begin(int contiguous) {
    const int all = first[experts], crews = gridDim.x / T::SPLIT, crew = blockIdx.x / T::SPLIT;
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
    int token_tile;
    tile_at(next - first[expert], (there + T::TOKENS - 1) / T::TOKENS, row_tiles, raster, token_tile,
            tile.row_tile);
    tile.expert = expert, tile.tokens = min(there - token_tile * T::TOKENS, T::TOKENS);
    tile.first_row = (ragged ? 0 : static_cast<i64>(expert) * capacity) + start[expert] +
                     token_tile * T::TOKENS;
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

// ---- Producers ----

// The rows of a box that are brought of a tile's activations.
template <class T>
__device__ __forceinline__ int box_of(const Tile& tile) {
  return tile.tokens <= T::few ? T::few : T::TOKENS;
}

// One warp: weights, and INSIDE activations as they were given.
template <class T>
__device__ __forceinline__ void produce(const TensorMap* few_rows, const TensorMap* all_rows,
                                        const Problem& p, const Rows& rows, Tiles<T>& tiles, u8* shared,
                                        u32 base, int lane) {
  const Span<T> k(rows.k);
  Ring<T::STAGES> ring(1);
  Tile tile;
  while (tiles.take(tile)) {
    const int top = tile.row_tile * T::rows, valid = min(p.features - top, T::rows);
    const i64 matrix = static_cast<i64>(tile.expert) * p.features * k.steps;  // in 32s of K
    const int box = box_of<T>(tile);
    // A lane copies one part of one consumer's rows
    const int consumer = lane / 3, part = lane % 3, mine = min(valid - consumer * kRows, kRows);
    const u8* from = part == 0 ? p.codes : part == 1 ? p.meta : p.scales;
    const int size = part == 0 ? 8 : part == 1 ? 2 : 1;
    from += size * (matrix + static_cast<i64>(top + consumer * kRows) * k.steps);
    const u32 to = base + T::a + consumer * T::block +
                   T::STEP * (part == 0 ? 0 : part == 1 ? kMeta : kScales);
    for (int chunk = k.first; chunk < k.last; chunk += T::STEP) {
      const u32 full = base + T::full + 8 * ring.stage;
      const int here = min(k.steps - 4 * chunk, 4 * T::STEP);
      mbarrier_wait(base + T::empty + 8 * ring.stage, ring.parity);
      if (lane == 0) mbarrier_expect(full, valid * here * 11 + T::boxes * box * 128);
      __syncwarp();
      if (consumer < T::CONSUMERS && mine > 0)
        bulk_load(to + ring.stage * T::stage_a, from + static_cast<i64>(mine) * size * 4 * chunk,
                  mine * size * here, full);
      if (T::INSIDE && lane >= 32 - T::boxes) {
        const int which = lane - (32 - T::boxes);
        tma_load(base + T::raw + ring.stage * T::stage_raw + which * T::half,
                 box < T::TOKENS ? few_rows : all_rows, chunk * (T::BF16 ? 256 : 64) + which * 128,
                 static_cast<int>(tile.first_row), full);
      }
      if constexpr (T::stage_scales > 0) {
        const int to_scales = T::raw_scales + ring.stage * T::stage_scales;
#pragma unroll
        for (int i = lane; i < T::TOKENS * T::STEP; i += 32) {  // words: those of 128 of K
          const int token = i / T::STEP, step = 4 * (chunk + i % T::STEP);
          const u8* scales = p.x_scales + (tile.first_row + token) * k.steps + step;
          const bool there = token < tile.tokens && step < k.steps;
          if (p.scale_vector)
            cp_async<4>(base + to_scales + 4 * i, there ? scales : p.x_scales, there);
          else
            for (int s = 0; s < 4; ++s)
              shared[to_scales + 4 * i + s] = there && step + s < k.steps ? __ldg(scales + s) : 0;
        }
        if (p.scale_vector) cp_async_arrive(full);
        else mbarrier_arrive(full);
      }
      ring.next();
    }
    if constexpr (T::SPLIT > 1) cluster_sync(), cluster_sync();
  }
  if constexpr (T::stage_scales > 0) cp_async_wait_all();
}

// One warp: activations that were expanded before.
template <class T>
__device__ __forceinline__ void produce_operand(const TensorMap* few_rows, const TensorMap* all_rows,
                                                const Rows& rows, Tiles<T>& tiles, u32 base, int lane) {
  const Span<T> k(rows.k);
  Ring<T::UNITS> ring(1);
  Tile tile;
  while (tiles.take(tile)) {
    const int box = box_of<T>(tile);
    const TensorMap* map = box < T::TOKENS ? few_rows : all_rows;
    for (int half = 2 * k.first; half < 2 * k.last; half += T::PART) {
      const u32 full = base + T::b_full + 8 * ring.stage;
      mbarrier_wait(base + T::b_empty + 8 * ring.stage, ring.parity);
      if (lane == 0) {
        mbarrier_expect(full, T::PART * box * 128);
#pragma unroll
        for (int i = 0; i < T::PART; ++i)
          tma_load(base + T::b + ring.stage * T::unit + i * T::half, map, (half + i) * 128,
                   static_cast<int>(tile.first_row), full);
      }
      __syncwarp();
      ring.next();
    }
  }
}

// A warp's share of 128 of K, from a stage's boxes to the operand: lane / 8 is the 32 of K.
template <class T>
__device__ __forceinline__ void expand_chunk(const u8* raw, const u8* scales, u8* to, int place,
                                             int tokens, int lane) {
  const int step = lane / 8, at_step = place * 4 + step;
#pragma unroll(T::TOKENS <= 16 ? 2 : 1)
  for (int first = 0; first < T::TOKENS; first += 8) {
    if (first >= tokens) break;
    const int token = first + lane % 8, turn = lane % 8;  // of the 128-byte swizzle
    uint4 units[4];
    if constexpr (T::BF16) {
      const uint4* row = reinterpret_cast<const uint4*>(raw + at_step / 2 * T::half + token * 128);
      uint4 given[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) given[i] = row[(at_step % 2 * 4 + i) ^ turn];
#pragma unroll
      for (int u = 0; u < 4; ++u) units[u] = reorder_unit(given[u % 2 * 2], given[u % 2 * 2 + 1], u);
    } else {
      const uint4* row = reinterpret_cast<const uint4*>(raw + token * 128);
      expand_block(row[at_step ^ turn], scales[token * 4 * T::STEP + at_step], units);
    }
    uint4* row = reinterpret_cast<uint4*>(to + step / 2 * T::half + token * 128);
#pragma unroll
    for (int u = 0; u < 4; ++u) row[(step % 2 * 4 + u) ^ turn] = units[u];
  }
}

// One warp of kExpanders: every so many stages' activations.
template <class T>
__device__ __forceinline__ void expand(const Rows& rows, Tiles<T>& tiles, u8* shared, u32 base,
                                       int which, int lane) {
  const Span<T> k(rows.k);
  Ring<T::STAGES> ring(0);
  Ring<T::UNITS> unit(1);
  int turn = 0;
  Tile tile;
  while (tiles.take(tile)) {
    for (int chunk = k.first; chunk < k.last; chunk += T::STEP) {
      const int here = min(k.last - chunk, T::STEP);
      if (turn == which) mbarrier_wait(base + T::full + 8 * ring.stage, ring.parity);
      for (int place = 0; place < here; ++place, unit.next()) {
        if (turn != which) continue;
        mbarrier_wait(base + T::b_empty + 8 * unit.stage, unit.parity);
        expand_chunk<T>(shared + T::raw + ring.stage * T::stage_raw,
                        shared + T::raw_scales + ring.stage * T::stage_scales,
                        shared + T::b + unit.stage * T::unit, place, tile.tokens, lane);
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) mbarrier_arrive(base + T::b_full + 8 * unit.stage);
      }
      if (turn == which && lane == 0) mbarrier_arrive(base + T::empty + 8 * ring.stage);
      if (++turn == kExpanders) turn = 0;
      ring.next();
    }
    if constexpr (T::SPLIT > 1) cluster_sync(), cluster_sync();
  }
}

// ---- Consumers ----

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
  const int thread = c.warp * 32 + c.lane, row = c.warp * 16 + c.lane / 4;
  const u8* own = shared + T::a + c.which * T::block;
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
  auto read = [&](Operand& o, int place, bool last, int here) {
    if (place == 0) mbarrier_wait(base + T::full + 8 * c.ring.stage, c.ring.parity);
    if (here == 0) load(o, place);
    else load_partly(o, place, here);
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
    if (c.lane == 0) mbarrier_arrive(base + T::b_empty + 8 * c.done.stage);
    c.done.next();
  };
  constexpr int kParts = 2 / T::PART;
  auto alone = [&](Operand& o) {  // nothing else is in flight
#pragma unroll
    for (int part = 0; part < kParts; ++part) multiply(o, part);
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
        read(o, T::STEP == 1 ? 0 : i, T::STEP == 1 || i == 1, 0);
        alone(o);
      }
    }
    chunk += 2 * pairs;
  }
#pragma unroll 1
  for (; chunk < k.last; ++chunk) {
    const int place = T::STEP == 1 ? 0 : chunk % T::STEP;
    Operand o;
    read(o, place, place == T::STEP - 1 || chunk == k.last - 1, min(k.steps - 4 * chunk, 4));
    alone(o);
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

template <class T, int WIDTH>
__device__ __forceinline__ bool compute(const Problem& p, const Rows& rows, const Tile& tile,
                                        u8* shared, u32 base, Consumer<T>& c) {
  float sum[WIDTH / 2];
  const int valid = p.features - tile.row_tile * T::rows - c.which * kRows;
  multiply_tile<T, WIDTH>(rows, valid, shared, base, c, sum);
  if constexpr (T::SPLIT > 1) add_splits<T, WIDTH>(shared, base, c, sum);
  if (T::SPLIT > 1 && cluster_rank() > 0) return false;
  return store<T, WIDTH>(p, tile, c, sum);
}

// In the narrowest product that holds what the expert has left.
template <class T>
__device__ __forceinline__ bool compute(const Problem& p, const Rows& rows, const Tile& tile,
                                        u8* shared, u32 base, Consumer<T>& c) {
  constexpr int W = T::TOKENS;
  if constexpr (W >= 64) {
    if (tile.tokens <= W / 4) return compute<T, W / 4>(p, rows, tile, shared, base, c);
    if (tile.tokens <= W / 2) return compute<T, W / 2>(p, rows, tile, shared, base, c);
  }
  if constexpr (W == 256)
    if (tile.tokens <= 192) return compute<T, 192>(p, rows, tile, shared, base, c);
  return compute<T, W>(p, rows, tile, shared, base, c);
}

template <class T>
__device__ __forceinline__ void consume(const Problem& p, const Rows& rows, Tiles<T>& tiles, u8* shared,
                                        u32 base, Consumer<T>& c) {
  Tile tile;
  while (tiles.take(tile)) {
    const bool spoilt = compute<T>(p, rows, tile, shared, base, c);
    if constexpr (T::BF16)
      if (spoilt) repair<T>(p, rows, tile, c);
  }
}

// ---- The kernel ----

template <class T>
__device__ __forceinline__ void run(const TensorMap* few_rows, const TensorMap* all_rows,
                                    const Problem& p, const Rows& rows) {
  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  Tiles<T> tiles(shared, p, rows);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(few_rows), prefetch_tensor_map(all_rows);
    for (int i = 0; i < T::STAGES; ++i) {
      mbarrier_init(base + T::full + 8 * i, T::stage_scales > 0 ? 33 : 1);
      mbarrier_init(base + T::empty + 8 * i, 4 * T::CONSUMERS + T::INSIDE);
    }
    for (int i = 0; i < T::UNITS; ++i) {
      mbarrier_init(base + T::b_full + 8 * i, 1);
      mbarrier_init(base + T::b_empty + 8 * i, 4 * T::CONSUMERS);
    }
    fence_mbarrier_init();
  }
  tiles.read_counts(rows);
  __syncthreads();
  tiles.add_up();
  __syncthreads();
  tiles.begin(p.contiguous);

  if (warp < 4) {
    if constexpr (T::exchange) give_registers<T::given>();
    if (warp == 0) {
      produce<T>(few_rows, all_rows, p, rows, tiles, shared, base, lane);
    } else if constexpr (T::INSIDE) {
      expand<T>(rows, tiles, shared, base, warp - 1, lane);
    } else if (warp == 1) {
      produce_operand<T>(few_rows, all_rows, rows, tiles, base, lane);
    }
  } else {
    if constexpr (T::exchange) take_registers<T::taken>();
    Consumer<T> c;
    c.which = warp / 4 - 1, c.warp = warp % 4, c.lane = lane;
    consume<T>(p, rows, tiles, shared, base, c);
  }
}

// The maps have boxes of T::few and of TOKENS rows: INSIDE of activations as they were given, else of
// those that were expanded.
template <bool BF16, bool INSIDE, int CONSUMERS, int TOKENS, int STEP, int STAGES, int CTAS, int SPLIT>
__global__ void __launch_bounds__(128 + 128 * CONSUMERS, CTAS)
    nvfp4_group(const __grid_constant__ TensorMap few_rows, const __grid_constant__ TensorMap all_rows,
                const __grid_constant__ Problem p, const __grid_constant__ Rows rows) {
  run<Traits<BF16, INSIDE, CONSUMERS, TOKENS, STEP, STAGES, CTAS, SPLIT>>(&few_rows, &all_rows, p, rows);
}
