// out[m, n] = sum_k x[m, k] * value(code[n, k]), summed in float32. weight_mm_panels_cpu.h multiplies many tokens, this
// file few of them, whose products are bound by memory:
//
// A block multiplies R rows of the weight by M tokens in registers: it converts a code once for M products, and loads x
// once for R rows. Where EACH codes fill whole bytes, a word, vectors of 16 words are loaded as stored, and the j-th shift
// of a vector gives the j-th code of each word. These are the first `whole` columns, and x is put into this order for
// them: [tokens, whole / STEP, STEP / LANES, LANES]. For the other columns x keeps its order, and codes_cpu.h reads the
// weight.
//
// LANES are 16. Where the processor has AVX-512, float8 comes in vectors of 32 words of 16 bits, two codes each, which
// are converted as float16.

#if BITS == 3 && defined(HAS_SHUFFLE) && defined(__AVX512BW__)
static constexpr bool OF_THREE_BYTES = true;
#else
static constexpr bool OF_THREE_BYTES = false;
#endif
static constexpr bool WORDS = 32 % BITS == 0 || OF_THREE_BYTES;
// Codes of a word, and columns of a vector of words. More than 8 codes would ask for rows of more than 128 columns.
static constexpr int EACH = PER_WORD < 8 ? PER_WORD : 8, STEP = 16 * EACH;

static inline float total(Float16 sums) {
    float parts[16], all = 0;
    memcpy(parts, &sums, sizeof(parts));
    for (int i = 0; i < 8; i++) parts[i] += parts[i + 8];
    for (int i = 0; i < 4; i++) all += parts[i] + parts[i + 4];
    return all;
}

#ifdef HAS_SHUFFLE
// The totals of four vectors, in lanes 0, 4, 8 and 12.
INLINE Float16 totals(Float16 a, Float16 b, Float16 c, Float16 d) {
    const Int16 low = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, high = low + 8;
    const Float16 two = __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
    const Float16 next = __builtin_shuffle(c, d, low) + __builtin_shuffle(c, d, high);
    const Int16 first = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
    Float16 all = __builtin_shuffle(two, next, first) + __builtin_shuffle(two, next, first + 4);
    const Int16 each = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    all += __builtin_shuffle(all, each ^ 2);
    return all + __builtin_shuffle(all, each ^ 1);
}
#endif

// ---- words -------------------------------------------------------------------------------------------------------

#if EXPONENT
// The highest bit of each byte: whether its code is NaN or an infinity.
INLINE Word16 specials(Word16 words) {
    return (words & 0x7f7f7f7fu) + (0x80 - SPECIAL) * 0x01010101u;
}

static inline bool any(Word16 bits) {
    bool found = false;
    for (int i = 0; i < 16; i++) found |= (bits[i] & 0x80808080u) != 0;
    return found;
}
#endif

#if EXPONENT && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__GNUC__)
typedef int16_t Short32 __attribute__((vector_size(64)));
typedef int16_t Short16 __attribute__((vector_size(32)));

static constexpr int LANES = 32;
static constexpr float NUMBER = EXPONENT == 4 ? 256 : 1;  // e4m3 has another bias than float16

// 16 codes as numbers divided by NUMBER: of the low bytes, then of the high bytes. NaN and infinities pass as any number.
INLINE Float16 numbers(Word16 words, int j) {
    Short32 all = (Short32)words;
    if (j < 2) all <<= 8;
    all = EXPONENT == 4 ? (all >> 1) & (int16_t)0xbf80 : all & (int16_t)0xff00;
    Short16 parts[2];
    memcpy(parts, &all, sizeof(all));
    return (Float16)__builtin_ia32_vcvtph2ps512_mask(parts[j % 2], Float16{}, (uint16_t)-1, 4);
}
#else
static constexpr int LANES = 16;
static constexpr float NUMBER = 1;

// The j-th code of each word, as a number. NaN and infinities of float8 pass as any number.
INLINE Float16 numbers(Word16 words, int j) {
#if EXPONENT
    const Int16 moved = (Int16)(words << (uint32_t)(24 - 8 * j)) >> (8 - EXPONENT);
    return (Float16)((Word16)moved & MOVED) * UNIT;
#else
    return number_of_word(words, j);
#endif
}
#endif

