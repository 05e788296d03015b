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

// The exponents of a chunk's groups, a byte each, for a thread's two rows.
struct Exponents {
    uint32 of[2];
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
    Exponents next, after;

    MEMBER Consumer(Shared &shared, const void *scale, const signed char *ranges, const Shape &shape,
                    const Schedule &schedule)
        : shared(shared), exponents((const unsigned char *)scale),
          largest((const unsigned char *)ranges + shape.spans()), shape(shape), schedule(schedule) {}

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
        Exponents result;
        const int group = chunk * STEPS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (shape.groups % STEPS == 0) {
                result.of[i] = *(const uint32 *)&exponents[first[i] + min(group, shape.groups - STEPS)];
            } else {
                result.of[i] = 0;
#pragma unroll
                for (int j = 0; j < STEPS; ++j)
                    result.of[i] |= exponents[first[i] + min(group + j, shape.groups - 1)] << 8 * j;
            }
        }
        return result;
    }

    // Unpacks the codes in the ring's present slot.
    MEMBER void unpack(Operand &a, const Exponents &own) const {
        each_word(shared, ring, [&](uint32 word, int step, int i) {
            const uint32 below = top[i] - byte_of(own.of[i], step);
            numbers_of(word, shared.numbers[min(below, (uint32)OCTAVES)], a[step][i], a[step][i + 2]);
        });
    }

    // Adds the sums of PERIOD chunks. Products are not in flight when it ends: across iterations of a loop, the compiler
    // would serialise them.
    MEMBER void add_period(float (&totals)[SUMS], Operand (&a)[2], int chunk) {
        float sums[SUMS];
        int before = 0;
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) {
            const uint32 tokens = tokens_at(shared, ring.slot);
            product_fence();
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
                multiply(sums, a[i % 2][step], (uint64)OPERAND_HIGH << 32 | tokens + 2 * step, i > 0 || step > 0);
            product_commit();
            if (i > 0) {
                product_wait<1>();
                release(shared, schedule, before);
            }
            before = ring.slot;
            ring.advance();
            const Exponents fetching = fetched(chunk + i + 3);
            if (i + 1 < PERIOD || chunk + PERIOD < schedule.last) unpack(a[(i + 1) % 2], next);
            next = after, after = fetching;
        }
        product_wait<0>();
        release(shared, schedule, before);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) in_use(sums[i]), totals[i] += sums[i];
    }

    // The scaled sums of the block's chunks of the tile whose rows of this thread begin at `row`.
    MEMBER void sum(float (&totals)[SUMS], int row) {
        Operand a[2];
        int own[2];
#pragma unroll
        for (int i = 0; i < SUMS; ++i) totals[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = min(row + i * 8, shape.n - 1);
            own[i] = largest[at], first[i] = (long long)at * shape.groups;
        }
        for (int pass = schedule.passes - 1; pass >= 0; --pass) {
            for (int i = 0; i < 2; ++i) top[i] = own[i] - OCTAVES * pass;
            next = fetched(schedule.first + 1), after = fetched(schedule.first + 2);
            unpack(a[0], fetched(schedule.first));
            for (int chunk = schedule.first; chunk < schedule.last; chunk += PERIOD) add_period(totals, a, chunk);
#pragma unroll
            for (int i = 0; i < SUMS; ++i) totals[i] *= pass ? 0x1p-15f : power_of(own[i / 2 % 2]);
        }
    }

    // What a row's sums are multiplied by: its largest exponent stands for 2^6 in e4m3. 255 is NaN.
    static MEMBER float power_of(int exponent) {
        const float power = bits_float(max((uint32)exponent << 23, 0x400000u));
        return fma_exactly(power, 0.0f, multiply_exactly(power, 0x1p-6f));
    }
};
