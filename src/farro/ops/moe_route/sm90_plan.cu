// dispatch_plan on SM90a in one launch. Clusters know nothing of each other: each counts all routes, a share in
// each of its CTAs, and ranks its own slices. Counts go to the other CTAs of the cluster through their shared memory.
#include "ptx.cuh"

using namespace farro;

namespace farro {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kAhead = 8;             // ids that a thread loads before it looks at one
constexpr u32 kNobody = 0xffffffffu;  // of a route that goes to no expert here

struct Plan {
  const void* ids;
  int *counts, *dest, *token, *route;  // counts [E] or, ragged, E + 1 offsets
  i64 stride_t, stride_k;              // of ids, in elements
  u32 routes, topk, first, experts, cap;
  u32 slice;  // routes that a CTA ranks, a multiple of its threads
};

__device__ __forceinline__ u32 local_expert(const Plan& p, int id) {
  const u32 e = static_cast<u32>(id) - p.first;
  return e < p.experts ? e : kNobody;
}
__device__ __forceinline__ u32 local_expert(const Plan& p, i64 id) {
  const u64 e = static_cast<u64>(id) - p.first;
  return e < p.experts ? static_cast<u32>(e) : kNobody;
}

template <typename ID, bool FLAT>
__device__ __forceinline__ ID load_id(const Plan& p, u32 at) {
  const ID* ids = static_cast<const ID*>(p.ids);
  if constexpr (FLAT) return __ldg(ids + at);
  return __ldg(ids + (at / p.topk) * p.stride_t + (at % p.topk) * p.stride_k);
}

// Adds routes [from, to) to `counts`, or those from `edge` on to `later`.
template <typename ID, bool FLAT>
__device__ __forceinline__ void count(const Plan& p, u32 from, u32 to, u32 edge, int* counts, int* later) {
  for (u32 top = from; top < to; top += kThreads * kAhead) {
    ID id[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const u32 at = top + i * kThreads + threadIdx.x;
      id[i] = at < to ? load_id<ID, FLAT>(p, at) : ID(-1);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const u32 at = top + i * kThreads + threadIdx.x, e = local_expert(p, id[i]);
      if (e != kNobody) atomicAdd((at < edge ? counts : later) + e, 1);
    }
  }
}

__device__ __forceinline__ int load_of_rank(const int* mine, u32 rank) {
  u32 there;
  int value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
  return value;
}

// Exclusive sums of `totals` into `sums`; returns the sum of all.
__device__ __forceinline__ int sum_before(const int* totals, int* sums, int experts, int* warps) {
  const int each = (experts + kThreads - 1) / kThreads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int begin = min(static_cast<int>(threadIdx.x) * each, experts), end = min(begin + each, experts);
  int own = 0;
  for (int e = begin; e < end; ++e) own += totals[e];
  int upto = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  int before = upto - own, all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  for (int e = begin; e < end; ++e) sums[e] = before, before += totals[e];
  __syncthreads();
  return all;
}

// -1 for the rows that no route has, four at a time; all threads of the grid share them.
template <bool RAGGED>
__device__ __forceinline__ void fill(const Plan& p, const int* totals, u32 rows, u32 used) {
  const int4 none = {-1, -1, -1, -1};
  const u32 step = gridDim.x * kThreads, units = rows / 4 + (rows % 4 != 0);
  u32 unit = blockIdx.x * kThreads + threadIdx.x;
  if constexpr (RAGGED) unit += used / 4;
  for (; unit < units; unit += step) {
    u32 row = unit * 4, e = 0, r = 0;
    if constexpr (!RAGGED) e = row / p.cap, r = row - e * p.cap;
    const bool alike = RAGGED || r + 4 <= p.cap;
    const u32 taken = RAGGED ? used - min(used, row) : totals[e] - min(static_cast<u32>(totals[e]), r);
    if (alike && row + 4 <= rows && (taken == 0 || taken >= 4)) {
      if (taken == 0) {
        reinterpret_cast<int4*>(p.token)[unit] = none;
        reinterpret_cast<int4*>(p.route)[unit] = none;
      }
      continue;
    }
    for (u32 i = 0; i < 4 && row < rows; ++i, ++row) {
      if (RAGGED ? row >= used : r >= static_cast<u32>(totals[e])) p.token[row] = -1, p.route[row] = -1;
      if (!RAGGED && ++r == p.cap) r = 0, ++e;
    }
  }
}

}  // namespace farro

