// wgmma for INT8: D (int32, registers) = [D +] A (64 x 32, shared) * B (32 x N, shared), both
// K-major in 128-byte rows with the 128-byte swizzle that TMA writes.
#pragma once

#include "ptx.cuh"

namespace farro {

// Shared-memory matrix descriptor: 128-byte swizzle, 8 rows of 128 bytes an atom (1024 bytes).
// The next 32 bytes along K are at descriptor + 2.
__device__ __forceinline__ u64 wgmma_descriptor(u32 smem) {
  return (static_cast<u64>(1) << 62) | (static_cast<u64>(1024 >> 4) << 32) |
         (static_cast<u64>(1) << 16) | ((smem & 0x3FFFF) >> 4);
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

// Operand lists: FARRO_D8(d, i) is eight accumulators from d[i] on.
#define FARRO_D4(d, i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define FARRO_D8(d, i) FARRO_D4(d, i), FARRO_D4(d, i + 4)
#define FARRO_D16(d, i) FARRO_D8(d, i), FARRO_D8(d, i + 8)
#define FARRO_D32(d, i) FARRO_D16(d, i), FARRO_D16(d, i + 16)
#define FARRO_D48(d, i) FARRO_D32(d, i), FARRO_D16(d, i + 32)
#define FARRO_D56(d, i) FARRO_D48(d, i), FARRO_D8(d, i + 48)
#define FARRO_D64(d, i) FARRO_D32(d, i), FARRO_D32(d, i + 32)

// m64nNk32, N columns; accumulate = false starts from zero.
template <int N>
struct WgmmaInt8;

template <>
struct WgmmaInt8<8> {
  static __device__ __forceinline__ void run(int (&d)[4], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {"
        "%0, %1, %2, %3}, "
        "%4, %5, p;\n}"
        : FARRO_D4(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

template <>
struct WgmmaInt8<16> {
  static __device__ __forceinline__ void run(int (&d)[8], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, p;\n}"
        : FARRO_D8(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

template <>
struct WgmmaInt8<32> {
  static __device__ __forceinline__ void run(int (&d)[16], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p;\n}"
        : FARRO_D16(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

template <>
struct WgmmaInt8<64> {
  static __device__ __forceinline__ void run(int (&d)[32], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p;\n}"
        : FARRO_D32(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

template <>
struct WgmmaInt8<96> {
  static __device__ __forceinline__ void run(int (&d)[48], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "
        "%48, %49, p;\n}"
        : FARRO_D48(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

template <>
struct WgmmaInt8<112> {
  static __device__ __forceinline__ void run(int (&d)[56], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55}, "
        "%56, %57, p;\n}"
        : FARRO_D56(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

template <>
struct WgmmaInt8<128> {
  static __device__ __forceinline__ void run(int (&d)[64], u64 a, u64 b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p;\n}"
        : FARRO_D64(d, 0)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

}  // namespace farro
