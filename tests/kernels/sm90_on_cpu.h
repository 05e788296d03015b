// Runs kernels that use sm90.cuh on a CPU, for tests. It replaces ptx.cuh and sm90.cuh. What takes long to compile stands
// in sm90_on_cpu.cpp, a library of its own. All threads of all blocks are fibers, which switch where they wait.
// Products complete where they are issued. Loads do too, unless EMULATED_DELAY=LATEST,SEED is set: then they complete in
// any order, one in 16 of them up to LATEST rounds of all fibers late. Stores by the TMA complete as late as allowed.
// So the emulation tests the arithmetic of indices, swizzles, fragments and barriers. It finds shared memory that is
// overwritten before it is stored and, with delays, shared memory that is read before it is loaded.

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define DEVICE static inline
#define MEMBER inline
#define __global__
#define __constant__ static
#define __device__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define DYNAMIC_SHARED(name) unsigned char *name = emulation::memory()
template <typename T> static constexpr T max(T a, T b) { return a < b ? b : a; }
template <typename T> static constexpr T min(T a, T b) { return b < a ? b : a; }

typedef unsigned int uint32;
typedef unsigned long long uint64;
struct Index { unsigned int x; };
extern Index threadIdx, blockIdx, gridDim;
struct uint2 { uint32 x, y; };
struct uint4 { uint32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline uint2 make_uint2(uint32 x, uint32 y) { return {x, y}; }
static inline uint4 make_uint4(uint32 x, uint32 y, uint32 z, uint32 w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {
struct Lane {
    uint32 given[6], address;  // what a fiber gives to the others of its warp
};
extern Lane *lanes;
extern unsigned int current;
extern unsigned char *shared;  // the memory of its block
void fail(const char *why);
inline unsigned char *memory() { return shared; }
void meet_warp();
void run(unsigned int grid, unsigned int block_threads, unsigned int cluster_blocks, void (*call)(const void *),
         const void *kernel);
template <typename F>
static void launch(unsigned int grid, unsigned int block_threads, unsigned int cluster_blocks, F kernel) {
    run(grid, block_threads, cluster_blocks, [](const void *p) { (*(const F *)p)(); }, &kernel);
}
}  // namespace emulation

// ---- barriers, clusters ----------------------------------------------------------------------------------------------

uint32 shared_address(const void *p);
void barrier_init(uint32 at, int arrivals);
static inline void barrier_init_fence() {}
void barrier_expect(uint32 at, uint32 bytes);
void barrier_arrive(uint32 at, uint32 rank);
void barrier_arrive(uint32 at);
void barrier_wait(uint32 at, uint32 parity);
void barrier_wait_after(uint32 at, uint32 parity);
uint32 cluster_rank();
void cluster_sync();
void cluster_arrive();
void cluster_wait();
static inline bool barrier_is_over(uint32, uint32) { return false; }  // a wait follows
static inline uint32 in_block(uint32 address, uint32 rank) { return address | rank << 24; }
void send(uint32 address, uint32 barrier, float4 x);
static inline void send(uint32 address, uint32 rank, float4 x, uint32 barrier) {
    send(in_block(address, rank), in_block(barrier, rank), x);
}
void named_barrier_arrive(int id, int threads);
void named_barrier_sync(int id, int threads);
static inline void wait_for_previous() {}
static inline void let_next_start() {}
void __trap();
void __syncwarp();
uint32 exchanged(uint32 x, uint32 lane);
uint32 __shfl_sync(uint32, uint32 x, uint32 lane);
int __shfl_sync(uint32, int x, uint32 lane);
uint32 ballot(bool condition);
uint32 warp_max(uint32 x);
uint32 __shfl_xor_sync(uint32, uint32 x, uint32 lanes);
float exchanged(float x, uint32 lane);
float __shfl_sync(uint32, float x, uint32 lane);
float __shfl_xor_sync(uint32, float x, uint32 lanes);

int bits_set(uint32 x);

// ---- copies ----------------------------------------------------------------------------------------------------------

struct TensorMap {
    const unsigned char *base;
    long rows, columns, stride;  // in elements
    int size, box, width;
    bool plain = false;  // not swizzled
};
static inline void prefetch(const TensorMap &) {}
static inline void prefetch_box(const TensorMap &, int, int) {}
static inline void prefetch_line(const void *p) { *(const volatile unsigned char *)p; }  // faults where nothing is
void check_bulk(const void *from, uint32 bytes);
void prefetch(const void *from, uint32 bytes);
void load_bulk(uint32 to, const void *from, uint32 bytes, uint32 barrier);

// The swizzle of 32 (64, 128) bytes: bit 4 (bits 4 to 5, to 6) of an address is XORed with bit 7 (bits 7 to 8, to 9).
// Other widths are not swizzled.
static inline uint32 swizzled(uint32 at, uint32 width) {
    return width == 32 || width == 64 || width == 128 ? at ^ (at >> 7 & (width / 16 - 1)) << 4 : at;
}

void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier);
void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier, unsigned short ranks);
void store_box(const TensorMap &map, int x, int y, uint32 from);
void store_commit();
void stores_wait(size_t pending);
template <int PENDING> static inline void store_wait() { stores_wait(PENDING); }
static inline void fence_for_tma() {}
void store_pair(uint32 address, float a, float b);
int4 __ldcs(const int4 *p);
uint32 shared_word(uint32 at);
uint4 shared_vector(uint32 at);

