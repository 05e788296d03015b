// Runs a CUDA kernel on a CPU, for tests. It replaces ptx.cuh. Blocks run one after another; the threads of a block are
// fibers that switch where threads of a GPU synchronize (warp_max, __syncthreads). Arithmetic is IEEE float32.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define DEVICE static inline
#define MEMBER inline
#define __global__
#define __constant__ static
#define __shared__ static
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) alignas(1024) static unsigned char name[228 * 1024]
template <typename T> static constexpr T max(T a, T b) { return a < b ? b : a; }
template <typename T> static constexpr T min(T a, T b) { return b < a ? b : a; }

struct Index { unsigned int x; };
extern Index threadIdx, blockIdx, blockDim, gridDim;

struct uint2 { unsigned int x, y; };
struct uint4 { unsigned int x, y, z, w; };
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

// ---- fibers: cuda_on_cpu.cpp -------------------------------------------------------------------------------------------

namespace emulation {
void run(unsigned int grid, unsigned int threads, void (*call)(const void *), const void *kernel);
template <typename F>
static void launch(unsigned int grid, unsigned int threads, F kernel) {
    run(grid, threads, [](const void *p) { (*(const F *)p)(); }, &kernel);
}
}  // namespace emulation

void __syncthreads();
int __syncthreads_or(int x);
unsigned int warp_max(unsigned int x);
int warp_sum(int x);
unsigned int take_next(unsigned int *counter, int lane);
float from_lane_of_half(float x, unsigned int from);
DEVICE void add_to(long long *sum, long long x) { *sum += x; }
DEVICE void prefetch(const void *p, unsigned int bytes) {
    if (((uintptr_t)p | bytes) % 16) __builtin_trap();
}

// Launches do not overlap.
static inline void wait_for_previous() {}
static inline void let_next_start() {}

// Blocks run one after another.
template <typename T>
static inline void atomicMax(T *p, T x) { *p = max(*p, x); }
static inline unsigned int atomicAdd(unsigned int *p, unsigned int x) { return (*p += x) - x; }
static inline void __threadfence() {}
DEVICE unsigned int load_acquire(const unsigned int *p) { return *p; }
DEVICE void sleep_shortly() { __builtin_trap(); }

// ---- instructions ----------------------------------------------------------------------------------------------------

