// How the warp groups of weight_mm_large_batch_sm90.cu, which lists the macros, unpack codes and multiply.
// weight_lookup_sm90.cuh, weight_mm_large_batch_tiles_sm90.cuh and `multiply` stand before.

// ---- unpacking ------------------------------------------------------------------------------------------------------

// An element of the bias or the residual, from its low 16 bits.
DEVICE float unpacked(uint32 bits) {
    if constexpr (OUT == FP16) return from_half(bits & 0xffff);
    else return bits_float(bits << 16);
}

DEVICE float number_at(const void *p, long long i, int type) {
    if (type == FP32) return ((const float *)p)[i];
    const uint32 bits = ((const unsigned short *)p)[i];
    return type == FP16 ? from_half(bits) : bits_float(bits << 16);
}

// Whether the scales of a chunk's two groups are read together.
static constexpr bool TWO_SCALES = CHUNK == 256 && GROUP == 128 && SCALE != FP32;

// A group's scale and zero point as stored in memory, loaded while the previous ones are in use.
struct Fetched {
    uint32 scale;  // with TWO_SCALES, of both groups
    int zero;
};

DEVICE int group_of(int run) { return GROUP ? run / (GROUP / RUN) : 0; }

// Loads the group of a chunk's run for the row whose groups begin at `row`.
DEVICE Fetched fetched(const void *scale, const signed char *zero, const Shape &shape, uint32 row, int chunk, int run) {
    const int group = TWO_SCALES ? chunk * 2 : group_of(chunk * RUNS + run);
    const uint32 at = row + min(group, shape.groups - (TWO_SCALES ? 2 : 1));
    Fetched result;
    if constexpr (SCALE == FP32) result.scale = ((const uint32 *)scale)[at];
    else if constexpr (TWO_SCALES) result.scale = *(const uint32 *)((const unsigned short *)scale + at);
    else result.scale = ((const unsigned short *)scale)[at];
    result.zero = !ZERO ? 0 : UNSIGNED ? ((const unsigned char *)zero)[TWO_SCALES ? at + run : at]
                            : zero[TWO_SCALES ? at + run : at];
    return result;
}

// Beyond the last group x is 0 and codes are arbitrary; the scale becomes 0, too.
DEVICE Group group_from(const Fetched &from, const Shape &shape, int chunk, int run, uint32 factor) {
    Group group;
    const uint32 bits = TWO_SCALES && run ? from.scale >> 16 : from.scale;
    group.scale = SCALE == FP32 ? bits_float(bits) : SCALE == FP16 ? from_half(bits) : bits_float(bits << 16);
    if (GROUP % CHUNK != 0 && !TWO_SCALES && group_of(chunk * RUNS + run) >= shape.groups) group.scale = 0.0f;
    const float least = UNSIGNED ? 0.0f : 1 << BITS - 1;
    const uint32 two = packed<DTYPE>(group.scale, group.scale);
    if constexpr (FOLDED) {
        group.factor = product_of(two, factor), group.offset = product_of(two, OFFSET);
    } else if constexpr (!ZERO) {
        group.offset = OFFSET;
    } else if constexpr (CODES == LOOKUP) {
        group.offset = packed<DTYPE>(from.zero + least, from.zero + least);
    } else {
        const float point = from.zero + least, one = DTYPE == FP16 ? 1024.0f : 0.0f;
        group.offset = packed<DTYPE>(-UNIT * (point + one / (1 << LOWER)), -UNIT * (point + one / (1 << HIGHER)));
    }
    return group;
}

// Loads a piece's codes from step `first` of a chunk on, for rows lane / 4 and lane / 4 + BELOW of a warp. The four
// threads of a row read the same bytes. `at` is the address of the upper row, whose units of 16 bytes the TMA has
// swizzled if its pitch is a power of two.
DEVICE void load_codes(uint32 (&codes)[2][WORDS], uint32 at, int first) {
    constexpr int TOGETHER = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < WORDS; i += TOGETHER) {
        const int bytes = first * BITS * 2 + i * 4;
        const uint32 from = PITCH & PITCH - 1 ? at + bytes : at ^ bytes;
        shared_words<TOGETHER>(&codes[0][i], from), shared_words<TOGETHER>(&codes[1][i], from + BELOW * PITCH);
    }
}

