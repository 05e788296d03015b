// Tiles, the ring and the producer of weight_mm_large_batch_sm90.cu, which lists the macros. ptx.cuh, sm90.cuh and
// weight_lookup_sm90.cuh stand before.

#ifndef EXPERTS
#define EXPERTS 0
#define GATED 0
#endif
#ifndef LAST_TOKENS
#define LAST_TOKENS 0
#endif
static_assert(CODES != E4M3 || !ZERO, "");
static constexpr int SUBTILES = ROWS > 64 * GROUPS ? 2 : 1;   // of 64 rows, in a warp group
// With 28,672 rows, 112 tiles of 256 leave 20 of 132 multiprocessors idle; 128 tiles of 224 leave only 4. Two adjacent
// blocks then hold 256 rows each of 448. Both hold the middle 64 rows, and each multiplies every other chunk of them.
static constexpr bool OVERLAP = ROWS == 224;
static constexpr int HELD = OVERLAP ? 256 : ROWS;             // rows of a stage
static constexpr int LANES = GROUPS * SUBTILES * 64 / HELD;   // warp groups that take turns at a tile's chunks
static_assert(!OVERLAP || (GROUPS == 4 && BESIDE == 2 && SPLIT == 1 && TOKENS <= 32), "");
// A turn belongs to a slot of the ring: a warp group that sees only some phases of a barrier could mistake one for
// the next.
static constexpr int TURNS = OVERLAP ? 2 : LANES;
// GATED: the two rows of a thread are one of `gate` and that of `up`. They lie in the two halves of a stage.
static constexpr int SPREAD = GATED ? 2 : 1;                  // a warp has 16 / SPREAD adjacent rows, and those below
static constexpr int BELOW = GATED ? ROWS / 2 : 8;            // rows of a stage between a thread's two rows
static_assert(!EXPERTS || (SPLIT == 1 && LANES == 1 && !OVERLAP && TOKENS % (16 * SPREAD) == 0), "");
static_assert(STAGES % TURNS == 0, "");
static_assert(JOINED == 1 || TURNS == 1 && SUBTILES == 1 && STAGES % JOINED == 0, "");
static constexpr int CLUSTER = BESIDE * SPLIT;                // blocks
static constexpr int SOURCES = SPLIT * LANES;                 // of a tile's sums
static constexpr int WARPS = 4 * GROUPS;                      // that multiply
static constexpr int THREADS = 128 * (GROUPS + 1);            // of these warps and the producer's warp group
static constexpr int STAGE_K = CHUNK / JOINED;                // K of a pipeline stage
static constexpr int ROW_BYTES = STAGE_K * BITS / 8;          // of a row of codes in a stage
// The same in a stage. The TMA copies multiples of 16 bytes from multiples of 16 on, so 8 bytes before or behind may be
// those of another chunk. An odd multiple leaves eight rows in different banks.
static constexpr int PITCH = ROW_BYTES % 16 ? (ROW_BYTES + 15) / 32 * 32 + 16 : ROW_BYTES;
static constexpr int CODE_BYTES = HELD * PITCH, TOKEN_BYTES = TOKENS * STAGE_K * 2;
static constexpr int BOXES = STAGE_K / 64;                   // of tokens in a stage, with rows of 128 bytes
static constexpr int BOX_ROWS = OVERLAP ? 64 : ROWS % 128 ? ROWS : 128;  // of codes
static constexpr int FETCHED = 32 * 1024;                    // most bytes of scales that are prefetched
static constexpr int STAGE_BYTES = CODE_BYTES + TOKEN_BYTES;
static_assert(STAGES > TURNS, "a warpgroup leaves a chunk's stage when it has begun with its next one");
static constexpr int SUMS = TOKENS / 2;  // of a thread in a subtile
static constexpr bool FLUSH = GROUP > 0 && !ROUNDED;  // a group's sums are scaled and added to the totals
static constexpr int RUN = GROUP % 128 == 0 && CHUNK > 64 ? 128 : GROUP % 64 == 0 ? 64 : 32;  // adjacent K in one group
static constexpr int RUNS = GROUP ? CHUNK / RUN : 1;
static constexpr int SUMMED = FLUSH ? RUNS : 1;                 // parts of a chunk with separate sums
// Instructions of a piece, with 16 K each: few, so that unpacking interleaves with the products; more, to hide its time,
// where registers suffice.
static constexpr bool LONG = TOKENS <= (FLUSH && CODES != LOOKUP ? 64 : SUBTILES == 1 ? 128 : 112);
static constexpr bool FOUR = (BITS <= 4 && !(CODES == INT4 && ROUNDED) || CODES == E4M3) && GROUPS == 2 && LONG && CHUNK > 64 &&
                            (RUN > 32 || SCALED);
