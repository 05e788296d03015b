// The product of two int8 matrices with scales, on sm_90a: out = (a @ b.T) * a_scale[:, None] * b_scale[None, :] + bias.
//
// int8_mm_hopper.py compiles this once for each combination of
//   TILE_N             columns of a tile: 256 or 128; a tile has 128 rows
//   STAGES             tiles of K in the ring
//   CLUSTER            1, or 2: blocks that share their columns; each loads half of b's rows, for both
//   SKEW               tiles of K that the second warpgroup begins behind the first, 0 .. STAGES
//   GROUP              rows of tiles (of clusters) that are worked through together, for the L2 cache
//   OUT                BF16, FP16 or FP32
//   BIAS               NONE, BF16, FP16 or FP32
// and puts before it ptx.cuh, hopper.cuh and `multiply`, the instruction for TILE_N.
//
// A block stays on its multiprocessor and takes every n-th tile of the result. Its third warpgroup is the producer: one
// thread has the TMA copy tiles of 128 bytes of K, of a and b, into a ring in shared memory. Each of the other two
// multiplies 64 rows of the tile, int32 sums in registers (half of those that a thread can have, for 256 columns), scales
// them, and stores them through shared memory by the TMA. The producer runs ahead into the next tile meanwhile, and a
// warpgroup that is behind the other (SKEW) has the tensor cores to itself while the other stores, and so the other way.

enum { NONE, BF16, FP16, FP32 };

static constexpr int TILE_M = 128, TILE_K = 128;  // TILE_K is also a row's bytes in shared memory
static constexpr int GROUPS = 2;                  // warpgroups that multiply
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K, STAGE_BYTES = A_BYTES + B_BYTES;
static constexpr int OUT_SIZE = OUT == FP32 ? 4 : 2;
static constexpr int BOX_COLUMNS = 128 / OUT_SIZE, BOX_BYTES = 64 * 128;  // of the result, stored at once
static constexpr int SUMS = TILE_N / 2;                                    // of a thread

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[GROUPS][2][BOX_BYTES];
    float scale[GROUPS][TILE_N];  // of the tile's columns
    uint64 full[STAGES], empty[STAGES];
};

// Which tiles a block works on: those of its cluster, in the order that keeps few rows of a and b in use.
struct Schedule {
    int rows, columns, next;  // of tiles; those of a cluster's blocks lie under each other and count as one

    MEMBER Schedule(int m, int n)
        : rows((m + CLUSTER * TILE_M - 1) / (CLUSTER * TILE_M)), columns((n + TILE_N - 1) / TILE_N),
          next(blockIdx.x / CLUSTER) {}

    MEMBER int left() const {
        const int step = gridDim.x / CLUSTER, total = rows * columns;
        return next < total ? (total - next + step - 1) / step : 0;
    }

    // The first row and column of the block's next tile; false after the last.
    MEMBER bool take(uint32 rank, int &row, int &column) {
        if (next >= rows * columns) return false;
        const int group = next / (GROUP * columns), within = next % (GROUP * columns);
        const int height = min(GROUP, rows - group * GROUP);
        row = ((group * GROUP + within % height) * CLUSTER + rank) * TILE_M;
        column = within / height * TILE_N;
        next += gridDim.x / CLUSTER;
        return true;
    }
};

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance() {
        if (++slot == STAGES) slot = 0, parity ^= 1;
    }
};

DEVICE void produce(Shared &shared, const TensorMap &a, const TensorMap &b, int m, int n, int steps, uint32 rank) {
    Schedule schedule(m, n);
    Ring ring;
    int row, column;
    while (schedule.take(rank, row, column)) {
        for (int step = 0; step < steps; ++step, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]);
            const uint32 to = shared_address(shared.stage[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_box(a, step * TILE_K, row, to, full);
            if constexpr (CLUSTER == 1) {
                load_box(b, step * TILE_K, column, to + A_BYTES, full);
            } else {
                const int first = rank * (TILE_N / CLUSTER);
                load_box(b, step * TILE_K, column + first, to + A_BYTES + first * TILE_K, full, (1 << CLUSTER) - 1);
            }
        }
    }
}

// A warp has read all it needs of a slot: says so to every block that writes to it.
DEVICE void release(Shared &shared, int slot) {
    const uint32 lane = threadIdx.x % 32, empty = shared_address(&shared.empty[slot]);
    if constexpr (CLUSTER == 1) {
        if (lane == 0) barrier_arrive(empty);
    } else {
        if (lane < CLUSTER) barrier_arrive(empty, lane);
    }
}

DEVICE float bias_at(const void *bias, int column) {
    if constexpr (BIAS == FP32) return ((const float *)bias)[column];
    else if constexpr (BIAS == BF16) return bits_float((uint32)((const unsigned short *)bias)[column] << 16);
    else return from_half(((const unsigned short *)bias)[column]);
}

// Two neighbouring sums to results.
DEVICE void scaled(const int *sums, float row_scale, float2 column_scale, float2 bias, float &x, float &y) {
    x = (float)sums[0] * row_scale * column_scale.x;
    y = (float)sums[1] * row_scale * column_scale.y;
    if constexpr (BIAS != NONE) x += bias.x, y += bias.y;
}

DEVICE uint32 packed(float x, float y) {
    if constexpr (OUT == FP16) return to_half2(x, y);
    else return to_bf16x2(x, y);
}