typedef uint8_t UnalignedByte16 __attribute__((vector_size(16), aligned(1)));
typedef uint8_t Byte64 __attribute__((vector_size(64)));

// The 16 words at `p`; the bits above their codes are any.
INLINE Word16 words_at(const uint8_t* p) {
    constexpr int BYTES_EACH = BITS * EACH / 8;
    if constexpr (BYTES_EACH == 1) {
        return __builtin_convertvector(*(const UnalignedByte16*)p, Word16);
    } else if constexpr (BYTES_EACH == 2) {
        return __builtin_convertvector(*(const UnalignedHalf16*)p, Word16);
#ifdef HAS_SHUFFLE
    } else if constexpr (OF_THREE_BYTES) {
        // Twelve bytes of codes in each quarter of the register, then three in each word.
        const Int16 quarters = {0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11};
        const Int16 loaded = (Int16)__builtin_ia32_loaddqusi512_mask((const int*)p, Int16{}, 0xfff);
        Byte64 at;
        for (int i = 0; i < 64; i++) at[i] = i / 16 * 16 + i % 16 / 4 * 3 + (i % 4 < 3 ? i % 4 : 2);
        return (Word16)__builtin_shuffle((Byte64)__builtin_shuffle(loaded, quarters), at);
#endif
    } else {
        return *(const UnalignedWord16*)p;
    }
}

// The index of each word's group among the groups of 16 words, where a group is whole words.
static inline Int16 groups_of_words(int64_t group) {
    Int16 each;
    for (int i = 0; i < 16; i++) each[i] = (int)(i * EACH / group);
    return each;
}

// The scale (or zero point) of each word's group, for 16 words from `column` on. May read 16 floats.
INLINE Float16 of_words(const float* found, int64_t column, int64_t group, Int16 each) {
    if (group % STEP == 0) return Float16{} + found[column / group];
#ifdef HAS_SHUFFLE
    const Float16 next = *(const UnalignedFloat16*)(found + column / group);
    return __builtin_shuffle(next, each);
#else
    Float16 all;
    for (int i = 0; i < 16; i++) all[i] = found[column / group + each[i]];
    return all;
#endif
}

template <typename Code>
INLINE Float16 of_words(const Code* found, int64_t column, int64_t group, Int16 each) {
    if (group % STEP == 0) return Float16{} + (float)found[column / group];
    Float16 all;
    for (int i = 0; i < 16; i++) all[i] = found[column / group + each[i]];
    return all;
}

// ---- rows --------------------------------------------------------------------------------------------------------

template <int R, int M>
struct Sums {
    const float* x;
    int64_t stride;  // of a token
    float ones[R][M] = {};
    Floats eights[R][M] = {};

    INLINE_MEMBER void operator()(int r, int64_t k, float value) {
        UNROLL for (int m = 0; m < M; m++) ones[r][m] += x[m * stride + k] * value;
    }
    INLINE_MEMBER void operator()(int r, int64_t k, Floats values) {
        UNROLL for (int m = 0; m < M; m++) eights[r][m] += *(const Unaligned*)(x + m * stride + k) * values;
    }
#ifdef HAS_TABLE
    Float16 sixteens[R][M] = {};

    INLINE_MEMBER void operator()(int r, int64_t k, Float16 values) {
        UNROLL for (int m = 0; m < M; m++) sixteens[r][m] += *(const UnalignedFloat16*)(x + m * stride + k) * values;
    }
#endif
};

struct Multiply {
    Weight weight;
    Operands given;
    const float* x;  // [tokens, columns]
    int64_t whole;  // 0: no words
    Int16 each = {};             // `groups_of_words`
    int64_t block = 0;           // the first of the rows whose scales are in `decoded`
    // Scales of 4 rows, then their zero points if ZERO is 2, each with 15 more floats, where those of the weight cannot
    // be read.
    float* decoded = nullptr;