static constexpr int STEPS = FOUR ? 4 : 2;
// Whether the two warp groups take turns to multiply, so that each unpacks while the tensor cores work for the other.
static constexpr bool ORDERED = CODES == LOOKUP && GROUPS == 2 && LANES == 1 && TOKENS >= 64 && TOKENS <= 128;
static constexpr int WORDS = STEPS * BITS / 2;  // of a row's codes in a piece
static constexpr int PIECES = CHUNK / 16 / STEPS, HALVES = PIECES / SUMMED;  // in a chunk, in a part
static constexpr int OF_STAGE = PIECES * SUBTILES / JOINED;  // pieces
static_assert(JOINED == 1 || OF_STAGE > 1, "a warp leaves a stage at the second piece of the next one");
// Whether a piece's codes are loaded while the products of the previous piece are issued, where registers suffice.
static constexpr bool EARLY = GROUPS == 2 || SUMS * (FLUSH ? 2 : 1) < (GROUPS == 3 ? 80 : 64);
static constexpr uint32 LESS = FOLDED ? 40 * 0x00800080 : 0;
// The factor of the weights in the products.
static constexpr float UNIT = CODES == LOOKUP         ? UNIT_OF_TABLE
                              : BASE || CODES == E4M3 ? 1.0f
                                                      : 1.0f / 64 / (FOLDED ? 1ll << 40 : 1);
// The bits of an integer, read as a number, times FACTOR, plus OFFSET, give the integer times UNIT: see two_of.
// E4M3's bits read as a bfloat16 are 2**-120 of the number.
static constexpr int MANTISSA = DTYPE == FP16 ? 10 : 7;
static constexpr uint32 BELOW_CODES = (HIGHER << 16) + LOWER << MANTISSA;  // in the exponents of both halves
static constexpr uint32 ONE = DTYPE == FP16 ? 0x3c00 : CODES == E4M3 ? 0x7b80 : BASE ? 0x3f80 : 0x7f00;
static constexpr uint32 FACTOR = ONE * 0x10001 - BELOW_CODES - LESS;
static constexpr uint32 OFFSET =
    BASE ? (BASE + 0x8000) * 0x10001 - BELOW_CODES + (1u << 15 + BITS + HIGHER) + (1u << BITS - 1 + LOWER)
         : 0xc000c000 - (8 - BITS) * 0x00800080 - LESS;
static constexpr int UNITS = HELD / 16;                         // of 16 rows, the share of a warp
static constexpr int OWN = TOKENS / 16 * UNITS / SPLIT;         // squares of 16 rows by 16 tokens that a block finishes
static constexpr int MERGED = OVERLAP ? TOKENS / 16 * 2 : 1;    // squares whose sum the other block has a part of
// Results on their way: of a warp, 16 rows of 16 tokens; of a warp group, 64 rows of 16 tokens, twice. The bytes between
// tokens avoid bank conflicts.
static constexpr int BOX_PITCH = 48, LINE_PITCH = 144, BOX_BYTES = 16 * BOX_PITCH, LINE_BYTES = 16 * LINE_PITCH;
static_assert(4 * BOX_BYTES <= 2 * LINE_BYTES, "");

// Whether the tiles of an incomplete last round may be divided among the two adjacent blocks.
static constexpr bool TAIL = BESIDE == 2 && SOURCES == 1 && !OVERLAP && !LAST_TOKENS;
// Whether the sums that blocks share take the ring's place. Then a block has one tile, or it is the last one.
static constexpr bool ONCE = SPLIT > 1 && LANES == 1 && TOKENS > 64;
// Whether scales and biases of rows are loaded before the products. With more tokens products took longer beside them.
static constexpr bool ROWS_FIRST = !GROUP && TOKENS < 128 && !ONCE && SOURCES == 1;
static constexpr int PHASES_MOST = 2;  // in which they arrive
static constexpr bool BESIDE_RING = SOURCES > 1 && !ONCE;  // whether they have a place of their own
static_assert(LAST_TOKENS < TOKENS && (!LAST_TOKENS || SOURCES == 1 && !OVERLAP && !EXPERTS), "");

