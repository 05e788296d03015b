// The consumers of MXFP4 weights in w4a8_mm_sm90.cu: sums of e4m3 products. w4a8_tiles_sm90.cuh and `multiply` stand before.
//
// E2M1 times 2^d is exact in e4m3 for d = -8 .. 6. So a row of codes is exact in e4m3 under one scale, if its exponents span
// less than OCTAVES. Otherwise the product takes another pass for each further OCTAVES, the smallest exponents first:
// groups that are not in the range of a pass are 0 there. quantize_rows_sm90.cu finds the largest exponent of each row and
// the number of passes, before the launch.

static constexpr float UNIT = 1.0f;

// The first four codes of a word, and the last four, as e4m3, by the bytes of their magnitudes.
DEVICE void numbers_of(uint32 word, uint2 magnitudes, uint32 &first, uint32 &last) {
    const uint32 chosen = word & 0x77777777, even = word << 4;
    first = masked_or(permute(even, word, 0x5140), 0x80808080, permute(magnitudes.x, magnitudes.y, chosen));
    last = masked_or(permute(even, word, 0x7362), 0x80808080, permute(magnitudes.x, magnitudes.y, chosen >> 16));
}

typedef uint32 Operand[STEPS][4];

// The exponents of a period's groups, a word for each chunk, for a thread's two rows.
struct Exponents {
    uint32 of[2][PERIOD];
};

// A thread's sums of rows lane / 4 and lane / 4 + 8 of its warp's 16.
struct Consumer {
    Shared &shared;
    const unsigned char *exponents, *largest;
    const Shape &shape;
    const Schedule &schedule;
    Ring ring;
    long long first[2];    // index of the rows' first group
    int top[2];            // exponent of the rows in this pass
    Exponents own, next;   // of this period and the next one

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *ranges, const Shape &shape,
                    const Schedule &schedule, const float *)
        : shared(shared), exponents((const unsigned char *)scale),
          largest((const unsigned char *)ranges + shape.spans()), shape(shape), schedule(schedule), ring{turn() * PERIOD} {}

    // Writes magnitudes of E2M1 times 2^(6 - below), for below = 0 .. OCTAVES - 1, then zeros. A barrier of the block follows.
    static MEMBER void prepare(Shared &shared) {
        const int below = threadIdx.x;
        if (below > OCTAVES) return;
        const float power = below == OCTAVES ? 0.0f : bits_float((127 + 6 - below) << 23);
        uint2 &own = shared.numbers[below];
        own.x = to_e4m3x2(0.0f, 0.5f * power) | to_e4m3x2(power, 1.5f * power) << 16;
        own.y = to_e4m3x2(2.0f * power, 3.0f * power) | to_e4m3x2(4.0f * power, 6.0f * power) << 16;
    }

    MEMBER Exponents fetched(int chunk) const {
        Exponents result = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int last = shape.groups - PERIOD * STEPS;  // codes beyond K are zeros
            if constexpr (VECTOR) load_words<PERIOD * STEPS>(result.of[i], exponents + first[i] + min(chunk * STEPS, last));
#pragma unroll
            for (int j = 0; !VECTOR && j < PERIOD * STEPS; ++j)
                result.of[i][j / STEPS] |= exponents[first[i] + min(chunk * STEPS + j, shape.groups - 1)] << j % STEPS * 8;
        }
        return result;
    }

    // Unpacks the codes in slot `slot` of the ring, chunk `i` of the period of `groups`.
    MEMBER void unpack(Operand &a, int slot, uint32 parity, const Exponents &groups, int i) const {
        barrier_wait(shared_address(&shared.full[slot]), parity);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32 words[4];
            half_words(shared, slot, half, words);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int step = half * HALF + j / 2, row = j % 2;
                const uint32 below = top[row] - byte_of(groups.of[row][i], step);
                numbers_of(words[j], shared.numbers[min(below, (uint32)OCTAVES)], a[step][row], a[step][row + 2]);
            }
        }
    }

    // Adds the sums of PERIOD chunks. Products are not in flight when it ends: across iterations of a loop, the compiler
    // would serialise them.
    template <int COUNT>
    MEMBER void add_period(float (&totals)[COUNT], Operand (&a)[2], int chunk) {
        float sums[COUNT];
        const int slot = ring.slot;
        const uint32 parity = ring.parity, tokens = tokens_at(shared, slot);
        const bool more = chunk + TURN < schedule.last;
        ring.advance(TURN);
        if (more) next = fetched(chunk + TURN);
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) {
            product_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                multiply(sums, a[i % 2][step], (uint64)OPERAND_HIGH << 32 | tokens + i * (STAGE_BYTES / 16) + 2 * step,
                         i > 0 || step > 0);
            product_commit();
            if (i > 0) {
                product_wait<1>();
                release(shared, schedule, slot + i - 1);
            }
            if (i + 1 < PERIOD) unpack(a[(i + 1) % 2], slot + i + 1, parity, own, i + 1);
            else if (more) unpack(a[0], ring.slot, ring.parity, next, 0);
        }
        own = next;
        product_wait<0>();
        release(shared, schedule, slot + PERIOD - 1);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) in_use(sums[i]), totals[i] += sums[i];
    }

    // The scaled sums of the block's chunks of the tile whose rows of this thread begin at `row`.
    template <int COUNT>
    MEMBER void sum(float (&totals)[COUNT], int row) {
        Operand a[2];
        int highest[2];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) totals[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = min(row + i * 8, shape.n - 1);
            highest[i] = largest[at], first[i] = (long long)at * shape.groups;
        }
        for (int pass = schedule.passes - 1; pass >= 0; --pass) {
            for (int i = 0; i < 2; ++i) top[i] = highest[i] - OCTAVES * pass;
            own = fetched(schedule.first + turn() * PERIOD);
            unpack(a[0], ring.slot, ring.parity, own, 0);
            for (int chunk = schedule.first + turn() * PERIOD; chunk < schedule.last; chunk += TURN)
                add_period(totals, a, chunk);
#pragma unroll
            for (int i = 0; i < COUNT; ++i) totals[i] *= pass ? 0x1p-15f : power_of(highest[i / 2 % 2]);
        }
    }

    // What a row's sums are multiplied by: its largest exponent stands for 2^6 in e4m3. 255 is NaN.
    static MEMBER float power_of(int exponent) {
        const float power = bits_float(max((uint32)exponent << 23, 0x400000u));
        return fma_exactly(power, 0.0f, multiply_exactly(power, 0x1p-6f));
    }
};
