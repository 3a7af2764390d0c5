// Kernels for planted.py that are wrong on purpose, and handoffs that are right: racecheck has
// to find the one kind, and its reports on rings of mbarriers mean something if it leaves the other.
#include "ptx.cuh"

using namespace farro;

extern "C" __global__ void beyond(int* to) { to[threadIdx.x + 65] = 1; }

extern "C" __global__ void unordered(int* to) {
  __shared__ int x[64];
  x[threadIdx.x] = threadIdx.x;
  to[threadIdx.x] = x[63 - threadIdx.x];
}

enum How { STORES, SMALL_COPIES, BULK, TENSOR };

extern __shared__ u8 raw[];

// Warp 0 hands rows of 32 numbers to warp 1 through one stage, which begins where the 128-byte swizzle
// does. With HASTY warp 1 reads before it waits.
template <How HOW, bool HASTY = false>
__device__ void hand_over(const TensorMap* map, const int* from, int* to, int rows) {
  const u32 begin = smem_address(raw), stage = (begin + 1023) & ~1023u;
  const u32 full = stage + 128, empty = full + 8;
  int* row = reinterpret_cast<int*>(raw + (stage - begin));
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(full, HOW == STORES || HOW == SMALL_COPIES ? 32 : 1);
    mbarrier_init(empty, 32);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int i = 0; i < rows; ++i) {
    const u32 parity = i & 1;
    if (threadIdx.x < 32) {
      mbarrier_wait(empty, parity ^ 1);
      if constexpr (HOW == STORES) {
        row[lane] = from[32 * i + lane];
        mbarrier_arrive(full);
      } else if constexpr (HOW == SMALL_COPIES) {
        cp_async<4>(stage + 4 * lane, from + 32 * i + lane, true);
        cp_async_arrive(full);
      } else if (lane == 0) {
        mbarrier_expect(full, 128);
        if constexpr (HOW == BULK) bulk_load(stage, from + 32 * i, 128, full);
        else tma_load(stage, map, 0, i, full);
      }
    } else {
      if (!HASTY) mbarrier_wait(full, parity);
      const int value = row[31 - lane];
      if (HASTY) mbarrier_wait(full, parity);
      if (HOW == BULK || HOW == TENSOR) fence_async_proxy();
      mbarrier_arrive(empty);
      to[32 * i + lane] = value;
    }
  }
  if (HOW == SMALL_COPIES) cp_async_wait_all();
}

#define HANDOFF(NAME, ...)                                                               \
  extern "C" __global__ void __launch_bounds__(64) NAME(const __grid_constant__ TensorMap map, \
                                                        const int* from, int* to, int rows) { \
    hand_over<__VA_ARGS__>(&map, from, to, rows);                                        \
  }
HANDOFF(right_stores, STORES)
HANDOFF(right_small_copies, SMALL_COPIES)
HANDOFF(right_bulk_copies, BULK)
HANDOFF(right_tensor_copies, TENSOR)
HANDOFF(hasty_stores, STORES, true)
