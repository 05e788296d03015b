// The decode kernel of experts: few tokens times the weights of the experts that a router chose, on sm_90.
//   out[p, n] = sum_k x[p / TOP, k] * (number(code[e, n, k]) - zero_point[e, n, k / group]) * scale[e, n, k / group]
//               + bias[e, n]
// for pair p of a token and the expert e = ids[p]. With GATED, the first half of the rows n is `gate`, the second
// is `up`, and out[p, n] = silu(gate[n]) * up[n].
//
// weight_mm_experts_sm90.py puts ptx.cuh, sm90.cuh and weight_codes_sm90.cuh before this source and compiles it for each
// combination of
//   CODES, BITS, VALUES, UNIT_VALUE, GROUP, X, SCALE, ZERO   the format of the weight, as in weight_mm_decode_sm90.cu;
//                      ZERO is not VALUE; x, bias and out are in X
//   SCALING            BY_UNIT; or IN_CODES, for E2M1 with powers of two for each 32 codes: a lane's words are one group
//   TOKENS             that a block multiplies at once: 8, 16 or 32
//   ALONG, BESIDE      warps of a block that share the k of a row, and those on adjacent 16 rows
//   DEPTH              chunks of a warp whose codes are in registers or on their way
//   GATED              whether half of the adjacent warps have rows of `gate`, the others those of `up`
//   BY_EXPERT          whether a block's number names an expert, or a pair, of which the first of an expert counts; the
//                      number after the last expert stands for ids that no expert has, whose results are 0
//   ALIGNED            whether the rows of x begin at multiples of 16 bytes
//
// A block has 16 rows of an expert for each adjacent warp. It finds the expert's pairs in `ids`, in their order, and
// multiplies them 8 * TILES at a time. So nothing is sorted, nothing waits for the host, and a weight is read once if
// no expert has more pairs than that.
//
// A warp reads codes straight to registers, in chunks of 16 rows, and converts them to one operand of mma,
// exactly. While it multiplies a chunk, the next ones are on their way, and all its rows are on their way to the L2
// cache. x is the other operand: the block copies a slab of it to shared memory, in the order in which lanes read it.
// The sums of a unit, which lies in one group, are scaled in float32. All additions have a fixed order.

static constexpr int TILES = TOKENS / 8;
static constexpr int WARPS = ALONG * BESIDE, THREADS = 32 * WARPS;
static constexpr int SLAB = 16 / TILES * (WORD == 8 ? 1 : 2);  // chunks of x in shared memory: 32 KiB
static_assert((SCALING == IN_CODES ? CODES == E2M1 && GROUP == 32 : SPAN % UNIT == 0) && (!GATED || BESIDE % 2 == 0), "");
static_assert(ZERO != VALUE && (CODES != E4M3 || ZERO == NONE), "");

struct Problem {
    const unsigned short *x;
    const unsigned char *codes, *scale;
    const unsigned char *zero_point;
    const unsigned short *bias;
    const float *global_scale;
    const long long *ids;
    unsigned short *out;
    long long x_stride, codes_stride, codes_expert;  // of x in elements, of codes in bytes
    int pairs, top, experts, n, k, width, groups;    // width: bytes of a row's codes
};

struct Shared {
    uint32 x[SLAB][TILES][4][32][PAIRS];  // of a chunk and 8 tokens, for each of a lane's words
    float2 x_sums[FOLD ? SLAB : 1][TOKENS];  // of the chunk's x times what `unpack` adds to codes; of x
    int rows[TOKENS];
    float sums[ALONG][TOKENS][16 * BESIDE + 1];
    alignas(16) unsigned char table[TABLE_BYTES + 16];
};

// ---- the expert's pairs ----------------------------------------------------------------------------------------------

// The expert of a pair; `experts` for numbers that no expert has.
DEVICE int expert_of(const Problem &p, int pair) {
    const unsigned long long id = p.ids[pair];
    return id < (unsigned long long)p.experts ? (int)id : p.experts;
}

static constexpr int SPANS = 8;  // of 32 pairs, whose ids are loaded together

