// moe_ffn's ends: routes sorted by expert before the products, and the weighted sum of rows after them.
//
// moe_plan is one cluster: each CTA counts its share of the routes by expert, all add up what the
// others counted, and each then gives its routes rows. Which of an expert's rows a route gets may
// change from run to run; no result depends on it.
#include "output.cuh"

using namespace farro;

constexpr int kThreads = 1024;
constexpr int kAbreast = 8;  // routes of a token whose rows are read at a time

struct Routes {
  const void* ids;
  int* offsets;  // [experts + 1]: an expert's first row, and the next one's
  int* row_of;   // [routes]: -1 for a dropped one
  int* source;   // [routes]: the token of a row
  i64 ids_token, ids_slot;
  int routes, topk, experts;
};

struct Sum {
  const u16* y;  // BF16 [rows][h]
  const int* row_of;
  const float* weights;
  void* out;  // [tokens][h]
  i64 weights_token, weights_slot;
  int topk, h;
};

// The expert of a route, or -1.
template <class Id>
__device__ __forceinline__ int expert_of(const Routes& p, int route) {
  const int token = route / p.topk, slot = route - token * p.topk;
  const i64 id = static_cast<const Id*>(p.ids)[token * p.ids_token + slot * p.ids_slot];
  return id >= 0 && id < p.experts ? static_cast<int>(id) : -1;
}

// Of each thread the sum of those before it.
__device__ __forceinline__ int sum_before(int own, int* of_warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int total = of_warps[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, total, step);
      if (lane >= step) total += other;
    }
    of_warps[lane] = total;
  }
  __syncthreads();
  return sum - own + (warp > 0 ? of_warps[warp - 1] : 0);
}

// Dynamic shared memory: int [2 * experts], counts and the next row of each expert.
template <class Id, int CLUSTER>
__global__ void __launch_bounds__(kThreads) moe_plan(const __grid_constant__ Routes p) {
  extern __shared__ int counts[];
  __shared__ int of_warps[32];
  int* next = counts + p.experts;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, own = rank * kThreads + threadIdx.x;
  if (threadIdx.x == 0) let_next_kernel_begin();

  for (int e = threadIdx.x; e < p.experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  for (int route = own; route < p.routes; route += CLUSTER * kThreads) {
    const int e = expert_of<Id>(p, route);
    if (e >= 0) atomicAdd(&counts[e], 1);
  }
  if constexpr (CLUSTER > 1) cluster_sync();
  else __syncthreads();

  // A thread has neighbouring experts
  const int each = (p.experts + kThreads - 1) / kThreads;
  const int first = min(static_cast<int>(threadIdx.x) * each, p.experts), last = min(first + each, p.experts);
  auto count_of = [&](int e, int other) {
    if constexpr (CLUSTER > 1) return load_remote_int(map_to_rank(smem_address(counts + e), other));
    else return counts[e];
  };
  int sum = 0;
  for (int e = first; e < last; ++e)
#pragma unroll
    for (int other = 0; other < CLUSTER; ++other) sum += count_of(e, other);
  sum = sum_before(sum, of_warps);
  for (int e = first; e < last; ++e) {
    if (rank == 0) p.offsets[e] = sum;
    int mine = sum;
#pragma unroll
    for (int other = 0; other < CLUSTER; ++other) {
      const int count = count_of(e, other);
      sum += count;
      if (other < rank) mine += count;
    }
    next[e] = mine;
  }
  if (rank == 0 && threadIdx.x == kThreads - 1) p.offsets[p.experts] = sum;
  if constexpr (CLUSTER > 1) cluster_sync();  // the others have read these counts
  else __syncthreads();

  for (int route = own; route < p.routes; route += CLUSTER * kThreads) {
    const int e = expert_of<Id>(p, route);
    int row = -1;
    if (e >= 0) {
      row = atomicAdd(&next[e], 1);
      p.source[row] = route / p.topk;
    }
    p.row_of[route] = row;
  }
}

// out[t] = sum over kept j, in order, of weights[t, j] * y[row_of[t, j]] in FP32; VECTOR columns a thread.
template <class Out, int VECTOR>
__global__ void __launch_bounds__(256) moe_sum(const __grid_constant__ Sum p) {
  static_assert(VECTOR == 1 || VECTOR == 8);
  const int column = (blockIdx.y * blockDim.x + threadIdx.x) * VECTOR;
  const i64 token = blockIdx.x;
  wait_for_kernel_before();
  if (column >= p.h) return;
  float total[VECTOR];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) total[i] = 0.0f;
  for (int first = 0; first < p.topk; first += kAbreast) {
    int row[kAbreast];
    float weight[kAbreast];
#pragma unroll
    for (int j = 0; j < kAbreast; ++j) {
      const bool there = first + j < p.topk;
      row[j] = there ? p.row_of[token * p.topk + first + j] : -1;
      weight[j] = there ? p.weights[token * p.weights_token + (first + j) * p.weights_slot] : 0.0f;
    }
    u32 pairs[kAbreast][VECTOR == 8 ? 4 : 1];
#pragma unroll
    for (int j = 0; j < kAbreast; ++j) {
      const u16* at = p.y + (row[j] < 0 ? 0 : row[j]) * static_cast<i64>(p.h) + column;
      if constexpr (VECTOR == 8) {
        const uint4 eight = row[j] < 0 ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(at);
        pairs[j][0] = eight.x, pairs[j][1] = eight.y, pairs[j][2] = eight.z, pairs[j][3] = eight.w;
      } else {
        pairs[j][0] = row[j] < 0 ? 0 : *at;
      }
    }
#pragma unroll
    for (int j = 0; j < kAbreast; ++j) {
      if (row[j] < 0) continue;
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) {
        const u32 pair = pairs[j][i / 2];
        const float value = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
        total[i] = __fadd_rn(total[i], __fmul_rn(weight[j], value));
      }
    }
  }
  Out* to = static_cast<Out*>(p.out) + token * p.h + column;
  if constexpr (VECTOR == 1) {
    *to = convert(total[0], Out{});
  } else if constexpr (sizeof(Out) == 4) {
#pragma unroll
    for (int i = 0; i < 8; i += 4)
      *reinterpret_cast<float4*>(to + i) = make_float4(total[i], total[i + 1], total[i + 2], total[i + 3]);
  } else {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pack2(total[0], total[1], Out{}), pack2(total[2], total[3], Out{}),
                   pack2(total[4], total[5], Out{}), pack2(total[6], total[7], Out{}));
  }
}
