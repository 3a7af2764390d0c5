// nvfp4_group_mm on SM90a: grouped products with paired-4:8 sparse weights through wgmma.sp.
//
// Persistent over (expert, 64 * CONSUMERS weight rows, up to TOKENS tokens). Two rings in shared memory:
// A, stages of STEP * 128 of K, holds compressed weights, which warp 0 brings by bulk copies; B, units
// of PART * 64 of K, activations as 16-bit operands. INSIDE, A also holds activations as they were given,
// and three warps expand them from there to B (never from memory: a load waits behind all the weights that
// are on their way); else TMA brings to B what sm90_expand.cu wrote. Each other warpgroup decodes 64
// weight rows to 16 bits in registers, 128 of K at a time, and multiplies them. A cluster of SPLIT CTAs
// shares K; the first adds their sums in order.
#include "sm90_kernel.cuh"
#include "sm90_store.cuh"

using namespace farro;

// The maps have boxes of T::few and of TOKENS rows: INSIDE of activations as they were given, else of
// those that were expanded.
template <bool BF16, bool INSIDE, int CONSUMERS, int TOKENS, int STEP, int STAGES, int CTAS, int SPLIT,
          int PAIR>
__global__ void __launch_bounds__(128 + 128 * CONSUMERS, CTAS)
    nvfp4_group(const __grid_constant__ TensorMap few_rows, const __grid_constant__ TensorMap all_rows,
                const __grid_constant__ Problem p, const __grid_constant__ Rows rows) {
  run<Traits<false, BF16, INSIDE, CONSUMERS, TOKENS, STEP, STAGES, CTAS, SPLIT, PAIR>>(&few_rows, &all_rows, p,
                                                                                rows, Stored{});
}
