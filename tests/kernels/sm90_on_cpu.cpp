// The part of ``sm90_on_cpu.h`` that no kernel changes, compiled once: fibers, barriers, copies, exchange between lanes.

#include "sm90_on_cpu.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

Index threadIdx, blockIdx, gridDim;

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
};
struct Barrier {
    int arrivals, missing;
    long bytes;
    uint32 phase;
};
struct Meeting {
    int come = 0, threads = 0;
    long count = 0;  // of the barriers passed
};
struct Block {
    unsigned char *memory;
    Meeting meetings[16];
    std::map<uint32, Barrier> barriers;
};
Lane *lanes;
unsigned int current;
unsigned char *shared;
static std::vector<Lane> given;
static std::vector<Fiber> fibers;
static std::vector<Block> blocks;
static jmp_buf scheduler;
static unsigned int threads, cluster;
static void (*body)(const void *);
static const void *what;
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

void load(std::function<void()> copy) {
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

void fail(const char *why) { fprintf(stderr, "%s\n", why), exit(3); }
static Block &block(uint32 rank) { return blocks[blockIdx.x / cluster * cluster + rank]; }
static Block &block() { return blocks[blockIdx.x]; }

// swapcontext would call the operating system for each switch, so only the start of a fiber uses its context.
void yield() {
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
    body(what);
    if (!fibers[current].stores.empty()) fail("nobody waits for a store");
    fibers[current].done = true;
    yield();
}

// Waits until all unfinished fibers of this fiber's group of `count` have come to their next meeting of that kind.
void meet(int kind, unsigned int count) {
    const unsigned int first = current / count * count;
    const long meeting = ++fibers[current].meetings[kind];
    yield_while([=] {
        for (unsigned int i = first; i < first + count && i < fibers.size(); ++i)
            if (!fibers[i].done && fibers[i].meetings[kind] < meeting) return true;
        return false;
    });
}

void meet_warp() { meet(0, 32); }
void come(int kind) { ++fibers[current].meetings[kind]; }
void await(int kind, unsigned int count) {
    --fibers[current].meetings[kind];
    meet(kind, count);
}

void run(unsigned int grid, unsigned int block_threads, unsigned int cluster_blocks, void (*call)(const void *),
         const void *kernel) {
    gridDim = {grid}, threads = block_threads, cluster = cluster_blocks, body = call, what = kernel;
    fibers = std::vector<Fiber>(grid * threads);
    given = std::vector<Lane>(grid * threads), lanes = given.data();
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
            shared = block().memory;
            go_on(fiber);
        }
    }
    for (Block &one : blocks) free(one.memory);
    fibers = std::vector<Fiber>(), blocks = std::vector<Block>(), given = std::vector<Lane>();
}
}  // namespace emulation

static void finish_phase(emulation::Barrier &b) {
    if (b.missing < 0) emulation::fail("more arrivals than a barrier waits for");
    if (b.missing == 0 && b.bytes == 0) b.phase ^= 1, b.missing = b.arrivals;
}

uint32 shared_address(const void *p) { return (const unsigned char *)p - emulation::memory(); }
void barrier_init(uint32 at, int arrivals) {
    emulation::block().barriers[at] = {arrivals, arrivals, 0, 0};
}

void barrier_expect(uint32 at, uint32 bytes) {
    emulation::Barrier &b = emulation::block().barriers.at(at);
    b.bytes += bytes, --b.missing;
    finish_phase(b);
}

void barrier_arrive(uint32 at, uint32 rank) {
    emulation::Barrier &b = emulation::block(rank).barriers.at(at);
    --b.missing;
    finish_phase(b);
}

void barrier_arrive(uint32 at) { barrier_arrive(at, blockIdx.x % emulation::cluster); }
void barrier_wait(uint32 at, uint32 parity) {
    const emulation::Barrier &b = emulation::block().barriers.at(at);
    emulation::yield_while([&b, parity] { return b.phase == parity; });
}