// The 64 x BOX_COLUMNS results from column `first` of the tile on, to shared memory as the TMA reads them. A thread of
// a warpgroup has of 8 neighbouring columns two in row lane / 4 of its warp's 16, and two in the row 8 below.
DEVICE void fill_box(uint32 box, const int *sums, const float *row_scale, const float *column_scale, const void *bias,
                     int column, int columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int matrix = lane / 8;  // of the four of a store: rows 0..7, 8..15, and both of the next eight columns
    const uint32 row = warp * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < BOX_COLUMNS / 8; j += 2) {
        float x[8];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int at = (j + half) * 8 + lane % 4 * 2;
            const float2 scale = *(const float2 *)&column_scale[at];
            float2 shift = {0.0f, 0.0f};
            if constexpr (BIAS != NONE) {
                if (column + at < columns) shift.x = bias_at(bias, column + at);
                if (column + at + 1 < columns) shift.y = bias_at(bias, column + at + 1);
            }
            const int *s = sums + (j + half) * 4;
            scaled(s, row_scale[0], scale, shift, x[half * 4], x[half * 4 + 1]);
            scaled(s + 2, row_scale[1], scale, shift, x[half * 4 + 2], x[half * 4 + 3]);
        }
        if constexpr (OUT == FP32) {
            const uint32 own = warp * 16 + lane / 4;  // the row below has the same remainder by 8
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32 chunk = (j + half) * 2 + lane % 4 / 2;
                const uint32 to = box + own * 128 + (chunk ^ own % 8) * 16 + lane % 2 * 8;
                store_pair(to, x[half * 4], x[half * 4 + 1]);
                store_pair(to + 8 * 128, x[half * 4 + 2], x[half * 4 + 3]);
            }
        } else {
            const uint32 chunk = j + matrix / 2;
            store_matrices(box + row * 128 + (chunk ^ row % 8) * 16, packed(x[0], x[1]), packed(x[2], x[3]),
                           packed(x[4], x[5]), packed(x[6], x[7]));
        }
    }
}

DEVICE void consume(Shared &shared, const TensorMap &out, const float *a_scale, const float *b_scale, const void *bias,
                    int a_scales, int b_scales, int m, int n, int steps, uint32 rank) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    Schedule schedule(m, n);
    Ring ring;
    // The first fillings of the ring wait for nobody, so that this ends.
    const int behind = SKEW == 0 || group == 0 ? 0 : min((long long)SKEW, (long long)schedule.left() * steps);
    if (behind > 0) barrier_wait(shared_address(&shared.full[behind - 1]), 0);

    int tile_row, column;
    while (schedule.take(rank, tile_row, column)) {
        const int row = tile_row + group * 64, first = row + thread / 32 * 16 + lane / 4;
        // Read now, used when the product is done.
        float row_scale[2], column_scale[TILE_N / 128];
#pragma unroll
        for (int i = 0; i < 2; ++i) row_scale[i] = first + i * 8 < m ? a_scale[a_scales ? first + i * 8 : 0] : 0.0f;
#pragma unroll
        for (int i = 0; i < TILE_N / 128; ++i) {
            const int at = column + i * 128 + thread;
            column_scale[i] = at < n ? b_scale[b_scales ? at : 0] : 0.0f;
        }

        int sums[SUMS];
        int before = 0;
        for (int step = 0; step < steps; ++step, ring.advance()) {
            barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
            const uint32 stage = shared_address(shared.stage[ring.slot]);
            const uint32 a = operand(stage + group * 64 * TILE_K), b = operand(stage + A_BYTES);
            product_fence();
#pragma unroll
            for (int k = 0; k < TILE_K / 32; ++k) multiply(sums, a + 2 * k, b + 2 * k, step > 0 || k > 0);
            product_commit();
            product_wait<1>();  // the step before is done
            if (step > 0) release(shared, before);
            before = ring.slot;
        }
        product_wait<0>();
        release(shared, before);

#pragma unroll
        for (int i = 0; i < TILE_N / 128; ++i) shared.scale[group][i * 128 + thread] = column_scale[i];
#pragma unroll
        for (int i = 0; i < TILE_N / BOX_COLUMNS; ++i) {
            const uint32 box = shared_address(shared.box[group][i % 2]);
            if (thread == 0) store_wait<1>();
            meet(1 + group, 128);  // the box is free, the scales are there
            fill_box(box, sums + i * (BOX_COLUMNS / 2), row_scale, shared.scale[group] + i * BOX_COLUMNS, bias,
                     column + i * BOX_COLUMNS, n);
            fence_for_tma();
            meet(1 + group, 128);
            if (thread == 0) {
                store_box(out, column + i * BOX_COLUMNS, row, box);
                store_commit();
            }
        }
    }
    if (thread == 0) store_wait<0>();
}

// Grid: a multiple of CLUSTER blocks, at most as many as there are multiprocessors. a [m, k] and b [n, k] by boxes of
// 128 x 128 and TILE_N / CLUSTER x 128, out [m, n] by boxes of 64 x BOX_COLUMNS; `steps` is k / 128, rounded up, at
// least 1. There is one scale for all rows (columns) if a_scales (b_scales) is 0.
#if CLUSTER > 1
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#endif
    int8_mm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
            const __grid_constant__ TensorMap out, const float *a_scale, const float *b_scale, const void *bias,
            int a_scales, int b_scales, int m, int n, int steps) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const uint32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle goes by addresses
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), GROUPS * 4 * CLUSTER);
        }
        barrier_init_fence();
    }
    if constexpr (CLUSTER == 1) __syncthreads();
    else cluster_meet();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<40>();
        if (threadIdx.x == GROUPS * 128) {
            prefetch(a), prefetch(b), prefetch(out);
            produce(shared, a, b, m, n, steps, rank);
        }
        __syncwarp();
    } else {
        take_registers<232>();
        consume(shared, out, a_scale, b_scale, bias, a_scales, b_scales, m, n, steps, rank);
        __syncwarp();
    }
    // The other block may still write to this one's barriers.
    if constexpr (CLUSTER > 1) cluster_meet();
}
