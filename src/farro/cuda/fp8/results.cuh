// The end of a tile of large.cu: from totals in registers to BF16 in memory, for each way of storing.
#pragma once

#include "fp8_problem.cuh"

namespace farro {

// The results of one wave of 64 rows, of each group a lane's GROUP / 4 neighbours of `row` and of the
// eighth after it: `store(group, low, high)`. What is added is read some groups ahead of what is
// stored: the compiler would not move a read over a store, and each would wait for memory by itself.
template <int EPILOGUE, int COLUMNS, int GROUP, class Store>
__device__ __forceinline__ void finish_wave(const Problem& p, const float (&total)[COLUMNS / 2],
                                            float alpha, int row, int lane_column, Store store) {
  constexpr int COUNT = GROUP / 4, kGroups = COLUMNS / GROUP;
  constexpr bool kBoth = (EPILOGUE & kBias) && (EPILOGUE & kResidual);
  constexpr int kAhead = (kBoth ? 64 : 128) / GROUP;  // groups: as many registers as there are
#pragma unroll
  for (int first = 0; first < kGroups; first += kAhead) {
    float bias[kAhead][COUNT] = {};
    u32 residual[2][kAhead][COUNT / 2] = {};
    const int column = lane_column + GROUP * first;
    if constexpr (EPILOGUE & kResidual) {
      load_residual<COUNT, kAhead, GROUP>(p, row, column, residual[0]);
      load_residual<COUNT, kAhead, GROUP>(p, row + 8, column, residual[1]);
    }
    if constexpr (EPILOGUE & kBias) load_biases<COUNT, kAhead, GROUP>(p, column, bias);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int g = first + j;
      if (g >= kGroups) break;
      const float* s = total + GROUP / 2 * g;
      float sum[2][COUNT], value[2][COUNT];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sum[half][i] = s[i / 2 * 4 + i % 2 + 2 * half];
        finish_values<EPILOGUE>(sum[half], alpha, bias[j], residual[half][j], value[half]);
      }
      store(g, value[0], value[1]);
    }
  }
}

// One wave of 64 rows: a lane's GROUP / 4 neighbouring columns of each group, of two rows.
template <int EPILOGUE, bool SCALED, int COLUMNS, int GROUP>
__device__ __forceinline__ void store_wave(const Problem& p, const float (&total)[COLUMNS / 2],
                                           float alpha, int row, int first_column, int lane) {
  constexpr int COUNT = GROUP / 4;
  const int lane_column = first_column + COUNT * (lane % 4);
  if (EPILOGUE == 0 && p.out_vector) {
    BFloat16* low = p.out + row * p.out_row + lane_column;
    BFloat16* high = low + 8 * p.out_row;
    const bool low_valid = row < p.m, high_valid = row + 8 < p.m;
#pragma unroll
    for (int g = 0; g < COLUMNS / GROUP; ++g) {
      if (first_column + GROUP * g >= p.n) break;
      const float* s = total + GROUP / 2 * g;
      u32 a[COUNT / 2], b[COUNT / 2];
#pragma unroll
      for (int j = 0; j < COUNT / 2; ++j) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = SCALED ? s[4 * j + i] : __fmul_rn(alpha, s[4 * j + i]);
        a[j] = pack2(v[0], v[1], BFloat16{});
        b[j] = pack2(v[2], v[3], BFloat16{});
      }
      if constexpr (COUNT == 8) {
        if (low_valid) *reinterpret_cast<uint4*>(low + GROUP * g) = *reinterpret_cast<uint4*>(a);
        if (high_valid) *reinterpret_cast<uint4*>(high + GROUP * g) = *reinterpret_cast<uint4*>(b);
      } else {
        if (low_valid) *reinterpret_cast<uint2*>(low + GROUP * g) = *reinterpret_cast<uint2*>(a);
        if (high_valid) *reinterpret_cast<uint2*>(high + GROUP * g) = *reinterpret_cast<uint2*>(b);
      }
    }
    return;
  }
  const auto store = [&](int g, const float (&low)[COUNT], const float (&high)[COUNT]) {
    const int column = lane_column + GROUP * g;
    if (column >= p.n) return;
    if (row < p.m) store_values(p, low, row, column);
    if (row + 8 < p.m) store_values(p, high, row + 8, column);
  };
  finish_wave<EPILOGUE, COLUMNS, GROUP>(p, total, alpha, row, lane_column, store);
}

// The same results to shared memory, and from there by TMA. `staged` holds one warp's 16 rows.
template <int EPILOGUE, int COLUMNS, int GROUP>
__device__ __forceinline__ void stage_wave(const Problem& p, const TensorMap* map,
                                           const float (&total)[COLUMNS / 2], float alpha,
                                           u8* staged, int first_row, int first_column, int lane) {
  constexpr int COUNT = GROUP / 4;
  const int lane_column = first_column + COUNT * (lane % 4), row = first_row + lane / 4;
  u8* to = staged + lane * (2 * COUNT);
  if (lane == 0) tma_store_wait<0>();  // the tile before has left this place
  __syncwarp();
  const auto store = [&](int g, const float (&low)[COUNT], const float (&high)[COUNT]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float(&value)[COUNT] = half ? high : low;
      u32 pair[COUNT / 2];
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) pair[i] = pack2(value[2 * i], value[2 * i + 1], BFloat16{});
      u8* at = to + g * (32 * GROUP) + half * (16 * GROUP);
      if constexpr (COUNT == 8) *reinterpret_cast<uint4*>(at) = *reinterpret_cast<uint4*>(pair);
      else *reinterpret_cast<uint2*>(at) = *reinterpret_cast<uint2*>(pair);
    }
  };
  finish_wave<EPILOGUE, COLUMNS, GROUP>(p, total, alpha, row, lane_column, store);
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) tma_store_groups(map, first_row, first_column / GROUP, smem_address(staged));
}

}  // namespace farro
