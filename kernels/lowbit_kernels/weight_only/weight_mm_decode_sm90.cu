// The decode kernel: at most 16 tokens times a weight of 1 to 8 bits, on sm_90, at memory speed.
//   out[m, n] = token_scale[m] / global_scale * sum_k x[m, k] * weight[n, k] + bias[n] + residual[m, n]
//   weight[n, k] = (number(code[n, k]) - zero_point[n, k / group]) * scale[n, k / group]
//                  or number(code[n, k]) * scale[n, k / group] + zero_point[n, k / group]
//
// weight_mm_decode_sm90.py puts ptx.cuh, sm90.cuh, row_codes.cuh, round_tokens_sm90.cuh, int4_as_int8.cuh and
// weight_codes_sm90.cuh before this source and compiles it for each combination of
//   CODES              INT: a bit stream of integers, each plus 2^(BITS - 1); TABLE: a bit stream of indices into VALUES;
//                      E2M1: a bit stream of numbers of 4 bits, for X = BF16; INT8; UINT8, integers plus 128; or E4M3
//   BITS               of a code: 1 to 7 for INT, 1 to 4 for TABLE, 4 for E2M1, else 8
//   VALUES, UNIT_VALUE numbers of the codes of a TABLE in X's dtype, as bits; their unit, in float32
//   GROUP              codes along k that share a scale, a multiple of 32 or 16; 0: a row has one scale
//   SCALING            BY_UNIT: the sums of codes of one group are scaled; BY_COLUMN: for few tokens, the columns of mma
//                      hold the sums of different groups; IN_CODES: codes times scales are exact in X's dtype
//   X, OUT, SCALE      BF16 or FP16; the scale also FP32, E8M0 or E4M3. OUT is also the dtype of the bias and the
//                      residual
//   ZERO               NONE; CODE: zero points are integers of the codes' grid, int8; UNSIGNED: the same plus
//                      2^(BITS - 1), uint8; VALUE: they are values, in the dtype of SCALE
//   TOKENS             1, 2, 4, 8 or 16
//   HEIGHT             of a tile, in 16 rows
//   SPLIT              blocks of a cluster; each has a slice of k (split-K)
//   PARTS              of a tile's slice, loaded one after the other
//   CHUNKS             of a part that one warp has, at most; a chunk is 64 codes of 8 bits, or 128 others
//   WHOLE              whether a part is whole rows without gaps between them
//   EVEN               whether every warp has CHUNKS chunks of every part
//   TEAMS              1, or 2 that take turns at tiles
//   RESIDENT           blocks of a multiprocessor: 1; or 2, the second of the next launch. It then has its codes already
//   PAIRED             BY_COLUMN for one token, and an even number of groups: a lane reads two scales at once
//   BOX                chunks whose x one copy loads to shared memory, as a box of all tokens; 0: no boxes
//   ROUNDS             NONE; or INT8 or E4M3: each token is rounded to codes with a scale of its own, token_scale. Groups
//                      are then scaled BY_UNIT
//   SOURCE             BF16 or FP16, the dtype of x in memory; X unless ROUNDS is E4M3
//   EXACT              int8 by int8, one scale a row: the bits of float sums are int32 sums, and out is (float(sum) *
//                      token_scale) * scale + bias, each operation rounded on its own
//
// Pipeline. A cluster takes every n-th tile of the weight. One thread of a block issues TMA copies of parts of tiles
// into a ring of stages. The ring holds only as much as keeps memory busy: with more copies in flight, later ones delay
// earlier ones. The first part is prefetched into the L2 cache while the previous kernel is still running.
//
// Compute. 16 warps share a part. A warp keeps the x of its chunks in registers as one operand of mma, and converts
// codes to the other operand, exactly. The sums of a unit, which lies in one group, are scaled in float32. Two more
// warps add up the sums of the 16 and store results, or send them to the block of the cluster that adds them up.
// Meanwhile the 16 warps work on the next tile. All additions have a fixed order.
//
// Two teams. A warp of 16 has little to do for a tile, and all of them wait for the same things at the same time. In two
// teams, one multiplies while the other adds up and waits, each warp does twice as much for a tile, and sends half the
// sums. Each team has a ring of its own.
//
// Launches that overlap (RESIDENT 2). Small weights take little longer than a launch. So this block leaves room for a
// block of the next launch, which copies all its codes to shared memory and waits for x. Codes and scales are thus read
// before the previous kernel has finished: a kernel that lets the next one start early must not write them.
//
// Few tokens. mma multiplies 8 columns. With fewer tokens, the columns hold the x of several chunks in the same
// registers. Each chunk of the weight is multiplied by all columns; only that chunk's columns of the product are used.
// So the registers of a block hold the x of 64 Ki of k for one token.
//
// Small groups and few tokens (BY_COLUMN). A column of mma holds the x of one group, and zeros for the other groups. So
// it sums up that group, and a lane scales its sums once for several groups, not once for each.
//
// Rounding. A cluster has all of x in registers, so it finds each token's scale there: the lanes of a warp, the warps of
// a block and the blocks of a cluster exchange the largest and smallest numbers of a token. Meanwhile codes arrive. int8
// codes of x are multiplied as int8: an instruction takes twice as many, and codes of a weight are unpacked faster.
//
// Neither codes nor x are reordered in memory: a lane reads adjacent codes, and the x that belongs to them. mma only
// needs both operands to have the same k at the same position.