// The experts of a lane's pairs in the spans from `base` on; -1 past the last pair.
DEVICE void load_experts(int (&found)[SPANS], const Problem &p, int base) {
#pragma unroll
    for (int i = 0; i < SPANS; ++i) {
        const int pair = base + i * 32 + threadIdx.x % 32;
        found[i] = pair < p.pairs ? expert_of(p, pair) : -1;
    }
}

// Fills `rows` with the next pairs of an expert from `from` on, at most TOKENS. Returns their number, and in `from` where
// to go on. Every warp does the same.
DEVICE int next_pairs(const Problem &p, int expert, int &from, int *rows) {
    const int lane = threadIdx.x % 32;
    int count = 0, base = from;
    for (; base < p.pairs && count < TOKENS; base += SPANS * 32) {
        int found[SPANS];
        load_experts(found, p, base);
#pragma unroll
        for (int i = 0; i < SPANS; ++i) {
            const uint32 hits = ballot(found[i] == expert);
            const int place = count + bits_set(hits & ((1u << lane) - 1));
            if (hits >> lane & 1 && place < TOKENS) rows[place] = base + i * 32 + lane;
            count += bits_set(hits);
        }
    }
    if (count < TOKENS) {
        from = p.pairs;
        return count;
    }
    __syncwarp();
    from = rows[TOKENS - 1] + 1;
    return TOKENS;
}

// Whether a pair before `pair` has the same expert.
DEVICE bool has_earlier(const Problem &p, int expert, int pair) {
    const int lane = threadIdx.x % 32;
    bool has = false;
    for (int base = 0; base < pair; base += SPANS * 32) {
        int found[SPANS];
        load_experts(found, p, base);
#pragma unroll
        for (int i = 0; i < SPANS; ++i) has |= base + i * 32 + lane < pair && found[i] == expert;
    }
    return ballot(has) != 0;
}

// ---- operands --------------------------------------------------------------------------------------------------------

// A lane's four words of a row's chunk that begins at byte `at`; 0 past the end of the row. Rows of streams that are not
// of 4 bits end with a chunk.
DEVICE void load_codes(Word (&words)[4], const unsigned char *row, int at, int width) {
    if constexpr (BITS != 4 && BITS != 8) return read_words(words, row + at);
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        const int first = at + word_at(unit * VECTOR, t) * BITS / 8;
        const bool inside = first < width;
        if constexpr (VECTOR == 4) {
            const uint4 all = inside ? stream_load((const uint4 *)(row + first)) : make_uint4(0, 0, 0, 0);
            words[0].low = all.x, words[1].low = all.y, words[2].low = all.z, words[3].low = all.w;
        } else if constexpr (VECTOR == 2) {
            const uint2 all = inside ? *(const uint2 *)(row + first) : make_uint2(0, 0);
            words[unit * 2].low = all.x, words[unit * 2 + 1].low = all.y;
        } else {
            words[unit].low = inside ? *(const uint32 *)(row + first) : 0;
        }
    }
    if constexpr (CODES == UINT8)
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i].low ^= 0x80808080;
}

// Copies x of `count` tokens and the chunks from `first` on to shared memory, with its sums over units.
DEVICE void copy_x(Shared &shared, const Problem &p, int count, int first, int chunks) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int i = warp; i < chunks * TILES; i += WARPS) {
        const int chunk = i / TILES, tile = i % TILES, token = tile * 8 + g;
        if (tile * 8 >= count) continue;
        const unsigned short *x = token < count ? p.x + shared.rows[token] / p.top * p.x_stride : nullptr;
        float2 sum = {0.0f, 0.0f};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            uint32 pairs[PAIRS];
            load_x<ALIGNED>(pairs, x, (first + chunk) * CHUNK + word_at(word, t), x ? p.k : 0);
            order_x<IN_ORDER>(pairs);
#pragma unroll
            for (int n = 0; n < PAIRS; ++n) {
                shared.x[chunk][tile][word][lane][n] = pairs[n];
                const float both = bits_float(pairs[n] << 16) + bits_float(pairs[n] & 0xffff0000);
                sum.x = fmaf(both, (128 >> place_of(n)) + MIDDLE, sum.x), sum.y += both;
            }
        }
        if constexpr (FOLD) {
#pragma unroll
            for (int lanes = 1; lanes < 4; lanes *= 2) {
                sum.x += __shfl_xor_sync(0xffffffff, sum.x, lanes);
                sum.y += __shfl_xor_sync(0xffffffff, sum.y, lanes);
            }
            if (t == 0) shared.x_sums[chunk][token] = sum;
        }
    }
}

