// Kernels that each use one piece of farro/cuda/include, for test_headers.py.
#include "experts.cuh"
#include "fp8_codes.cuh"
#include "fp8_scales.cuh"
#include "nvfp4.cuh"
#include "nvfp4_gate.cuh"
#include "output.cuh"
#include "tiles.cuh"
#include "wgmma.cuh"
#include "wgmma_sparse.cuh"

using namespace farro;

extern __shared__ u8 raw[];

// Shared memory from a multiple of 1024 on, where the 128-byte swizzle begins.
struct Aligned {
  u32 base;
  u8* memory;
  __device__ Aligned() {
    const u32 address = smem_address(raw);
    base = (address + 1023) & ~1023u;
    memory = raw + (base - address);
  }
};

// ---- mbarrier: warp 0 hands rows of 32 numbers to warp 1 through a ring ----

template <int STAGES>
__global__ void __launch_bounds__(64) hand_over(const int* from, int* to, int rows) {
  __shared__ int slots[STAGES][32];
  __shared__ u64 full[STAGES], empty[STAGES];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(smem_address(full + i), 32);
      mbarrier_init(smem_address(empty + i), 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  Ring<STAGES> ring(threadIdx.x < 32 ? 1 : 0);
  for (int row = 0; row < rows; ++row, ring.next()) {
    const u32 ready = smem_address(full + ring.stage), free = smem_address(empty + ring.stage);
    if (threadIdx.x < 32) {
      mbarrier_wait(free, ring.parity);
      slots[ring.stage][lane] = from[32 * row + lane];
      mbarrier_arrive(ready);
    } else {
      mbarrier_wait(ready, ring.parity);
      to[32 * row + lane] = slots[ring.stage][31 - lane];
      mbarrier_arrive(free);
    }
  }
}

// ---- Named barriers: pairs of warps reverse rows together, each pair at its own pace ----

__global__ void __launch_bounds__(128) reverse_in_pairs(const int* from, int* to, int rows) {
  __shared__ int slots[2][64];
  const int pair = threadIdx.x / 64, thread = threadIdx.x % 64;
  for (int row = pair; row < (pair ? rows : rows / 2); ++row) {
    const int at = 64 * (2 * row + pair);
    slots[pair][thread] = from[at + thread];
    named_barrier(1 + pair, 64);
    to[at + thread] = slots[pair][63 - thread];
    named_barrier(1 + pair, 64);
  }
}

// ---- TMA: one box, as it then lies in shared memory ----

template <int ROWS, bool GROUPS>
__global__ void __launch_bounds__(128)
    load_box(const __grid_constant__ TensorMap map, u8* to, int x, int y) {
  const Aligned shared;
  const u32 barrier = shared.base + 128 * ROWS;
  for (int i = threadIdx.x; i < 128 * ROWS; i += 128) shared.memory[i] = 0x5B;
  fence_async_proxy();  // these stores before TMA's
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&map);
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, 128 * ROWS);
    if constexpr (GROUPS) tma_load_groups(shared.base, &map, x, y, barrier);
    else tma_load(shared.base, &map, x, y, barrier);
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < 128 * ROWS; i += 128) to[i] = shared.memory[i];
}

template <int ROWS, bool PAIRS>
__global__ void __launch_bounds__(128)
    load_expert_box(const __grid_constant__ TensorMap map, u8* to, int x, int y, int expert) {
  const Aligned shared;
  const u32 barrier = shared.base + 128 * ROWS;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, 128 * ROWS);
    if constexpr (PAIRS) tma_load_pairs(shared.base, &map, x, y, expert, barrier);
    else tma_load_expert(shared.base, &map, x, y, expert, barrier);
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < 128 * ROWS; i += 128) to[i] = shared.memory[i];
}

// ---- Bulk copy: neighbouring bytes, and none around them ----

__global__ void __launch_bounds__(128) copy_bulk(const u8* from, u8* to, int first, int bytes) {
  constexpr int room = 16384;
  const Aligned shared;
  const u32 barrier = shared.base + room;
  for (int i = threadIdx.x; i < room; i += 128) shared.memory[i] = 0x5B;
  fence_async_proxy();  // these stores before the copy's
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_expect(barrier, bytes);
    bulk_load(shared.base + first, from, bytes, barrier);
  }
  mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < room; i += 128) to[i] = shared.memory[i];
}

