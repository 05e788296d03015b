// Quantizes the rows of experts along rows and, transposed, along columns, for sm_90: quantize_rowcol_sm90.cu for each
// expert, in one launch.
//
// The launchers put ptx.cuh, random_bits.h and quantize_rowcol_sm90.cu before this file, with its macros, STEPS -1, and
//   WEIGHTS     0: tokens; `offsets` holds the end of each expert's rows, and the transposed copies lie beside each other
//                  (grouped_columns.py)
//               1: weights; each expert has `each` rows, and a transposed copy of its own
//   BLOCKS      blocks of a multiprocessor, whose registers must suffice
//   LAG         tiles between the first and the second pass over an expert
//
// The two passes over an expert follow each other closely, so that the second reads what the L2 cache still holds. An
// item is a tile of one of the passes. Blocks take items by a counter, in an order in which the second pass over an
// expert comes after the first. A tile of the second pass waits until all tiles of the first are done. Those have been
// taken by other blocks before, and never wait, so some block always makes progress.

struct Parts {
    const int *offsets;
    int experts, m, each;
    long long columns_t;
};

// The experts one after the other: rows from `start` to `end`, the first column in the transposed copy, and the number
// of tiles up to the expert's end.
struct Cursor {
    int expert = -1;
    int start = 0, end = 0, place = 0, tiles = 0, before = 0;

    MEMBER void advance(const Parts &parts, int across) {
        ++expert;
        place += (end - start + TILE - 1) / TILE * TILE;
        start = end;
        before = tiles;
        if (WEIGHTS) end = start + parts.each;
        else end = min(max(parts.offsets[expert], start), parts.m);
        tiles += (end - start + TILE - 1) / TILE * across;
    }
};

// The items in their order, in segments of one pass over one expert.
struct Order {
    const Parts parts;
    const int across;
    Cursor first, second;            // of each pass, the expert of the last segment
    int begin = 0, items = 0;         // of the segment
    bool quantizes = false;

    MEMBER Order(const Parts &parts, int across) : parts(parts), across(across) {
        second.advance(parts, across);  // the next one
    }
    MEMBER Cursor cursor() const {
        Cursor found = first;
        if (quantizes) found = second;
        return found;
    }

    // Goes to the segment of an item; false after the last.
    MEMBER bool seek(int item) {
        while (item >= begin + items) {
            begin += items;
            if (quantizes) {
                if (second.expert + 1 >= parts.experts) return false;
                second.advance(parts, across);
            }
            const bool all = first.expert + 1 >= parts.experts;
            quantizes = second.expert <= first.expert && (all || first.tiles - second.tiles >= LAG);
            if (!quantizes) first.advance(parts, across);
            items = cursor().tiles - cursor().before;
        }
        return true;
    }
};

DEVICE Job part_of(const Job &whole, const Parts &parts, const Cursor &at) {
    Job job = whole;
    const long long start = at.start, expert = at.expert;
    job.x += start * whole.stride * SIZE;
    job.codes += start * whole.k16();
    job.scale += at.start;
    job.row_max += at.start;
    job.column_max += expert * whole.k;
    if (FACTOR) job.factor += expert * whole.k;
    job.m = at.end - at.start;
    job.before = at.start;
    if (WEIGHTS) {
        job.codes_t += expert * whole.k * job.m16();
    } else {
        job.codes_t += at.place;
        job.columns_t = parts.columns_t;
    }
    job.scale_t += ROW_SCALES ? at.start : expert * whole.k;
    return job;
}

#if STEPS < 0 && !GIVEN
// `done`: for each expert, the finished tiles of the first pass; then the counter of items. All are zero before.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    quantize_grouped(PARAMETERS, const int *offsets, long long experts, long long each, long long columns_t, uint32 *done) {
    JOB;
    __shared__ int taken[2];
    Shared &shared = *(Shared *)memory;
    const Parts parts = {offsets, (int)experts, (int)m, (int)each, columns_t};
    const Draws draws(job);
    Order order(parts, job.tiles_across());
    if (threadIdx.x == 0) taken[0] = atomicAdd(done + experts, 1u);
    __syncthreads();
    for (int turn = 0;; turn ^= 1) {
        const int item = taken[turn];
        if (!order.seek(item)) return;
        uint32 next = 0;  // stored late, since the counter answers late
        if (threadIdx.x == 0) next = atomicAdd(done + experts, 1u);
        const Cursor at = order.cursor();
        const Job own = part_of(job, parts, at);
        const int tile = item - order.begin;
        Part part;
        fetch(own, tile, part);
        if (order.quantizes) {
            if (threadIdx.x == 0)
                while (load_acquire(done + at.expert) < (uint32)order.items) sleep_shortly();
            __syncthreads();
            quantize_tile(own, shared, draws, tile, part);
        } else find_largest(own, shared, tile, part);
        if (threadIdx.x == 0) taken[turn ^ 1] = next;
        __syncthreads();
        if (!order.quantizes && threadIdx.x == 0) {
            __threadfence();  // after the barrier, it covers the whole block
            atomicAdd(done + at.expert, 1u);
        }
    }
}
#endif

#if GIVEN
// Transposed copies of weights whose scales are known: one block per tile.
extern "C" __global__ void __launch_bounds__(THREADS, 4) transpose_weights(PARAMETERS, long long each) {
    JOB;
    const long long tiles = (each + TILE - 1) / TILE * job.tiles_across();
    Cursor at;
    at.expert = blockIdx.x / tiles;
    at.start = at.expert * each, at.end = at.start + each;
    const Job own = part_of(job, {nullptr, 0, (int)m, (int)each, 0}, at);
    Part part;
    fetch(own, blockIdx.x % tiles, part);
    quantize_tile(own, *(Shared *)memory, Draws(job), blockIdx.x % tiles, part);
}
#endif

#if STEPS > 0
// Rows of at most 2048 elements: one warp per row, which stays in registers.
extern "C" __global__ void __launch_bounds__(THREADS) short_rows(PARAMETERS) {
    JOB;
    constexpr int SPAN = 32 * 8, MOST = 8;
    const int lane = threadIdx.x % 32;
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= m) return;
    Raw<8> raw[MOST];
    Extremes largest = {};
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * SPAN < k) load(job, row, i * SPAN + lane * 8, raw[i]);
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        if (i * SPAN >= k) continue;
#pragma unroll
        for (int j = 0; j < Raw<8>::WORDS; ++j) largest.take(raw[i].word[j]);
    }
    const Scale own = scale_of(largest.as_floats().of_warp().bits());
    if (lane == 0) job.scale[row] = shown(own);
    const Draws draws(job);
#pragma unroll
    for (int i = 0; i < MOST; ++i)
        if (i * SPAN < k) store_row(job, row, i * SPAN + lane * 8, raw[i], own, draws);
}
#endif
