// Which tiles a crew has: every so many of them, or where tiles are wide, the next one whenever it comes
// free, so that none waits for those whose experts left narrow ones.
#pragma once

#include "sm90_layout.cuh"

namespace farro {

// A crew's next tile lies in shared memory of each of its CTAs, told by one lane of the first.
template <class T>
struct Order : Tiles {
  static constexpr int kReaders = (3 + 4 * T::WARPGROUPS) * T::CLUSTER;  // warps
  u32 full, empty, slot;  // barriers and the tile: of this CTA, but `empty` of the crew's first
  u32 parity = 0;

  __device__ Order(const Problem& p, int* table, u32 base)
      : Tiles(table, p.experts, (p.features + T::features * T::CLUSTER - 1) / (T::features * T::CLUSTER),
              T::TOKENS, p.raster),
        full(base + T::handed_full), empty(base + T::handed_empty), slot(base + T::handed) {
    if constexpr (T::CLUSTER > 1) empty = map_to_rank(empty, 0);
  }

  __device__ __forceinline__ bool take(Tile& tile) {
    if constexpr (T::HANDED) {
      __syncwarp();
      if constexpr (T::CLUSTER > 1) mbarrier_wait_cluster(full, parity);
      else mbarrier_wait(full, parity);
      parity ^= 1;
      next = uniform(load_remote_int(slot));  // no lane goes on before all have read
      if (threadIdx.x % 32 == 0) {
        if constexpr (T::CLUSTER > 1) mbarrier_arrive_remote(empty);
        else mbarrier_arrive(empty);
      }
    }
    return Tiles::take(tile);
  }

  // By one lane of a crew's first CTA. `taken` counts tiles past each crew's first, is 0 before the kernel
  // and again after it: as many are taken as there are tiles, those past the end included.
  __device__ __forceinline__ void hand_out(int* taken, u32 base) {
    const u32 emptied = base + T::handed_empty;
    u32 turn = 1;
    for (int tile = next;;) {
      mbarrier_wait(emptied, turn);
      turn ^= 1;
      if constexpr (T::CLUSTER > 1) {
#pragma unroll
        for (int rank = 0; rank < T::CLUSTER; ++rank) {
          store_remote_int(map_to_rank(slot, rank), tile);
          mbarrier_arrive_cluster(map_to_rank(full, rank));
        }
      } else {
        store_remote_int(slot, tile);
        mbarrier_arrive(full);
      }
      if (tile >= end) return;
      const int before = atomicAdd(taken, 1);
      if (before == end - 1) *taken = 0;
      tile = stride + before;
    }
  }
};

}  // namespace farro
