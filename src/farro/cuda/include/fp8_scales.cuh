// Scales of the input's rows on their way to shared memory.
#pragma once

#include "fp8_problem.cuh"

namespace farro {

constexpr int kScaleBlocks = 4;  // scale blocks of K in one stage of scales
constexpr int kScaleStages = 3;

// Scales of kScaleBlocks blocks from `block` on: the input's rows as [blocks][ROWS] where neighbours
// are rows (vector 2), else as [ROWS][blocks]; zero outside.
template <int ROWS>
__device__ __forceinline__ void load_row_scales(const Problem& p, u32 to, int first, int block,
                                                int blocks, int lane) {
  if (p.input_scale_vector == 2) {
#pragma unroll 2
    for (int i = lane; i < ROWS / 4 * kScaleBlocks; i += 32) {
      const int j = i / (ROWS / 4), row = first + i % (ROWS / 4) * 4;
      const bool valid = block + j < blocks && row < p.m;
      cp_async<16>(to + 16 * i,
                   p.input_scale + (valid ? (block + j) * p.input_scale_block + row : 0), valid);
    }
    return;
  }
  const bool together = p.input_scale_vector == 1 && block + kScaleBlocks <= blocks;
#pragma unroll 2
  for (int i = lane; i < ROWS; i += 32) {
    const int row = first + i;
    const float* from = p.input_scale + (row < p.m ? row * p.input_scale_row : 0);
    const u32 at = to + 4 * kScaleBlocks * i;
    if (together) {
      cp_async<16>(at, from + (row < p.m ? block : 0), row < p.m);
    } else {
#pragma unroll
      for (int j = 0; j < kScaleBlocks; ++j) {
        const bool valid = row < p.m && block + j < blocks;
        cp_async<4>(at + 4 * j, from + (valid ? (block + j) * p.input_scale_block : 0), valid);
      }
    }
  }
}

}  // namespace farro