static constexpr bool IS_PAIRED = RESIDENT == 2;  // with a block of the next launch
static constexpr int WARPS = 16, MEMBERS = WARPS / TEAMS;  // that multiply; those of a team
static constexpr int ADDERS = IS_PAIRED ? 1 : 2;           // warps that add up
static constexpr int THREADS = 32 * (WARPS + (IS_PAIRED ? 2 : 4));  // 1 more warp loads codes, and 1 x unless IS_PAIRED
static constexpr int ROWS = 16 * HEIGHT, TILES = TOKENS > 8 ? 2 : 1;  // of a tile; mma takes 8 tokens
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
static constexpr bool COPIES_X = BOX == 0 && !IS_PAIRED && (TOKENS == 1 || (SHARE > 1 && SCALING != BY_COLUMN && PARTS > 2));
static constexpr int BOX_PITCH = BOX * CHUNK * 2, MAX_BOXES = 16;  // bytes of a token in a box, a multiple of 256
static constexpr bool LARGE_X = SETS * 4 * TILES * PAIRS > 32;  // x takes more than 32 registers
static constexpr int REGISTERS[2] = {LARGE_X ? 112 : 104, LARGE_X ? 32 : 64};  // of a multiplying warp; of the others
// int8 by int8, where x has int8 codes. CODE_UNIT: see four_of.
static constexpr bool BY_INTEGERS = ROUNDS == INT8 && ((CODES == INT && BITS == 4) || (CODES == INT8 && ZERO == NONE));
static constexpr float CODE_UNIT = BY_INTEGERS && BITS == 4 && ZERO == NONE ? 1.0f / 16 : 1.0f;
static constexpr bool FOLDS = FOLD && !BY_INTEGERS;
static_assert(!EXACT || (BY_INTEGERS && BITS == 8 && GROUP == 0 && SCALING == BY_UNIT), "");
// Whether the sums of x over a unit are needed.
static constexpr bool SUMS_X = FOLDS || (ZERO != NONE && (ZERO == VALUE || SCALING == BY_COLUMN) && UNITS == 1);
static_assert(SCALING != BY_UNIT || SPAN % UNIT == 0, "");
static_assert(SCALING != BY_COLUMN || (CHUNK % SPAN == 0 && DEPTH > 0 && IS_STREAM), "");
static_assert(SCALING != IN_CODES || ((CODES == TABLE || CODES == E2M1) && ZERO == NONE), "");
static_assert((CODES != E4M3 || ZERO == NONE) && (CODES != E2M1 || (X == BF16 && BITS == 4)), "");
static_assert(TEAMS == 1 || (TEAMS == 2 && BOX == 0), "");
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

    MEMBER int tiles() const { return (n + ROWS - 1) / ROWS; }
    MEMBER int scale_bytes() const { return ROWS * groups * SCALE_SIZE; }  // in a tile; a multiple of 16
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

// Prefetches the first part into the L2 cache while the previous kernel is still running. The L2 cache is coherent, so
// later loads see what that kernel writes. Prefetching more would delay x, which is needed first.
DEVICE void fetch(const Problem &p, const TensorMap &codes, int rank) {
    const int row = first_tile() * ROWS, rows = min(ROWS, p.n - row);
    if constexpr (WHOLE) prefetch(p.codes + (long long)row * p.pitch, rows * p.pitch);
    else prefetch_box(codes, column_of(part_of(p, rank, 0).first), row);
    const int scales = rows * p.groups * SCALE_SIZE & ~15;
    if (scales > 0) prefetch(p.scale + (long long)row * p.groups * SCALE_SIZE, scales);
}

