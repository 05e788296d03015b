// The product of two int8 or float8 matrices on sm_90a: out = (a @ b.T) * a_scale[:, None] * b_scale[None, :] + bias.
//
// scaled_mm_sm90.py compiles this file once for each combination of
//   SUM                int for int8 matrices, float for float8
//   OUT                BF16, FP16 or FP32; or SLICES: sums of slices of K, which `combine` adds and scales
//   BIAS               NONE, BF16, FP16 or FP32
//   TILE_N             columns of a tile: 256; 128 or 64 if a has few rows
//   STAGES             stages of the ring
// and puts ptx.cuh, sm90.cuh and `multiply`, the wgmma instruction, before it.
//
// Blocks are persistent: a block takes every n-th tile of the result (or of the slices of K, if there are fewer tiles
// than multiprocessors). Two blocks form a cluster. Wide tiles of a cluster lie under each other, and each block loads
// half of b's rows for both; narrow tiles lie beside each other, and each block loads half of a's rows. The third
// warpgroup of a block is the producer: one of its threads lets the TMA copy tiles of a and b, 128 bytes along K, into
// a ring in shared memory. Each of the other two warpgroups multiplies 64 rows of the tile, with 32-bit sums in
// registers (half of those that a thread can have), scales the sums, and stores them through shared memory by the TMA.
// Meanwhile the producer already loads the next tile.

enum { NONE, BF16, FP16, FP32, SLICES };

static constexpr int TILE_M = 128, TILE_K = 128;  // TILE_K is also a row's bytes in shared memory
static constexpr int CLUSTER = 2;
static constexpr int BESIDE = TILE_N < 256 ? CLUSTER : 1, UNDER = CLUSTER / BESIDE;  // the cluster's shape in tiles
static constexpr int GROUPS = 2;                  // warpgroups that multiply
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K, STAGE_BYTES = A_BYTES + B_BYTES;
static constexpr int OUT_SIZE = OUT == FP32 || OUT == SLICES ? 4 : 2;
static constexpr int BOX_COLUMNS = 128 / OUT_SIZE, BOX_BYTES = 64 * 128;  // a box of the result is stored at once
static constexpr int BOXES = TILE_N / BOX_COLUMNS;                        // boxes of a tile: an even number, or 1
static constexpr int SUMS = TILE_N / 2, COLUMN_SCALES = (TILE_N + 127) / 128;  // per thread

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[GROUPS][2][BOX_BYTES];
    float scale[GROUPS][TILE_N];  // scales of the tile's columns
    uint64 full[STAGES], empty[STAGES];
};

// The product's shape and its division: `steps` of TILE_K along K, `slices` of K with separate sums, and `group` rows
// of clusters whose tiles follow each other, so that they share b in the L2 cache.
struct Shape {
    int m, n, steps, group, slices;

    MEMBER int rows() const { return (m + UNDER * TILE_M - 1) / (UNDER * TILE_M); }
    MEMBER int columns() const { return (n + BESIDE * TILE_N - 1) / (BESIDE * TILE_N); }
};

// The tiles of a block: those of its cluster, in an order that keeps few rows of a and b in use at a time.
struct Schedule {
    const Shape shape;
    int next = blockIdx.x / CLUSTER;
    int row, column, out_row;  // first row and column of the tile taken, and its row in the result
    int first, end;            // its steps along K

    MEMBER explicit Schedule(const Shape &shape) : shape(shape) {}

    // Takes the block's next tile; false after the last.
    MEMBER bool take(uint32 rank) {
        const int rows = shape.rows(), columns = shape.columns(), slice = next / (rows * columns);
        if (slice >= shape.slices) return false;
        const int tile = next % (rows * columns), above = tile / (shape.group * columns) * shape.group;
        const int height = min(shape.group, rows - above), within = tile - above * columns;
        row = ((above + within % height) * UNDER + rank % UNDER) * TILE_M;
        column = (within / height * BESIDE + rank / UNDER) * TILE_N;
        out_row = row + slice * rows * UNDER * TILE_M;
        first = (long long)shape.steps * slice / shape.slices;
        end = (long long)shape.steps * (slice + 1) / shape.slices;
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

// Loads a in boxes of `a_rows` rows, and only boxes that have rows inside the matrix, since the TMA is slower for rows
// outside. The sums of missing rows are garbage and are never stored.
DEVICE void produce(Shared &shared, const TensorMap &a, const TensorMap &b, const Shape &shape, int a_rows, uint32 rank) {
    Schedule schedule(shape);
    Ring ring;
    while (schedule.take(rank)) {
        const int height = min(shape.m - schedule.row, TILE_M), boxes = height > 0 ? (height + a_rows - 1) / a_rows : 0;
        const int own_b = BESIDE > 1 ? 0 : rank * (TILE_N / CLUSTER);
        const unsigned short both = (1 << CLUSTER) - 1;
        for (int step = schedule.first; step < schedule.end; ++step, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]);
            const uint32 to = shared_address(shared.stage[ring.slot]), to_b = to + A_BYTES + own_b * TILE_K;
            const int k = step * TILE_K;
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, boxes * a_rows * TILE_K + B_BYTES);
            if constexpr (BESIDE > 1) {
                for (int y = rank * a_rows; y < boxes * a_rows; y += BESIDE * a_rows)
                    load_box(a, k, schedule.row + y, to + y * TILE_K, full, both);
                load_box(b, k, schedule.column, to_b, full);
            } else {
                if (boxes > 0) load_box(a, k, schedule.row, to, full);
                load_box(b, k, schedule.column + own_b, to_b, full, both);
            }
        }
    }
}

