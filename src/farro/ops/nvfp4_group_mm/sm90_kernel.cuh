// The persistent kernel of nvfp4_group_mm on SM90a, whatever becomes of the sums: a Result has
// finish<T, WIDTH>, by each consumer warpgroup with a tile's sums, repair<T> where that was true, and
// GATED begin<T>, by all consumers before their first tile.
#pragma once

#include "sm90_multiply.cuh"
#include "sm90_produce.cuh"

namespace farro {

template <class T, int WIDTH, class Result>
__device__ __forceinline__ bool compute(const Problem& p, const Rows& rows, const Result& result,
                                        const Tile& tile, u8* shared, u32 base, Consumer<T>& c) {
  float sum[WIDTH / 2];
  const int valid = p.features - tile.row_tile * T::rows - c.which * kRows;
  multiply_tile<T, WIDTH>(rows, valid, shared, base, c, sum);
  if constexpr (T::SPLIT > 1) add_splits<T, WIDTH>(shared, base, c, sum);
  if (T::SPLIT > 1 && cluster_rank() > 0) return false;
  return result.template finish<T, WIDTH>(p, tile, shared, base, c, sum);
}

// In the narrowest product that holds what the expert has left.
template <class T, class Result>
__device__ __forceinline__ bool compute(const Problem& p, const Rows& rows, const Result& result,
                                        const Tile& tile, u8* shared, u32 base, Consumer<T>& c) {
  constexpr int W = T::TOKENS;
  if constexpr (W == 192) {
    if (tile.tokens <= 96) return compute<T, 96>(p, rows, result, tile, shared, base, c);
    if (tile.tokens <= 144) return compute<T, 144>(p, rows, result, tile, shared, base, c);
    if (tile.tokens <= 176) return compute<T, 176>(p, rows, result, tile, shared, base, c);
  } else if constexpr (W >= 64) {
    if (tile.tokens <= W / 4) return compute<T, W / 4>(p, rows, result, tile, shared, base, c);
    if (tile.tokens <= W / 2) return compute<T, W / 2>(p, rows, result, tile, shared, base, c);
  }
  if constexpr (W == 256)
    if (tile.tokens <= 192) return compute<T, 192>(p, rows, result, tile, shared, base, c);
  return compute<T, W>(p, rows, result, tile, shared, base, c);
}

template <class T, class Result>
__device__ __forceinline__ void consume(const Problem& p, const Rows& rows, const Result& result,
                                        Tiles<T>& tiles, u8* shared, u32 base, Consumer<T>& c) {
  Tile tile;
  while (tiles.take(tile))
    if (compute<T>(p, rows, result, tile, shared, base, c)) result.template repair<T>(p, rows, tile, c);
}

template <class T, class Result>
__device__ __forceinline__ void run(const TensorMap* few_rows, const TensorMap* all_rows,
                                    const Problem& p, const Rows& rows, const Result& result) {
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
      mbarrier_init(base + T::b_empty + 8 * i, 4 * T::CONSUMERS * T::PAIR);
    }
    fence_mbarrier_init();
  }
  tiles.read_counts(rows);
  __syncthreads();
  tiles.add_up();
  __syncthreads();
  if constexpr (T::PAIR > 1) cluster_sync();  // its barriers are there
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
    if constexpr (T::GATED) {
      const bool blocks = p.halves == static_cast<int>(Halves::blocks), up = blocks && c.warp >= 2;
      c.slot = blocks ? c.which / 2 + (up ? T::CONSUMERS / 2 : 0) : c.which;
      c.part = blocks ? c.which % 2 * 2 + c.warp % 2 : c.warp;
      result.template begin<T>(tiles, c);
    }
    consume<T>(p, rows, result, tiles, shared, base, c);
  }
  if constexpr (T::PAIR > 1) {
    __syncwarp();
    cluster_leave();
  }
}

}  // namespace farro
