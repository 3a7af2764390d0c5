// quantize_fp8_per_tensor on SM90a: two kernels side by side, so that x comes from memory once.
//
// fp8_largest reads x, a maximum a CTA. Meanwhile fp8_quantize's CTAs, one a multiprocessor, bring the
// first of x to shared memory and wait; then they quantize that, and of the rest the last first, which
// the other kernel has just left in L2. The two need room beside each other: of registers and threads,
// and of shared memory, whose share the first kernel asks for as if it used it (sm90.py).
#include "fp8_codes.cuh"
#include "output.cuh"

using namespace farro;

struct Task {
  const u8* x;
  u32* partial;  // of each CTA of fp8_largest, the bits of its largest magnitude
  u8* codes;
  float* scale;
  i64 bytes;  // of x, a multiple of 16
  int held;   // bytes of x that a CTA of fp8_quantize keeps, a multiple of 16
  int parts;  // CTAs of fp8_largest
};

constexpr int kThreads = 512;
constexpr int kPiece = 1 << 15;  // bytes of a bulk copy
constexpr int kReads = 8;        // of 16 bytes, of a thread at a time

// Past L1, and the first that L2 gives up where nobody reads it again.
__device__ __forceinline__ uint4 read_once(const u8* at, bool last) {
  uint4 v;
  if (last)
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
  else
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
  return v;
}

__device__ __forceinline__ u32 larger2(u32 a, u32 b) {
  asm("max.u16x2 %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
  return a;
}

__device__ __forceinline__ float half_to_float(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
  return value;
}

// Of each element type: magnitudes, which order as integers do, NaN above all, and values.
template <class T>
struct Elements;
template <>
struct Elements<float> {
  static constexpr int count = 4;  // in 16 bytes
  static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return max(a, b & 0x7fffffff); }
  static __device__ __forceinline__ u32 bits(u32 a) { return a; }
  static __device__ __forceinline__ void values(u32 word, float* to) { to[0] = __uint_as_float(word); }
};
template <>
struct Elements<BFloat16> {
  static constexpr int count = 8;
  static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return larger2(a, b & 0x7fff7fff); }
  static __device__ __forceinline__ u32 bits(u32 a) { return max(a & 0xffff0000, a << 16); }
  static __device__ __forceinline__ void values(u32 word, float* to) {
    to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000);
  }
};
template <>
struct Elements<Float16> {
  static constexpr int count = 8;
  static __device__ __forceinline__ u32 larger(u32 a, u32 b) { return larger2(a, b & 0x7fff7fff); }
  static __device__ __forceinline__ u32 bits(u32 a) {
    return __float_as_uint(half_to_float(max(a & 0xffff, a >> 16)));
  }
  static __device__ __forceinline__ void values(u32 word, float* to) {
    to[0] = half_to_float(word), to[1] = half_to_float(word >> 16);
  }
};

// The largest of the CTA's words; `room` is kThreads / 32 words of shared memory.
__device__ __forceinline__ u32 largest_of_all(u32 word, u32* room) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) word = max(word, __shfl_xor_sync(~0u, word, step));
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = word;
  __syncthreads();
  word = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) word = max(word, room[i]);
  return word;
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) fp8_largest(const __grid_constant__ Task t) {
  __shared__ u32 room[kThreads / 32];
  using E = Elements<T>;
  let_next_kernel_begin();
  const i64 step = static_cast<i64>(gridDim.x) * kThreads * 16;
  u32 most = 0;
  i64 at = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * 16;
  for (; at + 3 * step < t.bytes; at += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = read_once(t.x + at + i * step, false);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      most = E::larger(E::larger(E::larger(E::larger(most, v[i].x), v[i].y), v[i].z), v[i].w);
  }
  for (; at < t.bytes; at += step) {
    const uint4 v = read_once(t.x + at, false);
    most = E::larger(E::larger(E::larger(E::larger(most, v.x), v.y), v.z), v.w);
  }
  const u32 all = largest_of_all(E::bits(most), room);
  if (threadIdx.x == 0) t.partial[blockIdx.x] = all;
}

// The codes of 16 bytes of x, at byte `at`.
template <class T>
__device__ __forceinline__ void write_codes(const Task& t, i64 at, const uint4& v, float inverse) {
  constexpr int kCount = Elements<T>::count;
  const u32 words[4] = {v.x, v.y, v.z, v.w};
  float value[kCount];
#pragma unroll
  for (int i = 0; i < 4; ++i) Elements<T>::values(words[i], value + i * (kCount / 4));
  u32 codes[kCount / 4];
#pragma unroll
  for (int i = 0; i < kCount / 4; ++i) {
    const float* four = value + 4 * i;
    codes[i] = codes_of(four[0], four[1], four[2], four[3], inverse);
  }
  u8* to = t.codes + at / 16 * kCount;
  if constexpr (kCount == 8)
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(codes[0]), "r"(codes[1])
                 : "memory");
  else
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(to), "r"(codes[0]) : "memory");
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) fp8_quantize(const __grid_constant__ Task t) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ u32 room[kThreads / 32];
  __shared__ __align__(8) u64 barrier_word;
  const u32 base = smem_address(shared), barrier = smem_address(&barrier_word);
  const i64 first = static_cast<i64>(blockIdx.x) * t.held;
  const i64 beyond = t.bytes - first;
  const int mine = static_cast<int>(beyond < 0 ? 0 : beyond < t.held ? beyond : t.held);

  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_expect(barrier, mine);
    for (int at = 0; at < mine; at += kPiece)
      bulk_load(base + at, t.x + first + at, min(kPiece, mine - at), barrier);
  }
  wait_for_kernel_before();
  u32 most = 0;
  for (int i = threadIdx.x; i < t.parts; i += kThreads) most = max(most, t.partial[i]);
  const float scale = scale_of(largest_of_all(most, room));
  const float inverse = inverse_of(scale);
  if (blockIdx.x == 0 && threadIdx.x == 0) *t.scale = scale;

  // The rest from its end on
  constexpr int kChunk = kThreads * kReads * 16;
  const i64 held = static_cast<i64>(gridDim.x) * t.held, rest = t.bytes - held;
  const i64 chunks = rest > 0 ? (rest + kChunk - 1) / kChunk : 0;
  for (i64 chunk = chunks - 1 - blockIdx.x; chunk >= 0; chunk -= gridDim.x) {
    const i64 at = held + chunk * kChunk + threadIdx.x * 16;
    uint4 v[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i)
      if (at + i * (kThreads * 16) < t.bytes) v[i] = read_once(t.x + at + i * (kThreads * 16), true);
#pragma unroll
    for (int i = 0; i < kReads; ++i)
      if (at + i * (kThreads * 16) < t.bytes)
        write_codes<T>(t, at + i * (kThreads * 16), v[i], inverse);
  }

  mbarrier_wait(barrier, 0);
  for (int at = threadIdx.x * 16; at < mine; at += kThreads * 16)
    write_codes<T>(t, first + at, *reinterpret_cast<const uint4*>(shared + at), inverse);
}
