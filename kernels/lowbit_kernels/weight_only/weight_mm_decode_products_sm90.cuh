// How the warps of weight_mm_decode_sm90.cu multiply: x in registers, and the sums of a warp's codes. Its macros and
// weight_mm_decode_copies_sm90.cuh stand before.

// ---- x in registers -------------------------------------------------------------------------------------------------

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

// Prefetches lines of one token's x into the L2 cache, and thus computes addresses for `load_tokens` before a wait: ptxas
// moves mere arithmetic behind it.
DEVICE void prefetch_token(const Problem &p, int rank) {
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
        const int column = set * SHARE + threadIdx.x % 32 / 4, part = column / CHUNKS, c = column % CHUNKS;
        const Range own = share_of(part_of(p, rank, part), threadIdx.x / 32, part);
        const int k = (own.first + c) * CHUNK + word_at(0, threadIdx.x % 4);
        if (part < PARTS && c < min(CHUNKS, own.count) && k < p.k) prefetch_line(p.x + k);
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

// The 1 of pair `i`'s codes, in both halves.
DEVICE constexpr uint32 one_of(int i) {
    if (AS_BITS) return IS_INTEGER ? 0x10001 << place_of(i) : 0x800080;
    return X == FP16 ? 0x3c003c00 : 0x3f803f80;
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
                const uint32 a = ONES ? one_of(i) : offset_of(0, i), b = ONES ? one_of(i + 1) : offset_of(0, i + 1);
                multiply(own, a, a, b, b, x[word][tile][i], x[word][tile][i + 1]);
            }
        sums[tile][0] = own[0], sums[tile][1] = own[1];
    }
}

// Multiplies x by a power of two for each column of mma, whose largest number then has the exponent 126, or less if it was
// below 0.5, and by one for each pair's place. `back`: 2^-7 of the reciprocals, without places, of a lane's columns of sums.
DEVICE void scale_x(float (&back)[TILES][2], Tokens (&x)[SETS]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        uint32 largest = 0;
#pragma unroll
        for (int i = 0; i < SETS * 4; ++i)
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair += 2)
                largest = largest_magnitudes_bf16(largest, x[i / 4][i % 4][tile][pair], x[i / 4][i % 4][tile][pair + 1]);
        largest = max(largest >> 16, largest & 0xffff);
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 1));
        largest = max(largest, __shfl_xor_sync(0xffffffff, largest, 2));
        const uint32 exponent = max(largest >> 7, 126u), factor = (380 - exponent) * 0x800080;
#pragma unroll
        for (int i = 0; i < SETS * 4; ++i)
#pragma unroll
            for (int pair = 0; pair < PAIRS; ++pair) {
                uint32 &own = x[i / 4][i % 4][tile][pair];
                own = multiply_bf16x2(own, factor - place_of(pair) * 0x800080);
            }
#pragma unroll
        for (int j = 0; j < 2; ++j) back[tile][j] = bits_float(__shfl_sync(0xffffffff, exponent, t * 8 + j * 4) << 23);
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
    float second[TILES][4] = {};
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
                    const float of_row = group < limit ? number_at(scales, group + row * rest) * MOVED_UP : 0.0f;
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
                multiply(word % CHAINS ? second[tile] : own[tile], a[i], b[i], a[i + 1], b[i + 1], x[word][tile][i],
                         x[word][tile][i + 1]);
    }
    if constexpr (CHAINS == 2)
#pragma unroll
        for (int i = 0; i < 4 * TILES; ++i) own[i / 4][i % 4] += second[i / 4][i % 4];
}

// The same as products of int8.
DEVICE void multiply_integers(float (&sums)[TILES][4], const Tokens &x, const Word (&upper)[4], const Word (&lower)[4],
                              int first, int end, const int (&zero)[2]) {
    int own[TILES][4] = {};
    constexpr int STEP = BITS == 4 ? 1 : 2;  // words of an instruction
    constexpr bool HAS_ZERO = ZERO != NONE;
    const uint32 zeros[2] = {(zero[0] + 8) * 0x01010101u, (zero[1] + 8) * 0x01010101u};
#pragma unroll
    for (int word = first; word < end; word += STEP) {
        const int next = word + STEP - 1;
        const uint32 row[2] = {upper[word].low, lower[word].low};
        uint32 a[4] = {row[0], row[1], upper[next].low, lower[next].low};
        if constexpr (BITS == 4) {
            a[0] = four_of<false, HAS_ZERO>(row[0], zeros[0]), a[1] = four_of<false, HAS_ZERO>(row[1], zeros[1]);
            a[2] = four_of<true, HAS_ZERO>(row[0], zeros[0]), a[3] = four_of<true, HAS_ZERO>(row[1], zeros[1]);
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
    if constexpr (LOADS_X) {  // long before x is there
        prefetch_token(p, rank);
        named_barrier_sync(1, THREADS);
    }
    wait_for_previous();
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
    if (!COPIES_X && BOX == 0 && !LOADS_X) named_barrier_sync(1, THREADS);
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
    }
    float back[TILES][2];
    if constexpr (BY_BITS) scale_x(back, x);
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
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
            const int start = first_group(own.first), row_groups = BOXED ? p.scale_pitch / SCALE_SIZE : p.groups;
            const int group = g * row_groups + start - group_in_stage(all);
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
                    const int at = group + high * 16 * row_groups;
                    const unsigned char *from = codes + high * 16 * p.pitch + c * CHUNK_BYTES;
                    const Scales of = {scales + at * SCALE_SIZE, zero_points + at * ZERO_SIZE, 8 * row_groups, p.groups - start};
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
            float (&own)[4] = sums[i / TILES][i % TILES];
            if constexpr (BY_BITS)
#pragma unroll
                for (int j = 0; j < 4; ++j) own[j] = multiply_exactly(own[j], back[i % TILES][j % 2]);
            shared.sums[buffer][warp % MEMBERS][i][lane] = Partial::of(own);
        }
        barrier_arrive(shared_address(&shared.summed[buffer]));
    }
}
