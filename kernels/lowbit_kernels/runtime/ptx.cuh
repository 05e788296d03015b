// GPU instructions without a C++ operator, one function each. This file includes nothing, so that kernels compile under
// NVRTC alone, and on a CPU with a replacement for this file.

#define DEVICE static __device__ __forceinline__
#define MEMBER __device__ __forceinline__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]  // its size is given at launch

DEVICE unsigned int float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(unsigned int x) { return __uint_as_float(x); }

// Rounds two floats to two bf16 in one word, to nearest even; `low` goes to the lower half.
DEVICE unsigned int to_bf16x2(float low, float high) {
    unsigned int packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// The same to fp16; beyond its range the result is infinity, as in torch.
DEVICE unsigned int to_half2(float low, float high) {
    unsigned int packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

DEVICE float from_half(unsigned int half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)half));
    return x;
}

// Rounds two floats to two e4m3 bytes, to nearest even, clamped to 448; `low` goes to the lower byte.
DEVICE unsigned int to_e4m3x2(float low, float high) {
    unsigned short packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// The same to two e5m2 bytes, clamped to 57344.
DEVICE unsigned int to_e5m2x2(float low, float high) {
    unsigned short packed;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// Converts two e4m3 bytes to two fp16 in one word, exactly.
DEVICE unsigned int from_e4m3x2(unsigned int packed) {
    unsigned int halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)packed));
    return halves;
}