    inline const float* scales_of(int64_t row) {
        const Layout& l = *weight.layout;
        if (decoded) return decoded + (row - block) * (l.groups + 15);
        return (const float*)weight.scale + first_group(l, row);
    }

    inline const Zero* zeros_of(int64_t row) {
        const Layout& l = *weight.layout;
#if ZERO == 2
        if (decoded) return decoded + (4 + row - block) * (l.groups + 15);
#endif
        return weight.zero + first_group(l, row);
    }

    void decode_scales(int64_t first, int64_t end) {
        block = first;
        const Layout& l = *weight.layout;
        for (int64_t n = first; decoded && n < end; n++) {
            float* __restrict to = decoded + (n - first) * (l.groups + 15);
            const int64_t from = first_group(l, n);
            for (int64_t g = 0; g < l.groups; g++) to[g] = scale_at(weight, from + g);
#if ZERO == 2
            memcpy(to + 4 * (l.groups + 15), weight.zero + from, l.groups * sizeof(float));
#endif
        }
    }

    template <int R, int M>
    INLINE_MEMBER void put_totals(int64_t m, int64_t n, Float16 (&sums)[R][M]) {
#ifdef HAS_SHUFFLE
        if constexpr (R == 4) {
            UNROLL for (int i = 0; i < M; i++) {
                const Float16 all = totals(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
                UNROLL for (int r = 0; r < 4; r++) write_one(given, m + i, n + r, all[4 * r]);
            }
            return;
        }
#endif
        for (int r = 0; r < R; r++)
            for (int i = 0; i < M; i++) write_one(given, m + i, n + r, total(sums[r][i]));
    }

    template <int R, int M>
    void by_words(int64_t n, int64_t m) {
        const Layout& l = *weight.layout;
        const float* tokens_x = x + m * l.columns;
        const int64_t group = group_of_words(), step = group % STEP ? STEP : group;
        const float* scales[R];
        const Zero* zeros[R];
        UNROLL for (int r = 0; r < R; r++) {
            scales[r] = scales_of(n + r);
            zeros[r] = zeros_of(n + r);
        }
        Float16 sums[R][M] = {};
#if EXPONENT
        Word16 special = {};
#endif
        for (int64_t start = 0; start < whole; start += step) {
            Float16 part[R][M] = {}, zero[R];
            UNROLL for (int r = 0; r < R; r++)
                zero[r] = ZERO ? of_words(zeros[r], start, group, each) : Float16{};
            Float16 given_sums[M] = {};
            for (int64_t k = start; k < start + step; k += STEP) {
                Word16 words[R];
                UNROLL for (int r = 0; r < R; r++) {
                    const uint8_t* p = weight.codes + (n + r) * l.row_bytes + k * BITS / 8;
                    words[r] = words_at(p);
                    __builtin_prefetch(p + 4 * l.row_bytes);  // rows are too short for the hardware prefetcher
#if EXPONENT
                    if (M == 1) special |= specials(words[r]);
#endif
                }
                UNROLL for (int j = 0; j < EACH; j++) {
                    Float16 given[M];
                    UNROLL for (int i = 0; i < M; i++)
                        given[i] = *(const UnalignedFloat16*)(tokens_x + i * l.columns + k + 16 * j);
                    if (ZERO == 2) UNROLL for (int i = 0; i < M; i++) given_sums[i] += given[i];
                    UNROLL for (int r = 0; r < R; r++) {
                        Float16 number = numbers(words[r], j);
                        if (ZERO == 1) number -= zero[r];
                        if (ZERO == 2 && MID) number -= (float)MID;
                        UNROLL for (int i = 0; i < M; i++) part[r][i] += number * given[i];
                    }
                }
            }
            UNROLL for (int r = 0; r < R; r++) {
                const Float16 scale = of_words(scales[r], start, group, each) * NUMBER;
                UNROLL for (int i = 0; i < M; i++) {
                    sums[r][i] += part[r][i] * scale;
                    if (ZERO == 2) sums[r][i] += given_sums[i] * zero[r];
                }
            }
        }
        if (whole < l.columns) add_codes<R, M>(n, m, whole, sums);
        put_totals<R, M>(m, n, sums);
#if EXPONENT
        if (M == 1 && __builtin_expect(any(special), 0)) one_by_one(n, R, m, M);
#endif
    }

#if EXPONENT
    // Whether some of these rows have NaN or infinities. With one token that is found on the way.
    bool has_special(int64_t first, int64_t end) {
        const Layout& l = *weight.layout;
        Word16 special = {};
        for (int64_t n = first; n < end; n++)
            for (int64_t k = 0; k < l.columns; k += STEP)
                special |= specials(*(const UnalignedWord16*)(weight.codes + n * l.row_bytes + k));
        return any(special);
    }
#endif

    // The same for any numbers, `rows` rows by `count` tokens.
    void one_by_one(int64_t first, int64_t rows, int64_t m, int64_t count) {
        const Layout& l = *weight.layout;
        for (int64_t n = first; n < first + rows; n++)
            for (int64_t i = m; i < m + count; i++) {
                float sum = 0;
                for (int64_t k = 0; k < l.columns; k++) {
                    const float scale = scale_at(weight, first_group(l, n) + k / l.group);
                    const int64_t each = STEP / LANES, in_chunk = k % each * LANES + k % STEP / each;
                    const float number = one(weight.codes + n * l.row_bytes, k);
                    sum += x[i * l.columns + k / STEP * STEP + in_chunk] * value(number, scale, Zero());
                }
                write_one(given, i, n, sum);
            }
    }

    // Adds the products of the columns from k on, whose x has its own order.
    template <int R, int M>
    INLINE_MEMBER void add_codes(int64_t n, int64_t m, int64_t k, Float16 (&all)[R][M]) {
        const Layout& l = *weight.layout;
        Sums<R, M> sums = {x + m * l.columns, l.columns};
        decode_columns<R>(weight, n, k, l.columns, sums);
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int i = 0; i < M; i++) {
                Floats parts[2] = {sums.eights[r][i], Floats{sums.ones[r][i]}};
                Float16 both;
                memcpy(&both, parts, sizeof(parts));
                all[r][i] += both;
#ifdef HAS_TABLE
                all[r][i] += sums.sixteens[r][i];
#endif
            }
        }
    }

    template <int R, int M>
    void by_codes(int64_t n, int64_t m) {
        Float16 all[R][M] = {};
        add_codes<R, M>(n, m, 0, all);
        put_totals<R, M>(m, n, all);
    }

    template <int R, int M>
    int64_t some(int64_t n, int64_t m) {
        for (; m + M <= given.tokens; m += M) {
            if constexpr (WORDS) whole ? by_words<R, M>(n, m) : by_codes<R, M>(n, m);
            else by_codes<R, M>(n, m);
        }
        return m;
    }
    void finish(int64_t first, int64_t end) {
#if EXPONENT
        if (whole && given.tokens > 1 && has_special(first, end))
            one_by_one(first, end - first, 0, given.tokens);
#endif
    }
    // Blocks whose sums fit into the registers, and are enough to hide the latency of additions.
    void blocks(int64_t n, int64_t end) {
        for (; n + 4 <= end; n += 4) {
            decode_scales(n, n + 4);
            some<4, 1>(n, some<4, 2>(n, 0));
            finish(n, n + 4);
        }
        decode_scales(n, end);
        for (; n < end; n++) {
            some<1, 1>(n, 0);
            finish(n, n + 1);
        }
    }
    void rows(int64_t n, int64_t end) {
        const Denormals denormals;
        const Layout& l = *weight.layout;
        Multiply own = *this;  // of this thread
        const bool reads_after = whole && group_of_words() % STEP != 0;
        if (SCALE_BYTES || weight.half_scales || reads_after) {
            const int64_t bytes = (ZERO == 2 ? 8 : 4) * (l.groups + 15) * sizeof(float);
            own.decoded = (float*)kept_sums.bytes(bytes);
            memset(own.decoded, 0, bytes);
        }
        if (reads_after) own.each = groups_of_words(l.group);
        own.blocks(n, end);
    }

    // Columns with one scale, for words. A row without groups is one, whether or not words fill it.
    int64_t group_of_words() const { return weight.layout->groups == 1 ? whole : weight.layout->group; }

    // x with the first `whole` columns in the order of words.
    static float* ordered(const Operands& given, const Layout& l, int64_t whole) {
        float* all = (float*)kept_x.bytes((2 * given.tokens + 1) * l.columns * sizeof(float));
        float* taken = whole ? all + given.tokens * l.columns : all;
        for (int64_t m = 0; m < given.tokens; m++) {
            Values::take_x(given, m, 0, l.columns, false, taken);
            if (!whole) {
                taken += l.columns;
                continue;
            }
            constexpr int RUN = STEP / LANES;
            float* to = all + m * l.columns;
            for (int64_t k = 0; k < whole; k += STEP)
                for (int j = 0; j < RUN; j++)
                    for (int i = 0; i < LANES; i++) to[k + j * LANES + i] = taken[k + i * RUN + j];
            memcpy(to + whole, taken + whole, (l.columns - whole) * sizeof(float));
        }
        return all;
    }
};

