// GPU instructions without a C++ operator, one function each. This file includes nothing, so that kernels compile under
// NVRTC alone, and on a CPU with a replacement for this file.

#define DEVICE static __device__ __forceinline__
#define MEMBER __device__ __forceinline__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]  // its size is given at launch

// A function that is one instruction: `code` gives its result from the operands that follow.
#define INSTRUCTION(type, constraint, name, parameters, code, ...) \
    DEVICE type name parameters { \
        type result; \
        asm(code : constraint(result) : __VA_ARGS__); \
        return result; \
    }
#define WORD_OF(...) INSTRUCTION(unsigned int, "=r", __VA_ARGS__)
#define FLOAT_OF(...) INSTRUCTION(float, "=f", __VA_ARGS__)

DEVICE unsigned int float_bits(float x) { return __float_as_uint(x); }
DEVICE float bits_float(unsigned int x) { return __uint_as_float(x); }

// Rounds two floats to two bf16 in one word, to nearest even; `low` goes to the lower half.
WORD_OF(to_bf16x2, (float low, float high), "cvt.rn.bf16x2.f32 %0, %1, %2;", "f"(high), "f"(low))

// The same to fp16; beyond its range the result is infinity, as in torch.
WORD_OF(to_half2, (float low, float high), "cvt.rn.f16x2.f32 %0, %1, %2;", "f"(high), "f"(low))

FLOAT_OF(from_half, (unsigned int half), "cvt.f32.f16 %0, %1;", "h"((unsigned short)half))

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
WORD_OF(from_e4m3x2, (unsigned int packed), "cvt.rn.f16x2.e4m3x2 %0, %1;", "h"((unsigned short)packed))

// Differences and products of two packed bf16 or fp16, each rounded once (bf16: sm_90 and newer).
WORD_OF(subtract_bf16x2, (unsigned int a, unsigned int b), "sub.rn.bf16x2 %0, %1, %2;", "r"(a), "r"(b))
WORD_OF(multiply_bf16x2, (unsigned int a, unsigned int b), "mul.rn.bf16x2 %0, %1, %2;", "r"(a), "r"(b))
WORD_OF(subtract_half2, (unsigned int a, unsigned int b), "sub.rn.f16x2 %0, %1, %2;", "r"(a), "r"(b))
WORD_OF(multiply_half2, (unsigned int a, unsigned int b), "mul.rn.f16x2 %0, %1, %2;", "r"(a), "r"(b))

// The largest of three magnitudes in each half, as fp16: one instruction of sm_90. NaN does not count.
WORD_OF(largest_magnitudes, (unsigned int a, unsigned int b, unsigned int c),
        "{.reg .b32 x, y, z;\n abs.f16x2 x, %1;\n abs.f16x2 y, %2;\n abs.f16x2 z, %3;\n"
        " max.f16x2 x, x, y;\n max.f16x2 %0, x, z;}", "r"(a), "r"(b), "r"(c))
WORD_OF(largest_magnitudes_bf16, (unsigned int a, unsigned int b, unsigned int c),
        "{.reg .b32 x, y, z;\n abs.bf16x2 x, %1;\n abs.bf16x2 y, %2;\n abs.bf16x2 z, %3;\n"
        " max.bf16x2 x, x, y;\n max.bf16x2 %0, x, z;}", "r"(a), "r"(b), "r"(c))

// a * b + c of two packed numbers, rounded once; subnormal numbers are kept.
WORD_OF(fma_bf16x2, (unsigned int a, unsigned int b, unsigned int c), "fma.rn.bf16x2 %0, %1, %2, %3;",
        "r"(a), "r"(b), "r"(c))
WORD_OF(fma_half2, (unsigned int a, unsigned int b, unsigned int c), "fma.rn.f16x2 %0, %1, %2, %3;",
        "r"(a), "r"(b), "r"(c))

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
FLOAT_OF(larger_magnitude, (float a, float b), "max.NaN.f32 %0, %1, %2;", "f"(fabsf(a)), "f"(fabsf(b)))

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

WORD_OF(larger_signed_halves, (unsigned int a, unsigned int b), "max.s16x2 %0, %1, %2;", "r"(a), "r"(b))

// Rounded to nearest even and without flushing subnormal numbers, whatever the compiler's options are.
FLOAT_OF(multiply_exactly, (float a, float b), "mul.rn.f32 %0, %1, %2;", "f"(a), "f"(b))
FLOAT_OF(fma_exactly, (float a, float b, float c), "fma.rn.f32 %0, %1, %2, %3;", "f"(a), "f"(b), "f"(c))
FLOAT_OF(divide_exactly, (float a, float b), "div.rn.f32 %0, %1, %2;", "f"(a), "f"(b))
FLOAT_OF(reciprocal_exactly, (float x), "rcp.rn.f32 %0, %1;", "f"(x))

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
FLOAT_OF(reciprocal, (float x), "rcp.approx.ftz.f32 %0, %1;", "f"(x))
DEVICE float quotient(float a, float b) { return a * reciprocal(b); }

