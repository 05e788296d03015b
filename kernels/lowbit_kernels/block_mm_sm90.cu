// The product of two float8 (e4m3) matrices with a scale for each 128 elements along K, on sm_90a:
// out = sum over steps of 128 along K of (a @ b.T of the step) * a_scale * b_scale, plus bias.
//
// block_mm_sm90.py compiles this file once for each combination of
//   OUT                BF16, FP16 or FP32
//   BIAS               NONE, BF16, FP16 or FP32
//   COLUMN_SCALES      b has a scale for each row and step; otherwise for each 128 rows and step
//   WAVES              rows of a tile / 128: 2, or 1 for few tiles
//   STAGES             stages of the ring
//   BOXES              boxes of the result that a warpgroup has in shared memory
// and puts ptx.cuh, sm90.cuh and `multiply`, the wgmma instruction, before it.
//
// The sums of the matrix units have about 14 bits. So the sum of each step is scaled and added in float32, as
// DeepSeek-V3 does (arXiv 2412.19437, 3.3.2). A warpgroup holds 64 x 128 sums of the current step and WAVES times as many
// scaled sums in registers. While it adds, the matrix units run the products of the other warpgroup: the warpgroups start
// products in turns, because products that start together also end together.
//
// Blocks are persistent: a block takes every n-th tile of the result. Two blocks form a cluster; their tiles lie beside
// each other, and each block loads half of a's rows for both. The third warpgroup of a block is the producer: one of its
// threads lets the TMA copy tiles of a and b and their scales into a ring in shared memory. Meanwhile the other two
// multiply, and store their results through shared memory by the TMA.

enum { NONE, BF16, FP16, FP32 };

static constexpr int WAVE = 64, TILE_N = 128, TILE_K = 128;  // TILE_K is also a row's bytes in shared memory
static constexpr int CLUSTER = 2, GROUPS = 2;                // GROUPS: warpgroups that multiply
static constexpr int TILE_M = GROUPS * WAVES * WAVE, THREADS = 128 * (GROUPS + 1);
static constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K;
static constexpr int OWN_A = TILE_M / CLUSTER;  // rows of a that a block loads for its cluster
static constexpr int OUT_SIZE = OUT == FP32 ? 4 : 2;
static constexpr int BOX_COLUMNS = 128 / OUT_SIZE, BOX_BYTES = WAVE * 128;  // a box of the result is stored at once
static constexpr int SUMS = TILE_N / 2;                                     // of a wave, per thread
static constexpr int FREE = 1, TURN = FREE + GROUPS;  // named barriers: a group's box is free; it is a group's turn

struct Shared {
    unsigned char stage[STAGES][A_BYTES + B_BYTES];
    unsigned char box[GROUPS][BOXES][BOX_BYTES];
    float a_scale[STAGES][TILE_M], b_scale[COLUMN_SCALES ? STAGES : 1][TILE_N];
    uint64 full[STAGES], empty[STAGES];
};

// The product's shape: `steps` of TILE_K along K, and `group` rows of tiles whose clusters follow each other, so that
// they share b in the L2 cache.
struct Shape {
    int m, n, steps, group;
};

// The tiles of a block: those of its cluster, in an order that keeps few rows of a and b in use at a time.
struct Schedule {
    const Shape shape;
    int next = blockIdx.x / CLUSTER;
    int row, column;  // the first of the tile taken

    MEMBER explicit Schedule(const Shape &shape) : shape(shape) {}

