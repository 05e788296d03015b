// The products of grouped_scaled_mm and grouped_block_mm on sm_90a, over all experts in one launch, of int8 or float8.
//
// grouped_mm_sm90.py compiles this file once for each combination of
//   OUT                BF16, FP16 or FP32
//   SUM                int for int8 operands, float for float8
//   RAGGED             0: the rows of a belong to experts:  out[m] = a[m] @ b[expert of m].T
//                      1: the columns of a and b do:        out[e] = a[:, columns of e] @ b[:, columns of e].T
//   BESIDE             tiles of a cluster that lie beside each other: 1 or 2
//   STAGES             stages of the ring
//   BLOCKS             grouped_block_mm: the sums of each step have scales
// with TILE_N 256 and BIAS NONE, and puts ptx.cuh, sm90.cuh, `multiply`, the wgmma instruction, and mm_tiles_sm90.cuh
// before it. With BLOCKS `multiply` has 128 columns, so that a thread has registers for the sums of a tile and of half a
// step.
//
// Blocks are persistent, as in scaled_mm_sm90.cu. Only the device knows how many rows each expert has. So each thread that
// needs the next tile walks over the offsets, from the expert of its last tile on. A tile belongs to one expert. The TMA
// loads whole boxes, also those with rows of the next expert. The sums of such rows are never stored: a box that is
// stored in part leaves shared memory by plain stores. Columns of experts begin at multiples of TILE_K, after zeros
// (grouped_columns.py), so a step never holds columns of two experts.

static constexpr int UNDER = CLUSTER / BESIDE;

// `offsets`: the end of each expert's rows, of `tokens` in all. `m`: rows of out; of each expert if RAGGED. n: columns.
// `steps` along K, unless RAGGED. `group`: rows of clusters whose tiles follow each other.
struct Shape {
    const int *offsets;
    int experts, tokens, m, n, steps, group;
};

// The tiles of a block: those of its cluster, one expert after the other.
struct Schedule {
    const Shape shape;
    int next = blockIdx.x / CLUSTER;
    int expert = -1, start = 0, end = 0, place = 0;  // its rows, and its first column if RAGGED
    int first = 0, tiles = 0;                        // of all experts before, and its own
    int row, column, height;                         // a tile: the first row and column, the rows that are stored
    int steps;                                       // of a tile of this expert

    MEMBER explicit Schedule(const Shape &shape) : shape(shape) {}

    // Takes the next expert. Without RAGGED, the rows that no expert has follow; they are zeros.
    MEMBER bool advance() {
        ++expert;
        if (expert >= shape.experts + (RAGGED ? 0 : 1)) return false;
        place += (end - start + TILE_K - 1) / TILE_K * TILE_K;
        start = end;
        end = expert < shape.experts ? min(max(shape.offsets[expert], start), shape.tokens) : shape.tokens;
        const int rows = RAGGED ? shape.m : end - start, columns = (shape.n + BESIDE * TILE_N - 1) / (BESIDE * TILE_N);
        first += tiles;
        tiles = (rows + UNDER * TILE_M - 1) / (UNDER * TILE_M) * columns;
        // Offsets beyond the rows may put columns beyond those that a and b, and their scales, have.
        const int columns_here = max(min(end - start, shape.tokens - place), 0);
        steps = RAGGED ? (columns_here + TILE_K - 1) / TILE_K : expert < shape.experts ? shape.steps : 0;
        return true;
    }

    // Takes the block's next tile; false after the last.
    MEMBER bool take(uint32 rank) {
        while (next >= first + tiles)
            if (!advance()) return false;
        const int all = RAGGED ? shape.m : end - start;
        const int rows = (all + UNDER * TILE_M - 1) / (UNDER * TILE_M), columns = tiles / rows, tile = next - first;
        const int above = tile / (shape.group * columns) * shape.group, within = tile - above * columns;
        const int together = min(shape.group, rows - above);
        row = ((above + within % together) * UNDER + rank % UNDER) * TILE_M;
        column = (within / together * BESIDE + rank / UNDER) * TILE_N;
        height = all - row;
        next += gridDim.x / CLUSTER;
        return true;
    }

    // Where the tile begins: rows of a, b and out, and the column along K.
    MEMBER int a_row() const { return RAGGED ? row : start + row; }
    MEMBER int b_row() const { return RAGGED ? column : min(expert, shape.experts - 1) * shape.n + column; }
    MEMBER long long out_row() const { return RAGGED ? (long long)expert * shape.m + row : start + row; }
    MEMBER int k() const { return RAGGED ? place : 0; }
};