// Tells every block that writes to a slot that this warp has read it.
DEVICE void release(Shared &shared, int slot) {
    const uint32 lane = threadIdx.x % 32;
    if (lane < CLUSTER) barrier_arrive(shared_address(&shared.empty[slot]), lane);
}

DEVICE float bias_at(const void *bias, int column) {
    if constexpr (BIAS == FP32) return ((const float *)bias)[column];
    else if constexpr (BIAS == BF16) return bits_float((uint32)((const unsigned short *)bias)[column] << 16);
    else return from_half(((const unsigned short *)bias)[column]);
}

// Two neighbouring sums to results. For SLICES the results are the sums' bits.
DEVICE float bits_of(int sum) { return bits_float((uint32)sum); }
DEVICE float bits_of(float sum) { return sum; }
DEVICE void scaled(const SUM *sums, float row_scale, float2 column_scale, float2 bias, float &x, float &y) {
    if constexpr (OUT == SLICES) {
        x = bits_of(sums[0]), y = bits_of(sums[1]);
        return;
    }
    x = (float)sums[0] * row_scale * column_scale.x;
    y = (float)sums[1] * row_scale * column_scale.y;
    if constexpr (BIAS != NONE) x += bias.x, y += bias.y;
}

DEVICE uint32 packed(float x, float y) {
    if constexpr (OUT == FP16) return to_half2(x, y);
    else return to_bf16x2(x, y);
}

// Writes 64 x BOX_COLUMNS results, from column `column` of the product on, to shared memory in the TMA's layout. For
// each 8 neighbouring columns, a thread holds two in row lane / 4 of its warp's 16 rows and two in the row 8 below.
DEVICE void fill_box(uint32 box, const SUM *sums, const float *row_scale, const float *column_scale, const void *bias,
                     int column, int columns) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int matrix = lane / 8;  // a store has four: rows 0..7 and 8..15 of eight columns, and of the next eight
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
            const SUM *s = sums + (j + half) * 4;
            scaled(s, row_scale[0], scale, shift, x[half * 4], x[half * 4 + 1]);
            scaled(s + 2, row_scale[1], scale, shift, x[half * 4 + 2], x[half * 4 + 3]);
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

DEVICE void consume(Shared &shared, const TensorMap &out, const float *a_scale, const float *b_scale, const void *bias,
                    int a_scales, int b_scales, const Shape &shape, uint32 rank) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    Schedule schedule(shape);
    Ring ring;
    while (schedule.take(rank)) {
        const int column = schedule.column, row = schedule.row + group * 64, first = row + thread / 32 * 16 + lane / 4;
        // Loads the scales early, so that they arrive while the product runs.
        float row_scale[2], column_scale[COLUMN_SCALES];
#pragma unroll
        for (int i = 0; i < 2; ++i) row_scale[i] = first + i * 8 < shape.m ? a_scale[a_scales ? first + i * 8 : 0] : 0.0f;
#pragma unroll
        for (int i = 0; i < COLUMN_SCALES; ++i) {
            const int at = column + i * 128 + thread;
            column_scale[i] = at >= shape.n ? 0.0f : b_scale ? b_scale[b_scales ? at : 0] : 1.0f;
        }

        SUM sums[SUMS];
        int before = 0;
        const int steps = schedule.end - schedule.first;
        for (int step = 0; step < steps; ++step, ring.advance()) {
            barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
            const uint32 stage = shared_address(shared.stage[ring.slot]);
            const uint32 a = operand(stage + group * 64 * TILE_K), b = operand(stage + A_BYTES);
            product_fence();
#pragma unroll
            for (int k = 0; k < TILE_K / 32; ++k) multiply(sums, a + 2 * k, b + 2 * k, step > 0 || k > 0);
            product_commit();
            product_wait<1>();  // the previous step is done
            if (step > 0) release(shared, before);
            before = ring.slot;
        }
        product_wait<0>();
        release(shared, before);
        // Rows outside of the matrix. The sums of slices must not be stored, since their rows lie inside the buffer. The
        // box must not be filled either: the store of the previous tile may still read it.
        if (row >= shape.m) continue;

#pragma unroll
        for (int i = 0; i < COLUMN_SCALES; ++i) {
            if (TILE_N % 128 == 0 || thread < TILE_N) shared.scale[group][i * 128 + thread] = column_scale[i];
        }
#pragma unroll
        for (int i = 0; i < BOXES; ++i) {
            const uint32 box = shared_address(shared.box[group][i % 2]);
            if (thread == 0) store_wait<(BOXES > 1)>();
            named_barrier_sync(1 + group, 128);  // the box is free, the scales are in shared memory
            fill_box(box, sums + i * (BOX_COLUMNS / 2), row_scale, shared.scale[group] + i * BOX_COLUMNS, bias,
                     column + i * BOX_COLUMNS, shape.n);
            fence_for_tma();
            named_barrier_sync(1 + group, 128);
            if (thread == 0) {
                store_box(out, column + i * BOX_COLUMNS, schedule.out_row + group * 64, box);
                store_commit();
            }
        }
    }
    if (thread == 0) store_wait<0>();
}

