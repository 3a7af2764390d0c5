// Producers of nvfp4_group_mm on SM90a: copies of weights and activations, activations to 16 bits.
#pragma once

#include "sm90_tiles.cuh"

namespace farro {

// The rows of a box that are brought of a tile's activations.
template <class T>
__device__ __forceinline__ int box_of(const Tile& tile) {
  return tile.tokens <= T::few ? T::few : T::TOKENS;
}

// By one warp, a stage of weights: each consumer's 32 rows of gate, then those of up.
template <class T>
__device__ __forceinline__ void copy_halves(const Problem& p, const Tile& tile, const Span<T>& k, i64 matrix,
                                            int chunk, u32 stage, u32 full, int lane) {
  for (int i = lane; i < T::CONSUMERS * 6 * T::STEP; i += 32) {
    const int place = i % T::STEP, half = i / T::STEP % 2, part = i / (2 * T::STEP) % 3;
    const int consumer = i / (6 * T::STEP), gate = (tile.row_tile * T::CONSUMERS + consumer) * 32;
    const int here = min(k.steps - 4 * (chunk + place), 4);
    if (here <= 0 || 2 * gate >= p.features) continue;
    const int row = gate + half * (p.features / 2), size = part == 0 ? 8 : part == 1 ? 2 : 1;
    const u8* from = part == 0 ? p.codes : part == 1 ? p.meta : p.scales;
    from += size * (matrix + static_cast<i64>(row / kRows * kRows) * k.steps +
                    kRows * 4 * (chunk + place) + row % kRows * here);
    const u32 to = stage + consumer * T::block + T::STEP * (part == 0 ? 0 : part == 1 ? kMeta : kScales);
    bulk_load(to + size * (place * kRows * 4 + half * 32 * here), from, size * 32 * here, full);
  }
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
    const int top = tile.row_tile * T::rows, rest = min(p.features - top, T::rows);
    const int valid = T::PAIR > 1 ? max(rest, 0) : rest;
    const i64 matrix = static_cast<i64>(tile.expert) * p.features * k.steps;  // in 32s of K
    const int box = box_of<T>(tile);
    // A lane copies one part of one consumer's rows
    const int consumer = lane / 3, part = lane % 3;
    int first = top + consumer * kRows, mine = min(valid - consumer * kRows, kRows);
    const bool halves = T::GATED && p.halves == static_cast<int>(Halves::halves);
    if (T::GATED && p.halves == static_cast<int>(Halves::blocks)) {
      constexpr int kPairs = T::CONSUMERS > 1 ? T::CONSUMERS / 2 : 1;
      first = (tile.row_tile * kPairs + consumer % kPairs) * kRows;
      mine = 2 * first < p.features ? kRows : 0;
      if (consumer >= kPairs) first += p.features / 2;
    }
    const u8* from = part == 0 ? p.codes : part == 1 ? p.meta : p.scales;
    const int size = part == 0 ? 8 : part == 1 ? 2 : 1;
    from += size * (matrix + static_cast<i64>(first) * k.steps);
    const u32 to = base + T::a + consumer * T::block +
                   T::STEP * (part == 0 ? 0 : part == 1 ? kMeta : kScales);
    for (int chunk = k.first; chunk < k.last; chunk += T::STEP) {
      const u32 full = base + T::full + 8 * ring.stage;
      const int here = min(k.steps - 4 * chunk, 4 * T::STEP);
      mbarrier_wait(base + T::empty + 8 * ring.stage, ring.parity);
      if (lane == 0) mbarrier_expect(full, valid * here * 11 + T::boxes * box * 128);
      __syncwarp();
      if (halves)
        copy_halves<T>(p, tile, k, matrix, chunk, base + T::a + ring.stage * T::stage_a, full, lane);
      else if (consumer < T::CONSUMERS && mine > 0)
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
        const u32 to = base + T::b + ring.stage * T::unit;
        const int first = static_cast<int>(tile.first_row);
        if constexpr (T::PAIR > 1) {  // its share of the rows, to both CTAs
          const int rank = cluster_rank(), boxes = box < T::TOKENS ? 1 - rank : 2;
          for (int i = 0; i < boxes; ++i) {
            const int row = (2 * rank + i) * T::few;
            tma_load_multicast(to + row * 128, few_rows, half * 128, first + row, full, 3);
          }
        } else {
#pragma unroll
          for (int i = 0; i < T::PART; ++i) tma_load(to + i * T::half, map, (half + i) * 128, first, full);
        }
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

}  // namespace farro