DEVICE void produce(Shared &shared, const TensorMap &a, const TensorMap &b, const Shape &shape, uint32 rank) {
    constexpr int A_ROWS = TILE_M / BESIDE, B_ROWS = TILE_N / UNDER;
    const unsigned short both = (1 << CLUSTER) - 1;
    const int own_a = BESIDE > 1 ? rank * A_ROWS : 0, own_b = BESIDE > 1 ? 0 : rank * B_ROWS;
    Schedule schedule(shape);
    Ring ring;
    while (schedule.take(rank)) {
        const int a_row = schedule.a_row() + own_a, b_row = schedule.b_row() + own_b;
        const bool loads_a = BESIDE > 1 || schedule.height > 0;
        for (int step = 0; step < schedule.steps; ++step, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            const uint32 to_a = to + own_a * TILE_K, to_b = to + A_BYTES + own_b * TILE_K;
            const int k = schedule.k() + step * TILE_K;
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, (loads_a ? A_BYTES : 0) + B_BYTES);
            if constexpr (BESIDE > 1) {
                load_box(a, k, a_row, to_a, full, both);
                load_box(b, k, b_row, to_b, full);
            } else {
                if (loads_a) load_box(a, k, a_row, to_a, full);
                load_box(b, k, b_row, to_b, full, both);
            }
        }
    }
}

// Stores the first `rows` rows of a box; `bytes` remain in a row of the result from `to` on, a multiple of 16.
DEVICE void store_rows(uint32 box, unsigned char *to, long long pitch, int rows, int bytes) {
    for (int i = threadIdx.x % 128; i < rows * 8; i += 128) {
        const int row = i / 8, chunk = i % 8;
        if (chunk * 16 < bytes) *(uint4 *)(to + row * pitch + chunk * 16) = shared_vector(box + row * 128 + (chunk ^ row % 8) * 16);
    }
}

// Writes zeros to `rows` rows of a tile; `bytes` remain in a row of the result from `to` on, a multiple of 16.
DEVICE void store_zeros(unsigned char *to, long long pitch, int rows, int bytes) {
    constexpr int CHUNKS = TILE_N * OUT_SIZE / 16;
    for (int i = threadIdx.x % 128; i < rows * CHUNKS; i += 128)
        if (i % CHUNKS * 16 < bytes) *(uint4 *)(to + i / CHUNKS * pitch + i % CHUNKS * 16) = make_uint4(0, 0, 0, 0);
}

#if BLOCKS
static constexpr int PARTS = TILE_N / 128, PART = 64;  // of 128 columns, with so many sums

// The scales of a step: of two rows; of each part's columns, or of the thread's column in it if RAGGED.
struct StepScales { float row[2], column[PARTS]; };

// The scaled sums of 64 rows of a tile over `steps` steps, at least one. `load` gives the scales of the next step.
// While one warpgroup adds products to its sums, the other multiplies. If RAGGED, scales of columns pass through shared
// memory. Each part has its own place there: after the barrier of one part, all threads have read that of the other.
template <typename Load>
DEVICE void accumulate_blocks(Shared &shared, Ring &ring, SUM (&sums)[SUMS], int steps, const Load &load) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, pair = threadIdx.x % 4 * 2;
    StepScales next = load();
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
    for (int step = 0; step < steps; ++step, ring.advance()) {
        const StepScales own = next;
        barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
        const uint32 stage = shared_address(shared.stage[ring.slot]), a = operand(stage + group * 64 * TILE_K);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const uint32 b = operand(stage + A_BYTES + part * 128 * TILE_K);
            SUM found[PART];
            product_fence();
#pragma unroll
            for (int k = 0; k < TILE_K / 32; ++k) multiply(found, a + 2 * k, b + 2 * k, k > 0);
            product_commit();
            if (part == 0 && step + 1 < steps) next = load();  // arrives while this step is multiplied
            float *place = shared.scale[group] + part * 128;
            if constexpr (RAGGED) {
                place[thread] = own.column[part];
                named_barrier_sync(1 + group, 128);
            }
            product_wait<0>();
#pragma unroll
            for (int i = 0; i < PART; ++i) in_use(found[i]);
            if (part == PARTS - 1) release(shared, ring.slot);
            const float all = RAGGED ? 1.0f : own.column[part], row[2] = {own.row[0] * all, own.row[1] * all};
#pragma unroll
            for (int i = 0; i < PART; i += 4) {  // 8 columns, of which the thread has two
                float2 column = {1.0f, 1.0f};
                if constexpr (RAGGED) column = *(const float2 *)&place[i * 2 + pair];
                SUM *to = sums + part * PART + i;
                to[0] += found[i] * (row[0] * column.x), to[1] += found[i + 1] * (row[0] * column.y);
                to[2] += found[i + 2] * (row[1] * column.x), to[3] += found[i + 3] * (row[1] * column.y);
            }
        }
    }
    if constexpr (RAGGED) named_barrier_sync(1 + group, 128);  // store_sums writes to these places
}
#endif

