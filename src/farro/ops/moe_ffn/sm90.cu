// moe_ffn's two grouped INT8 products on SM90a, over routes sorted by expert.
//
// Weights fill the 64-row side of wgmma, routes the narrow one. Persistent over (expert, up to TOKENS
// routes, 64 * WARPGROUPS * WAVES weight rows): warpgroup 0 fills a ring of stages of 128 of K, its
// first warp with weights by TMA, the last ones with rows; its second fills a ring of scales. Each other
// warpgroup multiplies WAVES times 64 weight rows, by groups: total = fma(float(sum), sX * sW, total).
//
// GATED (gate/up): of 16 weight rows 8 are gate and 8 up, so that a thread has both of a feature; SwiGLU
// and the quantizer follow in registers. Where a group has more features than a CTA, a cluster shares
// their maxima. GATHERS: rows are read where tokens have them, 16 bytes at a time.
#include "sm90_finish.cuh"
#include "sm90_order.cuh"
#include "sm90_produce.cuh"

using namespace farro;

template <class T, int WIDTH>
__device__ __forceinline__ void compute(const TensorMap* results, const Problem& p, const Tile& tile,
                                        u8* shared, u32 base, Consumer<T>& c) {
  float total[T::WAVES][WIDTH / 2];
  multiply_tile<T, WIDTH>(p, shared, base, c, total);
  if constexpr (T::GATED) {
    activate<T, WIDTH>(p, tile, shared, base, c, total);
  } else {
    if constexpr (T::STAGED)
      if (p.out_vector > 1) return send<T, WIDTH>(results, p, tile, shared, base, c, total);
    store<T, WIDTH>(p, tile, c, total);
  }
}

template <class T>
__device__ __forceinline__ void consume(const TensorMap* results, const Problem& p, Order<T>& tiles,
                                        u8* shared, u32 base, Consumer<T>& c) {
  constexpr int W = T::TOKENS;
  Tile tile;
  while (tiles.take(tile)) {  // in the narrowest product that holds the tile's rows
    if constexpr (W == 128)
      if (tile.rows > W / 2 && tile.rows <= W / 4 * 3) {
        compute<T, W / 4 * 3>(results, p, tile, shared, base, c);
        continue;
      }
    if constexpr (W >= 32)
      if (tile.rows <= W / 4) {
        compute<T, W / 4>(results, p, tile, shared, base, c);
        continue;
      }
    if constexpr (W >= 16)
      if (tile.rows <= W / 2) {
        compute<T, W / 2>(results, p, tile, shared, base, c);
        continue;
      }
    compute<T, W>(results, p, tile, shared, base, c);
  }
}

// ---- The kernels ----

template <class T>
__device__ __forceinline__ void run(const TensorMap* weights, const TensorMap* rows,
                                    const TensorMap* results, const Problem& p) {
  extern __shared__ u8 raw[];
  const u32 raw_address = smem_address(raw), base = (raw_address + 1023) & ~1023u;
  u8* shared = raw + (base - raw_address);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_tensor_map(weights);
    if constexpr (!T::GATHERS) prefetch_tensor_map(rows);
    if constexpr (!T::GATED && T::STAGED) prefetch_tensor_map(results);
    for (int i = 0; i < T::STAGES; ++i) {
      // weights, and rows
      mbarrier_init(base + T::full + 8 * i, 1 + (T::GATHERS ? 32 * T::GATHERERS : 1));
      mbarrier_init(base + T::empty + 8 * i, 4 * T::WARPGROUPS);
    }
    for (int i = 0; i < T::SLOTS; ++i) {
      mbarrier_init(base + T::scale_full + 8 * i, 32);
      mbarrier_init(base + T::scale_empty + 8 * i, 4 * T::WARPGROUPS);
    }
    mbarrier_init(base + T::ready, 4 * T::WARPGROUPS * T::CLUSTER);
    if constexpr (T::HANDED) {
      mbarrier_init(base + T::handed_full, 1);
      mbarrier_init(base + T::handed_empty, Order<T>::kReaders);
    }
    fence_mbarrier_init();
  }
  if constexpr (T::GATED)
    for (int i = threadIdx.x; i < 3 * T::parts * T::TOKENS; i += T::threads)
      reinterpret_cast<u32*>(shared + T::maxima)[i] = 0;
  if constexpr (T::GATHERS) wait_for_kernel_before();  // routes
  // The kernel after this one may rely on routes, and on these alone without waiting
  if (threadIdx.x == 0) let_next_kernel_begin();
  Order<T> tiles(p, reinterpret_cast<int*>(shared + T::table), base);
  tiles.read(p.offsets);
  __syncthreads();
  tiles.add_up();
  if constexpr (T::CLUSTER > 1) cluster_sync();
  else __syncthreads();
  tiles.begin(blockIdx.x / T::CLUSTER, gridDim.x / T::CLUSTER);

  if (warp < 4) {
    if constexpr (T::exchange) give_registers<T::given>();
    if (warp == 0) {
      bring_weights<T>(weights, p, tiles, base, lane);
    } else if (warp == 1) {
      if constexpr (!T::GATHERS) wait_for_kernel_before();
      bring_scales<T>(p, tiles, base, lane);
    } else if constexpr (!T::GATHERS) {
      if (warp == 2) {
        wait_for_kernel_before();
        bring_rows<T>(rows, p, tiles, base, lane);
      }
      if constexpr (T::HANDED)
        if (warp == 3 && lane == 0 && (T::CLUSTER == 1 || cluster_rank() == 0))
          tiles.hand_out(p.taken, base);
    } else if (warp < 2 + T::GATHERERS) {
      gather_rows<T>(p, tiles, base, warp - 2, lane);
    }
  } else {
    if constexpr (T::exchange) take_registers<T::taken>();
    Consumer<T> c;
    c.which = warp / 4 - 1, c.warp = warp % 4, c.lane = lane;
    consume<T>(results, p, tiles, shared, base, c);
    if constexpr (!T::GATED && T::STAGED) tma_store_wait<0>();
  }
  if constexpr (T::CLUSTER > 1) {  // the others may still raise maxima here
    __syncwarp();
    cluster_leave();
  }
}

// Rows of tokens, gathered.
template <int GROUP, int TOKENS, int WARPGROUPS, int WAVES, int STAGES, int CTAS>
__global__ void __launch_bounds__(128 + 128 * WARPGROUPS, CTAS)
    moe_gate_up(const __grid_constant__ TensorMap weights, const __grid_constant__ Problem p) {
  run<Traits<true, true, GROUP, TOKENS, WARPGROUPS, WAVES, STAGES, CTAS>>(&weights, nullptr, nullptr, p);
}

// Rows of routes, as moe_gather left them.
template <int GROUP, int TOKENS, int WARPGROUPS, int WAVES, int STAGES, int CTAS>
__global__ void __launch_bounds__(128 + 128 * WARPGROUPS, CTAS)
    moe_gate_up_gathered(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows,
                         const __grid_constant__ Problem p) {
  run<Traits<true, false, GROUP, TOKENS, WARPGROUPS, WAVES, STAGES, CTAS>>(&weights, &rows, nullptr, p);
}

template <int GROUP, int TOKENS, int WARPGROUPS, int WAVES, int STAGES, int CTAS>
__global__ void __launch_bounds__(128 + 128 * WARPGROUPS, CTAS)
    moe_down(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap rows,
             const __grid_constant__ TensorMap results, const __grid_constant__ Problem p) {
  run<Traits<false, false, GROUP, TOKENS, WARPGROUPS, WAVES, STAGES, CTAS>>(&weights, &rows, &results, p);
}
