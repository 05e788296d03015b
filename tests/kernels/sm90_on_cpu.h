// Runs kernels that use sm90.cuh on a CPU, for tests. It replaces ptx.cuh and sm90.cuh. All threads of all blocks are
// fibers, which switch where they wait. Products complete where they are issued. Loads do too, unless
// EMULATED_DELAY=LATEST,SEED is set: then they complete in any order, one in 16 of them up to LATEST rounds of all
// fibers late. Stores by the TMA complete as late as allowed. So the emulation tests the arithmetic of indices,
// swizzles, fragments and barriers. It finds shared memory that is overwritten before it is stored and, with delays,
// shared memory that is read before it is loaded.

#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define DEVICE static inline
#define MEMBER inline
#define __global__
#define __constant__ static
#define __device__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define DYNAMIC_SHARED(name) unsigned char *name = emulation::memory()
using std::max, std::min;

typedef unsigned int uint32;
typedef unsigned long long uint64;
struct Index { unsigned int x; };
static Index threadIdx, blockIdx, gridDim;
struct uint2 { uint32 x, y; };
struct uint4 { uint32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline uint2 make_uint2(uint32 x, uint32 y) { return {x, y}; }
static inline uint4 make_uint4(uint32 x, uint32 y, uint32 z, uint32 w) { return {x, y, z, w}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {
constexpr size_t STACK = 64 * 1024, MEMORY = 228 * 1024;
struct Store {
    std::function<void()> copy;
    bool committed = false;
};
struct Fiber {
    ucontext_t context;              // where it starts
    jmp_buf place;                   // where it goes on
    bool started = false;
    bool (*waits)(const void *) = 0; // whether it has to wait longer, given `what`; none: it does not wait
    const void *what;
    std::vector<Store> stores;  // not yet done
    std::unique_ptr<char[]> stack;
    bool done = false;
    long meetings[2] = {};  // of its warp, and of its cluster
    uint32 given[6], address;
};
struct Barrier {
    int arrivals, missing;
    long bytes;
    uint32 phase;
};
struct Meeting {
    int come = 0;
    long count = 0;  // of the barriers passed
};
struct Block {
    unsigned char *memory;
    Meeting meetings[16];
    std::map<uint32, Barrier> barriers;
};
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static jmp_buf scheduler;
static unsigned int current, threads, cluster;
static std::function<void()> body;
struct Load {
    long due;
    std::function<void()> copy;
};
static std::vector<Load> loads;  // not yet done
static long now, latest;
static uint64 chance;

static uint32 draw() {
    chance = chance * 6364136223846793005ull + 1442695040888963407ull;
    return chance >> 33;
}
static void load(std::function<void()> copy) {
    if (latest == 0) return copy();
    const long delay = draw() % 16 == 0 ? draw() % latest : draw() % 8;
    loads.push_back({now + delay, copy});
}
static void finish_loads() {
    for (size_t i = 0; i < loads.size();) {
        if (loads[i].due > now) {
            ++i;
            continue;
        }
        const auto copy = loads[i].copy;
        loads.erase(loads.begin() + i);
        copy();
    }
}

static void fail(const char *why) { fprintf(stderr, "%s\n", why), exit(3); }
static Block &block(uint32 rank) { return blocks[blockIdx.x / cluster * cluster + rank]; }
static Block &block() { return blocks[blockIdx.x]; }
static unsigned char *memory() { return block().memory; }
// swapcontext would call the operating system for each switch, so only the start of a fiber uses its context.
static void yield() {
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}
static void go_on(Fiber &fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.context);
}
// The scheduler asks again in each round, and does not switch to the fiber before `waits` is false.
template <typename Waits>
static void yield_while(const Waits &waits) {
    if (!waits()) return;
    Fiber &own = fibers[current];
    own.waits = [](const void *what) { return (*(const Waits *)what)(); };
    own.what = &waits;
    yield();
    own.waits = 0;
}
static void enter() {
    body();
    if (!fibers[current].stores.empty()) fail("nobody waits for a store");
    fibers[current].done = true;
    yield();
}

// Waits until all unfinished fibers of this fiber's group of `count` have come to their next meeting of that kind.
static void meet(int kind, unsigned int count) {
    const unsigned int first = current / count * count;
    const long meeting = ++fibers[current].meetings[kind];
    yield_while([=] {
        for (unsigned int i = first; i < first + count && i < fibers.size(); ++i)
            if (!fibers[i].done && fibers[i].meetings[kind] < meeting) return true;
        return false;
    });
}
static void meet_warp() { meet(0, 32); }
static void come(int kind) { ++fibers[current].meetings[kind]; }
static void await(int kind, unsigned int count) {
    --fibers[current].meetings[kind];
    meet(kind, count);
}

template <typename F>
static void launch(unsigned int grid, unsigned int block_threads, unsigned int cluster_blocks, F kernel) {
    gridDim = {grid}, threads = block_threads, cluster = cluster_blocks, body = kernel;
    fibers = std::vector<Fiber>(grid * threads);
    blocks = std::vector<Block>(grid);
    for (Block &one : blocks) {
        one.memory = (unsigned char *)aligned_alloc(1024, MEMORY);
        memset(one.memory, 0xff, MEMORY);  // unwritten memory reads as NaN
    }
    for (Fiber &fiber : fibers) {
        fiber.stack.reset(new char[STACK]);  // make_unique would write to all of it
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.get(), 0, STACK};
        fiber.context.uc_link = 0;
        makecontext(&fiber.context, enter, 0);
    }
    const char *delay = getenv("EMULATED_DELAY");
    latest = chance = now = 0;
    if (delay && sscanf(delay, "%ld,%llu", &latest, &chance) != 2) fail("EMULATED_DELAY is not LATEST,SEED");
    loads.clear();
    for (bool running = true; running;) {
        running = false;
        finish_loads();
        if (++now > 1000000) fail("the kernel hangs");
        for (current = 0; current < fibers.size(); ++current) {
            if (fibers[current].done) continue;
            running = true;
            Fiber &fiber = fibers[current];
            if (fiber.waits && fiber.waits(fiber.what)) continue;
            threadIdx = {current % threads}, blockIdx = {current / threads};
            go_on(fiber);
        }
    }
    for (Block &one : blocks) free(one.memory);
    // Each compiled variant is a library of its own, with its own fibers.
    fibers = std::vector<Fiber>(), blocks = std::vector<Block>();
}
}  // namespace emulation

