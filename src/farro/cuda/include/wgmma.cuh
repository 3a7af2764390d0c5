// wgmma: D (registers) = [D +] A (64 x 32, shared) * B (32 x N, shared), of bytes, both K-major in
// 128-byte rows with the 128-byte swizzle that TMA writes. INT8 sums to INT32, FP8 E4M3 to FP32.
#pragma once

#include "ptx.cuh"

namespace farro {

// Shared-memory matrix descriptor: 128-byte swizzle, 8 rows of 128 bytes an atom (1024 bytes).
// The next 32 bytes along K are at descriptor + 2.
__device__ __forceinline__ u64 wgmma_descriptor(u32 smem) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) |
         (static_cast<u64>(1) << 16) | ((smem & 0x3FFFF) >> 4);
}

// The same from its lower half: what moves through a ring is then added in 32 bits.
__device__ __forceinline__ u64 descriptor_of(u32 low) {
  return static_cast<u64>(0x40000040) << 32 | low;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Accumulators must not be read, moved or kept elsewhere between issue and wait.
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(int (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// m64nNk32, N columns; accumulate = false starts from zero.
template <int N>
struct WgmmaInt8;
template <int N>
struct WgmmaFp8;

// Accumulators as operands, of constraint C ("+r" or "+f"), and as text
#define FARRO_D4(C, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define FARRO_D8(C, i) FARRO_D4(C, i), FARRO_D4(C, i + 4)
#define FARRO_D16(C, i) FARRO_D8(C, i), FARRO_D8(C, i + 8)
#define FARRO_D32(C, i) FARRO_D16(C, i), FARRO_D16(C, i + 16)
#define FARRO_D40(C, i) FARRO_D32(C, i), FARRO_D8(C, i + 32)
#define FARRO_D48(C, i) FARRO_D32(C, i), FARRO_D16(C, i + 32)
#define FARRO_D56(C, i) FARRO_D48(C, i), FARRO_D8(C, i + 48)
#define FARRO_D64(C, i) FARRO_D32(C, i), FARRO_D32(C, i + 32)
#define FARRO_D72(C, i) FARRO_D64(C, i), FARRO_D8(C, i + 64)
#define FARRO_D80(C, i) FARRO_D64(C, i), FARRO_D16(C, i + 64)
#define FARRO_D88(C, i) FARRO_D80(C, i), FARRO_D8(C, i + 80)
#define FARRO_D96(C, i) FARRO_D64(C, i), FARRO_D32(C, i + 64)
#define FARRO_D104(C, i) FARRO_D96(C, i), FARRO_D8(C, i + 96)
#define FARRO_D112(C, i) FARRO_D96(C, i), FARRO_D16(C, i + 96)
#define FARRO_D120(C, i) FARRO_D112(C, i), FARRO_D8(C, i + 112)
#define FARRO_D128(C, i) FARRO_D64(C, i), FARRO_D64(C, i + 64)
#define FARRO_T4 "%0, %1, %2, %3"
#define FARRO_T8 FARRO_T4 ", %4, %5, %6, %7"
#define FARRO_T16 FARRO_T8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FARRO_T32 FARRO_T16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FARRO_T40 FARRO_T32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FARRO_T48 FARRO_T32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FARRO_T56 FARRO_T48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FARRO_T64 FARRO_T56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FARRO_T72 FARRO_T64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define FARRO_T80 FARRO_T72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define FARRO_T88 FARRO_T80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define FARRO_T96 FARRO_T64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FARRO_T104 FARRO_T96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define FARRO_T112 FARRO_T104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define FARRO_T120 FARRO_T112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FARRO_T128 FARRO_T96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define FARRO_WGMMA(N, REGISTERS, A, B, P)                                                       \
  template <>                                                                                    \
  struct WgmmaInt8<N> {                                                                          \
    static __device__ __forceinline__ void run(int (&d)[REGISTERS], u64 a, u64 b,               \
                                               bool accumulate) {                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" FARRO_T##REGISTERS     \
                   "}, %" #A ", %" #B ", p;\n}"                                                  \
                   : FARRO_D##REGISTERS("+r", 0)                                                 \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                         \
    }                                                                                            \
  };                                                                                             \
  template <>                                                                                    \
  struct WgmmaFp8<N> {                                                                           \
    static __device__ __forceinline__ void run(float (&d)[REGISTERS], u64 a, u64 b,              \
                                               bool accumulate) {                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\n"                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N                                        \
                   "k32.f32.e4m3.e4m3 {" FARRO_T##REGISTERS "}, %" #A ", %" #B ", p, 1, 1;\n}"   \
                   : FARRO_D##REGISTERS("+f", 0)                                                 \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                         \
    }                                                                                            \
  };

// N, registers, and the operands' numbers after them
FARRO_WGMMA(8, 4, 4, 5, 6)
FARRO_WGMMA(16, 8, 8, 9, 10)
FARRO_WGMMA(32, 16, 16, 17, 18)
FARRO_WGMMA(64, 32, 32, 33, 34)
FARRO_WGMMA(80, 40, 40, 41, 42)
FARRO_WGMMA(96, 48, 48, 49, 50)
FARRO_WGMMA(112, 56, 56, 57, 58)
FARRO_WGMMA(128, 64, 64, 65, 66)
FARRO_WGMMA(144, 72, 72, 73, 74)
FARRO_WGMMA(160, 80, 80, 81, 82)
FARRO_WGMMA(176, 88, 88, 89, 90)
FARRO_WGMMA(192, 96, 96, 97, 98)
FARRO_WGMMA(208, 104, 104, 105, 106)
FARRO_WGMMA(224, 112, 112, 113, 114)
FARRO_WGMMA(240, 120, 120, 121, 122)
FARRO_WGMMA(256, 128, 128, 129, 130)

}  // namespace farro