struct Shared {
    unsigned char stage[STAGES][STAGE_BYTES];
    float4 part[BESIDE_RING ? OWN : MERGED][BESIDE_RING ? SOURCES : 1][2][32];  // sums of the block's squares
    unsigned char box[BESIDE_RING ? BOX_BYTES : GROUPS * 2 * LINE_BYTES];
    uint64 full[STAGES], empty[STAGES], sums_arrived[PHASES_MOST], sums_read;
};
static constexpr int LOOKUP_AT = sizeof(Shared), TILES_AT = LOOKUP_AT + PAIRS * TABLE_STEP;

// The product's shape in tiles: `rows` of clusters and `columns` of tokens. The grid works through `band` columns at a
// time, so that the L2 cache serves them. With LAST_TOKENS, only the first `full` rows have `columns` tiles; the others have
// `last_columns` of them. With EXPERTS, `tiles` has how many columns the experts up to each one have.
struct Shape {
    int m, n, chunks, groups, rows, columns, band, full = 0, last_columns = 0;
    const int *ends = nullptr, *tiles = nullptr;

    MEMBER int count() const {
        return LAST_TOKENS ? full * columns + (rows - full) * last_columns : rows * columns;
    }
};

// The factors of the sums, the addends, and the result.
struct Epilogue {
    const void *scale, *bias, *residual;
    const float *token_scale, *global_scale;
    unsigned short *out;
    int wide;  // all rows begin at multiples of 16 bytes
    const int *order = nullptr;
};

struct Corner { int row, token; };  // of a tile's first result

// Iterates over a block's tiles; its chunks of a tile are first..last - 1. The last tiles end where the matrices end,
// since the TMA takes long for rows outside of them. A tile begins at `row` and `token`, and stores from `own()` on.
struct Schedule {
    const Shape shape;
    const uint32 rank;
    int first, last, tile = blockIdx.x / CLUSTER - gridDim.x / CLUSTER, row, token;
    int end, above = 0;    // with EXPERTS: of the tile's tokens; the first row of their weight
    bool divided = false;  // whether each of the two adjacent blocks has half of the tile's K
    bool is_last = false;  // whether the tile has LAST_TOKENS

    MEMBER Schedule(const Shape &shape, uint32 rank)
        : shape(shape),
          rank(rank),
          first(shape.chunks * (rank / BESIDE) / SPLIT),
          last(shape.chunks * (rank / BESIDE + 1) / SPLIT) {}

    MEMBER bool take() {
        const int clusters = gridDim.x / CLUSTER, tiles = shape.count();
        tile += clusters;
#if EXPERTS
        return take_of_expert();
#endif
        int here = tile, beside = rank % BESIDE, rows = shape.rows, columns = shape.columns, before = 0;
        if constexpr (TAIL) {
            const int left = tiles % clusters, more = tile - (tiles - left);
            divided = left * 2 <= clusters && more >= 0;
            if (divided) {
                here = tiles - left + more / 2, beside = more % 2;
                first = shape.chunks * rank / 2, last = shape.chunks * (rank + 1) / 2;
            }
        }
        if (here >= tiles) return false;
        if constexpr (LAST_TOKENS > 0) {
            const int first = shape.full * shape.columns;
            is_last = here >= first;
            if (is_last) here -= first, before = shape.full, columns = shape.last_columns;
            rows = is_last ? shape.rows - shape.full : shape.full;
        }
        const int above = here / (shape.band * rows) * shape.band;
        const int within = here - above * rows, width = min(shape.band, columns - above);
        row = ((before + within / width) * BESIDE + beside) * ROWS - (OVERLAP ? beside * 32 : 0);
        if constexpr (!OVERLAP) row = max(min(row, shape.n - ROWS), 0);
        token = max(min((above + within % width) * tokens(), shape.m - tokens()), 0);
        return true;
    }

    MEMBER int tokens() const { return LAST_TOKENS && is_last ? LAST_TOKENS : TOKENS; }

    MEMBER bool take_of_expert();

    // The row of all weights that is row `i` of a stage.
    MEMBER int row_at(int i) const { return above + row + i + (GATED && i >= BELOW ? shape.n / 2 - BELOW : 0); }

    MEMBER Corner own() const {
        return {OVERLAP ? row : (row + ROWS - 1) / ROWS * ROWS, (token + tokens() - 1) / tokens() * tokens()};
    }

