// nvfp4_group_mm on SM90a with the gated activation and the quantizer as its result, in the same launch.
#include "sm90_gated.cuh"
#include "sm90_kernel.cuh"

using namespace farro;

template <bool BF16, bool INSIDE, int CONSUMERS, int TOKENS, int STEP, int STAGES, int CTAS, int SPLIT,
          int PAIR>
__global__ void __launch_bounds__(128 + 128 * CONSUMERS, CTAS)
    nvfp4_gated(const __grid_constant__ TensorMap few_rows, const __grid_constant__ TensorMap all_rows,
                const __grid_constant__ Problem p, const __grid_constant__ Rows rows,
                const __grid_constant__ Gated g) {
  run<Traits<true, BF16, INSIDE, CONSUMERS, TOKENS, STEP, STAGES, CTAS, SPLIT, PAIR>>(&few_rows, &all_rows, p,
                                                                               rows, Quantized{g});
}
