// 2:4 sparse wgmma: D (FP32, registers) += A (64 x 32, two of each four kept, registers) * B (32 x N,
// shared, K-major in 128-byte rows with the 128-byte swizzle that TMA writes), FP16 or BF16.
#pragma once

#include "wgmma.cuh"

namespace farro {

// m64nNk32. Warp w, lane l holds of row r = 16 w + l / 4, j = l % 4: a[0] the two kept values of the
// four K from 4 j on, a[2] those from 16 + 4 j on, a[1] and a[3] the same of row r + 8. Lanes 0 and 1
// of each quad give `meta`: nibble c of its low half is idx0 | idx1 << 2 of row r and the c-th four of
// K, the high half row r + 8.
template <int N>
struct WgmmaSparse;

#define FARRO_WGMMA_SPARSE(N, REGISTERS, A0, A1, A2, A3, B, META, P)                             \
  template <>                                                                                    \
  struct WgmmaSparse<N> {                                                                        \
    static __device__ __forceinline__ void fp16(float (&d)[REGISTERS], const u32 (&a)[4], u64 b, \
                                                u32 meta, bool accumulate) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                   "wgmma.mma_async.sp.sync.aligned.m64n" #N                                     \
                   "k32.f32.f16.f16 {" FARRO_T##REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2        \
                   ", %" #A3 "}, %" #B ", %" #META ", 0, p, 1, 1, 0;\n}"                         \
                   : FARRO_D##REGISTERS("+f", 0)                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta),              \
                     "r"(static_cast<int>(accumulate)));                                         \
    }                                                                                            \
    static __device__ __forceinline__ void bf16(float (&d)[REGISTERS], const u32 (&a)[4], u64 b, \
                                                u32 meta, bool accumulate) {                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                   "wgmma.mma_async.sp.sync.aligned.m64n" #N                                     \
                   "k32.f32.bf16.bf16 {" FARRO_T##REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2      \
                   ", %" #A3 "}, %" #B ", %" #META ", 0, p, 1, 1, 0;\n}"                         \
                   : FARRO_D##REGISTERS("+f", 0)                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(meta),              \
                     "r"(static_cast<int>(accumulate)));                                         \
    }                                                                                            \
  };

// N, registers, and the operands' numbers after them
FARRO_WGMMA_SPARSE(8, 4, 4, 5, 6, 7, 8, 9, 10)
FARRO_WGMMA_SPARSE(16, 8, 8, 9, 10, 11, 12, 13, 14)
FARRO_WGMMA_SPARSE(32, 16, 16, 17, 18, 19, 20, 21, 22)
FARRO_WGMMA_SPARSE(64, 32, 32, 33, 34, 35, 36, 37, 38)
FARRO_WGMMA_SPARSE(96, 48, 48, 49, 50, 51, 52, 53, 54)
FARRO_WGMMA_SPARSE(128, 64, 64, 65, 66, 67, 68, 69, 70)
FARRO_WGMMA_SPARSE(144, 72, 72, 73, 74, 75, 76, 77, 78)
FARRO_WGMMA_SPARSE(176, 88, 88, 89, 90, 91, 92, 93, 94)
FARRO_WGMMA_SPARSE(192, 96, 96, 97, 98, 99, 100, 101, 102)
FARRO_WGMMA_SPARSE(256, 128, 128, 129, 130, 131, 132, 133, 134)

}  // namespace farro