// Boxes of 16 rows of GROUPS groups, one after the other through the same shared memory.
template <int BYTES>
__global__ void __launch_bounds__(32)
    store_boxes(const __grid_constant__ TensorMap map, const u8* from, int boxes, int z) {
  const Aligned shared;
  const int lane = threadIdx.x;
  for (int box = 0; box < boxes; ++box) {
    if (lane == 0) tma_store_wait<0>();
    __syncwarp();
    for (int i = lane; i < BYTES; i += 32) shared.memory[i] = from[box * BYTES + i];
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) tma_store_groups(&map, 16 * box, z, shared.base);
  }
  if (lane == 0) tma_store_wait<0>();
}

// The same to (x, 8 * box), where `valid` has the box's bit.
template <int BYTES>
__global__ void __launch_bounds__(32)
    store_some_boxes(const __grid_constant__ TensorMap map, const u8* from, int boxes, int x, u32 valid) {
  const Aligned shared;
  const int lane = threadIdx.x;
  for (int box = 0; box < boxes; ++box) {
    if (lane == 0) tma_store_wait<0>();
    __syncwarp();
    for (int i = lane; i < BYTES; i += 32) shared.memory[i] = from[box * BYTES + i];
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) tma_store(&map, x, 8 * box, shared.base, valid >> box & 1);
  }
  if (lane == 0) tma_store_wait<0>();
}

// ---- cp.async: one piece a lane ----

template <int BYTES>
__global__ void __launch_bounds__(32) copy_small(const u8* from, u8* to, u32 valid) {
  __shared__ alignas(16) u8 slots[32 * BYTES];
  __shared__ u64 landed;
  const int lane = threadIdx.x, mine = lane * BYTES;
  for (int i = 0; i < BYTES; ++i) slots[mine + i] = 0x5B;
  if (lane == 0) mbarrier_init(smem_address(&landed), 32);
  __syncwarp();
  const bool wanted = valid >> lane & 1;
  cp_async<BYTES>(smem_address(slots + mine), from + (wanted ? mine : 0), wanted);
  cp_async_arrive(smem_address(&landed));
  mbarrier_wait(smem_address(&landed), 0);
  const int other = (lane + 7) % 32 * BYTES;  // another lane's, so that the barrier counts
  for (int i = 0; i < BYTES; ++i) to[other + i] = slots[other + i];
  cp_async_wait_all();
}

// Lane i copies the first i % 17 of its 16 bytes.
__global__ void __launch_bounds__(32) copy_partly(const u8* from, u8* to) {
  __shared__ alignas(16) u8 slots[32 * 16];
  const int lane = threadIdx.x, mine = lane * 16;
  for (int i = 0; i < 16; ++i) slots[mine + i] = 0x5B;
  cp_async_16(smem_address(slots + mine), from + mine, lane % 17);
  cp_async_wait_all();
  for (int i = 0; i < 16; ++i) to[mine + i] = slots[mine + i];
}

// ---- wgmma: two waves of 64 rows of A (128 x 128) times B (N x 128), transposed ----

template <class Sum, int N>
struct Product : WgmmaInt8<N> {};
template <int N>
struct Product<float, N> : WgmmaFp8<N> {};

template <class Sum, int N, bool ACCUMULATE>
__global__ void __launch_bounds__(128)
    multiply(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
             Sum* to) {
  const Aligned shared;
  constexpr int a_bytes = 128 * 128, b_bytes = N * 128;
  const u32 b_base = shared.base + a_bytes, barrier = b_base + b_bytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_expect(barrier, a_bytes + b_bytes);
    tma_load(shared.base, &map_a, 0, 0, barrier);
    tma_load(b_base, &map_b, 0, 0, barrier);
  }
  __syncthreads();
  mbarrier_wait(barrier, 0);
  for (int wave = 0; wave < 2; ++wave) {
    const int first = 64 * wave + 16 * warp + lane / 4;
    auto place = [&](int i) {
      return (first + (i & 2) * 4) * N + i / 4 * 8 + 2 * (lane % 4) + i % 2;
    };
    Sum d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = place(i) % 200;
    const u64 a = wgmma_descriptor(shared.base + 64 * wave * 128);
    const u64 b = descriptor_of(static_cast<u32>(wgmma_descriptor(b_base)));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k)
      Product<Sum, N>::run(d, a + 2 * k, b + 2 * k, ACCUMULATE || k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) to[place(i)] = d[i];
  }
}

// ---- Sparse wgmma: A (64 x 64, of each four two `kept`, chosen by `meta`) times B (N x 64) ----