// A scale as stored in memory. It is converted where it is used, so that nothing waits for it before.
DEVICE uint32 stored_scale(const unsigned char *scales, long long i) {
    if constexpr (SCALE_SIZE == 4) return ((const uint32 *)scales)[i];
    else if constexpr (SCALE_SIZE == 2) return ((const unsigned short *)scales)[i];
    else return scales[i];
}

// A lane's x of a word; 0 for tokens that do not exist.
DEVICE void read_x(uint32 (&pairs)[PAIRS], const uint32 (&from)[PAIRS], bool exists) {
    if constexpr (PAIRS == 4) {
        const uint4 all = exists ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
        pairs[0] = all.x, pairs[1] = all.y, pairs[2] = all.z, pairs[3] = all.w;
    } else {
        const uint2 all = exists ? *(const uint2 *)from : make_uint2(0, 0);
        pairs[0] = all.x, pairs[1] = all.y;
    }
}

// ---- products --------------------------------------------------------------------------------------------------------

// Prefetches a warp's rows into the L2 cache, a row a lane.
DEVICE void fetch_rows(const Problem &p, int expert, int row) {
    const int own = row + threadIdx.x % 32;
    if (threadIdx.x % 32 < 16 && own < p.n) prefetch(p.codes + expert * p.codes_expert + own * p.codes_stride, p.width);
}

// What a lane holds of a chunk: of rows g and g + 8.
struct Chunk {
    Word words[2][4];
    uint32 scale[2][UNITS];
    int zero[2][UNITS];
};

// The rows of a warp, and where they are in memory.
struct Rows {
    const unsigned char *codes[2];
    long long first[2];  // index of the row's first scale

    MEMBER Rows(const Problem &p, int expert, int row) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = min(row + g + i * 8, p.n - 1);
            codes[i] = p.codes + expert * p.codes_expert + own * p.codes_stride;
            first[i] = ((long long)expert * p.n + own) * p.groups;
        }
    }

    // Past the end of the row x is 0, and codes and scales are arbitrary numbers of the row.
    MEMBER void load(Chunk &to, const Problem &p, int chunk) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            load_codes(to.words[i], codes[i], chunk * CHUNK_BYTES, p.width);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                if (GROUP == 0) continue;
                const int k = chunk * CHUNK + (SCALING == IN_CODES ? (int)threadIdx.x % 4 * 32 : unit * UNIT);
                const long long at = first[i] + min(k / SPAN, p.groups - 1);
                to.scale[i][unit] = stored_scale(p.scale, at);
                to.zero[i][unit] = ZERO == NONE ? 0 : zero_at(p.zero_point, at);
            }
        }
    }
};

