// Tiles, the ring and the producer of w4a8_mm_sm90.cu. Its macros, ptx.cuh, sm90.cuh and load_words.cuh stand before.

enum { BF16, FP16, FP32, INT4, E2M1 };

static constexpr int GROUPS = 2, WARPS = GROUPS * 4;  // that multiply
static constexpr int ROWS = 64 * GROUPS / LANES;     // of a block's tile
static constexpr int CHUNK = 128, PITCH = CHUNK / 2;  // k of a stage; bytes of its codes
static constexpr int BESIDE = SPLIT > 1 ? 1 : 2, CLUSTER = SPLIT * BESIDE;
static constexpr int SOURCES = SPLIT * LANES;  // of a tile's sums
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int CODE_BYTES = ROWS * PITCH, TOKEN_BYTES = TOKENS * CHUNK, STAGE_BYTES = CODE_BYTES + TOKEN_BYTES;
static constexpr int STEPS = CHUNK / 32, HALF = STEPS / 2;
static constexpr int TURN = PERIOD * LANES;
static_assert(STAGES % TURN == 0, "");
static_assert(TOKENS <= 128 && TOKENS % (16 * SOURCES) == 0, "");
static_assert(LAST_TOKENS < TOKENS && LAST_TOKENS % 16 == 0 && !(LAST_TOKENS && SOURCES > 1), "");

// Sums of 16 rows by 16 tokens.
typedef float4 Square[2][32];

// Exponents of MXFP4 below the largest of a row that e4m3 holds beside it, in octaves: E2M1 times 2^-8 .. 2^6 is exact.
static constexpr int OCTAVES = 15;
static constexpr int TILE_SPANS = ROWS / 32;  // of the rows of a tile; a span is of 32 rows

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[GROUPS][TOKENS / SOURCES * 128];  // results of 64 rows
    Square sums[SOURCES > 1 ? WARPS * TOKENS / 16 : 1];  // that were sent to this block
    float token_scale[GROUPS][TOKENS];
    uint2 numbers[CODES == E2M1 ? OCTAVES + 1 : 1];  // e4m3 of the 8 magnitudes, by octaves below
    uint64 full[STAGES], empty[STAGES], sums_arrived, sums_read;
};

// The product's shape: `rows` of clusters and `columns` of tokens in tiles. The grid works through `band` columns at a
// time, so that the L2 cache serves them. With LAST_TOKENS only the first `full` rows have `columns` tiles; the others have
// `last_columns` of them.
struct Shape {
    int m, n, chunks, groups, rows, columns, band, full, last_columns;
    const unsigned char *passes;  // E2M1: of each 32 rows

    MEMBER int count() const { return full * columns + (rows - full) * last_columns; }

    MEMBER int spans() const { return (n + 255) / 256 * 8; }
};

struct Schedule {
    const Shape shape;
    const uint32 rank;
    const int first, last;  // chunks
    int next = blockIdx.x / CLUSTER, row, token;
    bool is_last = false;  // whether the tile has LAST_TOKENS
    int passes = 1;  // over the tile's K: E2M1 needs another one for each OCTAVES that exponents of a row span

    MEMBER Schedule(const Shape &shape, uint32 rank)
        : shape(shape), rank(rank), first(shape.chunks / TURN * (rank / BESIDE) / SPLIT * TURN),
          last(shape.chunks / TURN * (rank / BESIDE + 1) / SPLIT * TURN) {}

    // Takes the block's next tile; false after the last.
    MEMBER bool take() {
        if (next >= shape.count()) return false;
        const int first_last = shape.full * shape.columns;
        is_last = LAST_TOKENS && next >= first_last;
        const int here = is_last ? next - first_last : next, columns = is_last ? shape.last_columns : shape.columns;
        const int rows = is_last ? shape.rows - shape.full : shape.full;
        const int above = here / (shape.band * rows) * shape.band;
        const int within = here - above * rows, width = min(shape.band, columns - above);
        const int above_row = ((is_last ? shape.full : 0) + within / width) * BESIDE;
        row = (above_row + rank % BESIDE) * ROWS;
        if constexpr (CODES == E2M1) {
            passes = 1;
            for (int i = 0; i < BESIDE * TILE_SPANS; ++i)
                passes = max(passes, (int)shape.passes[above_row * TILE_SPANS + i]);
        }
        token = (above + within % width) * (is_last ? LAST_TOKENS : TOKENS);
        next += gridDim.x / CLUSTER;
        return true;
    }
};

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance(int count = 1) {
        slot += count;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
};

// Which of the warp groups that take turns at the periods of the same rows the thread belongs to.
DEVICE int turn() { return LANES == 1 ? 0 : threadIdx.x / 128; }

// This thread's words of half a chunk of codes, in slot `slot`: of its two rows, for each of HALF steps.
DEVICE void half_words(Shared &shared, int slot, int half, uint32 (&words)[HALF * 2]) {
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 % (WARPS / LANES) * 16 + lane % 16, step = half * HALF + lane / 16;
    // The TMA has swizzled units of 16 bytes.
    load_matrices(shared_address(shared.stage[slot]) + line * PITCH + (step ^ line % 8 / 2) * 16, words);
}

// The tokens in a slot, as an operand of the units; the same in all lanes of a warp.
DEVICE uint32 tokens_at(Shared &shared, int slot) {
    return __shfl_sync(0xffffffff, operand(shared_address(shared.stage[slot]) + CODE_BYTES), 0);
}

// Tells the blocks that fill a slot that this warp has read it.
DEVICE void release(Shared &shared, const Schedule &schedule, int slot) {
    const int lane = threadIdx.x % 32;
    if (lane < BESIDE) barrier_arrive(shared_address(&shared.empty[slot]), BESIDE == 1 ? schedule.rank : lane);
}

// Prefetches the first codes into the L2 cache.
DEVICE void fetch(const TensorMap &codes, const Shape &shape, uint32 rank) {
    Schedule schedule(shape, rank);
    if (schedule.take())
        for (int chunk = schedule.first; chunk < min(schedule.first + STAGES, schedule.last); ++chunk)
            prefetch_box(codes, chunk * PITCH, schedule.row);
}

// x_last: x in boxes of LAST_TOKENS / BESIDE.
DEVICE void produce(Shared &shared, const TensorMap &codes, const TensorMap &x, const TensorMap &x_last, const Shape &shape,
                    uint32 rank) {
    Schedule schedule(shape, rank);
    Ring ring;
    while (schedule.take()) {
        const int count = schedule.last - schedule.first;
        for (int i = 0; i < count * schedule.passes; ++i, ring.advance()) {
            const int chunk = schedule.first + (CODES == E2M1 ? i % count : i);
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            const bool is_last = LAST_TOKENS && schedule.is_last;
            const int share = rank % BESIDE * ((is_last ? LAST_TOKENS : TOKENS) / BESIDE);
            barrier_expect(full, is_last ? CODE_BYTES + LAST_TOKENS * CHUNK : STAGE_BYTES);
            load_box(codes, chunk * PITCH, schedule.row, to, full);
            const uint32 tokens = to + CODE_BYTES + share * CHUNK;
            const TensorMap &map = is_last ? x_last : x;
            if constexpr (BESIDE == 1) load_box(map, chunk * CHUNK, schedule.token, tokens, full);
            else load_box(map, chunk * CHUNK, schedule.token + share, tokens, full, (1 << CLUSTER) - 1);
        }
    }
}
