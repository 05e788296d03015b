// The decode kernel: at most 16 tokens times a weight of 1 to 8 bits, on sm_90, at memory speed.
//   out[m, n] = token_scale[m] / global_scale * sum_k x[m, k] * weight[n, k] + bias[n] + residual[m, n]
//   weight[n, k] = (number(code[n, k]) - zero_point[n, k / group]) * scale[n, k / group]
//                  or number(code[n, k]) * scale[n, k / group] + zero_point[n, k / group]
//
// weight_mm_decode_sm90.py puts ptx.cuh, sm90.cuh, row_codes.cuh, round_tokens_sm90.cuh, int4_as_int8.cuh,
// weight_codes_sm90.cuh, weight_mm_decode_copies_sm90.cuh and weight_mm_decode_products_sm90.cuh before this source and
// compiles it for each combination of
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
//   LOADS_X            one token: lanes load x themselves, from addresses that they compute before their wait
//   EARLY              parts that a launch copies before its wait if its weight is `constant`
//   RESIDENT           blocks of a multiprocessor: 1; or 2, the second of the next launch, which sets up meanwhile
//   PAIRED             BY_COLUMN for one token, and an even number of groups: a lane reads two scales at once
//   BOXED              each part's scales are copied as a box of the TMA; else those of whole rows
//   LOOK_UP            E2M1: half of the codes are looked up in a table in shared memory, since arithmetic takes longer
//   BOX                chunks whose x one copy loads to shared memory, as a box of all tokens; 0: no boxes
//   ROUNDS             NONE; or INT8 or E4M3: each token is rounded to codes with a scale of its own, token_scale. Groups
//                      are then scaled BY_UNIT
//   SOURCE             BF16 or FP16, the dtype of x in memory; X unless ROUNDS is E4M3
//   SCALES_X           1: `scale_x` makes up for codes that are multiplied as they are (AS_BITS)
//   EXACT              int8 by int8, one scale a row: the bits of float sums are int32 sums, and out is (float(sum) *
//                      token_scale) * scale + bias, each operation rounded on its own
//   GATE               NONE; or SILU or GELU_TANH: the rows of codes are those of a gate and then as many of up, and
//                      out [m, n / 2] = activation(gate) * up. A tile has 8 rows of each, which lie in one lane's sums
//   NORMED             GATE for one token: both are multiplied by 1 / sqrt(mean(x^2) + eps) first
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
// block of the next launch, which sets up meanwhile. It lets that one start as soon as it has waited itself, not before:
// until its own wait the next one may read what the previous one wrote.
//
// Few tokens. mma multiplies 8 columns. With fewer tokens, the columns hold the x of several chunks in the same
// registers. Each chunk of the weight is multiplied by all columns; only that chunk's columns of the product are used.
// So the registers of a block hold the x of 64 Ki of k for one token.
//
// Small groups and few tokens (BY_COLUMN). A column of mma holds the x of one group, and zeros for the other groups. So
// it sums up that group, and a lane scales its sums once for several groups, not once for each.
//
// Codes as numbers (AS_BITS). Instructions that unpack codes bind the kernel. In bf16 the lowest 8 bits of a number are an
// integer times 2^-133, and mma multiplies such subnormal numbers exactly. So a mask takes codes of 4 bits from two places
// of a word: 5 instructions for 8 codes, in place of 7. The kernel scales x up by powers of two, so that sums are normal.
//
// E2M1. A pair of codes takes 2.25 instructions of the integer units by arithmetic, which bind the kernel at one token,
// and 1 by a look-up, whose loads alone take longer. With LOOK_UP half of the pairs are looked up.
//
// Rounding. A cluster has all of x in registers, so it finds each token's scale there: the lanes of a warp, the warps of
// a block and the blocks of a cluster exchange the largest and smallest numbers of a token. Meanwhile codes arrive. int8
// codes of x are multiplied as int8: an instruction takes twice as many, and codes of a weight are unpacked faster.
//
// Neither codes nor x are reordered in memory: a lane reads adjacent codes, and the x that belongs to them. mma only
// needs both operands to have the same k at the same position.

// ---- adding up ------------------------------------------------------------------------------------------------------

DEVICE float from_out(unsigned short x) {
    if constexpr (OUT == FP16) return from_half(x);
    else return bits_float((uint32)x << 16);
}

DEVICE unsigned short to_out(float x) {
    if constexpr (OUT == FP16) return (unsigned short)to_half2(x, 0.0f);
    else return (unsigned short)to_bf16x2(x, 0.0f);
}

DEVICE float from_x(uint32 x) { return SOURCE == FP16 ? from_half(x) : bits_float(x << 16); }