template <int WORDS>
static inline void shared_words(uint32 *to, uint32 at) {
    if (at % (WORDS * 4)) emulation::fail("misaligned words");
    memcpy(to, emulation::memory() + at, WORDS * 4);
}
uint32 constant_word(uint32 at);

// Four transposed 8 x 8 matrices. A lane holds two neighbouring elements of row lane / 4 of each, which lie in column
// lane / 4 in memory; lane i gives the address of row i % 8 of matrix i / 8.
template <typename F>
static inline void transposed_matrices(uint32 address, F move) {
    const unsigned int me = emulation::current, lane = me % 32;
    emulation::lanes[me].address = address;
    emulation::meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix)
        for (int i = 0; i < 2; ++i) {
            const unsigned int row = matrix * 8 + lane % 4 * 2 + i;
            move((unsigned short *)(emulation::memory() + emulation::lanes[me - lane + row].address) + lane / 4, matrix, i);
        }
    emulation::meet_warp();
}
void store_matrices(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d);
void load_matrices(uint32 address, uint32 (&x)[4]);
void store_matrices_transposed(uint32 address, const uint32 (&x)[4]);
void load_matrices_transposed(uint32 address, uint32 (&x)[4]);

// ---- arithmetic ------------------------------------------------------------------------------------------------------