// Loads all parts of the block's tiles. The scales and zero points of a tile begin at multiples of 16 bytes; those of a
// row need not.
DEVICE void produce(const Problem &p, const TensorMap &codes, Shared &shared, unsigned char *stages, int rank) {
    Ring ring(p.stages, 0), other(p.stages, TEAMS - 1);
    for (int tile = first_tile(); tile < p.tiles(); tile += tile_step()) {
        const int row = tile * ROWS, rows = min(ROWS, p.n - row);
        const long long first = (long long)row * p.groups;
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part, ring.advance()) {
            unsigned char *stage = stages + ring.slot() * p.stage_bytes();
            const uint32 full = shared_address(&shared.full[ring.slot()]);
            barrier_wait(shared_address(&shared.empty[ring.slot()]), ring.parity ^ 1);
            if (BOX > 0 && ring.slot() >= p.apart) barrier_wait(shared_address(&shared.loaded), 0);
            unsigned char *scale_to = stage + ROWS * p.pitch, *zero_to = scale_to + p.scale_bytes();
            const unsigned char *scale = p.scale + first * SCALE_SIZE, *zero_point = p.zero_point + first * ZERO_SIZE;
            const uint32 scales = bulk_part(scale_to, scale, rows * p.groups * SCALE_SIZE);
            const uint32 zeros = ZERO != NONE ? bulk_part(zero_to, zero_point, rows * p.groups * ZERO_SIZE) : 0;
            const uint32 bytes = (WHOLE ? rows : ROWS) * p.pitch;
            barrier_expect(full, bytes + scales + zeros);
            if constexpr (WHOLE) load_bulk(shared_address(stage), p.codes + (long long)row * p.pitch, bytes, full);
            else load_box(codes, column_of(part_of(p, rank, part).first), row, shared_address(stage), full);
            if (scales > 0) load_bulk(shared_address(scale_to), scale, scales, full);
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

// ---- multiplying ----------------------------------------------------------------------------------------------------

typedef uint32 Tokens[4][TILES][PAIRS];  // x of the chunks that share these registers

// Loads x from tokens that are `stride` elements apart and begin at k = `start`.
template <bool ALIGNED>
DEVICE void load_tokens(Tokens (&x)[SETS], const Problem &p, int rank, const unsigned short *from, long long stride,
                        int start) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const int column = TOKENS < 8 ? g / TOKENS : 0;
        const int part = SCALING == BY_COLUMN ? set / TURNS : (set * SHARE + column) / CHUNKS;
        const int c = SCALING == BY_COLUMN ? set % TURNS * DEPTH + column / GROUPS : (set * SHARE + column) % CHUNKS;
        const Range own = share_of(part_of(p, rank, part), warp, part);
        const bool exists = part < PARTS && c < min(CHUNKS, own.count);
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const int token = TOKENS < 8 ? g % TOKENS : tile * 8 + g;
                const int k = (own.first + c) * CHUNK + word_at(word, t) - start;
                const bool in_column = SCALING != BY_COLUMN || column % GROUPS == word_at(word, t) / SPAN;
                load_x<ALIGNED>(x[set][word][tile], from + token * stride, k,
                                exists && in_column && token < p.m ? p.k - start : 0);
            }
    }
}

// Exchanges the words whose indices differ in `BIT`, if `does`.
template <int BIT>
DEVICE void exchange(Tokens &x, bool does) {
#pragma unroll
    for (int word = 0; word < 4; ++word)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                if (word & BIT) continue;
                const uint32 own = x[word][tile][i], other = x[word | BIT][tile][i];
                x[word][tile][i] = does ? other : own;
                x[word | BIT][tile][i] = does ? own : other;
            }
}

// Loads x from boxes, each set of registers as soon as its box has arrived. Chunks that a warp does not have are
// loaded, too, but not multiplied. Where a lane's words are adjacent, the eight lanes of an access read in four orders,
// so that each reads from its own banks.
DEVICE void load_boxes(Tokens (&x)[SETS], const Problem &p, Shared &shared, const unsigned char *boxes, int rank) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int end = boxes_of(p, rank) * BOX, turn = VECTOR == 4 ? t / 2 + g % 2 * 2 : 0;
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const Range own = share_of(part_of(p, rank, set / CHUNKS), warp, set / CHUNKS);
        const int chunk = min(own.first + set % CHUNKS - part_of(p, rank, 0).first, end - 1);
        const unsigned char *box = boxes + chunk / BOX * (TOKENS * BOX_PITCH) + chunk % BOX * (CHUNK * 2);
        barrier_wait(shared_address(&shared.arrived[chunk / BOX]), 0);
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const unsigned char *from = box + (tile * 8 + g) * BOX_PITCH;
                const int k = word_at(word ^ turn, t);
                load_x<true>(x[set][word][tile], (const unsigned short *)from, k, CHUNK);
            }
        exchange<1>(x[set], turn & 1);
        exchange<2>(x[set], turn & 2);
    }
    barrier_arrive(shared_address(&shared.loaded));
}

// Makes the sums of a row NaN if one of its codes is.
DEVICE void add_nan(float (&sums)[TILES][4], const uint32 (&bad)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        uint32 any = bad[row];
        any |= __shfl_xor_sync(0xffffffff, any, 1), any |= __shfl_xor_sync(0xffffffff, any, 2);
        if (any & 0x80808080)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                sums[tile][2 * row] = sums[tile][2 * row + 1] = bits_float(0x7fc00000);
    }
}

// The group of a unit of a warp's chunk `c`, relative to the group of the warp's first chunk, `first`.
DEVICE int group_of(uint32 first, uint32 c, int unit) {
    if constexpr (GROUP == 0) return 0;
    else if constexpr (CHUNK % SPAN == 0) return (c * CHUNK + unit * UNIT) / SPAN;
    else if constexpr (SPAN % CHUNK == 0) return (int)(first % (SPAN / CHUNK) + c) / (SPAN / CHUNK);
    else return ((first + c) * CHUNK + unit * UNIT) / SPAN - first * CHUNK / SPAN;
}

// sums += the offsets of `unpack` (or ones) times x over words `first` .. `end` - 1, for the columns whose results a lane
// has. All rows of the product are equal.
template <bool ONES>
DEVICE void sum_x(float (&sums)[TILES][2], const Tokens &x, int first, int end) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float own[4] = {sums[tile][0], sums[tile][1], sums[tile][0], sums[tile][1]};
#pragma unroll
        for (int word = first; word < end; ++word)