// ---- barriers, clusters ----------------------------------------------------------------------------------------------

static inline void finish_phase(emulation::Barrier &b) {
    if (b.missing < 0) emulation::fail("more arrivals than a barrier waits for");
    if (b.missing == 0 && b.bytes == 0) b.phase ^= 1, b.missing = b.arrivals;
}
static inline uint32 shared_address(const void *p) { return (const unsigned char *)p - emulation::memory(); }
static inline void barrier_init(uint32 at, int arrivals) {
    emulation::block().barriers[at] = {arrivals, arrivals, 0, 0};
}
static inline void barrier_init_fence() {}
static inline void barrier_expect(uint32 at, uint32 bytes) {
    emulation::Barrier &b = emulation::block().barriers.at(at);
    b.bytes += bytes, --b.missing;
    finish_phase(b);
}
static inline void barrier_arrive(uint32 at, uint32 rank) {
    emulation::Barrier &b = emulation::block(rank).barriers.at(at);
    --b.missing;
    finish_phase(b);
}
static inline void barrier_arrive(uint32 at) { barrier_arrive(at, blockIdx.x % emulation::cluster); }
static inline void barrier_wait(uint32 at, uint32 parity) {
    const emulation::Barrier &b = emulation::block().barriers.at(at);
    emulation::yield_while([&b, parity] { return b.phase == parity; });
}
static inline void barrier_wait_after(uint32 at, uint32 parity) { barrier_wait(at, parity); }
static inline uint32 cluster_rank() { return blockIdx.x % emulation::cluster; }
static inline void cluster_sync() { emulation::meet(1, emulation::threads * emulation::cluster); }
static inline void cluster_arrive() { emulation::come(1); }
static inline void cluster_wait() { emulation::await(1, emulation::threads * emulation::cluster); }
static inline void send(uint32 address, uint32 rank, float4 x, uint32 barrier) {
    emulation::load([=, &own = emulation::block(rank)] {
        memcpy(own.memory + address, &x, 16);
        emulation::Barrier &b = own.barriers.at(barrier);
        b.bytes -= 16;
        finish_phase(b);
    });
}
static inline void named_barrier_arrive(int id, int threads) {
    emulation::Meeting &own = emulation::block().meetings[id];
    if (++own.come == threads) own.come = 0, ++own.count;
}
static inline void named_barrier_sync(int id, int threads) {
    const emulation::Meeting &own = emulation::block().meetings[id];
    const long before = own.count;
    named_barrier_arrive(id, threads);
    emulation::yield_while([&own, before] { return own.count == before; });
}
static inline void wait_for_previous() {}
static inline void let_next_start() {}
static inline void __trap() { emulation::fail("trap"); }
static inline void __syncwarp() { emulation::meet_warp(); }
static inline uint32 exchanged(uint32 x, uint32 lane) {
    const unsigned int me = emulation::current;
    emulation::fibers[me].given[0] = x;
    emulation::meet_warp();
    const uint32 result = emulation::fibers[me / 32 * 32 + lane].given[0];
    emulation::meet_warp();
    return result;
}
static inline uint32 __shfl_sync(uint32, uint32 x, uint32 lane) { return exchanged(x, lane); }
static inline int __shfl_sync(uint32, int x, uint32 lane) { return int(exchanged(uint32(x), lane)); }
static inline uint32 ballot(bool condition) {
    const unsigned int me = emulation::current;
    emulation::fibers[me].given[0] = condition;
    emulation::meet_warp();
    uint32 result = 0;
    for (unsigned int i = 0; i < 32; ++i) result |= emulation::fibers[me / 32 * 32 + i].given[0] << i;
    emulation::meet_warp();
    return result;
}
static inline uint32 warp_max(uint32 x) {
    for (uint32 lanes = 1; lanes < 32; lanes *= 2) x = max(x, exchanged(x, threadIdx.x % 32 ^ lanes));
    return x;
}
static inline uint32 __shfl_xor_sync(uint32, uint32 x, uint32 lanes) { return exchanged(x, threadIdx.x % 32 ^ lanes); }
static inline float exchanged(float x, uint32 lane) {
    uint32 bits;
    memcpy(&bits, &x, 4);
    bits = exchanged(bits, lane);
    memcpy(&x, &bits, 4);
    return x;
}
static inline float __shfl_sync(uint32, float x, uint32 lane) { return exchanged(x, lane); }
static inline float __shfl_xor_sync(uint32, float x, uint32 lanes) { return exchanged(x, threadIdx.x % 32 ^ lanes); }

