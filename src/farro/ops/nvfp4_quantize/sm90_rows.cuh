// Rows of experts that the quantizers' programs share: which there are, where they come from and go to.
#pragma once

#include "ptx.cuh"

namespace farro {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr u32 kUnused = 0x38383838u;  // scales of rows that no token has
constexpr int kFill = 4096;           // of such scales, that a warp writes at a time

// Rows stay where they are; go by a plan with room for each expert, or without; or by their routes.
enum Kind : int { in_place = 0, planned = 1, ragged = 2, by_routes = 3 };

struct Places {
  const void *tokens, *routes;  // of a plan, int32: of each row; by routes, int64: of each route its token and row
  const int* counts;            // of each expert, or of a ragged plan E + 1 offsets; null: all rows are used
  int token_count, route_count, experts, capacity;  // capacity: rows of each expert, or all of a ragged plan
};

// This warp among those of the grid: neighbours are of different CTAs, so that few items spread.
__device__ __forceinline__ u32 warp_of_grid() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

// Rows in use. Of those of experts, `starts` [E + 1] gets how many come before each expert's; all threads call.
template <int KIND>
__device__ __forceinline__ u32 used_rows(const Places& r, int* starts) {
  if (KIND == by_routes) return r.route_count;
  if (KIND == ragged) return min(max(r.counts[r.experts], 0), r.capacity);
  if (r.counts == nullptr) return r.experts * r.capacity;
  __shared__ int sums[kWarps];
  const int each = (r.experts + kThreads - 1) / kThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = min(static_cast<int>(threadIdx.x) * each, r.experts), end = min(begin + each, r.experts);
  int own = 0;
  for (int e = begin; e < end; ++e) own += min(max(r.counts[e], 0), r.capacity);
  int upto = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  int before = upto - own, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    all += sums[w];
  }
  for (int e = begin; e < end; ++e) {
    starts[e] = before;
    before += min(max(r.counts[e], 0), r.capacity);
  }
  if (threadIdx.x == 0) starts[r.experts] = all;
  __syncthreads();
  return all;
}

// Where one of the used rows lies, and what is in it.
struct Row {
  i64 place, token;  // token -1: nothing
  int expert, route;
};

// The last expert with starts[e] <= row: the one that has it.
__device__ __forceinline__ int expert_of(const int* starts, int experts, int row) {
  int low = 0, high = experts - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// place -1: a route that has no row. With `weighted` a row's route counts too.
template <int KIND>
__device__ __forceinline__ Row find_row(const Places& r, const int* starts, u32 used, bool weighted) {
  Row row{-1, -1, 0, 0};
  if constexpr (KIND == by_routes) {
    const i64 place = static_cast<const i64*>(r.routes)[used], token = static_cast<const i64*>(r.tokens)[used];
    if (place < 0 || place >= static_cast<i64>(r.experts) * r.capacity) return row;
    row.expert = static_cast<int>(static_cast<u32>(place) / static_cast<u32>(r.capacity));
    if (place >> 31 != 0) row.expert = static_cast<int>(place / r.capacity);
    if (place - static_cast<i64>(row.expert) * r.capacity >= r.counts[row.expert]) return row;
    row.place = place, row.route = static_cast<int>(used);
    row.token = token >= 0 && token < r.token_count ? token : -1;
    return row;
  }
  row.place = used;
  if (KIND != ragged && r.counts != nullptr) {
    row.expert = expert_of(starts, r.experts, used);
    row.place = static_cast<i64>(row.expert) * r.capacity + (used - starts[row.expert]);
  }
  if (KIND == in_place) {
    row.token = row.place;
    return row;
  }
  const int token = static_cast<const int*>(r.tokens)[row.place];
  bool there = token >= 0 && token < r.token_count;
  if (weighted) {
    row.route = static_cast<const int*>(r.routes)[row.place];
    there = there && row.route >= 0 && row.route < r.route_count;
  }
  row.token = there ? token : -1;
  return row;
}

// Bytes [begin, end) of unused scales, by one warp.
__device__ __forceinline__ void fill_bytes(u8* begin, u8* end) {
  const int lane = threadIdx.x % 32;
  u8* aligned = begin + (-reinterpret_cast<u64>(begin) & 15);
  aligned = aligned < end ? aligned : end;
  if (begin + lane < aligned) begin[lane] = 0x38;
  u8* tail = aligned + ((end - aligned) & ~15ll);
  for (u8* at = aligned + lane * 16; at < tail; at += 512)
    *reinterpret_cast<uint4*>(at) = uint4{kUnused, kUnused, kUnused, kUnused};
  if (tail + lane < end) tail[lane] = 0x38;
}

// Scales of the rows that are not in use; `warp` of `warps` in the grid.
template <int KIND>
__device__ __forceinline__ void fill_unused(const Places& r, u32 used, int blocks, u8* scales, u32 warp,
                                            u32 warps) {
  if (KIND != ragged && r.counts == nullptr) return;
  const i64 size = static_cast<i64>(r.capacity) * blocks;  // of an expert
  const u32 pieces = static_cast<u32>((size + kFill - 1) / kFill), regions = KIND == ragged ? 1 : r.experts;
  for (u32 i = warp; i < regions * pieces; i += warps) {
    const u32 e = i / pieces, piece = i - e * pieces;
    const int count = KIND == ragged ? used : min(max(r.counts[e], 0), r.capacity);
    const i64 begin = static_cast<i64>(count) * blocks + static_cast<i64>(piece) * kFill;
    const i64 end = begin + kFill < size ? begin + kFill : size;
    if (begin < end) fill_bytes(scales + e * size + begin, scales + e * size + end);
  }
}

}  // namespace farro