#pragma unroll
            for (int i = 0; i < PAIRS; i += 2) {
                const uint32 one = X == FP16 ? 0x3c003c00 : 0x3f803f80;
                const uint32 a = ONES ? one : offset_of(0, i), b = ONES ? one : offset_of(0, i + 1);
                multiply(own, a, a, b, b, x[word][tile][i], x[word][tile][i + 1]);
            }
        sums[tile][0] = own[0], sums[tile][1] = own[1];
    }
}

// The sums of x that belong to the unit or the groups of some registers: times the offsets, and alone.
struct Sums {
    float offset[TILES][2], plain[TILES][2];

    MEMBER void clear() {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 2; ++i) offset[tile][i] = plain[tile][i] = 0.0f;
    }
    MEMBER void add(const Tokens &x) {
        if constexpr (FOLDS) sum_x<false>(offset, x, 0, 4);
        if constexpr (SUMS_X && ZERO != NONE) sum_x<true>(plain, x, 0, 4);
    }
};

// Multiplies words `first` .. `end` - 1 of rows g and g + 8, which begin at `codes` and `codes + 8 * pitch`. `scales` and
// `limit`, for IN_CODES: those of row g at the chunk, and the number of groups that exist from there on.
DEVICE void multiply_words(float (&own)[TILES][4], const Tokens &x, const Word (&upper)[4], const Word (&lower)[4],
                           int first, int end, const int (&zero)[2], const unsigned char *table,
                           const unsigned char *scales, int rest, int limit) {
    const int t = threadIdx.x % 4;
    uint32 scale[2] = {};
#pragma unroll
    for (int word = first; word < end; ++word) {
        uint32 a[PAIRS], b[PAIRS];
        unpack(a, upper[word], zero[0], table);
        unpack(b, lower[word], zero[1], table);
        if constexpr (SCALING == IN_CODES) {
            if (word * WORD % SPAN == 0) {
                const int group = word_at(word, t) / SPAN;
#pragma unroll
                for (int row = 0; row < 2; ++row) {
                    const float of_row = group < limit ? number_at(scales, group + row * rest) : 0.0f;
                    scale[row] = X == FP16 ? to_half2(of_row, of_row) : to_bf16x2(of_row, of_row);
                }
            }
#pragma unroll
            for (int i = 0; i < PAIRS; ++i) {
                a[i] = X == FP16 ? multiply_half2(a[i], scale[0]) : multiply_bf16x2(a[i], scale[0]);
                b[i] = X == FP16 ? multiply_half2(b[i], scale[1]) : multiply_bf16x2(b[i], scale[1]);
            }
        }
#pragma unroll
        for (int i = 0; i < PAIRS; i += 2)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                multiply(own[tile], a[i], b[i], a[i + 1], b[i + 1], x[word][tile][i], x[word][tile][i + 1]);
    }
}

// The same as products of int8.
DEVICE void multiply_integers(float (&sums)[TILES][4], const Tokens &x, const Word (&upper)[4], const Word (&lower)[4],
                              int first, int end, const int (&zero)[2]) {
    int own[TILES][4] = {};
    constexpr int STEP = BITS == 4 ? 1 : 2;  // words of an instruction
    constexpr bool HAS_ZERO = ZERO != NONE;
#pragma unroll
    for (int word = first; word < end; word += STEP) {
        const int next = word + STEP - 1;
        const uint32 row[2] = {upper[word].low, lower[word].low};
        uint32 a[4] = {row[0], row[1], upper[next].low, lower[next].low};
        if constexpr (BITS == 4) {
            a[0] = four_of<false, HAS_ZERO>(row[0], zero[0]), a[1] = four_of<false, HAS_ZERO>(row[1], zero[1]);
            a[2] = four_of<true, HAS_ZERO>(row[0], zero[0]), a[3] = four_of<true, HAS_ZERO>(row[1], zero[1]);
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
            warp_multiply_s8(own[tile], a[0], a[1], a[2], a[3], x[word][tile][0], x[next][tile][BITS == 4 ? 1 : 0]);
    }
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) sums[i / 4][i % 4] = EXACT ? bits_float(own[i / 4][i % 4]) : own[i / 4][i % 4];
}

// Where the scales and zero points of a warp's groups are: those of row g; those of row g + 8 follow `rest` elements
// later. `left`: groups from there on to the end of the row.
struct Scales {
    const unsigned char *scales, *zero_points;
    int rest, left;
};