template <int N, bool BF16, bool ACCUMULATE>
__global__ void __launch_bounds__(128)
    multiply_sparse(const __grid_constant__ TensorMap map_b, const u32* kept, const u32* meta,
                    float* to) {
  const Aligned shared;
  const u32 barrier = shared.base + N * 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_expect(barrier, N * 128);
    tma_load(shared.base, &map_b, 0, 0, barrier);
  }
  const int first = 16 * warp + lane / 4;
  auto place = [&](int i) {
    return (first + (i & 2) * 4) * N + i / 4 * 8 + 2 * (lane % 4) + i % 2;
  };
  u32 a[2][4], choice[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const u32 *row = kept + (first * 2 + k) * 8 + quad, *below = row + 8 * 2 * 8;
    a[k][0] = row[0], a[k][1] = below[0], a[k][2] = row[4], a[k][3] = below[4];
    choice[k] = quad < 2 ? meta[(8 * warp + lane / 4) * 2 + k] : 0xffffffffu;  // the others' is not read
  }
  float d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = place(i) % 200;
  __syncthreads();
  mbarrier_wait(barrier, 0);
  const u64 b = wgmma_descriptor(shared.base);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if constexpr (BF16) WgmmaSparse<N>::bf16(d, a[k], b + 4 * k, choice[k], ACCUMULATE || k > 0);
    else WgmmaSparse<N>::fp16(d, a[k], b + 4 * k, choice[k], ACCUMULATE || k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) to[place(i)] = d[i];
}

// ---- Clusters: in each round every CTA reads 128 numbers of every CTA ----

template <int CLUSTER>
__global__ void __launch_bounds__(32) exchange(float* to, int rounds) {
  __shared__ alignas(16) float slots[128];
  const int rank = static_cast<int>(cluster_rank());
  for (int round = 0; round < rounds; ++round) {
    for (int i = threadIdx.x; i < 128; i += 32)
      slots[i] = static_cast<float>(8192 * blockIdx.x + 1024 * round + 128 * rank + i);
    cluster_sync();
    for (int from = 0; from < CLUSTER; ++from) {
      const u32 theirs = map_to_rank(smem_address(slots + 4 * (31 - threadIdx.x)), from);
      const float4 read = load_remote(theirs);
      float* at = to + ((blockIdx.x * rounds + round) * CLUSTER + from) * 128 + 4 * threadIdx.x;
      at[0] = read.x, at[1] = read.y, at[2] = read.z, at[3] = read.w;
    }
    cluster_leave();  // what a CTA reads it has before the others write again
  }
}

// ---- Maxima over a cluster, in three tables by turns: all CTAs of it get those of all ----

template <int CLUSTER>
__global__ void __launch_bounds__(64) share_maxima(const u32* from, u32* to, int rounds) {
  __shared__ u32 tables[3][64];
  __shared__ u64 complete;
  const u32 ready = smem_address(&complete);
  for (int i = 0; i < 3; ++i) tables[i][threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    mbarrier_init(ready, 2 * CLUSTER);
    fence_mbarrier_init();
  }
  if constexpr (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    tables[(round + 1) % 3][threadIdx.x] = 0;
    const int slot = (threadIdx.x * 7 + round) % 64 / 2;  // two threads each
    const u32 at = smem_address(&tables[round % 3][slot]);
    const u32 value = from[(blockIdx.x * rounds + round) * 64 + threadIdx.x];
    if constexpr (CLUSTER > 1)
      for (int rank = 0; rank < CLUSTER; ++rank) raise_remote_to(map_to_rank(at, rank), value);
    else
      raise_to(at, value);
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if constexpr (CLUSTER > 1) {
      if (lane < CLUSTER) mbarrier_arrive_cluster(map_to_rank(ready, lane));
      mbarrier_wait_cluster(ready, round % 2);
    } else {
      if (lane == 0) mbarrier_arrive(ready);
      mbarrier_wait(ready, round % 2);
    }
    const u32 own = smem_address(&tables[round % 3][threadIdx.x]);
    to[(blockIdx.x * rounds + round) * 64 + threadIdx.x] =
        threadIdx.x < 32 ? tables[round % 3][threadIdx.x] : load_remote_int(map_to_rank(own, 0));
  }
  if constexpr (CLUSTER > 1) cluster_sync();
}

// ---- A number at a time, told to all CTAs of a cluster by the first, once all have read the one before ----