// Grid: a multiple of CLUSTER blocks, at most one per multiprocessor. The maps describe a [m, k] in boxes of a_rows x
// 128, b [n, k] in boxes of TILE_N / UNDER x 128, and out [m, n] in boxes of 64 x BOX_COLUMNS; for SLICES, out is
// [slices, m rounded up to whole clusters, n]. `steps` is k / 128 rounded up, and at least `slices`. If a_scales
// (b_scales) is 0, all rows (columns) share one scale; if b_scale is null, it is 1.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    scaled_mm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
            const __grid_constant__ TensorMap out, const float *a_scale, const float *b_scale, const void *bias,
            int a_scales, int b_scales, int m, int n, int steps, int group, int slices, int a_rows) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Shape shape = {m, n, steps, group, slices};
    const uint32 rank = cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle depends on address bits
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), GROUPS * 4 * CLUSTER);
        }
        barrier_init_fence();
        prefetch(a), prefetch(b), prefetch(out);
    }
    cluster_sync();
    wait_for_previous();
    let_next_start();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<40>();
        if (threadIdx.x == GROUPS * 128) produce(shared, a, b, shape, a_rows, rank);
        __syncwarp();
    } else {
        take_registers<232>();
        consume(shared, out, a_scale, b_scale, bias, a_scales, b_scales, shape, rank);
        __syncwarp();
    }
    // The other block of the cluster may still write to this block's barriers.
    cluster_sync();
}

DEVICE void add(int &sum, int bits) { sum += bits; }
DEVICE void add(float &sum, int bits) { sum += bits_float((uint32)bits); }

// Adds the sums of `slices` products, `step` elements apart, and scales them; a thread computes four columns of a row.
// Rows of sums are `width` elements apart, rows of out `out_width`; both are multiples of 16 bytes. Not for OUT SLICES.
extern "C" __global__ void __launch_bounds__(256)
    combine(const SUM *sums, unsigned char *out, const float *a_scale, const float *b_scale, const void *bias,
            int a_scales, int b_scales, int m, int n, int slices, long long step, int width, int out_width) {
    const long long at = (blockIdx.x * 256ll + threadIdx.x) * 4;
    const int row = at / width, column = at % width;
    wait_for_previous();
    let_next_start();
    if (row >= m || column >= n) return;
    SUM sum[4] = {};
    for (int slice = 0; slice < slices; ++slice) {
        const int4 part = __ldcs((const int4 *)(sums + slice * step + at));
        add(sum[0], part.x), add(sum[1], part.y), add(sum[2], part.z), add(sum[3], part.w);
    }
    const float row_scale = a_scale[a_scales ? row : 0];
    float result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int own = min(column + i, n - 1);  // columns beyond n are cut off later
        result[i] = (float)sum[i] * row_scale * (b_scale ? b_scale[b_scales ? own : 0] : 1.0f);
        if constexpr (BIAS != NONE) result[i] += bias_at(bias, own);
    }
    unsigned char *to = out + ((long long)row * out_width + column) * OUT_SIZE;
    if constexpr (OUT == FP32) *(float4 *)to = make_float4(result[0], result[1], result[2], result[3]);
    else *(uint2 *)to = make_uint2(packed(result[0], result[1]), packed(result[2], result[3]));
}