void barrier_wait_after(uint32 at, uint32 parity) { barrier_wait(at, parity); }
uint32 cluster_rank() { return blockIdx.x % emulation::cluster; }
void cluster_sync() { emulation::meet(1, emulation::threads * emulation::cluster); }
void cluster_arrive() { emulation::come(1); }
void cluster_wait() { emulation::await(1, emulation::threads * emulation::cluster); }
void send(uint32 address, uint32 barrier, float4 x) {
    emulation::load([=, &own = emulation::block(address >> 24)] {
        memcpy(own.memory + (address & 0xffffff), &x, 16);
        emulation::Barrier &b = own.barriers.at(barrier & 0xffffff);
        b.bytes -= 16;
        finish_phase(b);
    });
}

void named_barrier_arrive(int id, int threads) {
    emulation::Meeting &own = emulation::block().meetings[id];
    if (own.threads && own.threads != threads) emulation::fail("two counts of threads for one named barrier");
    own.threads = threads;
    if (++own.come == threads) own.come = 0, ++own.count;
}

void named_barrier_sync(int id, int threads) {
    const emulation::Meeting &own = emulation::block().meetings[id];
    const long before = own.count;
    named_barrier_arrive(id, threads);
    emulation::yield_while([&own, before] { return own.count == before; });
}

void __trap() { emulation::fail("trap"); }
void __syncwarp() { emulation::meet_warp(); }
uint32 exchanged(uint32 x, uint32 lane) {
    const unsigned int me = emulation::current;
    emulation::lanes[me].given[0] = x;
    emulation::meet_warp();
    const uint32 result = emulation::lanes[me / 32 * 32 + lane].given[0];
    emulation::meet_warp();
    return result;
}

uint32 __shfl_sync(uint32, uint32 x, uint32 lane) { return exchanged(x, lane); }
int __shfl_sync(uint32, int x, uint32 lane) { return int(exchanged(uint32(x), lane)); }
uint32 ballot(bool condition) {
    const unsigned int me = emulation::current;
    emulation::lanes[me].given[0] = condition;
    emulation::meet_warp();
    uint32 result = 0;
    for (unsigned int i = 0; i < 32; ++i) result |= emulation::lanes[me / 32 * 32 + i].given[0] << i;
    emulation::meet_warp();
    return result;
}

uint32 warp_max(uint32 x) {
    for (uint32 lanes = 1; lanes < 32; lanes *= 2) x = max(x, exchanged(x, threadIdx.x % 32 ^ lanes));
    return x;
}

uint32 __shfl_xor_sync(uint32, uint32 x, uint32 lanes) { return exchanged(x, threadIdx.x % 32 ^ lanes); }
float exchanged(float x, uint32 lane) {
    uint32 bits;
    memcpy(&bits, &x, 4);
    bits = exchanged(bits, lane);
    memcpy(&x, &bits, 4);
    return x;
}

float __shfl_sync(uint32, float x, uint32 lane) { return exchanged(x, lane); }
float __shfl_xor_sync(uint32, float x, uint32 lanes) { return exchanged(x, threadIdx.x % 32 ^ lanes); }
int bits_set(uint32 x) { return __builtin_popcount(x); }
void check_bulk(const void *from, uint32 bytes) {
    if ((uintptr_t)from % 16 || bytes % 16 || bytes == 0) emulation::fail("no such copy");
}

void prefetch(const void *from, uint32 bytes) { check_bulk(from, bytes); }
void load_bulk(uint32 to, const void *from, uint32 bytes, uint32 barrier) {
    check_bulk(from, bytes);
    if (to % 16) emulation::fail("no such copy");
    emulation::load([=, &own = emulation::block()] {
        memcpy(own.memory + to, from, bytes);
        emulation::Barrier &b = own.barriers.at(barrier);
        b.bytes -= bytes;
        finish_phase(b);
    });
}

static void fill(const TensorMap &map, int x, int y, uint32 to, emulation::Block &block, uint32 barrier) {
    const int width = map.width * map.size;
    const bool is_swizzled = !map.plain && (width == 32 || width == 64 || width == 128);
    if (is_swizzled ? to % (8 * width) : width % 16 || to % 128) emulation::fail("no such box");
    // An H200 reports an illegal instruction.
    if (x * map.size % 16) emulation::fail("a box begins between multiples of 16 bytes");
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

void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier) {
    fill(map, x, y, to, emulation::block(), barrier);
}