template <typename ID, bool FLAT, bool RAGGED, int CLUSTER>
__global__ void __launch_bounds__(kThreads) plan_routes(const __grid_constant__ Plan p) {
  extern __shared__ __align__(16) int shared[];
  __shared__ int warps[kWarps];
  const u32 room = (p.experts + 3) / 4 * 4;
  int *below = shared, *above = below + room, *own = above + room;  // read by the cluster
  int *base = own + room, *totals = base + room;                    // where its next route goes; all there are
  u16* parts = reinterpret_cast<u16*>(totals + room);               // [warps][experts] of a round
  const u32 thread = threadIdx.x, warp = thread / 32, rank = CLUSTER > 1 ? cluster_rank() : 0;
  for (u32 i = thread; i < 3 * room; i += kThreads) shared[i] = 0;
  for (u32 i = thread; i < kWarps * room / 8; i += kThreads) reinterpret_cast<int4*>(parts)[i] = int4{0, 0, 0, 0};
  __syncthreads();

  const u32 first = blockIdx.x / CLUSTER * (CLUSTER * p.slice);  // of the cluster
  const u32 begin = min(first + rank * p.slice, p.routes), end = min(begin + p.slice, p.routes);
  const u32 share = p.routes / CLUSTER + 1;
  const u32 from = min(rank * share, p.routes), to = min(from + share, p.routes);
  count<ID, FLAT>(p, from, to, first, below, above);
  if (CLUSTER > 1) count<ID, FLAT>(p, begin, end, end, own, own);
  if (CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  for (u32 e = thread; e < p.experts; e += kThreads) {
    int before = 0, later = 0;
#pragma unroll
    for (u32 r = 0; r < CLUSTER; ++r) {
      if constexpr (CLUSTER > 1) {
        before += load_of_rank(below + e, r);
        later += load_of_rank(above + e, r);
      } else {
        before = below[e], later = above[e];
      }
    }
    totals[e] = before + later;
    if constexpr (CLUSTER > 1) {
#pragma unroll
      for (u32 r = 0; r + 1 < CLUSTER; ++r)
        if (r < rank) before += load_of_rank(own + e, r);
    }
    base[e] = before;
  }
  if (CLUSTER > 1)
    cluster_sync();  // no CTA ends while another reads its counts
  else
    __syncthreads();

  const u32 rows = RAGGED ? p.routes : p.experts * p.cap;
  u32 used = 0;
  if constexpr (RAGGED) {
    int* offsets = below;  // has been read
    used = sum_before(totals, offsets, p.experts, warps);
    for (u32 e = thread; e < p.experts; e += kThreads) {
      base[e] += offsets[e];
      if (blockIdx.x == 0) p.counts[e] = offsets[e];
    }
    if (blockIdx.x == 0 && thread == 0) p.counts[p.experts] = used;
  } else if (blockIdx.x == 0) {
    for (u32 e = thread; e < p.experts; e += kThreads) p.counts[e] = min(static_cast<u32>(totals[e]), p.cap);
  }
  fill<RAGGED>(p, totals, rows, used);

  // Ranks, a route a thread: those among the warp's routes, then those of the warps, then all before.
  for (u32 top = begin; top < end; top += kThreads) {
    const u32 at = top + thread;
    const u32 e = at < end ? local_expert(p, load_id<ID, FLAT>(p, at)) : kNobody;
    const u32 peers = __match_any_sync(~0u, e);
    const u32 among = __popc(peers & ((1u << thread % 32) - 1));
    u16* part = parts + warp * room + e;
    const bool leads = among == 0 && e != kNobody;
    if (leads) *part = static_cast<u16>(__popc(peers));
    __syncthreads();
    for (u32 i = thread; i < p.experts; i += kThreads) {
      u32 n[kWarps], left = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) left += n[w] = parts[w * room + i];
      base[i] += left;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {  // how many of the round are not before this warp's
        if (n[w] != 0) parts[w * room + i] = static_cast<u16>(left);
        left -= n[w];
      }
    }
    __syncthreads();
    int row = -1;
    if (e != kNobody) {
      row = base[e] - *part + among;
      if constexpr (!RAGGED) row = static_cast<u32>(row) < p.cap ? static_cast<int>(e * p.cap + row) : -1;
    }
    __syncwarp();
    if (leads) *part = 0;
    if (at < end) p.dest[at] = row;
    if (row >= 0) p.route[row] = at, p.token[row] = at / p.topk;
  }
}