static inline int bits_set(uint32 x) { return __builtin_popcount(x); }

// ---- copies ----------------------------------------------------------------------------------------------------------

struct TensorMap {
    const unsigned char *base;
    long rows, columns, stride;  // in elements
    int size, box, width;
    bool plain = false;  // not swizzled
};
static inline void prefetch(const TensorMap &) {}
static inline void prefetch_box(const TensorMap &, int, int) {}
static inline void check_bulk(const void *from, uint32 bytes) {
    if ((uintptr_t)from % 16 || bytes % 16 || bytes == 0) emulation::fail("no such copy");
}
static inline void prefetch(const void *from, uint32 bytes) { check_bulk(from, bytes); }
static inline void load_bulk(uint32 to, const void *from, uint32 bytes, uint32 barrier) {
    check_bulk(from, bytes);
    if (to % 16) emulation::fail("no such copy");
    emulation::load([=, &own = emulation::block()] {
        memcpy(own.memory + to, from, bytes);
        emulation::Barrier &b = own.barriers.at(barrier);
        b.bytes -= bytes;
        finish_phase(b);
    });
}

// The swizzle of 32 (64, 128) bytes: bit 4 (bits 4 to 5, to 6) of an address is XORed with bit 7 (bits 7 to 8, to 9).
// Other widths are not swizzled.
static inline uint32 swizzled(uint32 at, uint32 width) {
    return width == 32 || width == 64 || width == 128 ? at ^ (at >> 7 & (width / 16 - 1)) << 4 : at;
}