DEVICE unsigned int float_bits(float x) { unsigned int bits; memcpy(&bits, &x, 4); return bits; }
DEVICE float bits_float(unsigned int bits) { float x; memcpy(&x, &bits, 4); return x; }
DEVICE float reciprocal(float x) { return 1.0f / x; }
DEVICE float quotient(float a, float b) { return a / b; }
DEVICE float larger_magnitude(float a, float b) { return a != a || b != b ? NAN : fmaxf(fabsf(a), fabsf(b)); }
DEVICE unsigned int larger_halves(unsigned int a, unsigned int b) {
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff);
}
DEVICE unsigned int larger_signed_halves(unsigned int a, unsigned int b) {
    return (unsigned int)max((int)a >> 16, (int)b >> 16) << 16 | (max((int16_t)a, (int16_t)b) & 0xffff);
}
DEVICE float limit_magnitude(float x, float most) { return fabsf(x) > most ? copysignf(most, x) : x; }
DEVICE float multiply_exactly(float a, float b) { return a * b; }
DEVICE float fma_exactly(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float divide_exactly(float a, float b) { return a / b; }
DEVICE float reciprocal_exactly(float x) { return 1.0f / x; }
DEVICE float saturated_product(float a, float b) {
    const float product = fabsf(a) * b;
    return product != product ? 0.0f : product > 1.0f ? 1.0f : product;
}
DEVICE float clamped_product(float a, float b) {
    const float product = a * b;
    return product > 0.0f ? product > 1.0f ? 1.0f : product : 0.0f;
}
DEVICE float add_down(float a, float b) {  // the sum of a number of 24 bits and a smaller one, in double
    const double exact = (double)a + b;
    const float rounded = (float)exact;
    return rounded > exact ? nextafterf(rounded, -INFINITY) : rounded;
}
#ifndef ROOT_ERROR
#define ROOT_ERROR 0  // units in the last place by which an approximate root is too large
#endif
DEVICE float approximate_root(float x) {
    const float root = sqrtf(x);
    return root > 0.0f && ROOT_ERROR != 0 ? bits_float(float_bits(root) + ROOT_ERROR) : root;
}
DEVICE unsigned int shift_in(unsigned int high, unsigned int low, int bits) { return high << bits | low >> (32 - bits); }
DEVICE unsigned int permute(unsigned int a, unsigned int b, unsigned int selector) {
    unsigned int result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned int nibble = selector >> 4 * i & 15, from = nibble & 4 ? b : a;
        const unsigned int byte = from >> 8 * (nibble & 3) & 0xff;
        result |= (nibble & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << 8 * i;
    }
    return result;
}

DEVICE int dot_of_four(unsigned int a, unsigned int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
    return c;
}

DEVICE unsigned int byte_of(unsigned int word, int i) { return word >> 8 * i & 0xff; }

DEVICE unsigned int to_bf16(float x) {
    const unsigned int bits = float_bits(x);
    if (x != x) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE unsigned int to_bf16x2(float low, float high) { return to_bf16(high) << 16 | to_bf16(low); }

DEVICE float from_half(unsigned int half) { _Float16 x; const uint16_t bits = half; memcpy(&x, &bits, 2); return x; }
DEVICE unsigned int to_half(float x) { const _Float16 half = (_Float16)x; uint16_t bits; memcpy(&bits, &half, 2); return bits; }
DEVICE unsigned int to_half2(float low, float high) { return to_half(high) << 16 | to_half(low); }

// Float8 with 3 or 2 mantissa bits.
DEVICE float from_float8(unsigned int byte, int mantissa_bits) {
    const int bias = mantissa_bits == 3 ? 7 : 15;
    const int exponent = (byte & 0x7f) >> mantissa_bits, mantissa = byte & (1 << mantissa_bits) - 1;
    float x = exponent ? ldexpf((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
                       : ldexpf(mantissa, 1 - bias - mantissa_bits);
    if (mantissa_bits == 3 ? (byte & 0x7f) == 0x7f : (byte & 0x7f) >= 0x7c) x = NAN;
    return byte & 0x80 ? -x : x;
}
DEVICE unsigned int to_float8(float x, int mantissa_bits) {
    const unsigned int sign = float_bits(x) >> 24 & 0x80, end = mantissa_bits == 3 ? 0x7f : 0x7c;
    if (x != x) return 0x7f;
    const float magnitude = fabsf(x);
    unsigned int best = 0;
    for (unsigned int code = 0; code < end; ++code) {
        const float now = fabsf(from_float8(code, mantissa_bits) - magnitude);
        const float then = fabsf(from_float8(best, mantissa_bits) - magnitude);
        if (now < then || (now == then && code % 2 == 0)) best = code;
    }
    return sign | best;
}
DEVICE float from_e4m3(unsigned int byte) { return from_float8(byte, 3); }
DEVICE unsigned int to_e4m3(float x) { return to_float8(x, 3); }
DEVICE unsigned int to_e5m2x2(float low, float high) { return to_float8(high, 2) << 8 | to_float8(low, 2); }
DEVICE unsigned int to_e4m3x2(float low, float high) { return to_e4m3(high) << 8 | to_e4m3(low); }
DEVICE unsigned int from_e4m3x2(unsigned int pair) {
    return to_half(from_e4m3(pair >> 8 & 0xff)) << 16 | to_half(from_e4m3(pair & 0xff));
}

// Vector loads and stores check the alignment that a GPU needs.
template <typename T>
DEVICE T stream_load(const T *p) {
    if ((uintptr_t)p % sizeof(T)) __builtin_trap();
    return *p;
}
template <typename T>
DEVICE void stream_store(T *p, T x) {
    if ((uintptr_t)p % sizeof(T)) __builtin_trap();
    *p = x;
}

DEVICE void stream_store_if(bool condition, uint2 *p, uint2 x) {
    if (condition) stream_store(p, x);
}

template <typename T>
DEVICE T __ldg(const T *p) { return stream_load(p); }
template <typename T>
DEVICE T __ldcg(const T *p) { return stream_load(p); }

DEVICE bool for_warp(bool condition) { return condition; }

template <typename T>
DEVICE T *hidden(T *p) { return p; }
DEVICE unsigned int masked_or(unsigned int x, unsigned int mask, unsigned int y) { return (x & mask) | y; }

template <typename T>
DEVICE T constant_load(const T *p) {
    return *p;
}
