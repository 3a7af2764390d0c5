// Tiles of a grouped product over routes sorted by expert: who has which, told by counts that only the
// device knows.
#pragma once

#include "ptx.cuh"
#include "tiles.cuh"

namespace farro {

// One lane's value, which all lanes hold: told so, the compiler keeps what follows from it in uniform
// registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

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
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, each = (experts + 31) / 32;
    const int low = min(lane * each, experts), high = min(low + each, experts);
    int own = 0;
    for (int e = low; e < high; ++e) own += tiles_of(e);
    int before = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    before -= own;
    for (int e = low; e < high; ++e) {
      first[e] = before;
      before += tiles_of(e);
    }
    if (lane == 31) first[experts] = before;
  }

  __device__ __forceinline__ void begin(int crew, int crews) {
    next = crew, end = uniform(first[experts]), stride = crews;
  }

  __device__ __forceinline__ bool take(Tile& tile) {
    if (next >= end) return false;
    if (uniform(first[expert + 1]) <= next) {  // the first expert whose tiles end after `next`
      int low = expert + 1, high = experts - 1;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (first[middle + 1] <= next) low = middle + 1;
        else high = middle;
      }
      expert = uniform(low);
    }
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