// Adds the products of a chunk to `totals`; `at`: the chunk's place in the slab. `bad`: see `collect`.
DEVICE void multiply_chunk(float (&totals)[TILES][4], const Shared &shared, const Chunk &own, int at, int count,
                           const int (&row_zero)[2], uint32 (&bad)[2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit) {
        float sums[2][TILES][4] = {}, scale[2];  // two chains of products, since each waits for the one before
        int zero[2];
        uint32 in_codes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            scale[i] = GROUP == 0 ? 1.0f : number_of(own.scale[i][unit]);
            zero[i] = GROUP == 0 ? row_zero[i] : own.zero[i][unit];
            in_codes[i] = to_bf16x2(scale[i], scale[i]);
        }
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            const int word = unit * VECTOR + j;
            uint32 upper[PAIRS], lower[PAIRS];
            unpack(upper, own.words[0][word], zero[0], shared.table);
            unpack(lower, own.words[1][word], zero[1], shared.table);
            if constexpr (IS_BF16_E4M3) collect(bad[0], own.words[0][word].low), collect(bad[1], own.words[1][word].low);
#pragma unroll
            for (int i = 0; SCALING == IN_CODES && i < PAIRS; ++i) {
                upper[i] = multiply_bf16x2(upper[i], in_codes[0]);
                lower[i] = multiply_bf16x2(lower[i], in_codes[1]);
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                uint32 b[PAIRS];
                read_x(b, shared.x[at][tile][word][lane], tile * 8 + g < count);
#pragma unroll
                for (int i = 0; i < PAIRS; i += 2)
                    multiply(sums[j % 2][tile], upper[i], lower[i], upper[i + 1], lower[i + 1], b[i], b[i + 1]);
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float sum = sums[0][tile][i] + sums[1][tile][i];
                if constexpr (FOLD) {
                    const float2 of_x = shared.x_sums[at][tile * 8 + t * 2 + i % 2];
                    sum -= of_x.x;
                    if constexpr (ZERO != NONE) sum = fmaf(-(float)zero[i / 2], of_x.y, sum);
                }
                totals[tile][i] =
                    GROUP == 0 || SCALING == IN_CODES ? totals[tile][i] + sum : fmaf(sum, scale[i / 2], totals[tile][i]);
            }
    }
}

// A warp's chunks of a slab, of which DEPTH are in registers or on their way.
struct Share {
    const Rows &rows;
    const Problem &p;
    const int first, last;
    Chunk own[DEPTH];

    MEMBER Share(const Rows &rows, const Problem &p, int first, int last) : rows(rows), p(p), first(first), last(last) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i)
            if (first + i < last) rows.load(own[i], p, first + i);
    }
    MEMBER void add(float (&totals)[TILES][4], const Shared &shared, int slab, int count, const int (&row_zero)[2],
                    uint32 (&bad)[2]) {
#pragma unroll 1
        for (int chunk = first; chunk < last; chunk += DEPTH) {
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                if (chunk + i >= last) break;
                multiply_chunk(totals, shared, own[i], chunk + i - slab, count, row_zero, bad);
                if (chunk + i + DEPTH < last) rows.load(own[i], p, chunk + i + DEPTH);
            }
        }
    }
};

// The sums of a warp's 16 rows over its share of k, for `count` pairs, in shared memory.
DEVICE void sum_rows(Shared &shared, const Problem &p, int expert, int row, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int along = warp % ALONG, beside = warp / ALONG;
    const int chunks = (p.width + CHUNK_BYTES - 1) / CHUNK_BYTES;
    const Rows rows(p, expert, row);
    float totals[TILES][4] = {}, row_scale[2];
    int row_zero[2];
    uint32 bad[2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        row_scale[i] = GROUP == 0 ? number_of(stored_scale(p.scale, rows.first[i])) : 1.0f;
        if (CODES == TABLE) row_scale[i] *= UNIT_VALUE;
        if (SCALE == E4M3 && p.global_scale) row_scale[i] /= *p.global_scale;
        row_zero[i] = GROUP == 0 && ZERO != NONE ? zero_at(p.zero_point, rows.first[i]) : 0;
    }
#pragma unroll 1
    for (int slab = 0; slab < chunks; slab += SLAB) {
        const int own = min(SLAB, chunks - slab);
        Share share(rows, p, slab + own * along / ALONG, slab + own * (along + 1) / ALONG);
        if (slab > 0) named_barrier_sync(1, THREADS);  // all are done with the x of the last slab
        copy_x(shared, p, count, slab, own);
        named_barrier_sync(1, THREADS);
        share.add(totals, shared, slab, count, row_zero, bad);
    }
#pragma unroll
    for (int i = 0; IS_BF16_E4M3 && i < 2; ++i) {  // a row with a code that is NaN
        bad[i] |= __shfl_xor_sync(0xffffffff, bad[i], 1);
        bad[i] |= __shfl_xor_sync(0xffffffff, bad[i], 2);
        if (bad[i] & 0x80808080) row_scale[i] = bits_float(0x7fc00000);
    }
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            shared.sums[along][tile * 8 + t * 2 + i % 2][beside * 16 + g + i / 2 * 8] = totals[tile][i] * row_scale[i / 2];
}

