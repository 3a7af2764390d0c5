// Order of a persistent kernel's output tiles.
#pragma once

namespace farro {

// Tile t -> (row tile, column tile): `raster` row tiles, then the next column, so that a band of rows
// stays in L2 while all columns pass.
__device__ __forceinline__ void tile_at(int t, int row_tiles, int column_tiles, int raster,
                                        int& row_tile, int& column_tile) {
  const int band = raster * column_tiles, first = t / band * raster;
  const int height = min(raster, row_tiles - first), rest = t % band;
  row_tile = first + rest % height;
  column_tile = rest / height;
}

}  // namespace farro