static inline void fill(const TensorMap &map, int x, int y, uint32 to, emulation::Block &block, uint32 barrier) {
    const int width = map.width * map.size;
    const bool is_swizzled = !map.plain && (width == 32 || width == 64 || width == 128);
    if (is_swizzled ? to % (8 * width) : width % 16 || to % 128) emulation::fail("no such box");
    emulation::load([=, &block] {
        for (int i = 0; i < map.box * width; ++i) {
            const long row = y + i / width, byte = (long)x * map.size + i % width;
            const bool inside = row < map.rows && byte < map.columns * map.size;
            block.memory[map.plain ? to + i : swizzled(to + i, width)] =
                inside ? map.base[row * map.stride * map.size + byte] : 0;
        }
        emulation::Barrier &b = block.barriers.at(barrier);
        b.bytes -= (long)map.box * width;
        finish_phase(b);
    });
}
static inline void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier) {
    fill(map, x, y, to, emulation::block(), barrier);
}
static inline void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier, unsigned short ranks) {
    for (uint32 rank = 0; rank < emulation::cluster; ++rank)
        if (ranks >> rank & 1) fill(map, x, y, to, emulation::block(rank), barrier);
}
static inline void store_box(const TensorMap &map, int x, int y, uint32 from) {
    const int width = map.width * map.size;
    if (width != 128 || from % 1024) emulation::fail("no such box");
    const unsigned char *memory = emulation::memory();
    emulation::fibers[emulation::current].stores.push_back({[=] {
        for (int i = 0; i < map.box * width; ++i) {
            const long row = y + i / width, byte = (long)x * map.size + i % width;
            if (row < map.rows && byte < map.columns * map.size)
                ((unsigned char *)map.base)[row * map.stride * map.size + byte] = memory[swizzled(from + i, width)];
        }
    }});
}
// The kernels commit each store separately.
static inline void store_commit() { emulation::fibers[emulation::current].stores.back().committed = true; }
template <int PENDING> static inline void store_wait() {
    auto &stores = emulation::fibers[emulation::current].stores;
    for (; stores.size() > PENDING; stores.erase(stores.begin())) {
        if (!stores[0].committed) emulation::fail("a store is not committed");
        stores[0].copy();
    }
}
static inline void fence_for_tma() {}
static inline void store_pair(uint32 address, float a, float b) {
    const float2 pair = {a, b};
    memcpy(emulation::memory() + address, &pair, 8);
}
static inline int4 __ldcs(const int4 *p) { return *p; }
static inline uint32 shared_word(uint32 at) {
    uint32 x;
    memcpy(&x, emulation::memory() + at, 4);
    return x;
}
static inline uint4 shared_vector(uint32 at) {
    uint4 x;
    memcpy(&x, emulation::memory() + at, 16);
    return x;
}

template <int WORDS>
static inline void shared_words(uint32 *to, uint32 at) {
    if (at % (WORDS * 4)) emulation::fail("misaligned words");
    memcpy(to, emulation::memory() + at, WORDS * 4);
}
static inline uint32 constant_word(uint32 at) {
    uint32 x;
    shared_words<1>(&x, at);
    return x;
}

