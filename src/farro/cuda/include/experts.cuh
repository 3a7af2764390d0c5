// Whose a tile is, where experts have as many tiles as counts say that only the device knows.
#pragma once

#include "ptx.cuh"

namespace farro {

// One lane's value, which all lanes hold: told so, the compiler keeps what follows from it in uniform
// registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// By the CTA's first warp: first[e], for e of 0 to `experts`, is how many tiles the experts before e
// have together.
template <class Count>
__device__ __forceinline__ void add_up_tiles(int* first, int experts, const Count& tiles_of) {
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

// Moves `expert` on to that of `tile`, by a whole warp; tiles are taken in order.
__device__ __forceinline__ void to_expert_of(int tile, const int* first, int experts, int& expert) {
  if (uniform(first[expert + 1]) <= tile) {  // the first expert whose tiles end after `tile`
    int low = expert + 1, high = experts - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (first[middle + 1] <= tile) low = middle + 1;
      else high = middle;
    }
    expert = uniform(low);
  }
}

}  // namespace farro
