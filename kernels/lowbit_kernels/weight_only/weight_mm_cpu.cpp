// out[m, n] = sum_k x[m, k] * value(code[n, k]) in float32, for few tokens.
//
// A block multiplies R rows of the weight by M tokens in registers: it converts a code once for M products, and loads x
// once for R rows. Where words of 32 bits hold whole codes, and a row is whole vectors of 16 words (`in_words`), the
// vectors are loaded as stored, and the j-th shift of a vector gives the j-th code of each word. Then x comes in this
// order: [tokens, columns / CHUNK, CHUNK / LANES, LANES]. Otherwise x comes in its own order, and codes_cpu.h reads the
// weight.
//
// LANES are 16. Where the processor has AVX-512, float8 comes in vectors of 32 words of 16 bits, two codes each, which
// are converted as float16.

static constexpr int PER_WORD = 32 / BITS, CHUNK = 16 * PER_WORD;
static constexpr bool WORDS = 32 % BITS == 0 && ZERO != 2;

typedef uint32_t Word16 __attribute__((vector_size(64)));
typedef uint32_t UnalignedWord16 __attribute__((vector_size(64), aligned(1)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef float Float16 __attribute__((vector_size(64)));
typedef float UnalignedFloat16 __attribute__((vector_size(64), aligned(4)));

static inline float total(Float16 sums) {
    float parts[16], all = 0;
    memcpy(parts, &sums, sizeof(parts));
    for (int i = 0; i < 8; i++) parts[i] += parts[i + 8];
    for (int i = 0; i < 4; i++) all += parts[i] + parts[i + 4];
    return all;
}

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
    const Word16 codes = words >> (uint32_t)(j * BITS);
#if defined(HAS_TABLE)
    const Int16 all = Int16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} & MASK;
    return __builtin_shuffle(numbers_of<Float16>(all), (Int16)codes);
#elif EXPONENT
    const Int16 moved = (Int16)(words << (uint32_t)(24 - 8 * j)) >> (8 - EXPONENT);
    return (Float16)((Word16)moved & MOVED) * UNIT;
#else
    return numbers_of<Float16>((Int16)(codes & MASK));
#endif
}
#endif

// The index of each word's group among the groups of 16 words, where a group is whole words.
static inline Int16 groups_of_words(int64_t group) {
    Int16 each;
    for (int i = 0; i < 16; i++) each[i] = (int)(i * PER_WORD / group);
    return each;
}

// The scale (or zero point) of each word's group, for 16 words from `column` on. May read 16 floats.
INLINE Float16 of_words(const float* found, int64_t column, int64_t group, Int16 each) {
    if (group % CHUNK == 0) return Float16{} + found[column / group];
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
    if (group % CHUNK == 0) return Float16{} + (float)found[column / group];
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

    inline __attribute__((always_inline)) void operator()(int r, int64_t k, float value) {
        UNROLL for (int m = 0; m < M; m++) ones[r][m] += x[m * stride + k] * value;
    }
    inline __attribute__((always_inline)) void operator()(int r, int64_t k, Floats values) {
        UNROLL for (int m = 0; m < M; m++) eights[r][m] += *(const Unaligned*)(x + m * stride + k) * values;
    }
#ifdef HAS_TABLE
    inline __attribute__((always_inline)) void operator()(int r, int64_t k, Floats16 values) {
        Floats parts[2];
        memcpy(parts, &values, sizeof(parts));
        (*this)(r, k, parts[0]);
        (*this)(r, k + 8, parts[1]);
    }
#endif
};

struct Multiply {
    Weight weight;
    const float* x;
    float* out;  // [tokens, rows]
    int64_t tokens;
    bool in_words;
    int64_t block = 0;           // the first of the rows whose scales are in `decoded`
    float* decoded = nullptr;    // float32 scales of 4 rows, where those of the weight are bytes

    inline const float* scales_of(int64_t row) {
        const Layout& l = *weight.layout;
#if SCALE_BYTES
        return decoded + (row - block) * (l.groups + 15);
#else
        return weight.scale + first_group(l, row);
#endif
    }

    void decode_scales(int64_t first, int64_t end) {
        block = first;
#if SCALE_BYTES
        const Layout& l = *weight.layout;
        for (int64_t n = first; n < end; n++) {
            const uint8_t* __restrict bytes = weight.scale + first_group(l, n);
            float* __restrict to = decoded + (n - first) * (l.groups + 15);
            for (int64_t g = 0; g < l.groups; g++) to[g] = weight.of_byte[bytes[g]];
        }
#endif
    }