// Adds the products of the warp's chunk `c` to `sums`. Where chunks share the registers of x, only the columns of chunk
// `place` count. `codes` points to the chunk's codes of row g, `scales` to the groups of the warp's first k, which begins
// chunk `first`. `left`: k from there on. `bad` collects bits of codes (`is_nan`).
DEVICE void multiply_chunk(float (&sums)[TILES][4], const Tokens &x, const Sums &x_sums, const unsigned char *codes,
                           int pitch, const Scales &of, const unsigned char *table, int first, int c, int left,
                           int place, uint32 (&bad)[2]) {
    Word upper[4], lower[4];  // of rows g and g + 8
    read_words(upper, codes);
    read_words(lower, codes + 8 * pitch);
    if constexpr (IS_BF16_E4M3)
#pragma unroll
        for (int word = 0; word < 4; ++word) collect(bad[0], upper[word].low), collect(bad[1], lower[word].low);
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const int at = group_of(first, c, unit);
        // Past the end of the row codes are arbitrary and x is 0. The scale there may be NaN, so it is replaced by 0.
        const bool beyond = UNITS > 1 && c * CHUNK + unit * UNIT >= left;
        const int zero[2] = {zero_at(of.zero_points, at), zero_at(of.zero_points, at + of.rest)};
        float scale[2] = {1.0f, 1.0f}, added[2] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (SCALING == BY_UNIT) scale[i] = beyond ? 0.0f : number_at(of.scales, at + i * of.rest) * CODE_UNIT;
            if (ZERO == VALUE) added[i] = beyond ? 0.0f : number_at(of.zero_points, at + i * of.rest);
        }
        float own[TILES][4] = {};
        if constexpr (BY_INTEGERS)
            multiply_integers(own, x, upper, lower, unit * VECTOR, (unit + 1) * VECTOR, zero);
        else
            multiply_words(own, x, upper, lower, unit * VECTOR, (unit + 1) * VECTOR, zero, table,
                           of.scales + at * SCALE_SIZE, of.rest, of.left - at);
        Sums here = x_sums;
        if constexpr (ZERO == VALUE && UNITS > 1) here.clear(), sum_x<true>(here.plain, x, unit * VECTOR, (unit + 1) * VECTOR);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (SHARE > 1 && (int)(threadIdx.x % 4 * 2 + i % 2) / TOKENS != place) continue;
                if constexpr (FOLDS) own[tile][i] -= here.offset[tile][i % 2];
                if constexpr (FOLDS && (ZERO == CODE || ZERO == UNSIGNED))
                    own[tile][i] = fma_exactly(-(float)zero[i / 2], here.plain[tile][i % 2], own[tile][i]);
                if constexpr (EXACT) sums[tile][i] = plus(sums[tile][i], own[tile][i]);
                else sums[tile][i] = fma_exactly(own[tile][i], scale[i / 2], sums[tile][i]);
                if constexpr (ZERO == VALUE) sums[tile][i] = fma_exactly(added[i / 2], here.plain[tile][i % 2], sums[tile][i]);
            }
    }
}

// With BY_COLUMN: the products of chunk `place` of a set become the sums of its groups. `codes`: those of row g.
DEVICE void take_chunk(float (&groups)[4], const Tokens &x, const Sums &x_sums, const unsigned char *codes, int pitch,
                       const unsigned char *table, int place) {
    Word upper[4], lower[4];
    read_words(upper, codes);
    read_words(lower, codes + 8 * pitch);
    float own[TILES][4] = {};
    const int zero[2] = {};
    multiply_words(own, x, upper, lower, 0, 4, zero, table, nullptr, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (DEPTH == 1 || (int)(threadIdx.x % 4 * 2 + i % 2) / TOKENS / GROUPS == place)
            groups[i] = FOLDS ? own[0][i] - x_sums.offset[0][i % 2] : own[0][i];
}

// With BY_COLUMN: adds the sums of the groups from `first` on, scaled. `limit`: of the warp's groups.
DEVICE void scale_groups(float (&sums)[4], const float (&groups)[4], const Sums &x_sums, const Scales &of, int first,
                         int limit) {
    const int t = threadIdx.x % 4, at = first + 2 * t / TOKENS, next = first + (2 * t + 1) / TOKENS;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float scale[2], zero[2] = {};
        numbers_at(scale, of.scales, at + row * of.rest, at < limit, next < limit);
        if constexpr (ZERO == VALUE) {
            numbers_at(zero, of.zero_points, at + row * of.rest, at < limit, next < limit);
        } else if constexpr (ZERO != NONE) {
            zero[0] = at < limit ? (float)zero_at(of.zero_points, at + row * of.rest) : 0.0f;
            zero[1] = next < limit ? (float)zero_at(of.zero_points, next + row * of.rest) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float own = groups[2 * row + i], &sum = sums[2 * row + i];
            if constexpr (ZERO == CODE || ZERO == UNSIGNED) own = fma_exactly(-zero[i], x_sums.plain[0][i], own);
            sum = fma_exactly(own, scale[i], sum);
            if constexpr (ZERO == VALUE) sum = fma_exactly(zero[i], x_sums.plain[0][i], sum);
        }
    }
}