// Columns that `by_words` takes.
static int64_t whole_columns(const Layout& l) {
    const int64_t whole = l.columns / STEP * STEP;
    const bool in_groups = STEP % l.group == 0 && l.group % EACH == 0 && LANES == 16;
    const bool fits = l.groups == 1 || l.group % STEP == 0 || in_groups;
    return WORDS && fits && !(EXPONENT && whole < l.columns) ? whole : 0;
}

static void multiply_few(const Weight& weight, const Operands& given, Parallel parallel, int64_t threads) {
    const int64_t whole = whole_columns(*weight.layout);
    Multiply job = {weight, given, Multiply::ordered(given, *weight.layout, whole), whole};
    all_rows(job, 0, weight.layout->rows, parallel, threads);
}

#ifdef HAS_PAIRS
static constexpr int64_t FEW = 3, FEW_HALVES = BITS == 8 ? 3 : 2;  // the most tokens that are few
#else
static constexpr int64_t FEW = 3, FEW_HALVES = 3;
#endif

// x [tokens, columns], bias [rows] or null and out [tokens, rows] are float32 or, if `halves` & 1, bfloat16. Scales are
// float32 or bytes or, if `halves` & 2, bfloat16.
struct Call {
    const Layout* layout;
    void* out;
    const uint8_t* codes;
    const Scale* scale;
    const Zero* zero;
    const float* of_byte;
    const void *x, *bias;
    int64_t tokens, columns, rows, halves;
    Parallel parallel;
    int64_t threads;
};