// Unpacks the first operand of the piece's products: k = 2 t and 2 t + 1 of each eight.
DEVICE void unpack(uint32 (&a)[STEPS * 4], const uint32 (&codes)[2][WORDS], int first, const Place &place,
                   const Group (&upper)[RUNS], const Group (&lower)[RUNS], uint32 (&seen)[2]) {
    constexpr int EIGHTS = CODES == STREAM ? 2 * STEPS : 16 / BITS;  // in a vector of 16 bytes; in a piece
#pragma unroll
    for (int i = 0; CODES == STREAM && i < STEPS * 4; ++i) {
        const int run = GROUP ? (first + i / 4) * 16 / RUN : 0;
        const Group &group = i % 2 ? lower[run] : upper[run];
        a[i] = two_of_stream(codes[i % 2], i / 2, place, group, packed<DTYPE>(group.scale, group.scale));
    }
#pragma unroll
    for (int i = 0; CODES != STREAM && i < WORDS / 2; ++i) {
        const int run = GROUP ? (first + i / 2 * 8 / BITS) * 16 / RUN : 0;
        const Group &group = i % 2 ? lower[run] : upper[run];
        const uint32 scale = ROUNDED ? packed<DTYPE>(group.scale, group.scale) : 0;
        uint32 raw[EIGHTS];
#pragma unroll
        for (int j = i / 2 * EIGHTS; j < (i / 2 + 1) * EIGHTS; ++j) {
            const uint32 *from = &codes[i % 2][BITS / 4 * j];
            a[j * 2 + i % 2] = two_of(from[0], from[BITS / 4 - 1], place, group, scale, raw[j % EIGHTS]);
        }
        if constexpr (CODES == E4M3 && DTYPE == BF16) seen[i % 2] = largest_magnitudes(seen[i % 2], raw[0], raw[1]);
    }
}

// The same by look-up, or with SCALED. `scales` are those of the rows, with SCALED, and `origin` see RELATIVE.
DEVICE void unpack(uint32 (&a)[STEPS * 4], const uint32 (&codes)[2][WORDS], int first, const Place &place,
                   const Pairs &pairs, const Group (&upper)[RUNS], const Group (&lower)[RUNS],
                   const Scales (&scales)[2], const uint32 (&origin)[2], uint32 (&seen)[2]) {
#pragma unroll
    for (int i = 0; i < STEPS * 2; ++i) {
        const int step = first + i / 2, below = i % 2;
        const Group plain = {0.0f, 0, place.offset};
        const int group = GROUP < CHUNK ? step * 16 / (GROUP ? GROUP : 1) : 0;
        const uint32 offset = SCALED ? (ZERO == 1 ? scales[below].offset(group) : 0)
                                     : (below ? lower : upper)[GROUP ? step * 16 / RUN : 0].offset;
        Factor factor = {0, 0, 0};
        if constexpr (SCALED) factor = scales[below].factor(group, origin[below]);
        uint32 raw[2] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint32 &x = a[i / 2 * 4 + j * 2 + below];
            const int eight = i / 2 * 2 + j;
            if constexpr (CODES == LOOKUP) x = pairs.at(codes[below], eight);
            else if constexpr (CODES == STREAM) x = two_of_stream(codes[below], eight, place, plain, 0);
            else x = two_of(codes[below][eight * 2], codes[below][eight * 2 + 1], place, upper[0], 0, raw[j]);
            if constexpr (ZERO == 1) x = difference_of(x, offset);
            if constexpr (SCALED) x = scaled(x, factor);
        }
        if constexpr (CODES == E4M3) seen[below] = largest_magnitudes(seen[below], raw[0], raw[1]);
    }
}

// The upper or the lower row of a thread among those of one weight, where `row` is the upper one; the last row for
// those that don't exist.
DEVICE int own_row(const Shape &shape, int row, int below) {
    if constexpr (GATED) return min(row, shape.n / 2 - 1) + below * (shape.n / 2);
    else return min(row + below * 8, shape.n - 1);
}

// ---- the consumers --------------------------------------------------------------------------------------------------

template <typename T, int COUNT>
DEVICE void keep(T (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) in_use(x[i]);
}

// Whether the other block also holds the rows of the thread's warp group.
DEVICE bool shares(uint32 rank) { return OVERLAP && threadIdx.x / 128 == (rank ? 0 : 3); }

// Signals that a warp has read a slot, to every block that writes to it; for a divided tile, to its own block twice.
DEVICE void release(uint32 empty, uint32 rank, bool divided) {
    const uint32 lane = threadIdx.x % 32;
    if (BESIDE == 1 && lane == 0) barrier_arrive(empty);
    if (BESIDE > 1 && lane < BESIDE) barrier_arrive(empty, TAIL && divided ? rank : rank / BESIDE * BESIDE + lane);
}

