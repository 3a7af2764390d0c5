// The warps of moe_ffn's products that copy: each fills a ring.
#pragma once

#include "sm90_order.cuh"

namespace farro {

template <class T>
__device__ __forceinline__ void bring_weights(const TensorMap* map, const Problem& p, Order<T>& tiles,
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

// Rows of routes, BOX together; those after the tile's are never looked at.
template <class T>
__device__ __forceinline__ void bring_rows(const TensorMap* map, const Problem& p, Order<T>& tiles,
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
__device__ __forceinline__ void gather_rows(const Problem& p, Order<T>& tiles, u32 base, int which,
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
__device__ __forceinline__ void bring_scales(const Problem& p, Order<T>& tiles, u32 base, int lane) {
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
      if constexpr (T::GATHERS) row[i] = __ldcg(p.source + row[i]);
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

}  // namespace farro