// The activation of a gate.
DEVICE float activated(float x) {
    if constexpr (GATE == SILU) return x * reciprocal(1.0f + exponential(-x));
    return x * reciprocal(1.0f + exponential(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
}

DEVICE void add(float &to, float x) { to = EXACT ? plus(to, x) : fma_exactly(x, 1.0f, to); }
DEVICE void add(float4 &to, const float4 &x) {
    add(to.x, x.x), add(to.z, x.z);
    if constexpr (TOKENS > 1) add(to.y, x.y), add(to.w, x.w);
}

// The operands that are added to a piece of a tile, and their use: 16 rows from `row` on, 8 tokens from `token` on.
struct Epilogue {
    float bias[2], residual[4], token_scale[2], scale[2];

    // The row of the weight of a lane's sum `i`, 0 or 1.
    MEMBER static int row_of(const Problem &p, int row, int i) {
        return row + threadIdx.x % 32 / 4 + i * (GATE == NONE ? 8 : p.outputs());
    }

    MEMBER Epilogue(const Problem &p, int row, int token) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = row_of(p, row, i), of = token + 2 * t + i;
            bias[i] = p.bias && own < p.n ? from_out(p.bias[own]) : 0.0f;
            token_scale[i] = p.token_scale && of < p.m ? p.token_scale[of] : 1.0f;
            scale[i] = EXACT && own < p.n ? number_at(p.scale, own) : 1.0f;
            if constexpr (CODES == TABLE) token_scale[i] *= UNIT_VALUE;
            if constexpr (IS_MOVED) token_scale[i] *= MOVED_UNIT;
            if constexpr (BY_BITS) token_scale[i] *= BITS_UNIT;
            if (SCALE == E4M3 && p.global_scale) token_scale[i] = divide_exactly(token_scale[i], *p.global_scale);
        }
#pragma unroll
        for (int i = 0; i < 4; i += TOKENS == 1 ? 2 : 1) {
            const int own = row_of(p, row, i / 2), of = token + 2 * t + i % 2;
            const bool exists = p.residual && own < p.n && of < p.m;
            residual[i] = exists ? from_out(p.residual[(long long)of * p.n + own]) : 0.0f;
        }
    }

    MEMBER void store(const Problem &p, const Shared &shared, int row, int token, const float4 &sums, float factor) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const float all[4] = {sums.x, sums.y, sums.z, sums.w};
        float of_tokens[2] = {token_scale[0] * factor, token_scale[1] * factor}, results[4] = {};
        if constexpr (ROUNDS != NONE)
#pragma unroll
            for (int i = 0; i < 2; ++i) of_tokens[i] *= shared.tokens.scale[token + 2 * t + i];
#pragma unroll
        for (int i = 0; i < 4; i += TOKENS == 1 ? 2 : 1) {
            const int own = row_of(p, row, i / 2), of = token + 2 * t + i % 2;
            float result = fma_exactly(all[i], of_tokens[i % 2], bias[i / 2]) + residual[i];
            if (EXACT) result = (float)(int)float_bits(all[i]) * of_tokens[i % 2] * scale[i / 2];
            if (EXACT && p.bias) result = fma_exactly(result, 1.0f, bias[i / 2]);  // no product to fuse with
            if (GATE == NONE && own < p.n && of < p.m) p.out[(long long)of * p.n + own] = to_out(result);
            results[i] = result;
        }
        if constexpr (GATE != NONE)
#pragma unroll
            for (int i = 0; i < (TOKENS == 1 ? 1 : 2); ++i) {
                const int own = row_of(p, row, 0), of = token + 2 * t + i;
                if (of < p.m) p.out[(long long)of * p.outputs() + own] = to_out(activated(results[i]) * results[i + 2]);
            }
    }
};

// 1 / sqrt(mean(x^2) + eps) of one token, by a warp.
DEVICE float norm_factor(const Problem &p, const unsigned short *x) {
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll 4
    for (int i = 8 * lane; i < p.k; i += 256) {
        const uint4 own = *(const uint4 *)(x + i);
        const uint32 words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float low = from_x(words[j] & 0xffff), high = from_x(words[j] >> 16);
            sum = fma_exactly(low, low, sum), sum = fma_exactly(high, high, sum);
        }
    }
