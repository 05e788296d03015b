// The part of ``cuda_on_cpu.h`` that no kernel changes, compiled once: fibers, and exchange between lanes.

#include "cuda_on_cpu.h"

#include <limits.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <vector>

Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
struct Fiber {
    jmp_buf place;  // where it goes on
    std::unique_ptr<char[]> stack;
    bool started = false, done;
    unsigned int first, last = 0;  // of the group that it waits for in `meet`; last 0: it does not wait
    unsigned int given;

    bool of_block() const { return last - first == blockDim.x; }
};
static std::vector<Fiber> fibers;  // they stay from block to block, and from launch to launch
// How many meetings of its warp, and of its block, each fiber has come to; INT_MAX if it is done. Warps of a block may
// have met a different number of times.
static std::vector<int> meetings[2];
static jmp_buf scheduler;
static unsigned int current;
static void (*body)(const void *);
static const void *what;

static void yield() {
    if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}

static void enter() {
    for (;;) {
        body(what);
        fibers[current].done = true;
        meetings[0][current] = meetings[1][current] = INT_MAX;
        yield();
    }
}

// swapcontext would call the operating system for each switch, so only the start of a fiber uses a context.
static void go_on(Fiber &fiber) {
    if (_setjmp(scheduler)) return;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    fiber.stack = std::make_unique<char[]>(64 * 1024);
    ucontext_t context;
    getcontext(&context);
    context.uc_stack = {fiber.stack.get(), 0, 64 * 1024};
    makecontext(&context, enter, 0);
    setcontext(&context);
}

// Waits until every unfinished fiber of [first, last) has come to its next meeting.
static void meet(unsigned int first, unsigned int last) {
    fibers[current].first = first, fibers[current].last = min(last, blockDim.x);
    ++meetings[fibers[current].of_block()][current];
    yield();
}

static bool waits(unsigned int i) {
    const Fiber &own = fibers[i];
    const int *met = &meetings[own.of_block()][0];
    return std::any_of(met + own.first, met + own.last, [met, i](int n) { return n < met[i]; });
}

void run(unsigned int grid, unsigned int threads, void (*call)(const void *), const void *kernel) {
    gridDim = {grid}, blockDim = {threads};
    body = call, what = kernel;
    if (fibers.size() < threads) fibers.resize(threads);
    for (unsigned int block = 0; block < grid; ++block) {
        blockIdx = {block};
        for (auto &of_group : meetings) of_group.assign(threads, 0);
        for (unsigned int i = 0; i < threads; ++i) fibers[i].done = false, fibers[i].last = 0;
        for (bool running = true; running;) {
            running = false;
            for (current = 0; current < threads; ++current) {
                Fiber &fiber = fibers[current];
                if (fiber.done) continue;
                running = true;
                if (fiber.last && waits(current)) continue;
                fiber.last = 0;
                threadIdx = {current};
                go_on(fiber);
            }
        }
    }
}
}  // namespace emulation

void __syncthreads() {
    emulation::meet(0, blockDim.x);
    threadIdx = {emulation::current};
}

unsigned int warp_max(unsigned int x) {
    using namespace emulation;
    const unsigned int first = current / 32 * 32;
    fibers[current].given = x;
    meet(first, first + 32);
    unsigned int largest = 0;
    for (unsigned int i = first; i < first + 32; ++i) largest = fibers[i].given > largest ? fibers[i].given : largest;
    meet(first, first + 32);  // before a fiber overwrites its value
    return largest;
}

int warp_sum(int x) {
    using namespace emulation;
    const unsigned int first = current / 32 * 32;
    fibers[current].given = (unsigned int)x;
    meet(first, first + 32);
    unsigned int sum = 0;
    for (unsigned int i = first; i < first + 32; ++i) sum += fibers[i].given;
    meet(first, first + 32);  // before a fiber overwrites its value
    return (int)sum;
}

unsigned int take_next(unsigned int *counter, int lane) {
    using namespace emulation;
    const unsigned int first = current / 32 * 32;
    if (lane == 0) fibers[current].given = (*counter)++;
    meet(first, first + 32);
    const unsigned int n = fibers[first].given;
    meet(first, first + 32);
    return n;
}
float from_lane_of_half(float x, unsigned int from) {
    using namespace emulation;
    const unsigned int first = current / 32 * 32;
    memcpy(&fibers[current].given, &x, 4);
    meet(first, first + 32);
    memcpy(&x, &fibers[current / 16 * 16 + from % 16].given, 4);
    meet(first, first + 32);
    return x;
}

int __syncthreads_or(int x) {
    using namespace emulation;
    fibers[current].given = x;
    __syncthreads();
    bool any = false;
    for (unsigned int i = 0; i < blockDim.x; ++i) any |= fibers[i].given != 0;
    __syncthreads();  // before a fiber overwrites its value
    return any;
}