template <int CLUSTER>
__global__ void __launch_bounds__(64) tell_all(const int* from, int* to, int rounds) {
  __shared__ int told;
  __shared__ u64 barriers[2];
  const u32 full = smem_address(barriers), empty = smem_address(barriers + 1), slot = smem_address(&told);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 2 * CLUSTER);
    fence_mbarrier_init();
  }
  cluster_sync();
  for (int round = 0; round < rounds; ++round) {
    if (cluster_rank() == 0 && threadIdx.x == 0) {
      mbarrier_wait(empty, (round + 1) % 2);
      for (int rank = 0; rank < CLUSTER; ++rank) {
        store_remote_int(map_to_rank(slot, rank), from[blockIdx.x / CLUSTER * rounds + round]);
        mbarrier_arrive_cluster(map_to_rank(full, rank));
      }
    }
    __syncwarp();
    mbarrier_wait_cluster(full, round % 2);
    to[(blockIdx.x * rounds + round) * 64 + threadIdx.x] = load_remote_int(slot);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive_remote(map_to_rank(empty, 0));
  }
  cluster_sync();
}

// ---- Kernels that overlap: the second begins while the first is still at work ----

__global__ void __launch_bounds__(32) write_late(int* to, int value) {
  let_next_kernel_begin();
  const i64 begun = clock64();
  while (clock64() - begun < 200000) {
  }
  to[32 * blockIdx.x + threadIdx.x] = value + 32 * blockIdx.x + threadIdx.x;
}

__global__ void __launch_bounds__(32) read_after(const int* from, int* to) {
  wait_for_kernel_before();
  to[32 * blockIdx.x + threadIdx.x] = __ldcg(from + 32 * blockIdx.x + threadIdx.x);
}

// ---- Multicast: each CTA brings 8 rows of each box to all of its cluster, and each copies whole boxes
// out, at a pace of its own; a stage is filled again when all CTAs have given it back ----

template <int CLUSTER, int STAGES>
__global__ void __launch_bounds__(64)
    share(const __grid_constant__ TensorMap map, u8* to, int boxes) {
  constexpr int part = 8 * 128, box = CLUSTER * part;
  const Aligned shared;
  const u32 full = shared.base + STAGES * box, empty = full + 8 * STAGES;
  const int rank = static_cast<int>(cluster_rank()), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(full + 8 * i, 1);
      mbarrier_init(empty + 8 * i, CLUSTER);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x < 32) {
    Ring<STAGES> ring(1);
    for (int i = 0; lane == 0 && i < boxes; ++i, ring.next()) {
      mbarrier_wait(empty + 8 * ring.stage, ring.parity);
      mbarrier_expect(full + 8 * ring.stage, box);
      tma_load_multicast(shared.base + ring.stage * box + rank * part, &map, 0,
                         i * 8 * CLUSTER + rank * 8, full + 8 * ring.stage, (1 << CLUSTER) - 1);
    }
    __syncwarp();
  } else {
    Ring<STAGES> ring(0);
    for (int i = 0; i < boxes; ++i, ring.next()) {
      mbarrier_wait(full + 8 * ring.stage, ring.parity);
      if ((i * 7 + rank) % 5 == 0) __nanosleep(500 * rank);
      u8* at = to + (static_cast<i64>(blockIdx.x) * boxes + i) * box;
      for (int j = lane; j < box; j += 32) at[j] = shared.memory[ring.stage * box + j];
      __syncwarp();
      if (lane < CLUSTER) mbarrier_arrive_remote(map_to_rank(empty + 8 * ring.stage, lane));
    }
  }
  cluster_arrive_relaxed();
  cluster_wait();
}

// ---- setmaxnreg: more live values than 168 registers hold ----

__global__ void __launch_bounds__(384, 1) trade_registers(const int* from, int* to) {
  constexpr int count = 192;
  if (threadIdx.x < 128) {
    give_registers<40>();
    to[threadIdx.x] = from[threadIdx.x];
  } else {
    take_registers<232>();
    const int thread = threadIdx.x - 128;
    int x[count];
#pragma unroll
    for (int i = 0; i < count; ++i) x[i] = from[128 + i * 256 + thread];
    wgmma_hold(x);
#pragma unroll
    for (int i = 0; i < count; ++i) to[128 + i * 256 + thread] = x[count - 1 - i];
  }
}

// ---- Output types ----

template <class Out>
__global__ void convert_all(const float* from, Out* to, u32* pairs, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  to[i] = convert(from[i], Out{});
  if constexpr (sizeof(Out) == 2)
    if (i % 2 == 0) pairs[i / 2] = pack2(from[i], from[i + 1], Out{});
}

__global__ void read_bias(const void* bias, int kind, i64 stride, float* to, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = load_bias(bias, static_cast<BiasKind>(kind), i * stride);
}

// ---- Order of tiles ----

__global__ void visit(int* to, int row_tiles, int column_tiles, int raster) {
  const int t = blockIdx.x * blockDim.x + threadIdx.x;
  if (t < row_tiles * column_tiles)
    tile_at(t, row_tiles, column_tiles, raster, to[2 * t], to[2 * t + 1]);
}

