// How weight_mm_decode_sm90.cu, which lists the macros, divides a product among blocks and warps, and copies a block's
// share to shared memory. The files that it names stand before.

static constexpr bool IS_PAIRED = RESIDENT == 2;  // with a block of the next launch
static constexpr int WARPS = 16, MEMBERS = WARPS / TEAMS;  // that multiply; those of a team
static constexpr int ADDERS = IS_PAIRED ? 1 : 2;           // warps that add up
static constexpr int THREADS = 32 * (WARPS + (IS_PAIRED ? 2 : 4));  // 1 more warp loads; 4 warps give registers together
static constexpr int ROWS = 16 * HEIGHT, TILES = TOKENS > 8 ? 2 : 1;  // of a tile; mma takes 8 tokens
static constexpr int OUTPUTS = GATE == NONE ? ROWS : ROWS / 2;  // columns of the result that a tile makes
static constexpr int PIECES = HEIGHT * TILES;                         // of a tile's sums: 16 rows by 8 tokens
static constexpr int MAX_STAGES = 6;
static constexpr int GROUPS = SCALING == BY_UNIT || SPAN > CHUNK ? 1 : CHUNK / SPAN;  // of a chunk
static constexpr int DEPTH = SCALING == BY_COLUMN ? 8 / TOKENS / GROUPS : 1;  // chunks whose groups fill the columns
static constexpr int TURNS = (CHUNKS + DEPTH - 1) / DEPTH;
static constexpr int SHARE = SCALING == BY_COLUMN ? DEPTH : TOKENS < 8 ? 8 / TOKENS : 1;  // chunks with x in the same registers
// Sets of registers for x. With BY_COLUMN a set belongs to a part.
static constexpr int SETS = SCALING == BY_COLUMN ? PARTS * TURNS : (PARTS * CHUNKS + SHARE - 1) / SHARE;
// Whether x is copied to shared memory first, token by token. This is faster for one token or many parts, where lanes
// would load x from distant addresses. Otherwise the copies are slower, since they queue with those of the codes.
static constexpr bool COPIES_X = BOX == 0 && !LOADS_X && (TOKENS == 1 || (SHARE > 1 && SCALING != BY_COLUMN && PARTS > 2));
static constexpr int BOX_PITCH = BOX * CHUNK * 2, MAX_BOXES = 16;  // bytes of a token in a box, a multiple of 256
static constexpr bool LARGE_X = SETS * 4 * TILES * PAIRS > 32;  // x takes more than 32 registers
static constexpr int REGISTERS[2] = {LARGE_X ? 112 : 104, LARGE_X ? 32 : 64};  // of a multiplying warp; of the others
// int8 by int8, where x has int8 codes. CODE_UNIT: see four_of.
static constexpr bool BY_INTEGERS = ROUNDS == INT8 && ((CODES == INT && BITS == 4) || (CODES == INT8 && ZERO == NONE));
static constexpr float CODE_UNIT = BY_INTEGERS && BITS == 4 && ZERO == NONE ? 1.0f / 16 : 1.0f;
static constexpr bool FOLDS = FOLD && !BY_INTEGERS, BY_BITS = AS_BITS && !BY_INTEGERS;
// With BY_BITS, results times the powers of `scale_x` are this much too small: 2^7 and the unit of the bits, divided by 2^133.
static constexpr float BITS_UNIT = IS_INTEGER ? 0x1p7f : CODES == E2M1 ? 1.0f : 0x1p-6f;
// Chains of mma that do not wait for each other. Two are up to 5% faster for 2 to 8 tokens of int4; other widths were not timed.
static constexpr int CHAINS = BY_BITS && CODES == INT && BITS == 4 && SCALING == BY_UNIT && TOKENS > 1 && TOKENS <= 8 ? 2 : 1;
// With IS_MOVED, codes times scales are MOVED_UNIT times too small, so that a scale times MOVED_UP is finite in bf16.
static constexpr float MOVED_UNIT = 256.0f, MOVED_UP = IS_MOVED ? 0x1p118f : 1.0f;  // 2^126 / MOVED_UNIT
static_assert(!EXACT || (BY_INTEGERS && BITS == 8 && GROUP == 0 && SCALING == BY_UNIT), "");
// Whether the sums of x over a unit are needed.
static constexpr bool SUMS_X = FOLDS || (ZERO != NONE && (ZERO == VALUE || SCALING == BY_COLUMN) && UNITS == 1);
static_assert(SCALING != BY_UNIT || SPAN % UNIT == 0, "");
static_assert(SCALING != BY_COLUMN || (CHUNK % SPAN == 0 && DEPTH > 0 && IS_STREAM), "");
static_assert(SCALING != IN_CODES || ((CODES == TABLE || CODES == E2M1) && ZERO == NONE), "");
static_assert((CODES != E4M3 || ZERO == NONE) && (CODES != E2M1 || (X == BF16 && BITS == 4)), "");
static_assert(GATE == NONE || (HEIGHT == 1 && SPLIT == 1 && ROUNDS == NONE), "");
static_assert(TEAMS == 1 || (TEAMS == 2 && BOX == 0), "");
static_assert(EARLY == 0 || (TEAMS == 1 && BOX == 0), "");
static_assert(!IS_PAIRED || LOADS_X, "");
static_assert(RESIDENT == 1 || (RESIDENT == 2 && BOX == 0 && SPLIT == 1), "");
static_assert((BOX == 0 || (IS_STREAM && SHARE == 1)), "");
static_assert(ROUNDS == NONE || CODES == E2M1 || (SCALING == BY_UNIT && ZERO != VALUE && CODES != TABLE), "");