// Differences and products of two packed bf16 or fp16, each rounded once (bf16: sm_90 and newer).
DEVICE unsigned int subtract_bf16x2(unsigned int a, unsigned int b) {
    unsigned int result;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
DEVICE unsigned int multiply_bf16x2(unsigned int a, unsigned int b) {
    unsigned int result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
DEVICE unsigned int subtract_half2(unsigned int a, unsigned int b) {
    unsigned int result;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}
DEVICE unsigned int multiply_half2(unsigned int a, unsigned int b) {
    unsigned int result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// The larger of the magnitudes in each half, as bf16; NaN does not count.
DEVICE unsigned int larger_magnitudes(unsigned int a, unsigned int b) {
    unsigned int result;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// a * b + c of two packed numbers, rounded once; subnormal numbers are kept.
DEVICE unsigned int fma_bf16x2(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}
DEVICE unsigned int fma_half2(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int result;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

// The largest `x` of the warp in one instruction (sm_80 and newer).
DEVICE unsigned int warp_max(unsigned int x) {
    unsigned int result;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(x));
    return result;
}

// The sum of `x` over the warp in one instruction (sm_80 and newer).
DEVICE int warp_sum(int x) {
    int result;
    asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(x));
    return result;
}

DEVICE void add_to(long long *sum, long long x) { atomicAdd((unsigned long long *)sum, (unsigned long long)x); }

// The larger of |a| and |b|; NaN if either is one.
DEVICE float larger_magnitude(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(a)), "f"(fabsf(b)));
    return result;
}

// The larger of each 16-bit half, in one instruction on sm_90 and newer.
DEVICE unsigned int larger_halves(unsigned int a, unsigned int b) {
#if __CUDA_ARCH__ >= 900
    unsigned int result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
#else
    return max(a & 0xffff0000, b & 0xffff0000) | max(a & 0xffff, b & 0xffff);
#endif
}

DEVICE unsigned int larger_signed_halves(unsigned int a, unsigned int b) {
    unsigned int result;
    asm("max.s16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Rounded to nearest even and without flushing subnormal numbers, whatever the compiler's options are.
DEVICE float multiply_exactly(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
DEVICE float fma_exactly(float a, float b, float c) {
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}
DEVICE float divide_exactly(float a, float b) {
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
DEVICE float reciprocal_exactly(float x) {
    float result;
    asm("rcp.rn.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// |a| * b, at most 1; NaN becomes 0.
DEVICE float saturated_product(float a, float b) { return __saturatef(fabsf(a) * b); }

// x clamped to -most .. most; `most` is not negative. A NaN stays one.
DEVICE float limit_magnitude(float x, float most) {
#if __CUDA_ARCH__ >= 860
    float result;
    asm("min.ftz.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(most));
    return result;
#else
    return fabsf(x) > most ? copysignf(most, x) : x;
#endif
}

// a * b, clamped to 0..1; NaN becomes 0.
DEVICE float clamped_product(float a, float b) { return __saturatef(a * b); }

// a + b, rounded down.
DEVICE float add_down(float a, float b) { return __fadd_rd(a, b); }

// 1 / x and a / b with an error of up to two units in the last place, for |x| and |b| in 2**-126 .. 2**126.
DEVICE float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
DEVICE float quotient(float a, float b) { return a * reciprocal(b); }

// e to the power of x, with an error of about 2**-21 (2 + |x|).
DEVICE float exponential(float x) { return __expf(x); }

// The root of x, with an error of up to two units in the last place; NaN for negative x.
DEVICE float approximate_root(float x) {
    float result;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// 2^x and log2(x), with an error of about 2**-22, relative for 2^x.
DEVICE float power_of_2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
DEVICE float logarithm_2(float x) {
    float result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// `high` shifted left; the highest bits of `low` fill its lowest bits.
DEVICE unsigned int shift_in(unsigned int high, unsigned int low, int bits) { return __funnelshift_l(low, high, bits); }

// `low` shifted right; the lowest bits of `high` fill its highest bits.
DEVICE unsigned int shift_out(unsigned int low, unsigned int high, int bits) { return __funnelshift_r(low, high, bits); }

// Four bytes of b:a, chosen by the four nibbles of the selector; nibble 8 + n gives the sign of byte n eight times.
DEVICE unsigned int permute(unsigned int a, unsigned int b, unsigned int selector) {
    unsigned int result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
    return result;
}

// (x & mask) | y in one instruction.
DEVICE unsigned int masked_or(unsigned int x, unsigned int mask, unsigned int y) {
    unsigned int result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(y));
    return result;
}

DEVICE unsigned int byte_of(unsigned int word, int i) { return permute(word, 0, 0x4440 | i); }

// For data that is used once: the caches evict it first.
DEVICE uint4 stream_load(const uint4 *p) { return __ldcs(p); }
DEVICE uint2 stream_load(const uint2 *p) { return __ldcs(p); }
DEVICE unsigned int stream_load(const unsigned int *p) { return __ldcs(p); }
DEVICE void stream_store(uint4 *p, uint4 x) { __stcs(p, x); }
DEVICE void stream_store(uint2 *p, uint2 x) { __stcs(p, x); }
DEVICE void stream_store(unsigned int *p, unsigned int x) { __stcs(p, x); }

// Prefetches into the L2 cache (sm_90 and newer); the address and `bytes` are multiples of 16.
DEVICE void prefetch(const void *p, unsigned int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes));
#endif
}

// The next number, for the whole warp, of a counter in shared memory. For an addition, the compiler would count the
// active lanes first, which takes longer than an increment up to a limit that is never reached.
DEVICE unsigned int take_next(unsigned int *counter, int lane) {
    unsigned int n = 0;
    if (lane == 0)
        asm volatile("atom.shared.inc.u32 %0, [%1], 0xfffffffe;"
                     : "=r"(n)
                     : "r"((unsigned int)__cvta_generic_to_shared(counter)));
    return __shfl_sync(0xffffffff, n, 0);
}

// A condition that is the same in all lanes of the warp, which the compiler cannot know of itself.
DEVICE bool for_warp(bool condition) { return __any_sync(0xffffffff, condition); }

// Bit n: the condition of lane n.
DEVICE unsigned int ballot(bool condition) { return __ballot_sync(0xffffffff, condition); }
DEVICE int bits_set(unsigned int x) { return __popc(x); }

// `x` of another lane of the same half warp, whose number is the lowest four bits of `from`; for all lanes at once.
DEVICE float from_lane_of_half(float x, unsigned int from) { return __shfl_sync(0xffffffff, x, from, 16); }

// A number that other blocks count up; what they wrote before is then visible (sm_70 and newer).
DEVICE unsigned int load_acquire(const unsigned int *p) {
    unsigned int x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)) : "memory");
    return x;
}
DEVICE void sleep_shortly() { __nanosleep(50); }

// The same pointer, but the compiler takes it for another one: it reads nothing through it before this place.
template <typename T>
DEVICE T *hidden(T *p) {
    asm volatile("" : "+l"(p));
    return p;
}

// Loads a struct, 16 bytes at a time, through the read-only cache: no thread may write to it during the kernel. The
// compiler drops loads of unused members.
template <typename T>
DEVICE T constant_load(const T *p) {
    static_assert(sizeof(T) % 16 == 0 && alignof(T) == 16, "");
    union {
        T value;
        uint4 part[sizeof(T) / 16];
    };
#pragma unroll
    for (unsigned int i = 0; i < sizeof(T) / 16; ++i) part[i] = __ldg((const uint4 *)p + i);
    return value;
}

// (x & mask) ^ bits in one instruction, also if both are constants.
DEVICE unsigned int masked_xor(unsigned int x, unsigned int mask, unsigned int bits) {
    unsigned int result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
    return result;
}

// sums += a * b by a warp, 16 x 16 times 16 x 8 (sm_80 and newer). Lane 4 g + t holds
//   of a     columns 2 t, 2 t + 1 of rows g and g + 8, then columns 2 t + 8, 2 t + 9 of both;
//   of b     rows 2 t, 2 t + 1 of column g, then rows 2 t + 8, 2 t + 9;
//   of sums  columns 2 t, 2 t + 1 of row g, then of row g + 8.
DEVICE void warp_multiply_bf16(float (&sums)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                               unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void warp_multiply_half(float (&sums)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                               unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for bytes with a sign, 16 x 32 times 32 x 8. Lane 4 g + t holds
//   of a     columns 4 t to 4 t + 3 of rows g and g + 8, then columns 4 t + 16 to 4 t + 19 of both;
//   of b     rows 4 t to 4 t + 3 of column g, then rows 4 t + 16 to 4 t + 19.
DEVICE void warp_multiply_s8(int (&sums)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                             unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
