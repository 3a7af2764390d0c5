// Thin wrappers of the PTX that Hopper kernels are made of: shared addresses, mbarrier, TMA,
// clusters, register budgets, fences. Names follow the PTX ISA. Included by every kernel; needs no
// other header, so that NVRTC compiles it with nothing installed.
#pragma once

using i8 = signed char;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

// A TMA descriptor (CUtensorMap): 128 opaque bytes, passed as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

namespace farro {

__device__ __forceinline__ u32 smem_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier ----

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialized barriers visible to the copy engine and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Position in a ring of stages, and the parity that its barriers are waited for with: a consumer
// starts at 0, a producer at 1, since a fresh barrier's last phase counts as over.
template <int STAGES>
struct Ring {
  int stage = 0;
  u32 parity;
  __device__ explicit Ring(u32 start) : parity(start) {}
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// ---- TMA ----

// Asks L2 for the sector at an address, and waits for nothing.
__device__ __forceinline__ void prefetch_to_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// One 2-D box at (x, y) (x along the contiguous dimension) to shared memory; outside is zero. x is
// a multiple of 16 bytes: from others the copy engine stops with an illegal instruction.
__device__ __forceinline__ void tma_load(u32 smem, const TensorMap* map, int x, int y,
                                         u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(smem),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// As tma_load, the same box to the same offset of every CTA of the cluster whose bit is in `ranks`, and
// its bytes to the barrier at that offset of each.
__device__ __forceinline__ void tma_load_multicast(u32 smem, const TensorMap* map, int x, int y,
                                                   u32 barrier, u16 ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem),
      "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(ranks)
      : "memory");
}

// A box of a matrix whose rows are seen as [groups][2][4][2] (tensor_map.encode_groups): x bytes along
// a row, from group y on.
__device__ __forceinline__ void tma_load_groups(u32 smem, const TensorMap* map, int x, int y,
                                                u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, 0, 0, 0, %3}], [%4];" ::"r"(smem),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}

// A box of the matrices of experts (tensor_map.encode_experts): x bytes along a row, row y, expert z.
__device__ __forceinline__ void tma_load_expert(u32 smem, const TensorMap* map, int x, int y, int z,
                                                u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(smem),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same where each 8 rows of a first half are followed by 8 of a second (tensor_map.encode_pairs):
// x bytes along a row, from eight rows `block` of both halves on.
__device__ __forceinline__ void tma_load_pairs(u32 smem, const TensorMap* map, int x, int block,
                                               int expert, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, 0, 0, %3, %4}], [%5];" ::"r"(smem),
      "l"(map), "r"(x), "r"(block), "r"(expert), "r"(barrier)
      : "memory");
}

// `bytes` neighbouring bytes; addresses and size are multiples of 16.
__device__ __forceinline__ void bulk_load(u32 smem, const void* global, int bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// A 3-D box from shared memory (a multiple of 128 bytes) to (0, y, z); outside nothing is written. Only
// lanes that store count in the two functions below.
__device__ __forceinline__ void tma_store_groups(const TensorMap* map, int y, int z, u32 smem) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {0, %1, %2}], [%3];\n"
      "cp.async.bulk.commit_group;" ::"l"(map),
      "r"(y), "r"(z), "r"(smem)
      : "memory");
}

// A 2-D box from shared memory to (x, y), where `valid`; a group either way.
__device__ __forceinline__ void tma_store(const TensorMap* map, int x, int y, u32 smem, bool valid) {
  if (valid)
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
                 "r"(x), "r"(y), "r"(smem)
                 : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until shared memory has been read by all stores of this thread but the last PENDING.
template <int PENDING>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Between this thread's ordinary stores to shared memory and what tells wgmma, or TMA, of them; and
// between its loads, where their values were not used yet, and what lets TMA write there again.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Small asynchronous copies (a producer warp's scales) ----

// BYTES (4, 8 or 16, aligned so) to shared memory, or zeros where `valid` is false (nothing is read).
template <int BYTES>
__device__ __forceinline__ void cp_async(u32 smem, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem), "l"(global),
               "n"(BYTES), "r"(valid ? BYTES : 0)
               : "memory");
}

// The first `bytes` (0 to 16) of 16, and zeros after them; past L1, which would not be read again.
__device__ __forceinline__ void cp_async_16(u32 smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes)
               : "memory");
}

// Arrive at the barrier once this thread's cp.async so far have landed.
__device__ __forceinline__ void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Before a thread that copied leaves: its copies have landed.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// ---- Clusters ----

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The two halves of a barrier of the cluster that orders no memory: a CTA says that it needs no other
// any more, and leaves once all have said so. Results on their way to global memory are not waited for.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// Arrive at a barrier of another CTA of the cluster (map_to_rank), or of this one. Releases within the
// CTA, which is enough to give a stage of operands back: a release to the cluster halved the speed.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

// Before a CTA leaves whose memory others read: they have used what they read.
__device__ __forceinline__ void cluster_leave() {
  cluster_arrive_relaxed();
  cluster_wait();
}

// As mbarrier_arrive_remote, and what this thread (or its warp, before __syncwarp) wrote to any CTA of
// the cluster is seen by who waits with mbarrier_wait_cluster.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 remote) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

// The larger one stays in shared memory, of this CTA or of another of the cluster (map_to_rank).
__device__ __forceinline__ void raise_to(u32 smem, u32 value) {
  asm volatile("red.relaxed.cta.shared::cta.max.u32 [%0], %1;" ::"r"(smem), "r"(value) : "memory");
}
__device__ __forceinline__ void raise_remote_to(u32 remote, u32 value) {
  asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;" ::"r"(remote), "r"(value)
               : "memory");
}

// The address of `smem` in CTA `rank` of the cluster.
__device__ __forceinline__ u32 map_to_rank(u32 smem, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem), "r"(rank));
  return remote;
}

// 16 aligned bytes of a CTA of the cluster; an address of the own CTA will do too.
__device__ __forceinline__ float4 load_remote(u32 remote) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(remote)
               : "memory");
  return value;
}

__device__ __forceinline__ int load_remote_int(u32 remote) {
  int value;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
  return value;
}

__device__ __forceinline__ void store_remote_int(u32 remote, int value) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
}

// Wait until `threads` threads of the CTA (whole warps) have come to barrier `id` (1 to 15).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Kernels that overlap (Launch(..., overlaps=True)) ----

// All that the kernels before this one wrote is there; at once where the launch does not overlap.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The next kernel may begin once every CTA has said so, or ended.
__device__ __forceinline__ void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Register budgets ----

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace farro