extern "C" int64_t multiply(const Call* call) {
    const Call& c = *call;
    const Layout& l = *c.layout;
    const Weight weight = {c.layout, c.codes, c.scale, c.zero, c.of_byte, (c.halves & 2) != 0};
    const Operands given = {c.x, c.out, c.bias, c.tokens, c.columns, c.rows, (c.halves & 1) != 0};
    const bool in_words = 32 % BITS == 0 && l.columns % CHUNK == 0 && (l.group % PER_WORD == 0 || l.groups == 1);
    if (c.tokens <= (given.halves ? FEW_HALVES : FEW)) {
        multiply_few(weight, given, c.parallel, c.threads);
        return 1;
    }
#ifdef HAS_PAIRS
    if (given.halves && fits_bfloat16() && (l.groups == 1 || (l.group >= 16 && l.group % 2 == 0))) {
        multiply_panels<Pairs>(weight, given, in_words, c.parallel, c.threads);
        return 1;
    }
#endif
    multiply_panels<Values>(weight, given, in_words, c.parallel, c.threads);
    return 1;
}

// The most tokens, of float32 or bfloat16, whose product this kernel computes faster than BLAS multiplies decoded tiles.
extern "C" int64_t most_tokens(int64_t halves) {
#ifdef HAS_PAIRS
    if (halves) return fits_bfloat16() ? INT64_MAX : 32;
#endif
#if defined(__AVX2__)
    return INT64_MAX;
#elif defined(__aarch64__)
    return 24;
#else
    return FEW;
#endif
}