// Four transposed 8 x 8 matrices. A lane holds two neighbouring elements of row lane / 4 of each, which lie in column
// lane / 4 in memory; lane i gives the address of row i % 8 of matrix i / 8.
template <typename F>
static inline void transposed_matrices(uint32 address, F move) {
    const unsigned int me = emulation::current, lane = me % 32;
    emulation::fibers[me].address = address;
    emulation::meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix)
        for (int i = 0; i < 2; ++i) {
            const unsigned int row = matrix * 8 + lane % 4 * 2 + i;
            move((unsigned short *)(emulation::memory() + emulation::fibers[me - lane + row].address) + lane / 4, matrix, i);
        }
    emulation::meet_warp();
}
static inline void store_matrices(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    const unsigned int me = emulation::current, lane = me % 32;
    const uint32 x[4] = {a, b, c, d};
    emulation::fibers[me].address = address;
    emulation::meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix)
        memcpy(emulation::memory() + emulation::fibers[me - lane + matrix * 8 + lane / 4].address + lane % 4 * 4, &x[matrix], 4);
    emulation::meet_warp();
}
static inline void load_matrices(uint32 address, uint32 (&x)[4]) {
    const unsigned int me = emulation::current, lane = me % 32;
    emulation::fibers[me].address = address;
    emulation::meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix)
        memcpy(&x[matrix], emulation::memory() + emulation::fibers[me - lane + matrix * 8 + lane / 4].address + lane % 4 * 4, 4);
    emulation::meet_warp();
}
static inline void store_matrices_transposed(uint32 address, const uint32 (&x)[4]) {
    transposed_matrices(address, [&](unsigned short *p, int matrix, int i) { *p = x[matrix] >> 16 * i; });
}
static inline void load_matrices_transposed(uint32 address, uint32 (&x)[4]) {
    for (uint32 &one : x) one = 0;
    transposed_matrices(address, [&](unsigned short *p, int matrix, int i) { x[matrix] |= (uint32)*p << 16 * i; });
}

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
static inline uint32 larger_magnitudes(uint32 a, uint32 b) { return larger_halves(a & 0x7fff7fff, b & 0x7fff7fff); }

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
    memcpy(emulation::fibers[me].given, a, 16);
    emulation::meet_warp();
    const auto number = [](uint32 bits) { return HALF ? from_half(bits) : from_bf16(bits); };
    float row[2][16];
    for (int i = 0; i < 32; ++i) {
        const int k = i % 16, below = i / 16;
        const uint32 word = emulation::fibers[me / 4 * 4 + k % 8 / 2].given[below + k / 8 * 2];
        row[below][k] = number(word >> 16 * (k % 2) & 0xffff);
    }
    for (int i = 0; i < SUMS; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k) {
            const uint32 at = swizzled((b & 0x3fff) * 16 + token * 128 + k * 2, 128);
            sum += row[i / 2 % 2][k] * number(*(const unsigned short *)(emulation::memory() + at));
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
    memcpy(emulation::fibers[me].given, a, 16);
    emulation::meet_warp();
    for (int i = 0; i < SUMS; ++i) {
        const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        Sum sum = 0;
        for (int k = 0; k < 32; ++k) {
            const uint32 word = emulation::fibers[me / 4 * 4 + k % 16 / 4].given[i / 2 % 2 + k / 16 * 2];
            const uint32 at = swizzled((b & 0x3fff) * 16 + token * 128 + k, 128);
            sum += (Sum)value(word >> 8 * (k % 4) & 255) * (Sum)value(emulation::memory()[at]);
        }
        sums[i] = (add ? sums[i] : 0) + sum;
    }
    emulation::meet_warp();
}

// 64 rows of 32 bytes by SUMS * 2 columns; both operands lie in shared memory in swizzled rows of 128 bytes. `a_value`
// and `b_value` decode a byte.
template <class Sum, int SUMS, class Decode, class Other>
static inline void multiply_bytes(Sum (&sums)[SUMS], uint32 a, uint32 b, bool add, Decode a_value, Other b_value) {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const auto byte = [](uint32 operand, int row, int k) {
        return emulation::memory()[swizzled((operand & 0x3fff) * 16 + row * 128 + k, 128)];
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
static inline void warp_multiply(float (&sums)[4], const uint32 (&own)[6], bool half) {
    const unsigned int me = emulation::current, lane = me % 32;
    memcpy(emulation::fibers[me].given, own, 24);
    emulation::meet_warp();
    const auto given = [&](int other, int i, int k) {
        return half_of(emulation::fibers[me - lane + other * 4 + k % 8 / 2].given[i], k % 2, half);
    };
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k)
            sums[i] += given(lane / 4, i / 2 + k / 8 * 2, k) * given(lane % 4 * 2 + i % 2, 4 + k / 8, k);
    emulation::meet_warp();
}
static inline void warp_multiply_bf16(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    warp_multiply(sums, {a0, a1, a2, a3, b0, b1}, false);
}
static inline void warp_multiply_half(float (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    warp_multiply(sums, {a0, a1, a2, a3, b0, b1}, true);
}

// mma.m16n8k32 of bytes with a sign.
static inline void warp_multiply_s8(int (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    const unsigned int me = emulation::current, lane = me % 32;
    const uint32 own[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(emulation::fibers[me].given, own, 24);
    emulation::meet_warp();
    const auto given = [&](int other, int i, int k) {
        return from_s8(emulation::fibers[me - lane + other * 4 + k % 16 / 4].given[i] >> 8 * (k % 4) & 255);
    };
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k)
            sums[i] += given(lane / 4, i / 2 + k / 16 * 2, k) * given(lane % 4 * 2 + i % 2, 4 + k / 16, k);
    emulation::meet_warp();
}