DEVICE void consume(const Problem &p, Shared &shared, const unsigned char *table, const unsigned char *stages,
                    const unsigned char *copy, int rank) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    Tokens x[SETS];
    if (COPIES_X || BOX > 0) named_barrier_sync(1, THREADS);
    if constexpr (BOX > 0) {
        load_boxes(x, p, shared, copy, rank);
    } else if (!is_aligned(p)) {
        load_tokens<false>(x, p, rank, p.x, p.x_stride, 0);
    } else if (COPIES_X) {
        const Slice own(p, rank);
        barrier_wait(shared_address(&shared.copied), 0);
        load_tokens<true>(x, p, rank, (const unsigned short *)copy, own.pitch() / 2, own.first);
    } else {
        load_tokens<true>(x, p, rank, p.x, p.x_stride, 0);
    }
    if (!COPIES_X && BOX == 0) named_barrier_sync(1, THREADS);
    if constexpr (ROUNDS != NONE)
        round_tokens<ROUNDS == E4M3, SOURCE == FP16, X == FP16, BY_INTEGERS>(
            x, shared.tokens, shared_address(&shared.exchanged), rank);
    Sums x_sums[SETS];
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
#pragma unroll
        for (int word = 0; word < 4; ++word)
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) order_x<IN_ORDER || BY_INTEGERS>(x[set][word][tile]);
        x_sums[set].clear(), x_sums[set].add(x[set]);
    }

    const int team = warp / MEMBERS;
    Ring ring(p.stages, team);
    uint32 round = team;
    for (int tile = first_tile() + team * tile_step(); tile < p.tiles(); tile += TEAMS * tile_step(), round += TEAMS) {
        float sums[HEIGHT][TILES][4] = {};
        uint32 bad[HEIGHT][2] = {};
#pragma unroll
        for (int part = 0; part < PARTS; ++part, ring.advance()) {
            const Range all = part_of(p, rank, part), own = share_of(all, warp, part);
            const int start = GROUP == 0 ? 0 : own.first * CHUNK / SPAN, group = g * p.groups + start;
            const unsigned char *stage = stages + ring.slot() * p.stage_bytes();
            const unsigned char *codes = stage + g * p.pitch + (own.first - all.first) * CHUNK_BYTES;
            const unsigned char *scales = stage + ROWS * p.pitch, *zero_points = scales + p.scale_bytes();
            const int left = p.groups * SPAN - own.first * CHUNK;
            float groups[HEIGHT][4];
            barrier_wait(shared_address(&shared.full[ring.slot()]), ring.parity);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int high = 0; high < HEIGHT; ++high) {
                    const int at = group + high * 16 * p.groups;
                    const unsigned char *from = codes + high * 16 * p.pitch + c * CHUNK_BYTES;
                    const Scales of = {scales + at * SCALE_SIZE, zero_points + at * ZERO_SIZE, 8 * p.groups, p.groups - start};
                    if constexpr (SCALING == BY_COLUMN) {
                        const int set = part * TURNS + c / DEPTH;
                        const Sums &sum = x_sums[set];
                        if (c % DEPTH == 0)
#pragma unroll
                            for (int i = 0; i < 4; ++i) groups[high][i] = 0.0f;
                        if (EVEN || c < own.count) take_chunk(groups[high], x[set], sum, from, p.pitch, table, c % DEPTH);
                        if (c % DEPTH == DEPTH - 1 || c == CHUNKS - 1)
                            scale_groups(sums[high][0], groups[high], sum, of, c / DEPTH * DEPTH * GROUPS,
                                         min(of.left, own.count * GROUPS));
                    } else if (EVEN || c < own.count) {
                        const int set = (part * CHUNKS + c) / SHARE, place = (part * CHUNKS + c) % SHARE;
                        multiply_chunk(sums[high], x[set], x_sums[set], from, p.pitch, of, table, own.first, c, left,
                                       place, bad[high]);
                    }
                }
            barrier_arrive(shared_address(&shared.empty[ring.slot()]));
        }
        if constexpr (IS_BF16_E4M3)
#pragma unroll
            for (int high = 0; high < HEIGHT; ++high) add_nan(sums[high], bad[high]);

        const uint32 buffer = round & 1;
        barrier_wait(shared_address(&shared.added[buffer]), ~round >> 1 & 1);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const float (&own)[4] = sums[i / TILES][i % TILES];
            shared.sums[buffer][warp % MEMBERS][i][lane] = Partial::of(own);
        }
        barrier_arrive(shared_address(&shared.summed[buffer]));
    }
}

// ---- adding up ------------------------------------------------------------------------------------------------------

DEVICE float from_out(unsigned short x) {
    if constexpr (OUT == FP16) return from_half(x);
    else return bits_float((uint32)x << 16);
}

DEVICE unsigned short to_out(float x) {
    if constexpr (OUT == FP16) return (unsigned short)to_half2(x, 0.0f);
    else return (unsigned short)to_bf16x2(x, 0.0f);
}

DEVICE void add(float &to, float x) { to = EXACT ? plus(to, x) : fma_exactly(x, 1.0f, to); }
DEVICE void add(float4 &to, const float4 &x) {
    add(to.x, x.x), add(to.z, x.z);
    if constexpr (TOKENS > 1) add(to.y, x.y), add(to.w, x.w);
}

// The operands that are added to a piece of a tile, and their use: 16 rows from `row` on, 8 tokens from `token` on.
struct Epilogue {
    float bias[2], residual[4], token_scale[2], scale[2];