void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier, unsigned short ranks) {
    for (uint32 rank = 0; rank < emulation::cluster; ++rank)
        if (ranks >> rank & 1) fill(map, x, y, to, emulation::block(rank), barrier);
}

void store_box(const TensorMap &map, int x, int y, uint32 from) {
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
void store_commit() { emulation::fibers[emulation::current].stores.back().committed = true; }
void store_pair(uint32 address, float a, float b) {
    const float2 pair = {a, b};
    memcpy(emulation::memory() + address, &pair, 8);
}

int4 __ldcs(const int4 *p) { return *p; }
uint32 shared_word(uint32 at) {
    uint32 x;
    memcpy(&x, emulation::memory() + at, 4);
    return x;
}

uint4 shared_vector(uint32 at) {
    uint4 x;
    memcpy(&x, emulation::memory() + at, 16);
    return x;
}

uint32 constant_word(uint32 at) {
    uint32 x;
    shared_words<1>(&x, at);
    return x;
}

void store_matrices(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    const unsigned int me = emulation::current, lane = me % 32;
    const uint32 x[4] = {a, b, c, d};
    emulation::lanes[me].address = address;
    emulation::meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix)
        memcpy(emulation::memory() + emulation::lanes[me - lane + matrix * 8 + lane / 4].address + lane % 4 * 4, &x[matrix], 4);
    emulation::meet_warp();
}

void load_matrices(uint32 address, uint32 (&x)[4]) {
    const unsigned int me = emulation::current, lane = me % 32;
    emulation::lanes[me].address = address;
    emulation::meet_warp();
    for (int matrix = 0; matrix < 4; ++matrix)
        memcpy(&x[matrix], emulation::memory() + emulation::lanes[me - lane + matrix * 8 + lane / 4].address + lane % 4 * 4, 4);
    emulation::meet_warp();
}

void store_matrices_transposed(uint32 address, const uint32 (&x)[4]) {
    transposed_matrices(address, [&](unsigned short *p, int matrix, int i) { *p = x[matrix] >> 16 * i; });
}

void load_matrices_transposed(uint32 address, uint32 (&x)[4]) {
    for (uint32 &one : x) one = 0;
    transposed_matrices(address, [&](unsigned short *p, int matrix, int i) { x[matrix] |= (uint32)*p << 16 * i; });
}
void stores_wait(size_t pending) {
    auto &stores = emulation::fibers[emulation::current].stores;
    for (; stores.size() > pending; stores.erase(stores.begin())) {
        if (!stores[0].committed) emulation::fail("a store is not committed");
        stores[0].copy();
    }
}
void warp_multiply(float (&sums)[4], const uint32 (&own)[6], bool half) {
    const unsigned int me = emulation::current, lane = me % 32;
    memcpy(emulation::lanes[me].given, own, 24);
    emulation::meet_warp();
    const auto given = [&](int other, int i, int k) {
        return half_of(emulation::lanes[me - lane + other * 4 + k % 8 / 2].given[i], k % 2, half);
    };
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k)
            sums[i] += given(lane / 4, i / 2 + k / 8 * 2, k) * given(lane % 4 * 2 + i % 2, 4 + k / 8, k);
    emulation::meet_warp();
}
void warp_multiply_s8(int (&sums)[4], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint32 b0, uint32 b1) {
    const unsigned int me = emulation::current, lane = me % 32;
    const uint32 own[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(emulation::lanes[me].given, own, 24);
    emulation::meet_warp();
    const auto given = [&](int other, int i, int k) {
        return from_s8(emulation::lanes[me - lane + other * 4 + k % 16 / 4].given[i] >> 8 * (k % 4) & 255);
    };
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 32; ++k)
            sums[i] += given(lane / 4, i / 2 + k / 16 * 2, k) * given(lane % 4 * 2 + i % 2, 4 + k / 16, k);
    emulation::meet_warp();
}
