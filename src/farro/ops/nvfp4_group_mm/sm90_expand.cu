// Activations of nvfp4_group_mm for the sparse tensor cores, where tiles have many tokens: FP16 (or
// BF16 as given), each 32 of K in the order of compressed weights, even positions, then odd ones.
#include "nvfp4.cuh"

using namespace farro;

// Of each expert (y) the rows that it has; a thread writes 16 bytes at a time, neighbours adjoin.
template <bool BF16>
__global__ void __launch_bounds__(256)
    nvfp4_expand(const void* x, const u8* scales, uint4* to, const __grid_constant__ Rows p) {
  int first, count;
  rows_of(p, blockIdx.y, first, count);
  const i64 steps = p.k / 32, top = p.ragged ? first : static_cast<i64>(blockIdx.y) * p.capacity;
  const i64 end = (top + count) * steps * 4;
#pragma unroll 4
  for (i64 i = top * steps * 4 + blockIdx.x * 256ll + threadIdx.x; i < end; i += gridDim.x * 256ll)
    to[i] = unit_of<BF16>(x, scales, i / 4, static_cast<int>(i % 4));
}