    MEMBER Epilogue(const Problem &p, int row, int token) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = row + g + 8 * i, of = token + 2 * t + i;
            bias[i] = p.bias && own < p.n ? from_out(p.bias[own]) : 0.0f;
            token_scale[i] = p.token_scale && of < p.m ? p.token_scale[of] : 1.0f;
            scale[i] = EXACT && own < p.n ? number_at(p.scale, own) : 1.0f;
            if constexpr (CODES == TABLE) token_scale[i] *= UNIT_VALUE;
            if (SCALE == E4M3 && p.global_scale) token_scale[i] = divide_exactly(token_scale[i], *p.global_scale);
        }
#pragma unroll
        for (int i = 0; i < 4; i += TOKENS == 1 ? 2 : 1) {
            const int own = row + g + i / 2 * 8, of = token + 2 * t + i % 2;
            const bool exists = p.residual && own < p.n && of < p.m;
            residual[i] = exists ? from_out(p.residual[(long long)of * p.n + own]) : 0.0f;
        }
    }

    MEMBER void store(const Problem &p, const Shared &shared, int row, int token, const float4 &sums) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const float all[4] = {sums.x, sums.y, sums.z, sums.w};
        float of_tokens[2] = {token_scale[0], token_scale[1]};
        if constexpr (ROUNDS != NONE)
#pragma unroll
            for (int i = 0; i < 2; ++i) of_tokens[i] *= shared.tokens.scale[token + 2 * t + i];
#pragma unroll
        for (int i = 0; i < 4; i += TOKENS == 1 ? 2 : 1) {
            const int own = row + g + i / 2 * 8, of = token + 2 * t + i % 2;
            float result = fma_exactly(all[i], of_tokens[i % 2], bias[i / 2]) + residual[i];
            if (EXACT) result = (float)(int)float_bits(all[i]) * of_tokens[i % 2] * scale[i / 2];
            if (EXACT && p.bias) result = fma_exactly(result, 1.0f, bias[i / 2]);  // no product to fuse with
            if (own < p.n && of < p.m) p.out[(long long)of * p.n + own] = to_out(result);
        }
    }
};

// Adds up the columns that belong to the same token.
DEVICE void fold(float4 &sums) {
#pragma unroll
    for (int lanes = 2; lanes >= 1; lanes /= 2)
        if (2 * lanes >= TOKENS) {
            float own[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
            for (int i = 0; i < 4; i += TOKENS == 1 ? 2 : 1) add(own[i], __shfl_xor_sync(0xffffffff, own[i], lanes));
            sums = make_float4(own[0], own[1], own[2], own[3]);
        }
}

// The address of block `rank`'s sums for the cluster's `round`-th tile, piece 0. Block round % SPLIT adds them up.
DEVICE float4 *kept_at(float4 *kept, int round, int rank) {
    return kept + (round / SPLIT * SPLIT + rank) * PIECES * 32 + threadIdx.x % 32;
}

// Adds up the warps' sums of the even or the odd tiles.
DEVICE void finish(const Problem &p, Shared &shared, float4 *kept, int rank, int first) {
    const int lane = threadIdx.x % 32;
    for (int round = first; round < rounds_of(p); round += ADDERS) {
        const int buffer = round & 1;
        const uint32 parity = round >> 1 & 1;
        const int tile = first_tile() + round * tile_step();
        const auto sum = [&](int i) {
            if (i == 0) barrier_wait(shared_address(&shared.summed[buffer]), parity);
            float4 all = shared.sums[buffer][0][i][lane].columns();
#pragma unroll (LARGE_X ? 5 : 15)
            for (int warp = 1; warp < MEMBERS; ++warp) add(all, shared.sums[buffer][warp][i][lane].columns());
            if constexpr (TOKENS < 8) fold(all);
            return all;
        };
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int row = tile * ROWS + i / TILES * 16, token = i % TILES * 8;
            if constexpr (SPLIT == 1) {
                const Epilogue epilogue(p, row, token);  // loads its operands before the wait in `sum`
                const float4 sums = sum(i);
                epilogue.store(p, shared, row, token, sums);
            } else {
                send(shared_address(kept_at(kept, round, rank) + i * 32), round % SPLIT, sum(i),
                     shared_address(&shared.received));
            }
        }
        barrier_arrive(shared_address(&shared.added[buffer]));
    }
}

// Adds up the blocks' sums of the tiles that this block finishes.
DEVICE void combine(const Problem &p, Shared &shared, float4 *kept, int rank) {
    const int rounds = rounds_of(p);
    barrier_wait_after(shared_address(&shared.received), 0);
    for (int i = threadIdx.x / 32; i / PIECES * SPLIT + rank < rounds; i += THREADS / 32) {
        const int round = i / PIECES * SPLIT + rank, piece = i % PIECES;
        const int row = (first_tile() + round * tile_step()) * ROWS + piece / TILES * 16, token = piece % TILES * 8;
        const Epilogue epilogue(p, row, token);
        float4 sums = kept_at(kept, round, 0)[piece * 32];
#pragma unroll
        for (int other = 1; other < SPLIT; ++other) add(sums, kept_at(kept, round, other)[piece * 32]);
        epilogue.store(p, shared, row, token, sums);
    }
}