#pragma unroll
    for (int lanes = 16; lanes >= 1; lanes /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
    return 1.0f / sqrtf(sum / p.k + p.eps);
}

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
DEVICE void finish(const Problem &p, Shared &shared, float4 *kept, int rank, int first, const unsigned char *copy) {
    const int lane = threadIdx.x % 32;
    float factor = 1.0f;
    if constexpr (NORMED) {
        if (COPIES_X && is_aligned(p)) barrier_wait(shared_address(&shared.copied), 0);
        factor = norm_factor(p, COPIES_X && is_aligned(p) ? (const unsigned short *)copy : p.x);
    }
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
            const int row = tile * OUTPUTS + i / TILES * 16, token = i % TILES * 8;
            if constexpr (SPLIT == 1) {
                const Epilogue epilogue(p, row, token);  // loads its operands before the wait in `sum`
                const float4 sums = sum(i);
                epilogue.store(p, shared, row, token, sums, factor);
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
        const int row = (first_tile() + round * tile_step()) * OUTPUTS + piece / TILES * 16, token = piece % TILES * 8;
        const Epilogue epilogue(p, row, token);
        float4 sums = kept_at(kept, round, 0)[piece * 32];
#pragma unroll
        for (int other = 1; other < SPLIT; ++other) add(sums, kept_at(kept, round, other)[piece * 32]);
        epilogue.store(p, shared, row, token, sums, 1.0f);
    }
}

// Grid: clusters of SPLIT blocks, at least one block and at most SPLIT blocks a tile.
//
// codes [n, row bytes]: a pointer if WHOLE; else a tensor map of elements of 8 bytes, in boxes of ROWS rows of `pitch`
// bytes. x [m, k]: with BOX also a tensor map of elements of 8 bytes, in boxes of TOKENS rows of BOX_PITCH bytes. scale
// and zero_point [n, groups]; with BOXED the scale also a tensor map of elements of 8 bytes, in boxes of ROWS rows of
// `scale_pitch` bytes, which else is that of a row's groups. bias [n], residual and out [m, n], token_scale [m]; bias,
// residual and token_scale may be null. codes, scale and zero_point begin at multiples of 16 bytes. `chunks`: in a row.
//
// Shared memory, in this order:
//   Shared, and with CODES = TABLE or LOOK_UP the table of `write_table`
//   `stages` of Problem::stage_bytes(), and 128 bytes that may be read past them; the boxes of x lie after the first
//   `apart` stages, and the other stages use their memory once x is in registers
//   with SPLIT > 1: 512 bytes for each piece of the sums of a cluster's tiles, whose number is rounded up to SPLIT
//   if COPIES_X: m tokens of Slice::pitch()
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    decode_mm(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap x_map,
              const __grid_constant__ TensorMap scale_map, const unsigned short *x, const unsigned char *codes,
              const unsigned char *scale, const unsigned char *zero_point, const unsigned short *bias,
              const unsigned short *residual, const float *token_scale, const float *global_scale, unsigned short *out,
              long long x_stride, int m, int n, int k, int chunks, int groups, int pitch, int stages, int apart,
              int scale_pitch, float eps, int constant) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    const Problem p = {x, codes, scale, zero_point, bias, residual, token_scale, global_scale, out, x_stride,
                       m, n, k, chunks, groups, pitch, stages, apart, scale_pitch, eps, constant};
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
        if constexpr (TABLE_BYTES > 0) write_table(table, WARPS);
        consume(p, shared, table, ring, copy, rank);
    } else {
        if constexpr (!IS_PAIRED) give_registers<REGISTERS[1]>();
        if (role == ADDERS && lane == 0) {
            if (!is_early(p)) fetch(p, map, rank);
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
        Ring copies(stages, 0);
        int tile = first_tile(), part = 0;
        if (EARLY > 0 && role == ADDERS) {
            const int early = is_early(p) ? min(EARLY, stages) : 0;
            if (lane == 0) produce(p, map, scale_map, shared, ring, rank, copies, tile, part, early);
            __syncwarp();  // a lane that waits for the previous launch stops its warp
        }
        wait_for_previous();  // which may have written the weight
        if (role == ADDERS && lane == 0) {
            if constexpr (IS_PAIRED) let_next_start();
            if (COPIES_X && is_aligned(p)) copy_x(p, shared, copy, rank);  // first: the TMA copies in this order
            if constexpr (BOX > 0) copy_boxes(p, x_map, shared, copy, rank);
            produce(p, map, scale_map, shared, ring, rank, copies, tile, part, -1);
            if constexpr (!IS_PAIRED) let_next_start();  // not earlier, since its copies would delay these
        }
        __syncwarp();
        if constexpr (SPLIT > 1)
            if (role < ADDERS) cluster_wait();  // the other blocks run and have initialised their barriers
        if (role < ADDERS) finish(p, shared, kept, rank, role, copy);
    }
    if constexpr (SPLIT > 1) {
        __syncwarp();
        if ((role < 0 && ROUNDS == NONE) || role >= ADDERS) cluster_wait();
        if constexpr (ROUNDS != NONE) named_barrier_sync(4, THREADS);  // token_scale is written
        combine(p, shared, kept, rank);
    }
}