// ---- Tiles of experts: the first warp adds them up, then each warp takes every `step`-th tile ----

__global__ void __launch_bounds__(128)
    share_tiles(const int* counts, int* sums, int* owners, int experts, int rows, int step) {
  int* first = reinterpret_cast<int*>(raw);
  add_up_tiles(first, experts, [&](int e) { return (counts[e] + rows - 1) / rows; });
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += 128) sums[e] = first[e];
  const int tiles = first[experts];
  int expert = 0;
  for (int tile = threadIdx.x / 32; tile < tiles; tile += step) {
    to_expert_of(tile, first, experts, expert);
    owners[32 * tile + threadIdx.x % 32] = expert;
  }
}

__global__ void __launch_bounds__(128) first_of_warp(const int* from, int* to) {
  to[threadIdx.x] = uniform(from[threadIdx.x]);
}

// ---- Parts of the FP8 kernels: scales of a tile's rows, and GELU ----

template <int ROWS>
__global__ void __launch_bounds__(32)
    row_scales(const __grid_constant__ Problem p, float* to, int first, int block, int blocks) {
  __shared__ alignas(16) float slots[ROWS * kScaleBlocks];
  for (int i = threadIdx.x; i < ROWS * kScaleBlocks; i += 32) slots[i] = 1e30f;
  __syncwarp();
  load_row_scales<ROWS>(p, smem_address(slots), first, block, blocks, threadIdx.x);
  cp_async_wait_all();
  __syncwarp();
  for (int i = threadIdx.x; i < ROWS * kScaleBlocks; i += 32) to[i] = slots[i];
}

__global__ void gelu_all(const float* from, float* to, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = gelu_tanh(from[i]);
}

// Four neighbours share a scale.
__global__ void encode_fours(const float* from, float* scale, u32* to, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  u32 largest = 0;
  for (int j = 0; j < 4; ++j) largest = max(largest, __float_as_uint(from[4 * i + j]) & 0x7fffffff);
  const float* four = from + 4 * i;
  scale[i] = scale_of(largest);
  to[i] = codes_of(four[0], four[1], four[2], four[3], inverse_of(scale[i]));
}

// ---- Parts of the NVFP4 kernels ----

__global__ void rows_of_experts(const __grid_constant__ Rows p, int* to) {
  const int expert = blockIdx.x * blockDim.x + threadIdx.x;
  if (expert < p.experts) rows_of(p, expert, to[2 * expert], to[2 * expert + 1]);
}

// Four bytes as E4M3 (4 numbers), then the codes in their low and in their high nibbles.
__global__ void decode_bytes(const u32* from, uint2* to, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const u32 bytes = from[i], low = low_codes(bytes), high = high_codes(bytes);
  to[3 * i] = make_uint2(low_to_halves(bytes), high_to_halves(bytes));
  to[3 * i + 1] = make_uint2(low_to_halves(low), high_to_halves(low));
  to[3 * i + 2] = make_uint2(low_to_halves(high), high_to_halves(high));
}

// Products of halves with both, with the low and with the high of another pair.
template <bool BF16>
__global__ void multiply_pairs(const u32* a, const u32* b, u32* to, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  if constexpr (!BF16) to[i] = multiply_halves(a[i], b[i]);
  to[count + i] = multiply_by<BF16, false>(a[i], b[i]);
  to[2 * count + i] = multiply_by<BF16, true>(a[i], b[i]);
}

__global__ void widen_halves(const u32* from, u32* to, float factor, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = halves_to_brains(from[i], factor);
}

__global__ void expand_blocks(const uint4* codes, const u8* scales, uint4* to, int blocks) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= blocks) return;
  uint4 units[4];
  expand_block(codes[i], scales[i], units);
  for (int u = 0; u < 4; ++u) to[4 * i + u] = units[u];
}

template <bool BF16>
__global__ void expand_units(const void* x, const u8* scales, uint4* to, int units) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < units) to[i] = unit_of<BF16>(x, scales, i / 4, i % 4);
}

__global__ void gate_pairs(const u32* gates, const u32* ups, u32* to, float2* values, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) to[i] = gated_pair(gates[i], ups[i]), values[i] = gated(gates[i], ups[i]);
}

// Scales and ratios of blocks whose largest magnitudes have these bits.
__global__ void scale_blocks(const u32* largest, const float* gscale, u32* scales, float* ratios, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) scales[i] = scale_of(largest[i], gscale[i], ratios[i]);
}
