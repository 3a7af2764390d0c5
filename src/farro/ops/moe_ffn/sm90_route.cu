// moe_ffn's ends: routes sorted by expert before the products, and the weighted sum of rows after them;
// where experts have many rows, moe_gather brings these together, so that the first product reads whole boxes.
//
// moe_plan is one cluster: each CTA counts its share of the routes by expert, all add up what the
// others counted, and each then gives its routes rows. Which of an expert's rows a route gets may
// change from run to run; no result depends on it.
#include "output.cuh"

using namespace farro;

constexpr int kThreads = 1024;
constexpr int kAbreast = 8;  // routes of a token whose rows are read at a time
constexpr int kLoads = 8;    // ids, or pieces of a row, that a thread reads at a time
constexpr int kSumThreads = 128, kSumTokens = 8, kSumRoutes = 256;  // of a CTA that sums many tokens

struct Routes {
  const void* ids;
  int* offsets;  // [experts + 1]: an expert's first row, and the next one's
  int* row_of;   // [routes]: -1 for a dropped one
  int* source;   // [routes]: the token of a row
  int* taken;    // [2]: of both products, see sm90_order.cuh
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

struct Gather {
  const u8* x;
  const float* x_scale;
  const int* offsets;
  const int* source;
  u8* rows;        // [routes][pitch]
  float* scales;   // [groups][routes]
  i64 x_pitch, x_scale_row, x_scale_group;
  int experts, groups, routes, pitch;  // pitch: a row's bytes, a multiple of 16
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

  // What to do with each of this thread's routes and its expert, whose ids are read some at a time
  auto for_own_routes = [&](const auto& act) {
    for (int first = own; first < p.routes; first += kLoads * CLUSTER * kThreads) {
      int expert[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int route = first + i * CLUSTER * kThreads;
        expert[i] = route < p.routes ? expert_of<Id>(p, route) : -1;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int route = first + i * CLUSTER * kThreads;
        if (route < p.routes) act(route, expert[i]);
      }
    }
  };
  for (int e = threadIdx.x; e < p.experts; e += kThreads) counts[e] = 0;
  if (rank == 0 && threadIdx.x < 2) p.taken[threadIdx.x] = 0;
  __syncthreads();
  for_own_routes([&](int, int e) {
    if (e >= 0) atomicAdd(&counts[e], 1);
  });
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

  for_own_routes([&](int route, int e) {
    int row = -1;
    if (e >= 0) {
      row = atomicAdd(&next[e], 1);
      p.source[row] = route / p.topk;
    }
    p.row_of[route] = row;
  });
}

// Rows of tokens and their scales, in the order of routes: a warp for each row, then a thread for each scale.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) moe_gather(const __grid_constant__ Gather p) {
  wait_for_kernel_before();
  // The kernel after this one reads the plan without waiting: it is there
  if (threadIdx.x == 0) let_next_kernel_begin();
  const int rows = __ldcg(p.offsets + p.experts), lane = threadIdx.x % 32;
  const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS, pieces = p.pitch / 16;
  for (int row = thread / 32; row < rows; row += threads / 32) {
    const uint4* from = reinterpret_cast<const uint4*>(p.x + __ldcg(p.source + row) * p.x_pitch);
    uint4* to = reinterpret_cast<uint4*>(p.rows + static_cast<i64>(row) * p.pitch);
    for (int first = lane; first < pieces; first += 32 * kLoads) {
      uint4 held[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (first + 32 * i < pieces) held[i] = __ldg(from + first + 32 * i);
#pragma unroll
      for (int i = 0; i < kLoads; ++i)
        if (first + 32 * i < pieces) to[first + 32 * i] = held[i];
    }
  }
  for (int row = thread; row < rows; row += threads) {
    const float* from = p.x_scale + __ldcg(p.source + row) * p.x_scale_row;
#pragma unroll 8
    for (int g = 0; g < p.groups; ++g)
      p.scales[static_cast<i64>(g) * p.routes + row] = __ldg(from + g * p.x_scale_group);
  }
}

template <int VECTOR, class Out>
__device__ __forceinline__ void store_columns(Out* to, const float (&total)[VECTOR]) {
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
  store_columns<VECTOR>(static_cast<Out*>(p.out) + token * p.h + column, total);
}

// The same of kSumTokens tokens, eight columns a thread, at most kSumRoutes / kSumTokens routes of a token:
// which rows there are is looked up once for all columns, and only these are read, kAbreast at a time
// whosever they are.
template <class Out>
__global__ void __launch_bounds__(kSumThreads, 7) moe_sum_many(const __grid_constant__ Sum p, int tokens) {
  __shared__ int row_of[kSumRoutes];
  __shared__ float weight_of[kSumRoutes];
  __shared__ int last_of[kSumRoutes];  // of the token whose last route this is, which one of these; or -1
  __shared__ int count_of[kSumTokens];
  const i64 first = static_cast<i64>(blockIdx.x) * kSumTokens;
  const int here = static_cast<int>(min(static_cast<i64>(kSumTokens), tokens - first));
  const int column = (blockIdx.y * kSumThreads + threadIdx.x) * 8, lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  constexpr int kWarps = kSumThreads / 32, kOwn = kSumTokens / kWarps;
  wait_for_kernel_before();
  // A warp for a token: routes that were kept move to the front, in order
  int row[kOwn];
  u32 kept[kOwn];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int i = warp + n * kWarps;
    row[n] = i < here && lane < p.topk ? p.row_of[(first + i) * p.topk + lane] : -1;
    kept[n] = __ballot_sync(~0u, row[n] >= 0);
    if (lane == 0) count_of[i] = __popc(kept[n]);
  }
  __syncthreads();
  int all = 0;
#pragma unroll
  for (int i = 0; i < kSumTokens; ++i) all += count_of[i];
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    const int i = warp + n * kWarps, before = __popc(kept[n] & ((1u << lane) - 1));
    if (row[n] < 0) continue;
    int at = before;
    for (int other = 0; other < i; ++other) at += count_of[other];
    row_of[at] = row[n];
    weight_of[at] = p.weights[(first + i) * p.weights_token + lane * p.weights_slot];
    last_of[at] = before == count_of[i] - 1 ? i : -1;
  }
  __syncthreads();
  if (column >= p.h) return;
  Out* out = static_cast<Out*>(p.out) + first * p.h + column;
  float total[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) total[k] = 0.0f;
  for (int i = 0; i < here; ++i)
    if (count_of[i] == 0) store_columns<8>(out + static_cast<i64>(i) * p.h, total);
  for (int j = 0; j < all; j += kAbreast) {
    uint4 pairs[kAbreast];
#pragma unroll
    for (int n = 0; n < kAbreast; ++n)
      if (j + n < all)
        pairs[n] = __ldcs(reinterpret_cast<const uint4*>(p.y + static_cast<i64>(row_of[j + n]) * p.h + column));
#pragma unroll
    for (int n = 0; n < kAbreast; ++n) {
      if (j + n >= all) continue;
      const float weight = weight_of[j + n];
      const u32 words[4] = {pairs[n].x, pairs[n].y, pairs[n].z, pairs[n].w};
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float value = __uint_as_float(k % 2 ? words[k / 2] & 0xffff0000u : words[k / 2] << 16);
        total[k] = __fadd_rn(total[k], __fmul_rn(weight, value));
      }
      const int token = last_of[j + n];
      if (token < 0) continue;
      store_columns<8>(out + static_cast<i64>(token) * p.h, total);
#pragma unroll
      for (int k = 0; k < 8; ++k) total[k] = 0.0f;
    }
  }
}
