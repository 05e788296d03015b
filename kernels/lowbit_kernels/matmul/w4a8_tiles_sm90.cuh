// Tiles, the ring and the producer of w4a8_mm_sm90.cu. Its macros, ptx.cuh and sm90.cuh stand before.

enum { BF16, FP16, FP32, INT4, E2M1 };

static constexpr int ROWS = 128, CHUNK = 128, PITCH = CHUNK / 2;  // of a block's tile; k of a stage; bytes of its codes
static constexpr int BESIDE = SPLIT > 1 ? 1 : 2, CLUSTER = SPLIT * BESIDE, GROUPS = 2, WARPS = GROUPS * 4;
static constexpr int THREADS = 128 * (GROUPS + 1);
static constexpr int CODE_BYTES = ROWS * PITCH, TOKEN_BYTES = TOKENS * CHUNK, STAGE_BYTES = CODE_BYTES + TOKEN_BYTES;
static constexpr int SUMS = TOKENS / 2;  // of a thread
static constexpr int STEPS = CHUNK / 32;
static constexpr int PERIOD = 4;  // chunks whose products are added up before the sums are scaled
static_assert(TOKENS <= 128 && TOKENS % (16 * SPLIT) == 0, "");

// Sums of 16 rows by 16 tokens. With SPLIT each block of a cluster finishes some of the tokens.
typedef float4 Square[2][32];
static constexpr int SQUARES = TOKENS / 16 / SPLIT;  // that a warp finishes

// Exponents of MXFP4 below the largest of a row that e4m3 holds beside it, in octaves: E2M1 times 2^-8 .. 2^6 is exact.
static constexpr int OCTAVES = 15;
static constexpr int TILE_SPANS = ROWS / 32;  // of the rows of a tile; a span is of 32 rows

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    unsigned char box[GROUPS][TOKENS / SPLIT * 128];  // results of 64 rows
    Square sums[SPLIT > 1 ? WARPS * TOKENS / 16 : 1];  // that blocks of the cluster sent
    float token_scale[GROUPS][TOKENS];
    uint2 numbers[CODES == E2M1 ? OCTAVES + 1 : 1];  // e4m3 of the 8 magnitudes, by octaves below
    uint64 full[STAGES], empty[STAGES], sums_arrived, sums_read;
};

// The product's shape: `rows` of clusters and `columns` of tokens in tiles. The grid works through `band` columns at a
// time, so that the L2 cache serves them.
struct Shape {
    int m, n, chunks, groups, rows, columns, band;
    const unsigned char *passes;  // E2M1: of each 32 rows

    MEMBER int spans() const { return (n + 255) / 256 * 8; }
};

struct Schedule {
    const Shape shape;
    const uint32 rank;
    const int first, last;  // chunks
    int next = blockIdx.x / CLUSTER, row, token;
    int passes = 1;  // over the tile's K: E2M1 needs another one for each OCTAVES that exponents of a row span

    MEMBER Schedule(const Shape &shape, uint32 rank)
        : shape(shape), rank(rank), first(shape.chunks / PERIOD * (rank / BESIDE) / SPLIT * PERIOD),
          last(shape.chunks / PERIOD * (rank / BESIDE + 1) / SPLIT * PERIOD) {}

    // Takes the block's next tile; false after the last.
    MEMBER bool take() {
        if (next >= shape.rows * shape.columns) return false;
        const int above = next / (shape.band * shape.rows) * shape.band;
        const int within = next - above * shape.rows, width = min(shape.band, shape.columns - above);
        const int above_row = within / width * BESIDE;
        row = (above_row + rank % BESIDE) * ROWS;
        if constexpr (CODES == E2M1) {
            passes = 1;
            for (int i = 0; i < BESIDE; ++i) {
                const uint32 four = ((const uint32 *)shape.passes)[above_row + i];
                for (int j = 0; j < TILE_SPANS; ++j) passes = max(passes, (int)byte_of(four, j));
            }
        }
        token = (above + within % width) * TOKENS;
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

// Gives `unpack` this thread's words of codes in the ring's present slot, each with its step, for its two rows.
template <typename Unpack>
DEVICE void each_word(Shared &shared, const Ring &ring, const Unpack &unpack) {
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * 16 + lane % 8;
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    const uint32 stage = shared_address(shared.stage[ring.slot]);
    // The TMA has swizzled units of 16 bytes.
    const uint32 at = stage + line * PITCH + (lane / 8 ^ lane % 8 / 2) * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        uint32 words[STEPS];
        load_matrices(at + i * 8 * PITCH, words);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) unpack(words[step], step, i);
    }
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

DEVICE void produce(Shared &shared, const TensorMap &codes, const TensorMap &x, const Shape &shape, uint32 rank) {
    Schedule schedule(shape, rank);
    Ring ring;
    const int share = rank % BESIDE * (TOKENS / BESIDE);
    while (schedule.take()) {
        const int count = schedule.last - schedule.first;
        for (int i = 0; i < count * schedule.passes; ++i, ring.advance()) {
            const int chunk = schedule.first + (CODES == E2M1 ? i % count : i);
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            barrier_expect(full, STAGE_BYTES);
            load_box(codes, chunk * PITCH, schedule.row, to, full);
            const uint32 tokens = to + CODE_BYTES + share * CHUNK;
            if constexpr (BESIDE == 1) load_box(x, chunk * CHUNK, schedule.token, tokens, full);
            else load_box(x, chunk * CHUNK, schedule.token + share, tokens, full, (1 << CLUSTER) - 1);
        }
    }
}