    MEMBER bool more() const { return tile + (int)gridDim.x / CLUSTER < shape.count(); }

    // Whether the other block multiplies the 64 rows from `below` on of the chunk in this slot.
    MEMBER bool leaves(int below, int slot) const {
        return OVERLAP && below == (rank ? 0 : 192) && slot % 2 != rank;
    }
};

struct Ring {
    int slot = 0;
    uint32 parity = 0;
    MEMBER void advance(int stages = 1) {  // at most STAGES
        slot += stages;
        if (slot >= STAGES) slot -= STAGES, parity ^= 1;
    }
    MEMBER Ring after(int stages) const { return {(slot + stages) % STAGES, parity ^ (slot + stages) / STAGES % 2}; }
};

// ---- the producer ---------------------------------------------------------------------------------------------------

// Prefetches a block's first codes and its scales into the L2 cache while the previous kernel is still running. Later
// loads see what that kernel writes: the L2 cache is coherent.
DEVICE void fetch(const TensorMap &codes, const Epilogue &epilogue, const Shape &shape, uint32 rank) {
    Schedule schedule(shape, rank);
    if (!schedule.take()) return;
#pragma unroll
    for (int i = 0; i < HELD; i += BOX_ROWS)
        if (!schedule.leaves(i, 0)) prefetch_box(codes, schedule.first * JOINED * ROW_BYTES & ~15, schedule.row + i);
    const long long row = shape.groups * (long long)SCALE_BYTES;
    const char *from = (const char *)epilogue.scale + schedule.row * row;
    const long long bytes = min(HELD, shape.n - schedule.row) * row, ahead = -(long long)from & 15;
    if (GROUP > 0 && bytes >= ahead + 16) prefetch(from + ahead, (uint32)min(bytes - ahead, 1ll * FETCHED) & ~15);
}

// x_last: x in boxes of LAST_TOKENS / BESIDE.
DEVICE void produce(Shared &shared, const TensorMap &codes, const TensorMap &x, const TensorMap &x_last, const Shape &shape,
                    uint32 rank) {
    const int half = rank % BESIDE * (TOKENS / BESIDE), last_half = rank % BESIDE * (LAST_TOKENS / BESIDE);
    const unsigned short all = ((1 << BESIDE) - 1) << rank / BESIDE * BESIDE;
    Ring ring;
    for (Schedule schedule(shape, rank); schedule.take();) {
        for (int part = schedule.first * JOINED; part < schedule.last * JOINED; ++part, ring.advance()) {
            const uint32 full = shared_address(&shared.full[ring.slot]), to = shared_address(shared.stage[ring.slot]);
            barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
            const bool less = OVERLAP && ring.slot % 2 != rank;
            const int fewer = LAST_TOKENS && schedule.is_last ? (TOKENS - LAST_TOKENS) * STAGE_K * 2 : 0;
            barrier_expect(full, STAGE_BYTES - (less ? BOX_ROWS * PITCH : 0) - fewer);
            if (less)  // for the four warps of these rows, at both blocks
                for (int i = 0; i < 8; ++i) barrier_arrive(shared_address(&shared.empty[ring.slot]), i % 2);
#pragma unroll
            for (int i = 0; i < HELD; i += GATED ? min(BELOW, 128) : BOX_ROWS)
                if (!schedule.leaves(i, ring.slot))
                    load_box(codes, part * ROW_BYTES & ~15, schedule.row_at(i), to + i * PITCH, full);
#pragma unroll
            for (int box = 0; box < BOXES; ++box) {
                const int share = LAST_TOKENS && schedule.is_last ? last_half : half;
                const uint32 there = to + CODE_BYTES + box * (TOKEN_BYTES / BOXES) + share * 128;
                const int k = part * STAGE_K + box * 64;
                if (LAST_TOKENS && schedule.is_last) {
                    if constexpr (BESIDE == 1) load_box(x_last, k, schedule.token, there, full);
                    else load_box(x_last, k, schedule.token + share, there, full, all);
                } else if (BESIDE == 1 || schedule.divided) {
                    const uint32 begin = there - share * 128;
                    for (int i = 0; i < TOKENS; i += TOKENS / BESIDE)
                        load_box(x, k, schedule.token + i, begin + i * 128, full);
                } else {
                    load_box(x, k, schedule.token + share, there, full, all);
                }
            }
        }
    }
}