// a + b, of int32 sums if EXACT. The bits of 0 are the integer 0.
DEVICE float plus(float a, float b) { return EXACT ? bits_float(float_bits(a) + float_bits(b)) : a + b; }

// A lane's sums of a piece: rows g and g + 8 of two columns, which are added up at once for one token.
#if TOKENS == 1
struct Partial {
    float upper, lower;

    MEMBER static Partial of(const float (&x)[4]) { return {plus(x[0], x[1]), plus(x[2], x[3])}; }
    MEMBER float4 columns() const { return make_float4(upper, 0.0f, lower, 0.0f); }
};
#else
struct Partial : float4 {
    MEMBER static Partial of(const float (&x)[4]) { return {{x[0], x[1], x[2], x[3]}}; }
    MEMBER float4 columns() const { return *this; }
};
#endif

// The start of shared memory, before the ring. The buffers that the adding warps read are double: for even and odd
// tiles.
struct Shared {
    uint64 full[MAX_STAGES], empty[MAX_STAGES];
    uint64 copied;               // x is in shared memory
    uint64 arrived[MAX_BOXES];   // a box of x is in shared memory
    uint64 loaded;               // the warps have x in registers
    uint64 received;             // the sums of all blocks have arrived
    uint64 exchanged;            // the ends of the tokens have arrived from all blocks
    uint64 summed[2], added[2];  // the warps' sums are written; they have been read
    TokenScales<ROUNDS == NONE ? 1 : 16, WARPS> tokens;
    alignas(512) Partial sums[2][MEMBERS][PIECES][32];
};

struct Problem {
    const unsigned short *x;
    const unsigned char *codes, *scale, *zero_point;
    const unsigned short *bias, *residual;
    const float *token_scale, *global_scale;
    unsigned short *out;
    long long x_stride;  // in elements
    int m, n, k, chunks, groups;
    int pitch, stages, apart;  // bytes of a part's row; of the ring; stages that share no memory with the boxes of x
    int scale_pitch;           // bytes of a row's scales in a stage
    float eps;
    int constant;  // no launch of the graph writes the weight

    MEMBER int outputs() const { return GATE == NONE ? n : n / 2; }
    MEMBER int tiles() const { return (outputs() + OUTPUTS - 1) / OUTPUTS; }
    MEMBER int scale_bytes() const { return ROWS * scale_pitch; }  // in a stage; a multiple of 16
    MEMBER int stage_bytes() const {
        return (ROWS * pitch + scale_bytes() + ROWS * groups * ZERO_SIZE + 127) & ~127;  // the TMA's alignment
    }
};

// A range of a row's chunks.
struct Range {
    int first, count;
};
DEVICE Range part_of(const Problem &p, int rank, int part) {
    const int start = (int)((long long)p.chunks * rank / SPLIT);
    const int own = (int)((long long)p.chunks * (rank + 1) / SPLIT) - start;
    const int first = own * part / PARTS;
    return {start + first, own * (part + 1) / PARTS - first};
}
// The chunks of one warp. The warps that get one chunk more change from part to part, so that the totals are even.
DEVICE Range share_of(const Range &part, int warp, int index) {
    const int own = warp % MEMBERS, more = index * MEMBERS / PARTS, first = (part.count * own + more) / MEMBERS;
    return {part.first + first, (part.count * (own + 1) + more) / MEMBERS - first};
}