    // Takes the block's next tile; false after the last.
    MEMBER bool take(uint32 rank) {
        const int rows = (shape.m + TILE_M - 1) / TILE_M, columns = (shape.n + CLUSTER * TILE_N - 1) / (CLUSTER * TILE_N);
        if (next >= rows * columns) return false;
        const int above = next / (shape.group * columns) * shape.group, within = next - above * columns;
        const int height = min(shape.group, rows - above);
        row = (above + within % height) * TILE_M;
        column = (within / height * CLUSTER + rank) * TILE_N;
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

DEVICE void produce(Shared &shared, const TensorMap &a, const TensorMap &b, const TensorMap &a_scale,
                    const TensorMap &b_scale, const Shape &shape, uint32 rank) {
    Schedule schedule(shape);
    Ring ring;
    constexpr int bytes = A_BYTES + B_BYTES + TILE_M * 4 + (COLUMN_SCALES ? TILE_N * 4 : 0);
    while (schedule.take(rank)) {
        for (int step = 0; step < shape.steps; ++step, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            const int k = step * TILE_K, own = rank * OWN_A;
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, bytes);
            load_box(a, k, schedule.row + own, to + own * TILE_K, full, (unsigned short)((1 << CLUSTER) - 1));
            load_box(b, k, schedule.column, to + A_BYTES, full);
            // Two scales are one element of their maps.
            load_box(a_scale, schedule.row / 2, step, shared_address(shared.a_scale[ring.slot]), full);
            if constexpr (COLUMN_SCALES)
                load_box(b_scale, schedule.column / 2, step, shared_address(shared.b_scale[ring.slot]), full);
        }
    }
}

// Tells every block that writes to a slot that this warp has read it.
DEVICE void release(Shared &shared, int slot) {
    const uint32 lane = threadIdx.x % 32;
    if (lane < CLUSTER) barrier_arrive(shared_address(&shared.empty[slot]), lane);
}

// sums += products * the scales of the thread's two rows * the scale of each column.
DEVICE void add_scaled(float (&sums)[SUMS], const float (&products)[SUMS], float upper, float lower,
                       const float *column_scale) {
#pragma unroll
    for (int i = 0; i < SUMS; i += 4) {
        float4 scale = {upper, upper, lower, lower};
        if constexpr (COLUMN_SCALES) {
            const float2 column = *(const float2 *)&column_scale[i * 2];
            scale = {upper * column.x, upper * column.y, lower * column.x, lower * column.y};
        }
        sums[i] += products[i] * scale.x;
        sums[i + 1] += products[i + 1] * scale.y;
        sums[i + 2] += products[i + 2] * scale.z;
        sums[i + 3] += products[i + 3] * scale.w;
    }
}

DEVICE float bias_at(const void *bias, int column) {
    if constexpr (BIAS == FP32) return ((const float *)bias)[column];
    else if constexpr (BIAS == BF16) return bits_float((uint32)((const unsigned short *)bias)[column] << 16);
    else return from_half(((const unsigned short *)bias)[column]);
}

DEVICE uint32 packed(float x, float y) {
    if constexpr (OUT == FP16) return to_half2(x, y);
    else return to_bf16x2(x, y);
}

// Writes 64 x BOX_COLUMNS results, from column `column` of the product on, to shared memory in the TMA's layout. For
// each 8 neighbouring columns, a thread holds two in row lane / 4 of its warp's 16 rows and two in the row 8 below.
DEVICE void fill_box(uint32 box, const float *sums, const void *bias, int column, int columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int matrix = lane / 8;  // a store has four: rows 0..7 and 8..15 of eight columns, and of the next eight
    const uint32 row = warp * 16 + (matrix & 1) * 8 + lane % 8;
#pragma unroll
    for (int j = 0; j < BOX_COLUMNS / 8; j += 2) {
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = sums[j * 4 + i];
        if constexpr (BIAS != NONE) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = column + (j + i / 2) * 8 + lane % 4 * 2 + i % 2;
                const float shift = at < columns ? bias_at(bias, at) : 0.0f;
                x[i / 2 * 4 + i % 2] += shift, x[i / 2 * 4 + i % 2 + 2] += shift;
            }
        }
        if constexpr (OUT_SIZE == 4) {
            const uint32 own = warp * 16 + lane / 4;  // own + 8 has the same remainder modulo 8
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

DEVICE void consume(Shared &shared, const TensorMap &out, const float *b_scale, const void *bias, const Shape &shape,
                    uint32 rank) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const int own_row = group * WAVES * WAVE + thread / 32 * 16 + lane / 4;  // of the tile
    Schedule schedule(shape);
    Ring ring;
    if (group == 1) named_barrier_arrive(TURN, GROUPS * 128);  // group 0 begins
    while (schedule.take(rank)) {
        // A tile beside the last one has the scales of that one, and stores nothing.
        const int scales = min(schedule.column, shape.n - 1) / TILE_N * shape.steps;
        float sums[WAVES][SUMS] = {};
        for (int step = 0; step < shape.steps; ++step, ring.advance()) {
            const float tile_scale = COLUMN_SCALES ? 1.0f : b_scale[scales + step];
            barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
            const uint32 stage = shared_address(shared.stage[ring.slot]);
            const uint32 b = operand(stage + A_BYTES);
            const float *row_scale = &shared.a_scale[ring.slot][own_row];
#pragma unroll
            for (int wave = 0; wave < WAVES; ++wave) {
                const uint32 a = operand(stage + (group * WAVES + wave) * WAVE * TILE_K);
                const float upper = row_scale[wave * WAVE] * tile_scale, lower = row_scale[wave * WAVE + 8] * tile_scale;
                float products[SUMS];
#pragma unroll
                for (int i = 0; i < SUMS; ++i) in_use(products[i]);
                named_barrier_sync(TURN + group, GROUPS * 128);
                product_fence();
#pragma unroll
                for (int k = 0; k < TILE_K / 32; ++k) multiply(products, a + 2 * k, b + 2 * k, k > 0);
                product_commit();
                named_barrier_arrive(TURN + 1 - group, GROUPS * 128);
#pragma unroll
                for (int i = 0; i < SUMS; ++i) in_use(products[i]);
                product_wait<0>();
#pragma unroll
                for (int i = 0; i < SUMS; ++i) in_use(products[i]);
                if (!COLUMN_SCALES && wave == WAVES - 1) release(shared, ring.slot);
                add_scaled(sums[wave], products, upper, lower,
                           &shared.b_scale[COLUMN_SCALES ? ring.slot : 0][lane % 4 * 2]);
            }
            if (COLUMN_SCALES) release(shared, ring.slot);
        }

        constexpr int ACROSS = TILE_N / BOX_COLUMNS;  // boxes of a wave
#pragma unroll
        for (int i = 0; i < WAVES * ACROSS; ++i) {
            const int row = schedule.row + (group * WAVES + i / ACROSS) * WAVE;
            const int column = schedule.column + i % ACROSS * BOX_COLUMNS;
            const uint32 box = shared_address(shared.box[group][i % BOXES]);
            if (thread == 0) store_wait<BOXES - 1>();
            named_barrier_sync(FREE + group, 128);  // the box is free
            fill_box(box, sums[i / ACROSS] + i % ACROSS * (BOX_COLUMNS / 2), bias, column, shape.n);
            fence_for_tma();
            named_barrier_sync(FREE + group, 128);
            if (thread == 0) {
                store_box(out, column, row, box);
                store_commit();
            }
        }
    }
    if (thread == 0) store_wait<0>();
}

// Grid: a multiple of CLUSTER blocks, at most one per multiprocessor. The maps describe a [m, k] in boxes of TILE_M /
// CLUSTER x 128, b [n, k] in boxes of 128 x 128, out [m, n] in boxes of 64 x BOX_COLUMNS, and the scales of a [steps, m]
// and, for COLUMN_SCALES, of b [steps, n], as pairs, in boxes of a tile's scales. Otherwise `b_scale` is [n / 128 rounded
// up, steps] and its map is not used. `steps` is k / 128.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    block_mm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
             const __grid_constant__ TensorMap a_scales, const __grid_constant__ TensorMap b_scales,
             const __grid_constant__ TensorMap out, const float *b_scale, const void *bias, int m, int n, int steps,
             int group) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Shape shape = {m, n, steps, group};
    const uint32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle depends on address bits
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), GROUPS * 4 * CLUSTER);
        }
        barrier_init_fence();
        prefetch(a), prefetch(b), prefetch(a_scales), prefetch(out);
    }
    cluster_sync();
    wait_for_previous();
    let_next_start();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<40>();
        if (threadIdx.x == GROUPS * 128) produce(shared, a, b, a_scales, b_scales, shape, rank);
        __syncwarp();
    } else {
        take_registers<232>();
        consume(shared, out, b_scale, bias, shape, rank);
        __syncwarp();
    }
    // The other block of the cluster may still write to this block's barriers.
    cluster_sync();
}