// e to the power of x, with an error of about 2**-21 (2 + |x|).
DEVICE float exponential(float x) { return __expf(x); }

// The root of x, with an error of up to two units in the last place; NaN for negative x.
FLOAT_OF(approximate_root, (float x), "sqrt.approx.ftz.f32 %0, %1;", "f"(x))

// 2^x and log2(x), with an error of about 2**-22, relative for 2^x.
FLOAT_OF(power_of_2, (float x), "ex2.approx.ftz.f32 %0, %1;", "f"(x))
FLOAT_OF(logarithm_2, (float x), "lg2.approx.ftz.f32 %0, %1;", "f"(x))

// `high` shifted left; the highest bits of `low` fill its lowest bits.
DEVICE unsigned int shift_in(unsigned int high, unsigned int low, int bits) { return __funnelshift_l(low, high, bits); }

// `low` shifted right; the lowest bits of `high` fill its highest bits.
DEVICE unsigned int shift_out(unsigned int low, unsigned int high, int bits) { return __funnelshift_r(low, high, bits); }

// Four bytes of b:a, chosen by the four nibbles of the selector; nibble 8 + n gives the sign of byte n eight times.
WORD_OF(permute, (unsigned int a, unsigned int b, unsigned int selector), "prmt.b32 %0, %1, %2, %3;",
        "r"(a), "r"(b), "r"(selector))

// (x & mask) | y in one instruction.
WORD_OF(masked_or, (unsigned int x, unsigned int mask, unsigned int y), "lop3.b32 %0, %1, %2, %3, 0xea;",
        "r"(x), "r"(mask), "r"(y))

// The products of four signed bytes, added to c.
INSTRUCTION(int, "=r", dot_of_four, (unsigned int a, unsigned int b, int c), "dp4a.s32.s32 %0, %1, %2, %3;",
            "r"(a), "r"(b), "r"(c))

DEVICE unsigned int byte_of(unsigned int word, int i) { return permute(word, 0, 0x4440 | i); }

// For data that is used once: the caches evict it first.
DEVICE uint4 stream_load(const uint4 *p) { return __ldcs(p); }
DEVICE uint2 stream_load(const uint2 *p) { return __ldcs(p); }
DEVICE unsigned int stream_load(const unsigned int *p) { return __ldcs(p); }
DEVICE void stream_store(uint4 *p, uint4 x) { __stcs(p, x); }
DEVICE void stream_store(uint2 *p, uint2 x) { __stcs(p, x); }
DEVICE void stream_store(unsigned int *p, unsigned int x) { __stcs(p, x); }

// Stores without a branch: the compiler would move what only the store needs into one.
DEVICE void stream_store_if(bool condition, uint2 *p, uint2 x) {
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, %0, 0;\n @p st.global.cs.v2.u32 [%1], {%2, %3};}"
                 ::"r"((int)condition), "l"(__cvta_generic_to_global(p)), "r"(x.x), "r"(x.y) : "memory");
}

// Prefetches into the L2 cache (sm_90 and newer); the address and `bytes` are multiples of 16.
DEVICE void prefetch(const void *p, unsigned int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "r"(bytes));
#endif
}

// Prefetches the line of this address into the L2 cache.
DEVICE void prefetch_line(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p))); }

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
WORD_OF(masked_xor, (unsigned int x, unsigned int mask, unsigned int bits), "lop3.b32 %0, %1, %2, %3, 0x6a;",
        "r"(x), "r"(mask), "r"(bits))

#define WARP_MULTIPLY(name, type, constraint, shape) \
    DEVICE void name(type (&sums)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3, \
                     unsigned int b0, unsigned int b1) { \
        asm("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
            : constraint(sums[0]), constraint(sums[1]), constraint(sums[2]), constraint(sums[3]) \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1)); \
    }

// sums += a * b by a warp, 16 x 16 times 16 x 8 (sm_80 and newer). Lane 4 g + t holds
//   of a     columns 2 t, 2 t + 1 of rows g and g + 8, then columns 2 t + 8, 2 t + 9 of both;
//   of b     rows 2 t, 2 t + 1 of column g, then rows 2 t + 8, 2 t + 9;
//   of sums  columns 2 t, 2 t + 1 of row g, then of row g + 8.
WARP_MULTIPLY(warp_multiply_bf16, float, "+f", "m16n8k16.row.col.f32.bf16.bf16.f32")
WARP_MULTIPLY(warp_multiply_half, float, "+f", "m16n8k16.row.col.f32.f16.f16.f32")

// The same for bytes with a sign, 16 x 32 times 32 x 8. Lane 4 g + t holds
//   of a     columns 4 t to 4 t + 3 of rows g and g + 8, then columns 4 t + 16 to 4 t + 19 of both;
//   of b     rows 4 t to 4 t + 3 of column g, then rows 4 t + 16 to 4 t + 19.
WARP_MULTIPLY(warp_multiply_s8, int, "+r", "m16n8k32.row.col.s32.s8.s8.s32")