// Scales of rows: one for each row of a, for each expert if RAGGED. Scales of columns: one for each row of b and expert;
// if b_scales is 0, one for all. With BLOCKS those of grouped_block_mm.
DEVICE void consume(Shared &shared, const TensorMap &out, unsigned char *result, int pitch,
                    const float *a_scale, const float *b_scale, int b_scales, const Shape &shape, uint32 rank) {
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
    const int own = group * 64 + thread / 32 * 16 + thread % 32 / 4;
    Schedule schedule(shape);
    Ring ring;
    while (schedule.take(rank)) {
        const int column = schedule.column, rows = min(schedule.height - group * 64, 64);
        const long long first = schedule.out_row() + group * 64;
        if (schedule.steps == 0) {  // no expert has these rows, or this expert has no tokens
            store_zeros(result + first * pitch + column * OUT_SIZE, pitch, rows, pitch - column * OUT_SIZE);
            continue;
        }
        SUM sums[SUMS];
#if BLOCKS
        const float row_scale[2] = {1.0f, 1.0f};
        float column_scale[COLUMN_SCALES];
#pragma unroll
        for (int i = 0; i < COLUMN_SCALES; ++i) column_scale[i] = 1.0f;
        const int of = column + (RAGGED ? thread : 0), tiles = (shape.n + 127) / 128;
        const long long start = schedule.k() / TILE_K, tile = (long long)schedule.expert * tiles + column / 128;
        const float *of_rows = a_scale + start * shape.m + schedule.a_row() + own;
        const float *of_columns = b_scale + (RAGGED ? start * shape.n + of : tile * schedule.steps);
        accumulate_blocks(shared, ring, sums, schedule.steps, [&] {
            StepScales found;
#pragma unroll
            for (int i = 0; i < 2; ++i) found.row[i] = own + i * 8 < schedule.height ? of_rows[i * 8] : 0.0f;
#pragma unroll
            for (int i = 0; i < PARTS; ++i)
                found.column[i] = of + i * 128 < shape.n ? of_columns[RAGGED ? i * 128 : i * schedule.steps] : 0.0f;
            of_rows += shape.m, of_columns += RAGGED ? shape.n : 1;
            return found;
        });
#else
        // Loads the scales early, so that they arrive while the product runs.
        float row_scale[2], column_scale[COLUMN_SCALES];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            row_scale[i] = own + i * 8 < schedule.height ? a_scale[schedule.out_row() + own + i * 8] : 0.0f;
#pragma unroll
        for (int i = 0; i < COLUMN_SCALES; ++i) {
            const int at = column + i * 128 + thread;
            column_scale[i] = at < shape.n ? b_scale[b_scales ? (long long)schedule.expert * shape.n + at : 0] : 0.0f;
        }
        accumulate(shared, ring, sums, schedule.steps);
#endif
        if (rows <= 0) continue;
        // Plain stores join no group of the TMA's, and so store_sums would not wait for those of the previous tile.
        if (thread == 0 && rows < 64) store_wait<0>();
        store_sums(shared, sums, row_scale, column_scale, nullptr, column, shape.n, [&](int i, uint32 box) {
            const int at = column + i * BOX_COLUMNS;
            if (rows < 64) {
                store_rows(box, result + first * pitch + at * OUT_SIZE, pitch, rows, pitch - at * OUT_SIZE);
            } else if (thread == 0) {
                store_box(out, at, first, box);
                store_commit();
            }
        });
    }
    if (thread == 0) store_wait<0>();
}

// Grid: a multiple of CLUSTER blocks, at most one per multiprocessor. The maps describe a in boxes of TILE_M / BESIDE x
// 128, b, with the rows of all experts under each other, in boxes of TILE_N / UNDER x 128, and out, likewise, in boxes
// of 64 x BOX_COLUMNS. `result` is out, whose rows are `pitch` bytes apart, a multiple of 16.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_mm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
               const __grid_constant__ TensorMap out, unsigned char *result, const float *a_scale, const float *b_scale,
               const int *offsets, int pitch, int b_scales, int experts, int tokens, int m, int n, int steps, int group) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Shape shape = {offsets, experts, tokens, m, n, steps, group};
    const uint32 rank = cluster_rank();
    prepare(shared, a, b, out);
    cluster_sync();
    wait_for_previous();
    let_next_start();

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<BLOCKS ? 40 : 56>();
        if (threadIdx.x == GROUPS * 128) produce(shared, a, b, shape, rank);
        __syncwarp();
    } else {
        take_registers<BLOCKS ? 232 : 224>();
        consume(shared, out, result, pitch, a_scale, b_scale, b_scales, shape, rank);
        __syncwarp();
    }
    // The other block of the cluster may still write to this block's barriers.
    cluster_sync();
}