// Grid: clusters of SPLIT blocks, at least one block and at most SPLIT blocks a tile.
//
// codes [n, row bytes]: a pointer if WHOLE; else a tensor map of elements of 8 bytes, in boxes of ROWS rows of `pitch`
// bytes. x [m, k]: with BOX also a tensor map of elements of 8 bytes, in boxes of TOKENS rows of BOX_PITCH bytes. scale
// and zero_point [n, groups], bias [n], residual and out [m, n], token_scale [m]; bias, residual and token_scale may be
// null. codes, scale and zero_point begin at multiples of 16 bytes. `chunks`: in a row.
//
// Shared memory, in this order:
//   Shared, and with CODES = TABLE the table of `write_table`
//   `stages` of Problem::stage_bytes(), and 128 bytes that may be read past them; the boxes of x lie after the first
//   `apart` stages, and the other stages use their memory once x is in registers
//   with SPLIT > 1: 512 bytes for each piece of the sums of a cluster's tiles, whose number is rounded up to SPLIT
//   if COPIES_X: m tokens of Slice::pitch()
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    decode_mm(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap x_map,
                  const unsigned short *x, const unsigned char *codes, const unsigned char *scale,
                  const unsigned char *zero_point, const unsigned short *bias, const unsigned short *residual,
                  const float *token_scale, const float *global_scale, unsigned short *out, long long x_stride, int m, int n, int k, int chunks,
                  int groups, int pitch, int stages, int apart) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Problem p = {x, codes, scale, zero_point, bias, residual, token_scale, global_scale, out, x_stride,
                       m, n, k, chunks, groups, pitch, stages, apart};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, role = warp - WARPS;
    const int rank = SPLIT > 1 ? cluster_rank() : 0;
    unsigned char *table = memory + sizeof(Shared), *ring = table + TABLE_BYTES, *past = ring + stages * p.stage_bytes() + 128;
    const unsigned char *copy = past + (SPLIT > 1 ? (rounds_of(p) + SPLIT - 1) / SPLIT * SPLIT * PIECES * 512 : 0);
    if constexpr (BOX > 0) {
        copy = ring + apart * p.stage_bytes();
        past += max((int)(copy + most_boxes(p) * TOKENS * BOX_PITCH - past), 0);
    }
    float4 *kept = (float4 *)past;

    if (warp < WARPS) {
        if constexpr (!IS_PAIRED) take_registers<REGISTERS[0]>();
        if constexpr (SPLIT > 1) cluster_arrive();
        if constexpr (CODES == TABLE) write_table(table, WARPS);
        wait_for_previous();
        consume(p, shared, table, ring, copy, rank);
    } else {
        if constexpr (!IS_PAIRED) give_registers<REGISTERS[1]>();
        if (role == ADDERS && lane == 0) {
            if constexpr (IS_PAIRED) let_next_start();  // it reads results of others only when this launch is done
            fetch(p, map, rank);
            for (int i = 0; i < stages; ++i) {
                barrier_init(shared_address(&shared.full[i]), 1);
                barrier_init(shared_address(&shared.empty[i]), MEMBERS * 32);
            }
            barrier_init(shared_address(&shared.copied), 1);
            if constexpr (BOX > 0) {
                barrier_init(shared_address(&shared.loaded), WARPS * 32);
                for (int i = 0; i < boxes_of(p, rank); ++i) barrier_init(shared_address(&shared.arrived[i]), 1);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                barrier_init(shared_address(&shared.summed[i]), MEMBERS * 32);
                barrier_init(shared_address(&shared.added[i]), 32);
            }
            if constexpr (SPLIT > 1) {
                const int own = (rounds_of(p) - rank + SPLIT - 1) / SPLIT;  // tiles that this block adds up
                barrier_init(shared_address(&shared.received), 1);
                barrier_expect(shared_address(&shared.received), own * SPLIT * PIECES * 512);
                if constexpr (ROUNDS != NONE) {
                    barrier_init(shared_address(&shared.exchanged), 1);
                    barrier_expect(shared_address(&shared.exchanged), SPLIT * ((TOKENS + 3) / 4) * 16);
                }
            }
            barrier_init_fence();
        }
        __syncwarp();
        if constexpr (SPLIT > 1) cluster_arrive();
        named_barrier_sync(2, THREADS - WARPS * 32);
        named_barrier_arrive(1, THREADS);
        wait_for_previous();  // which may have written the weight
        if (COPIES_X && role == ADDERS + 1 && lane == 0 && is_aligned(p)) copy_x(p, shared, copy, rank);
        if (role == ADDERS && lane == 0) {
            if constexpr (BOX > 0) copy_boxes(p, x_map, shared, copy, rank);
            produce(p, map, shared, ring, rank);
            if constexpr (!IS_PAIRED) let_next_start();  // not earlier, since its copies would delay these
        }
        __syncwarp();
        if constexpr (SPLIT > 1)
            if (role < ADDERS) cluster_wait();  // the other blocks run and have initialised their barriers
        if (role < ADDERS) finish(p, shared, kept, rank, role);
    }
    if constexpr (SPLIT > 1) {
        __syncwarp();
        if ((role < 0 && ROUNDS == NONE) || role >= ADDERS) cluster_wait();
        if constexpr (ROUNDS != NONE) named_barrier_sync(4, THREADS);  // token_scale is written
        combine(p, shared, kept, rank);
    }
}