static inline float bits_float(uint32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32 float_bits(float x) { uint32 bits; memcpy(&bits, &x, 4); return bits; }
static inline float from_bf16(uint32 bits) { return bits_float(bits << 16); }
static inline uint32 to_bf16(float x) {
    const uint32 bits = float_bits(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static inline float from_half(uint32 bits) {
    const unsigned short low = bits;
    _Float16 x;
    memcpy(&x, &low, 2);
    return x;
}
static inline uint32 to_half(float x) {
    const _Float16 half = x;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
}
static inline uint32 to_bf16x2(float low, float high) { return to_bf16(low) | to_bf16(high) << 16; }
static inline uint32 to_half2(float low, float high) { return to_half(low) | to_half(high) << 16; }
static inline float from_e4m3(uint32 byte) {
    const uint32 exponent = byte >> 3 & 15, fraction = byte & 7;
    const float magnitude = exponent ? ldexpf(8 + fraction, (int)exponent - 10) : ldexpf(fraction, -9);
    return copysignf((byte & 127) == 127 ? NAN : magnitude, byte & 128 ? -1.0f : 1.0f);
}
static inline uint32 to_e4m3(float x) {
    if (x != x) return 0x7f;
    const auto distance = [&](uint32 code) { return fabsf(from_e4m3(code) - fabsf(x)); };
    uint32 best = 0;
    for (uint32 code = 1; code < 0x7f; ++code)
        if (distance(code) < distance(best) || (distance(code) == distance(best) && code % 2 == 0)) best = code;
    return best | (float_bits(x) >> 24 & 0x80);
}
static inline uint32 to_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
static inline uint32 from_e4m3x2(uint32 pair) { return to_half2(from_e4m3(pair & 255), from_e4m3(pair >> 8)); }
static inline uint32 subtract_bf16x2(uint32 a, uint32 b) {
    return to_bf16x2(from_bf16(a & 0xffff) - from_bf16(b & 0xffff), from_bf16(a >> 16) - from_bf16(b >> 16));
}
static inline uint32 multiply_bf16x2(uint32 a, uint32 b) {
    return to_bf16x2(from_bf16(a & 0xffff) * from_bf16(b & 0xffff), from_bf16(a >> 16) * from_bf16(b >> 16));
}
static inline uint32 subtract_half2(uint32 a, uint32 b) {
    return to_half2(from_half(a) - from_half(b), from_half(a >> 16) - from_half(b >> 16));
}
static inline uint32 multiply_half2(uint32 a, uint32 b) {
    return to_half2(from_half(a) * from_half(b), from_half(a >> 16) * from_half(b >> 16));
}
static inline uint32 fma_bf16x2(uint32 a, uint32 b, uint32 c) {
    const auto fused = [](uint32 a, uint32 b, uint32 c) { return fmaf(from_bf16(a), from_bf16(b), from_bf16(c)); };
    return to_bf16x2(fused(a & 0xffff, b & 0xffff, c & 0xffff), fused(a >> 16, b >> 16, c >> 16));
}
static inline uint32 fma_half2(uint32 a, uint32 b, uint32 c) {
    const auto fused = [](uint32 a, uint32 b, uint32 c) { return fmaf(from_half(a), from_half(b), from_half(c)); };
    return to_half2(fused(a, b, c), fused(a >> 16, b >> 16, c >> 16));
}
static inline float reciprocal(float x) { return 1.0f / x; }
static inline float power_of_2(float x) { return exp2f(x); }
static inline float logarithm_2(float x) { return log2f(x); }
static inline bool for_warp(bool condition) { return condition; }
static inline float exponential(float x) { return expf(x); }
static inline float quotient(float a, float b) { return a / b; }
template <typename T>
static inline T stream_load(const T *p) {
    if ((uintptr_t)p % sizeof(T)) emulation::fail("a misaligned load");
    return *p;
}
static inline float fma_exactly(float a, float b, float c) { return fmaf(a, b, c); }
static inline float multiply_exactly(float a, float b) { return a * b; }
static inline float divide_exactly(float a, float b) { return a / b; }
static inline float reciprocal_exactly(float x) { return 1.0f / x; }
static inline uint32 larger_signed_halves(uint32 a, uint32 b) {
    const short low = max((short)a, (short)b), high = max((short)(a >> 16), (short)(b >> 16));
    return (uint32)(unsigned short)high << 16 | (unsigned short)low;
}
static inline uint32 masked_xor(uint32 x, uint32 mask, uint32 y) { return (x & mask) ^ y; }
static inline uint32 masked_or(uint32 x, uint32 mask, uint32 y) { return (x & mask) | y; }
static inline uint32 permute(uint32 a, uint32 b, uint32 selector) {
    uint32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32 byte = ((uint64)b << 32 | a) >> 8 * (selector >> 4 * i & 7) & 255;
        result |= (selector >> 4 * i & 8 ? byte >> 7 ? 255 : 0 : byte) << 8 * i;
    }
    return result;
}
static inline uint32 shift_in(uint32 high, uint32 low, uint32 bits) { return ((uint64)high << 32 | low) << bits % 32 >> 32; }
static inline uint32 larger_halves(uint32 a, uint32 b) {
    return max(a & 0xffff0000, b & 0xffff0000) | max(a & 0xffff, b & 0xffff);
}
static inline uint32 largest_magnitudes(uint32 a, uint32 b, uint32 c) {
    return larger_halves(larger_halves(a & 0x7fff7fff, b & 0x7fff7fff), c & 0x7fff7fff);
}
static inline uint32 largest_magnitudes_bf16(uint32 a, uint32 b, uint32 c) { return largest_magnitudes(a, b, c); }

static inline uint32 byte_of(uint32 word, int i) { return word >> 8 * i & 255; }
static inline uint32 shift_out(uint32 low, uint32 high, int bits) {
    return (uint32)(((uint64)high << 32 | low) >> bits);
}

// ---- products of warpgroups --------------------------------------------------------------------------------------------

static inline uint32 operand(uint32 address) { return (address >> 4 & 0x3fff) | 1 << 16; }
static constexpr uint32 OPERAND_HIGH = 0;
static inline void product_fence() {}
static inline void product_commit() {}
static inline void in_use(float &) {}
static inline void in_use(uint32 &) {}
template <int PENDING> static inline void product_wait() {}
template <int REGISTERS> static inline void give_registers() {}
template <int REGISTERS> static inline void take_registers() {}

// A warp's 16 of the 64 rows. The registers of a hold two neighbouring elements of rows lane / 4 and lane / 4 + 8, at
// columns 2 (lane % 4) and 2 (lane % 4) + 8. b lies in shared memory in swizzled rows of 128 bytes.
template <bool HALF, int SUMS>
static inline void multiply_fragments(float (&sums)[SUMS], const uint32 *a, uint32 b, bool add) {
    const unsigned int me = emulation::current, lane = me % 32;
    const emulation::Lane *const lanes = emulation::lanes;
    const unsigned char *const memory = emulation::memory();
    memcpy(emulation::lanes[me].given, a, 16);
    emulation::meet_warp();
    const auto number = [](uint32 bits) { return HALF ? from_half(bits) : from_bf16(bits); };
    float row[2][16];
    for (int i = 0; i < 32; ++i) {
        const int k = i % 16, below = i / 16;
        const uint32 word = lanes[me / 4 * 4 + k % 8 / 2].given[below + k / 8 * 2];
        row[below][k] = number(word >> 16 * (k % 2) & 0xffff);
    }
    for (int i = 0; i < SUMS; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
            const uint32 at = swizzled((b & 0x3fff) * 16 + token * 128 + k * 2, 128);
            sum += row[i / 2 % 2][k] * number(*(const unsigned short *)(memory + at));
        }
        sums[i] = (add ? sums[i] : 0.0f) + sum;
    }
    emulation::meet_warp();
}

// The same for 32 bytes of a row, which `value` decodes: the registers hold four neighbours, at columns 4 (lane % 4) and 4
// (lane % 4) + 16.
template <class Sum, int SUMS, class Decode>
static inline void multiply_words(Sum (&sums)[SUMS], const uint32 *a, uint32 b, bool add, Decode value) {
    const unsigned int me = emulation::current, lane = me % 32;
    const emulation::Lane *const lanes = emulation::lanes;
    const unsigned char *const memory = emulation::memory();
    memcpy(emulation::lanes[me].given, a, 16);
    emulation::meet_warp();
    for (int i = 0; i < SUMS; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        Sum sum = 0;
        for (int k = 0; k < 32; ++k) {
            const uint32 word = lanes[me / 4 * 4 + k % 16 / 4].given[i / 2 % 2 + k / 16 * 2];
            const uint32 at = swizzled((b & 0x3fff) * 16 + token * 128 + k, 128);
            sum += (Sum)value(word >> 8 * (k % 4) & 255) * (Sum)value(memory[at]);
        }
        sums[i] = (add ? sums[i] : 0) + sum;
    }
    emulation::meet_warp();
}

// 64 rows of 16 fp16 numbers by SUMS * 2 columns; both operands lie in shared memory in swizzled rows of 128 bytes.
template <int SUMS>
static inline void multiply_halves(float (&sums)[SUMS], uint32 a, uint32 b, bool add) {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const unsigned char *const memory = emulation::memory();
    const auto number = [memory](uint32 operand, int row, int k) {
        return from_half(*(const unsigned short *)(memory + swizzled((operand & 0x3fff) * 16 + row * 128 + k * 2, 128)));
    };
    for (int i = 0; i < SUMS; ++i) {
        float sum = 0;
        for (int k = 0; k < 16; ++k)
            sum += number(a, own + i / 2 % 2 * 8, k) * number(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
        sums[i] = (add ? sums[i] : 0.0f) + sum;
    }
}

// 64 rows of 32 bytes by SUMS * 2 columns; both operands lie in shared memory in swizzled rows of 128 bytes. `a_value`
// and `b_value` decode a byte.
template <class Sum, int SUMS, class Decode, class Other>
static inline void multiply_bytes(Sum (&sums)[SUMS], uint32 a, uint32 b, bool add, Decode a_value, Other b_value) {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const unsigned char *const memory = emulation::memory();
    const auto byte = [memory](uint32 operand, int row, int k) {
        return memory[swizzled((operand & 0x3fff) * 16 + row * 128 + k, 128)];
    };
    for (int i = 0; i < SUMS; ++i) {
        Sum sum = 0;
        for (int k = 0; k < 32; ++k)
            sum += (Sum)a_value(byte(a, own + i / 2 % 2 * 8, k)) * (Sum)b_value(byte(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k));
        sums[i] = (add ? sums[i] : 0) + sum;
    }
}

static inline int from_s8(unsigned char byte) { return (signed char)byte; }
static inline float from_e5m2(unsigned char byte) { return from_half(byte << 8); }

// ---- products of warps -------------------------------------------------------------------------------------------------

static inline float half_of(uint32 word, int i, bool half) {
    const uint32 bits = word >> 16 * i & 0xffff;
    return half ? from_half(bits) : from_bf16(bits);
}

// mma.m16n8k16; ptx.cuh describes what each lane holds.
void warp_multiply(float (&sums)[4], const uint32 (&own)[6], bool half);
static inline void warp_multiply_bf16(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    warp_multiply(sums, {a0, a1, a2, a3, b0, b1}, false);
}
static inline void warp_multiply_half(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    warp_multiply(sums, {a0, a1, a2, a3, b0, b1}, true);
}

// mma.m16n8k32 of bytes with a sign.
void warp_multiply_s8(int (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1);
