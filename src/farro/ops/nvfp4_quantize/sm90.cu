// The NVFP4 quantizers on SM90a: rows of 32-blocks, 32 blocks of one row a warp at a time. Rows that a plan sends
// may also be copied from tokens that an earlier launch quantized, where that is less work: only the device knows how
// many rows there are, so both launches look.
#include "sm90_codes.cuh"
#include "sm90_rows.cuh"

using namespace farro;

namespace farro {

struct Quantize {
  const void* x;  // null: all rows are copies
  const float *weights, *gscale;
  u8 *codes, *scales;
  int blocks, per_expert;
  int least;  // rows from which tokens are quantized once, and then copied; 0: never
  const u8 *token_codes, *token_scales;
};

__device__ __forceinline__ void load(u32 (&to)[4], const uint4* from) {
  const uint4 value = __ldg(from);
  to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
}

template <bool WEIGHTED>
__device__ __forceinline__ void quantize_row(const Quantize& p, const Row& row, int first, float gscale) {
  const int lane = threadIdx.x % 32, count = p.blocks - first;
  const i64 from = row.token * p.blocks + first, to = row.place * p.blocks + first;
  if (row.token < 0) {
    if (lane < count) p.scales[to + lane] = static_cast<u8>(kUnused);
    return;
  }
  u32 pairs[kSteps][4];
  const uint4* values = static_cast<const uint4*>(p.x) + from * 4 + lane;
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (s * 8 + lane / 4 < count)
      load(pairs[s], values + s * 32);
    else
      pairs[s][0] = pairs[s][1] = pairs[s][2] = pairs[s][3] = 0;
  }
  if constexpr (WEIGHTED) {
    const float weight = __ldg(p.weights + row.route);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs[s][i] = pack2(__fmul_rn(low_of(pairs[s][i]), weight), __fmul_rn(high_of(pairs[s][i]), weight), BFloat16{});
  }
  quantize_blocks(pairs, gscale, count, p.codes + to * 16, p.scales + to);
}

// 128 blocks of a row that is quantized already.
__device__ __forceinline__ void copy_row(const Quantize& p, const Row& row, int first) {
  const int lane = threadIdx.x % 32, count = min(p.blocks - first, 128);
  const i64 from = row.token * p.blocks + first, to = row.place * p.blocks + first;
  const bool there = row.token >= 0, words = p.blocks % 4 == 0;
  uint4 codes[4];
  u32 scales = kUnused;
  if (there) {
#pragma unroll
    for (int s = 0; s < 4; ++s)
      if (s * 32 + lane < count) codes[s] = reinterpret_cast<const uint4*>(p.token_codes)[from + s * 32 + lane];
    if (words && lane * 4 < count) scales = *reinterpret_cast<const u32*>(p.token_scales + from + lane * 4);
#pragma unroll
    for (int s = 0; s < 4; ++s)
      if (s * 32 + lane < count) reinterpret_cast<uint4*>(p.codes)[to + s * 32 + lane] = codes[s];
  }
  if (words) {
    if (lane * 4 < count) *reinterpret_cast<u32*>(p.scales + to + lane * 4) = scales;
  } else {
    for (int i = lane; i < count; i += 32) p.scales[to + i] = there ? p.token_scales[from + i] : static_cast<u8>(kUnused);
  }
}

// gscale of a ragged plan's row: of the expert whose end is the first past it.
__device__ __forceinline__ float ragged_gscale(const Quantize& p, const Places& r, int row) {
  int low = 0, high = r.experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (r.counts[middle + 1] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return __ldg(p.gscale + low);
}

}  // namespace farro

template <int KIND, bool WEIGHTED>
__global__ void __launch_bounds__(kThreads, 4)
    nvfp4_quantize(const __grid_constant__ Quantize p, const __grid_constant__ Places r) {
  extern __shared__ int starts[];
  const u32 used = used_rows<KIND>(r, starts);
  const u32 warp = warp_of_grid(), warps = gridDim.x * kWarps;
  const bool once = p.x == nullptr || (p.least > 0 && used >= p.least);
  const bool copies = (KIND == planned || KIND == ragged) && !WEIGHTED && once;
  const u32 width = copies ? 128 : 32, pieces = (p.blocks + width - 1) / width, items = used * pieces;
  Row row{-1, -1, 0, 0}, next{-1, -1, 0, 0};
  if (warp < items) next = find_row<KIND>(r, starts, warp / pieces, WEIGHTED);
  for (u32 item = warp; item < items; item += warps) {
    row = next;
    if (item + warps < items) next = find_row<KIND>(r, starts, (item + warps) / pieces, WEIGHTED);
    const int first = item % pieces * width;
    if (KIND == by_routes && row.place < 0) continue;
    if (copies) {
      copy_row(p, row, first);
    } else {
      float gscale;
      if (KIND == ragged && p.per_expert)
        gscale = ragged_gscale(p, r, row.place);
      else
        gscale = __ldg(p.gscale + (p.per_expert ? row.expert : 0));
      quantize_row<WEIGHTED>(p, row, first, gscale);
    }
  }
  fill_unused<KIND>(r, used, p.blocks, p.scales, warp, warps);
}

// All blocks of `x`, [blocks] of 32 values; with p.least only where the plan of `r` has as many rows.
template <int KIND>
__global__ void __launch_bounds__(kThreads, 4)
    nvfp4_quantize_tokens(const __grid_constant__ Quantize p, const __grid_constant__ Places r) {
  extern __shared__ int starts[];
  if (KIND != in_place && used_rows<KIND>(r, starts) < p.least) return;
  const float gscale = __ldg(p.gscale);
  const u32 items = (p.blocks + 31u) / 32, warps = gridDim.x * kWarps;
  for (u32 item = warp_of_grid(); item < items; item += warps)
    quantize_row<false>(p, Row{0, 0, 0, 0}, item * 32, gscale);
}

// Rows [gate | up] that stay where they are, in units of 8 columns of each where INTERLEAVED.
template <bool INTERLEAVED>
__global__ void __launch_bounds__(kThreads, 4)
    nvfp4_gate(const __grid_constant__ Quantize p, const __grid_constant__ Places r) {
  extern __shared__ int starts[];
  const u32 used = used_rows<in_place>(r, starts), lane = threadIdx.x % 32;
  const u32 warp = warp_of_grid(), warps = gridDim.x * kWarps;
  const u32 pieces = (p.blocks + 31) / 32, items = used * pieces;
  for (u32 item = warp; item < items; item += warps) {
    const Row row = find_row<in_place>(r, starts, item / pieces, false);
    const int first = item % pieces * 32, count = p.blocks - first;
    const float gscale = __ldg(p.gscale + (p.per_expert ? row.expert : 0));
    const uint4* gates = static_cast<const uint4*>(p.x) + row.place * p.blocks * 8;
    const uint4* ups = gates + (INTERLEAVED ? 1 : p.blocks * 4);
    u32 pairs[kSteps][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const u32 unit = (first * 4 + s * 32 + lane) * (INTERLEAVED ? 2 : 1);
      u32 gate[4] = {0, 0, 0, 0}, up[4] = {0, 0, 0, 0};
      if (s * 8 + static_cast<int>(lane) / 4 < count) load(gate, gates + unit), load(up, ups + unit);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[s][i] = gated_pair(gate[i], up[i]);
    }
    const i64 to = row.place * p.blocks + first;
    quantize_blocks(pairs, gscale, count, p.codes + to * 16, p.scales + to);
  }
  fill_unused<in_place>(r, used, p.blocks, p.scales, warp, warps);
}
