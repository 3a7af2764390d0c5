// Tiles of a grouped product over routes sorted by expert: who has which, told by counts that only the
// device knows.
#pragma once

#include "experts.cuh"
#include "tiles.cuh"

namespace farro {

struct Tile {
  int expert, column_tile, first_row, rows;  // routes [first_row, first_row + rows)
};

// In shared memory, int [2 * (experts + 1)]: the tiles of all experts before e, and their routes.
struct Tiles {
  int* first;
  int* start;
  int experts, column_tiles, most, raster;  // `most` routes a tile
  int expert = 0, next, end, stride;

  __device__ Tiles(int* table, int experts, int column_tiles, int most, int raster)
      : first(table), start(table + experts + 1), experts(experts), column_tiles(column_tiles),
        most(most), raster(raster) {}

  __device__ __forceinline__ int tiles_of(int e) const {
    return column_tiles * ((start[e + 1] - start[e] + most - 1) / most);
  }

  // Both by all threads, with a barrier after each. Past L1, which may hold those of the last call.
  __device__ __forceinline__ void read(const int* offsets) {
    for (int e = threadIdx.x; e <= experts; e += blockDim.x) start[e] = __ldcg(offsets + e);
  }
  __device__ __forceinline__ void add_up() {
    add_up_tiles(first, experts, [&](int e) { return tiles_of(e); });
  }

  __device__ __forceinline__ void begin(int crew, int crews) {
    next = crew, end = uniform(first[experts]), stride = crews;
  }

  __device__ __forceinline__ bool take(Tile& tile) {
    if (next >= end) return false;
    to_expert_of(next, first, experts, expert);
    const int begin = uniform(start[expert]), rows = uniform(start[expert + 1]) - begin;
    int row_tile;
    tile_at(next - uniform(first[expert]), (rows + most - 1) / most, column_tiles, raster, row_tile,
            tile.column_tile);
    tile.expert = expert, tile.first_row = begin + row_tile * most;
    tile.rows = min(rows - row_tile * most, most);
    next += stride;
    return true;
  }
};

}  // namespace farro
