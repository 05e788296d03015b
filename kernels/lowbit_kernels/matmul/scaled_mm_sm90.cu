// The product of two int8 or float8 matrices on sm_90a: out = (a @ b.T) * a_scale[:, None] * b_scale[None, :] + bias.
//
// scaled_mm_sm90.py compiles this file once for each combination of
//   SUM                int for int8 matrices, float for float8
//   OUT                BF16, FP16 or FP32; or SLICES: sums of slices of K, which `combine` adds and scales
//   BIAS               NONE, BF16, FP16 or FP32
//   TILE_N             columns of a tile: 256; 128 or 64 if a has few rows
//   STAGES             stages of the ring
// and puts ptx.cuh, sm90.cuh, `multiply`, the wgmma instruction, and mm_tiles_sm90.cuh before it.
//
// Blocks are persistent: a block takes every n-th tile of the result (or of the slices of K, if there are fewer tiles
// than multiprocessors). Two blocks form a cluster. Wide tiles of a cluster lie under each other, and each block loads
// half of b's rows for both; narrow tiles lie beside each other, and each block loads half of a's rows. The third
// warpgroup of a block is the producer: one of its threads lets the TMA copy tiles of a and b, 128 bytes along K, into
// a ring in shared memory. Each of the other two warpgroups multiplies 64 rows of the tile, with 32-bit sums in
// registers (half of those that a thread can have), scales the sums, and stores them through shared memory by the TMA.
// Meanwhile the producer already loads the next tile.

static constexpr int BESIDE = TILE_N < 256 ? CLUSTER : 1, UNDER = CLUSTER / BESIDE;  // the cluster's shape in tiles

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
        accumulate(shared, ring, sums, schedule.end - schedule.first);
        // Rows outside of the matrix. The sums of slices must not be stored, since their rows lie inside the buffer. The
        // box must not be filled either: the store of the previous tile may still read it.
        if (row >= shape.m) continue;
        store_sums(shared, sums, row_scale, column_scale, bias, column, shape.n, [&](int i, uint32 box) {
            if (thread != 0) return;
            store_box(out, column + i * BOX_COLUMNS, schedule.out_row + group * 64, box);
            store_commit();
        });
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
    prepare(shared, a, b, out);
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