// A team's stages, `count` from `first` on.
struct Ring {
    int first, count, at;
    uint32 parity;

    MEMBER Ring(int stages, int team) : first(stages / TEAMS * team), count(stages / TEAMS), at(0), parity(0) {}
    MEMBER int slot() const { return first + at; }
    MEMBER void advance() {
        if (++at == count) at = 0, parity ^= 1;
    }
};

// Whether parts are copied while the previous kernel is still running.
DEVICE bool is_early(const Problem &p) { return EARLY > 0 && p.constant; }

DEVICE int first_tile() { return blockIdx.x / SPLIT; }
DEVICE int tile_step() { return gridDim.x / SPLIT; }
DEVICE int rounds_of(const Problem &p) { return (p.tiles() - first_tile() + tile_step() - 1) / tile_step(); }

// ---- copying --------------------------------------------------------------------------------------------------------

// Copies the bytes after the last multiple of 16. Returns how many bytes the TMA has to copy.
DEVICE uint32 bulk_part(unsigned char *to, const unsigned char *from, int bytes) {
    const int whole = bytes & ~15;
#pragma unroll 1
    for (int i = whole; i < bytes; ++i) to[i] = from[i];
    return whole;
}

// The column of a chunk in the tensor map of codes, whose elements have 8 bytes.
DEVICE int column_of(int chunk) { return chunk * (CHUNK_BYTES / 8); }

// The group in which a chunk begins.
DEVICE int first_group(int chunk) { return GROUP == 0 ? 0 : (int)((long long)chunk * CHUNK / SPAN); }

// The first group of a part whose scale a stage holds. The TMA reads boxes from multiples of 16 bytes on.
DEVICE int group_in_stage(const Range &part) {
    return BOXED ? first_group(part.first) & ~(16 / SCALE_SIZE - 1) : 0;
}

// Prefetches the first part into the L2 cache while the previous kernel is still running. The L2 cache is coherent, so
// later loads see what that kernel writes. Prefetching more would delay x, which is needed first.
DEVICE void fetch(const Problem &p, const TensorMap &codes, int rank) {
#pragma unroll
    for (int half = 0; half < ROWS / OUTPUTS; ++half) {
        const int row = first_tile() * OUTPUTS + half * p.outputs(), rows = min(OUTPUTS, p.n - row);
        if constexpr (WHOLE) prefetch(p.codes + (long long)row * p.pitch, rows * p.pitch);
        else prefetch_box(codes, column_of(part_of(p, rank, 0).first), row);
        const int scales = rows * p.groups * SCALE_SIZE & ~15;
        if (scales > 0) prefetch(p.scale + (long long)row * p.groups * SCALE_SIZE, scales);
    }
}