// Adds the scaled sums of a group to the totals.
template <int COUNT>
DEVICE void flush(float (&totals)[COUNT], float (&sums)[COUNT], const float (&scale)[2]) {
    keep(sums);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) totals[i] = fmaf(sums[i], scale[i / 2 % 2], totals[i]);
}

// A thread's share of the products: the sums of rows lane / 4 and lane / 4 + 8 of its warp's 16, in each subtile.
struct Consumer {
    Shared &shared;
    const void *scale;
    const signed char *zero;
    const Shape &shape;
    const uint32 rank;
    Ring ring;
    uint32 base, a[2][STEPS * 4];
    uint32 loaded[2][WORDS];          // codes of the next piece
    uint32 rows[SUBTILES][2];         // index of the rows' first group
    uint32 seen[SUBTILES][2];         // of the rows' codes or scales: whether one is NaN
    uint32 origin[SUBTILES][2];       // with RELATIVE: of the factors of a row
    Group group[SUBTILES][2][RUNS];   // of the present chunk
    Fetched next[SUBTILES][2][RUNS];  // of the next chunk
    Scales scales[SUBTILES][2], next_scales[SUBTILES][2];  // the same with SCALED
    const Place place;
    const Pairs pairs;

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *zero, const Shape &shape, uint32 rank)
        : shared(shared), scale(scale), zero(zero), shape(shape), rank(rank), base(shared_address(&shared)),
          place(threadIdx.x % 4, FACTOR, shape.m > 0 ? OFFSET : 0), pairs(shared_address(&shared) + LOOKUP_AT, threadIdx.x % 4) {
        in_use(base);  // else the compiler recomputes it at each use
#pragma unroll
        for (int i = 0; i < STEPS * 4; ++i) a[0][i] = a[1][i] = 0;
    }

    MEMBER uint32 address(const void *p) const { return base + (uint32)((const char *)p - (const char *)&shared); }

    MEMBER void begin(int row, int above) {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2; ++i) {
            const int own = above + own_row(shape, row + i / 2 * (64 / SPREAD), i % 2);
            rows[i / 2][i % 2] = (uint32)own * shape.groups;
            in_use(rows[i / 2][i % 2]);
            seen[i / 2][i % 2] = origin[i / 2][i % 2] = 0;
        }
    }

    // The origins of rows' factors, from their largest scales. The four threads of a row read a quarter each.
    MEMBER void find_tops() {
        uint32 most[SUBTILES * 2] = {};
        const bool wide = shape.groups % 16 == 0;
#pragma unroll 2
        for (int first = threadIdx.x % 4 * (wide ? 16 : 1); first < shape.groups; first += wide ? 64 : 4) {
#pragma unroll
            for (int i = 0; i < SUBTILES * 2; ++i) {
                const unsigned char *at = (const unsigned char *)scale + rows[i / 2][i % 2] + first;
                uint32 four[4] = {};
                if (wide) load_words<16>(four, at);
                else four[0] = *at;
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    most[i] = larger_halves(larger_halves(most[i], four[j] & 0x00ff00ff), four[j] >> 8 & 0x00ff00ff);
            }
        }
#pragma unroll
        for (int i = 0; i < SUBTILES * 2; ++i) {
            uint32 top = max(most[i] & 0xffff, most[i] >> 16);
            top = max(top, __shfl_xor_sync(0xffffffff, top, 1));
            top = max(top, __shfl_xor_sync(0xffffffff, top, 2));
            if (top == 255) seen[i / 2][i % 2] = LARGEST + 1;
            origin[i / 2][i % 2] = (MOST_TOP - min(top, (uint32)MOST_TOP)) * 0x00800080;
        }
    }

    // Multiplies the largest scales of rows into their sums.
    template <int COUNT>
    MEMBER void multiply_tops(float (&sums)[SUBTILES][COUNT]) const {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2; ++i) {
            const uint32 top = MOST_TOP - (origin[i / 2][i % 2] >> 23);
            const float power = bits_float(max(top << 23, 0x400000u));  // 2**-127 is a subnormal number
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                if (j / 2 % 2 == i % 2) sums[i / 2][j] = multiply_exactly(sums[i / 2][j], power);
        }
    }

    MEMBER void fetch(int chunk) {
        if constexpr (SCALED) {
#pragma unroll
            for (int i = 0; i < SUBTILES * 2; ++i)
                next_scales[i / 2][i % 2].load(scale, zero, rows[i / 2][i % 2], shape.groups, chunk);
            return;
        }
#pragma unroll
        for (int i = 0; i < SUBTILES * 2 * RUNS; ++i) {
            const int subtile = i / RUNS / 2, below = i / RUNS % 2, run = i % RUNS;
            next[subtile][below][run] = fetched(scale, zero, shape, rows[subtile][below], chunk, run);
        }
    }

    MEMBER void take_fetched(int chunk) {
        if constexpr (SCALED) {
#pragma unroll
            for (int i = 0; i < SUBTILES * 2; ++i) {
                scales[i / 2][i % 2] = next_scales[i / 2][i % 2];
                if constexpr (MAY_BE_NAN && !RELATIVE) {
                    uint32 &own = seen[i / 2][i % 2];
                    if constexpr (CODES == LOOKUP) own |= scales[i / 2][i % 2].nan();
                    else if (scales[i / 2][i % 2].nan()) own = LARGEST + 1;
                }
            }
            return;
        }
#pragma unroll
        for (int i = 0; i < SUBTILES * 2 * RUNS; ++i) {
            const int subtile = i / RUNS / 2, below = i / RUNS % 2, run = i % RUNS;
            group[subtile][below][run] = group_from(next[subtile][below][run], shape, chunk, run, place.factor);
        }
    }

    // The first step of a chunk's piece. Within a part, the pieces of one subtile precede those of the next.
    static MEMBER int step_of(int piece) {
        return piece / (HALVES * SUBTILES) * (CHUNK / 16 / SUMMED) + piece % HALVES * STEPS;
    }

    MEMBER void load_piece(uint32 at, int piece) {
        const int later = piece / OF_STAGE, subtile = piece / HALVES % SUBTILES;
        const uint32 from = at + later * STAGE_BYTES + later % 2 * (ROW_BYTES % 16) + subtile * (64 / SPREAD) * PITCH;
        load_codes(loaded, from, step_of(piece) % (STAGE_K / 16));
    }

    // Adds the products of chunks first..last - 1 to `sums`, or to `totals` where groups have separate sums; both begin
    // as 0. A piece has two or four products. While the tensor cores work on a piece, the next is unpacked in other
    // registers.
    template <int COUNT>
    MEMBER void sum(float (&sums)[SUBTILES][COUNT], float (&totals)[SUBTILES][COUNT], int row, int first, int last,
                    bool divided, int above) {
        const int lane = threadIdx.x % 32, line = threadIdx.x / 32 * (16 / SPREAD) % (64 / SPREAD) + lane / 4;
        // of the row, where the TMA swizzles
        const int swizzle = PITCH == 128 ? lane / 4 : PITCH == 64 ? lane / 8 % 4 : PITCH == 32 ? lane / 16 % 2 : 0;
        const int group_of_rows = threadIdx.x / 128 % (GROUPS / LANES);
        const int turns = shares(rank) ? 2 : LANES, turn = shares(rank) ? rank : threadIdx.x / 128 / (GROUPS / LANES);
        const int others = (turn - ring.slot) & (turns - 1);  // chunks before its first one
        uint32 codes = (group_of_rows * (64 / SPREAD) * SUBTILES + line) * PITCH + swizzle * 16;
        float pending[SUBTILES][2] = {};
        uint32 end = last;
        uint32 operands = operand(base + CODE_BYTES);
        in_use(codes), in_use(end), in_use(operands);
        begin(row, above);
        fetch(first + others);
        if constexpr (RELATIVE) find_tops();
        if constexpr (GROUP == 0) take_fetched(0);
        int before = -1;
        const Ring after = ring.after((last - first) * JOINED);
        ring = ring.after(others);
        for (int chunk = first + others; chunk < (int)end; chunk += turns, ring.advance(turns * JOINED)) {
            if constexpr (GROUP > 0) {
                take_fetched(chunk);
                fetch(chunk + turns);
            }
            barrier_wait(address(shared.full) + ring.slot * 8, ring.parity);
            const uint32 stage = base + ring.slot * STAGE_BYTES + (JOINED == 1 ? chunk % 2 * (ROW_BYTES % 16) : 0);
            // The shuffle tells the compiler that the value is uniform, so that one instruction adds to its 64 bits.
            // Otherwise each half is moved at each use.
            const uint32 low = __shfl_sync(0xffffffff, operands + ring.slot * (STAGE_BYTES / 16), 0);
            const uint64 tokens = (uint64)OPERAND_HIGH << 32 | low;
            if constexpr (EARLY) load_piece(stage + codes, 0);
#pragma unroll
            for (int piece = 0; piece < PIECES * SUBTILES; ++piece) {
                const int subtile = piece / HALVES % SUBTILES, half = piece % HALVES, part = piece / (HALVES * SUBTILES);
                const int later = piece / OF_STAGE;  // than the chunk's first stage
                uint32(&own)[STEPS * 4] = a[piece % 2];
                if (later && piece % OF_STAGE == 0) {
                    barrier_wait(address(shared.full) + ring.slot * 8 + later * 8, ring.parity);
                    if constexpr (EARLY) load_piece(stage + codes, piece);
                }
                // Waits until the products of the piece before the last one are done with these registers. Where the
                // last piece ended a group, it waits for that one, too: the compiler can't tell whose sums are read,
                // and would serialise the products.
                if (FLUSH && SUBTILES > 1 && HALVES == 1 && piece % 2 == 0) product_wait<0>();
                else product_wait<1>();
                keep(own);
                if (piece == 1 && before >= 0) release(address(shared.empty) + before * 8, rank, divided);
                if (later && piece % OF_STAGE == 1)
                    release(address(shared.empty) + ring.slot * 8 + (later - 1) * 8, rank, divided);
                if constexpr (!EARLY) load_piece(stage + codes, piece);
                if constexpr (CODES == LOOKUP || SCALED) {
                    unpack(own, loaded, step_of(piece), place, pairs, group[subtile][0], group[subtile][1],
                           scales[subtile], origin[subtile], seen[subtile]);
                } else {
                    unpack(own, loaded, step_of(piece), place, group[subtile][0], group[subtile][1], seen[subtile]);
                }
                if (EARLY && (piece + 1) % OF_STAGE) load_piece(stage + codes, piece + 1);
                if (FLUSH && piece % (HALVES * SUBTILES) == 0) {
                    product_wait<0>();
                    flush_all(totals, sums, pending, part);
                }
                if constexpr (ORDERED) named_barrier_sync(2 + threadIdx.x / 128, WARPS * 32);
                product_fence();
#pragma unroll
                for (int i = 0; i < STEPS; ++i) {
                    const int k = (step_of(piece) + i) % (STAGE_K / 16), box = k / 4 * (TOKEN_BYTES / BOXES / 16);
                    const uint64 b = tokens + later * (STAGE_BYTES / 16) + box + k % 4 * 2;
                    multiply(sums[subtile], own + i * 4, b, !FLUSH || half > 0 || i > 0);
                }
                product_commit();
                if constexpr (ORDERED) named_barrier_arrive(3 - threadIdx.x / 128, WARPS * 32);
            }
            before = ring.slot + JOINED - 1;
        }
        product_wait<0>();
        keep(a[0]), keep(a[1]);
        if (before >= 0) release(address(shared.empty) + before * 8, rank, divided);
        ring = after;
        if constexpr (FLUSH) flush_all(totals, sums, pending, 0);
        else keep(sums[0]), keep(sums[SUBTILES - 1]);
        if constexpr (RELATIVE) multiply_tops(sums);
        if constexpr (CODES == E4M3 && DTYPE == BF16 || MAY_BE_NAN) spread_nan(FLUSH ? totals : sums);
    }

    // Makes all sums of a row NaN if one of its codes or scales is NaN.
    template <int COUNT>
    MEMBER void spread_nan(float (&sums)[SUBTILES][COUNT]) const {
#pragma unroll
        for (int i = 0; i < SUBTILES * 2; ++i) {
            uint32 found = seen[i / 2][i % 2];
            if constexpr (CODES == E4M3) {  // each of the four threads of a row has seen codes of its own
                found = max(found & 0x7fff, found >> 16 & 0x7fff) > LARGEST;
                found |= __shfl_xor_sync(0xffffffff, found, 1);
                found |= __shfl_xor_sync(0xffffffff, found, 2);
            }
#pragma unroll
            for (int j = 0; j < COUNT; ++j)
                if (j / 2 % 2 == i % 2) sums[i / 2][j] = found ? bits_float(0x7fc00000) : sums[i / 2][j];
        }
    }

    // Adds the scaled sums of the previous group to the totals, and keeps this part's scales for the next call.
    template <int COUNT>
    MEMBER void flush_all(float (&totals)[SUBTILES][COUNT], float (&sums)[SUBTILES][COUNT], float (&scale)[SUBTILES][2],
                          int part) {
#pragma unroll
        for (int i = 0; i < SUBTILES; ++i) {
            flush(totals[i], sums[i], scale[i]);
            scale[i][0] = group[i][0][part].scale, scale[i][1] = group[i][1][part].scale;
        }
    }
};