// ---- results ---------------------------------------------------------------------------------------------------------

DEVICE float from_x(unsigned short bits) {
    if constexpr (X == FP16) return from_half(bits);
    else return bits_float((uint32)bits << 16);
}

DEVICE float sum_of(const Shared &shared, const Problem &p, int expert, int token, int column, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ALONG; ++i) sum += shared.sums[i][token][column];
    return p.bias ? sum + from_x(p.bias[(long long)expert * p.n + row]) : sum;
}

// Adds up the sums of the warps and stores results; 0 for pairs without an expert.
DEVICE void store(const Shared &shared, const Problem &p, int expert, bool exists, int row, int count) {
    constexpr int OWN = GATED ? 8 * BESIDE : 16 * BESIDE;
    const int width = GATED ? p.n / 2 : p.n;
    for (int i = threadIdx.x; i < count * OWN; i += THREADS) {
        const int token = i / OWN, column = i % OWN, n = row + column;
        if (n >= width) continue;
        float y = exists ? sum_of(shared, p, expert, token, column, n) : 0.0f;
        if constexpr (GATED) {
            const float up = exists ? sum_of(shared, p, expert, token, OWN + column, width + n) : 0.0f;
            y = quotient(y, 1.0f + exponential(-y)) * up;
        }
        const uint32 packed = X == FP16 ? to_half2(y, 0.0f) : to_bf16x2(y, 0.0f);
        p.out[(long long)shared.rows[token] * width + n] = (unsigned short)packed;
    }
}

// Grid: tiles of rows for each expert or pair, those of one after the other.
extern "C" __global__ void __launch_bounds__(THREADS, 16 / (TILES < 4 ? TILES : 2) / WARPS)
    expert_mm(const unsigned short *x, const unsigned char *codes, const unsigned char *scale,
              const unsigned char *zero_point, const unsigned short *bias, const float *global_scale,
              const long long *ids, unsigned short *out, long long x_stride, long long codes_stride,
              long long codes_expert, int pairs, int top, int experts, int n, int k, int width, int groups) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Problem p = {x,     codes, scale,   zero_point, bias, global_scale, ids,   out, x_stride, codes_stride, codes_expert,
                       pairs, top,   experts, n,          k,    width,        groups};
    constexpr int OWN = GATED ? 8 * BESIDE : 16 * BESIDE;
    const int tiles = ((GATED ? n / 2 : n) + OWN - 1) / OWN;
    const int slot = blockIdx.x / tiles, row = blockIdx.x % tiles * OWN;
    const int beside = threadIdx.x / 32 / ALONG;
    // With GATED, the second half of the adjacent warps has rows of `up`.
    const int of_warp = GATED && beside >= BESIDE / 2 ? n / 2 + (beside - BESIDE / 2) * 16 : beside * 16;
    if constexpr (CODES == TABLE) write_table(shared.table, WARPS);  // before the first barrier
    wait_for_previous();
    let_next_start();
    const int expert = BY_EXPERT ? slot : expert_of(p, slot);
    const bool exists = expert < experts, fetches = exists && threadIdx.x / 32 % ALONG == 0;
    if (!BY_EXPERT && fetches) fetch_rows(p, expert, row + of_warp);  // if not for this block, then for another one
    if (!BY_EXPERT && has_earlier(p, expert, slot)) return;
    for (int from = BY_EXPERT ? 0 : slot; from < pairs;) {
        const int count = next_pairs(p, expert, from, shared.rows);
        if (count == 0) return;
        if (BY_EXPERT && fetches) fetch_rows(p, expert, row + of_warp);
        named_barrier_sync(1, THREADS);
        if (exists) sum_rows(shared, p, expert, row + of_warp, count);
        named_barrier_sync(1, THREADS);
        store(shared, p, expert, exists, row, count);
        named_barrier_sync(1, THREADS);
    }
}