// Loads the parts of the block's tiles from `part` of `tile` on; with EARLY at most `count`, and -1 for all. The scales
// and zero points of a tile begin at multiples of 16 bytes; those of a row need not.
DEVICE void produce(const Problem &p, const TensorMap &codes, const TensorMap &scale_map, Shared &shared,
                    unsigned char *stages, int rank, Ring &ring, int &tile, int &part, int count) {
    Ring other(p.stages, TEAMS - 1);
    for (; tile < p.tiles(); tile += tile_step(), part = 0) {
        const int row = tile * OUTPUTS, rows = min(OUTPUTS, p.n - row);
        const long long first = (long long)row * p.groups;
#pragma unroll 1
        for (; part < PARTS; ++part, ring.advance()) {
            if (EARLY > 0 && count-- == 0) return;
            unsigned char *stage = stages + ring.slot() * p.stage_bytes();
            const uint32 full = shared_address(&shared.full[ring.slot()]);
            barrier_wait(shared_address(&shared.empty[ring.slot()]), ring.parity ^ 1);
            if (BOX > 0 && ring.slot() >= p.apart) barrier_wait(shared_address(&shared.loaded), 0);
            unsigned char *scale_to = stage + ROWS * p.pitch, *zero_to = scale_to + p.scale_bytes();
            const unsigned char *scale = p.scale + first * SCALE_SIZE, *zero_point = p.zero_point + first * ZERO_SIZE;
            const uint32 scales = BOXED ? p.scale_bytes() * OUTPUTS / ROWS
                                        : bulk_part(scale_to, scale, rows * p.groups * SCALE_SIZE);
            const uint32 zeros = ZERO != NONE ? bulk_part(zero_to, zero_point, rows * p.groups * ZERO_SIZE) : 0;
            const uint32 bytes = (WHOLE ? rows : OUTPUTS) * p.pitch;
            barrier_expect(full, (bytes + scales + zeros) * (ROWS / OUTPUTS));
            if constexpr (GATE != NONE) {  // the rows of up, which follow those of the gate
                const uint32 codes_to = shared_address(stage) + OUTPUTS * p.pitch;
                const long long further = (long long)p.outputs() * p.groups;
                if constexpr (WHOLE)
                    load_bulk(codes_to, p.codes + (long long)(row + p.outputs()) * p.pitch, bytes, full);
                else load_box(codes, column_of(part_of(p, rank, part).first), row + p.outputs(), codes_to, full);
                if constexpr (BOXED)
                    load_box(scale_map, group_in_stage(part_of(p, rank, part)) * SCALE_SIZE / 8, row + p.outputs(),
                             shared_address(scale_to) + scales, full);
                else load_bulk(shared_address(scale_to) + scales, scale + further * SCALE_SIZE, scales, full);
                if (zeros > 0) load_bulk(shared_address(zero_to) + zeros, zero_point + further * ZERO_SIZE, zeros, full);
            }
            if constexpr (WHOLE) load_bulk(shared_address(stage), p.codes + (long long)row * p.pitch, bytes, full);
            else load_box(codes, column_of(part_of(p, rank, part).first), row, shared_address(stage), full);
            if constexpr (BOXED)
                load_box(scale_map, group_in_stage(part_of(p, rank, part)) * SCALE_SIZE / 8, row,
                         shared_address(scale_to), full);
            else if (scales > 0) load_bulk(shared_address(scale_to), scale, scales, full);
            if (zeros > 0) load_bulk(shared_address(zero_to), zero_point, zeros, full);
        }
        if constexpr (TEAMS == 2) {
            const Ring used = ring;
            ring = other, other = used;
        }
    }
}

// The k of the block's slice. `pitch` is the distance of tokens in the copy of x, with a gap against bank conflicts.
struct Slice {
    int first, count;

    MEMBER Slice(const Problem &p, int rank) {
        const Range last = part_of(p, rank, PARTS - 1);
        first = part_of(p, rank, 0).first * CHUNK;
        count = max(min((last.first + last.count) * CHUNK, p.k) - first, 0);
    }
    MEMBER int pitch() const { return ((count * 2 + 127) & ~127) + 32; }
};

DEVICE bool is_aligned(const Problem &p) {
    return ((unsigned long long)p.x & 15) == 0 && (p.x_stride & 7) == 0 && (p.k & 7) == 0;
}

DEVICE void copy_x(const Problem &p, Shared &shared, const unsigned char *to, int rank) {
    const Slice own(p, rank);
    const uint32 barrier = shared_address(&shared.copied), bytes = own.count * 2;
    barrier_expect(barrier, p.m * bytes);
    for (int token = 0; token < p.m && bytes > 0; ++token)
        load_bulk(shared_address(to) + token * own.pitch(), p.x + token * p.x_stride + own.first, bytes, barrier);
}

// The number of the block's boxes of x.
DEVICE int boxes_of(const Problem &p, int rank) {
    const Range last = part_of(p, rank, PARTS - 1);
    return (last.first + last.count - part_of(p, rank, 0).first + BOX - 1) / BOX;
}

// The most boxes that any block has.
DEVICE int most_boxes(const Problem &p) { return ((p.chunks + SPLIT - 1) / SPLIT + BOX - 1) / BOX; }

// Loads all boxes of x, before the codes, which are needed later. A box has all tokens; the TMA writes 0 for missing
// ones.
DEVICE void copy_boxes(const Problem &p, const TensorMap &x, Shared &shared, const unsigned char *to, int rank) {
    const int first = part_of(p, rank, 0).first;
#pragma unroll 1
    for (int i = 0; i < boxes_of(p, rank); ++i) {
        const uint32 arrived = shared_address(&shared.arrived[i]);
        barrier_expect(arrived, TOKENS * BOX_PITCH);
        load_box(x, (first + i * BOX) * (CHUNK / 4), 0, shared_address(to) + i * TOKENS * BOX_PITCH, arrived);
    }
}