    template <int R, int M>
    void by_words(int64_t n, int64_t m) {
        const Layout& l = *weight.layout;
        const float* tokens_x = x + m * l.columns;
        const int64_t step = l.group % CHUNK ? CHUNK : l.group;
        const Int16 each = groups_of_words(l.group);
        const float* scales[R];
        const Zero* zeros[R];
        UNROLL for (int r = 0; r < R; r++) {
            scales[r] = scales_of(n + r);
            zeros[r] = weight.zero + first_group(l, n + r);
        }
        Float16 sums[R][M] = {};
#if EXPONENT
        Word16 special = {};
#endif
        for (int64_t start = 0; start < l.columns; start += step) {
            Float16 part[R][M] = {}, zero[R];
            UNROLL for (int r = 0; r < R; r++)
                zero[r] = ZERO ? of_words(zeros[r], start, l.group, each) : Float16{};
            for (int64_t k = start; k < start + step; k += CHUNK) {
                Word16 words[R];
                UNROLL for (int r = 0; r < R; r++) {
                    const uint8_t* p = weight.codes + (n + r) * l.row_bytes + k * BITS / 8;
                    words[r] = *(const UnalignedWord16*)p;
                    __builtin_prefetch(p + 4 * l.row_bytes);  // rows are too short for the hardware prefetcher
#if EXPONENT
                    if (M == 1) special |= specials(words[r]);
#endif
                }
                UNROLL for (int j = 0; j < PER_WORD; j++) {
                    Float16 given[M];
                    UNROLL for (int i = 0; i < M; i++)
                        given[i] = *(const UnalignedFloat16*)(tokens_x + i * l.columns + k + 16 * j);
                    UNROLL for (int r = 0; r < R; r++) {
                        const Float16 number = ZERO ? numbers(words[r], j) - zero[r] : numbers(words[r], j);
                        UNROLL for (int i = 0; i < M; i++) part[r][i] += number * given[i];
                    }
                }
            }
            UNROLL for (int r = 0; r < R; r++) {
                const Float16 scale = of_words(scales[r], start, l.group, each) * NUMBER;
                UNROLL for (int i = 0; i < M; i++) sums[r][i] += part[r][i] * scale;
            }
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < M; i++) out[(m + i) * l.rows + n + r] = total(sums[r][i]);
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
            for (int64_t k = 0; k < l.columns; k += CHUNK)
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
                    const int64_t each = CHUNK / LANES, in_chunk = k % each * LANES + k % CHUNK / each;
                    const float number = one(weight.codes + n * l.row_bytes, k);
                    sum += x[i * l.columns + k / CHUNK * CHUNK + in_chunk] * value(number, scale, Zero());
                }
                out[i * l.rows + n] = sum;
            }
    }

    template <int R, int M>
    void by_codes(int64_t n, int64_t m) {
        const Layout& l = *weight.layout;
        Sums<R, M> sums = {x + m * l.columns, l.columns};
        decode_rows<R>(weight, n, sums);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < M; i++) {
                float parts[8], all = sums.ones[r][i];
                memcpy(parts, &sums.eights[r][i], sizeof(parts));
                for (int p = 0; p < 8; p++) all += parts[p];
                out[(m + i) * l.rows + n + r] = all;
            }
    }

    template <int R, int M>
    int64_t some(int64_t n, int64_t m) {
        for (; m + M <= tokens; m += M) {
            if constexpr (WORDS) in_words ? by_words<R, M>(n, m) : by_codes<R, M>(n, m);
            else by_codes<R, M>(n, m);
        }
        return m;
    }
    void finish(int64_t first, int64_t end) {
#if EXPONENT
        if (in_words && tokens > 1 && has_special(first, end))
            one_by_one(first, end - first, 0, tokens);
#endif
    }
    // Blocks whose sums fit into the registers, and are enough to hide the latency of additions.
    void blocks(int64_t n, int64_t end) {
        for (; n + 4 <= end; n += 4) {
            decode_scales(n, n + 4);
            const int64_t fours = some<2, 4>(n, 0);
            some<2, 4>(n + 2, 0);
            some<4, 1>(n, some<4, 2>(n, fours));
            finish(n, n + 4);
        }
        decode_scales(n, end);
        for (; n < end; n++) {
            some<1, 1>(n, some<1, 4>(n, 0));
            finish(n, n + 1);
        }
    }
    void rows(int64_t n, int64_t end) {
        const Denormals denormals;
        Multiply own = *this;  // of this thread
        own.decoded = SCALE_BYTES ? new float[4 * (weight.layout->groups + 15)]() : nullptr;
        own.blocks(n, end);
        delete[] own.decoded;
    }
};

// LANES of the order of x for vectors of words; 0 where such codes are not loaded in words.
extern "C" int64_t lanes() { return WORDS ? LANES : 0; }

// `in_words`: x has the order above, CHUNK divides the columns, and a group is whole chunks or, with 16 LANES, divides a
// chunk into whole words. In the second case 15 more floats must be readable after float32 scales.
extern "C" int64_t multiply(const Layout* layout, float* out, const uint8_t* codes, const Scale* scale,
                            const Zero* zero, const float* of_byte, const float* x, int64_t tokens, int64_t in_words,
                            Parallel parallel, int64_t threads) {
    Multiply job = {{layout, codes, scale, zero, of_byte}, x, out, tokens, in_words != 0};
    all_rows(job, 0, layout->rows, parallel, threads);
    return 1;
}
