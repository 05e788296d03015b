// The large-batch kernel: many tokens times a weight of at most 8 bits, integers, float8 or a table's, on sm_90a.
//   out[m, n] = token_scale[m] * sum_k x[m, k] * (code[n, k] - zero[n, k / GROUP]) * scale[n, k / GROUP]
//               + bias[n] + residual[m, n]
//
// weight_mm_large_batch_sm90.py puts ptx.cuh, sm90.cuh, load_words.cuh, weight_lookup_sm90.cuh,
// weight_mm_large_batch_tiles_sm90.cuh, `multiply`, the wgmma instruction, and weight_mm_large_batch_products_sm90.cuh
// before this source and compiles it for each combination of
//   DTYPE, OUT         BF16 or FP16: of x; of bias, residual and out
//   CODES, BITS        INT4 (nibble = code + 8, even k in the low one), INT8, E4M3 (ZERO 0), STREAM: a bit
//                      stream of integers of 1 to 3 or 5 to 7 BITS, or LOOKUP: a bit stream of codes of 1 to 4 BITS,
//                      whose values TABLE lists: see weight_lookup_sm90.cuh
//   UNSIGNED           1: integers and zero points are unsigned: a nibble or a byte is the code
//   GROUP              codes along k that share a scale, a multiple of 32, or 16 for LOOKUP with ROUNDED; 0: a row has one scale
//   SCALE              BF16, FP16 or FP32; for LOOKUP and E4M3 with ROUNDED also E8M0 and E4M3
//   ZERO               1: there are zero points; 2, 3: they are values in float32 or DTYPE, added to the scaled codes
//   ROUNDED            1: the scale is multiplied into the weight, which is rounded to DTYPE (SCALE is DTYPE, except
//                      for LOOKUP and E4M3); 0: the scale is multiplied into the sums of a group, in float32
//   TOKENS             of a tile: a multiple of 16, at most 256
//   ROWS               of the weight in a tile: 64, 128 or 256; 192 with GROUPS 3; or 224, with GROUPS 4, BESIDE
//                      2, SPLIT 1 and at most 32 TOKENS
//   GROUPS             warp groups that multiply: 2, 3 or 4
//   BESIDE             1 or 2 blocks of a cluster, on adjacent rows; each loads half of the tokens for both
//   SPLIT              1, 2, 4 or 8 blocks of a cluster that share a tile's K (split-K)
//   CHUNK              K whose scales are read together: 64, 128 or 256; 256 with groups of 128 needs an even number of
//                      them in a row
//   JOINED             pipeline stages of a chunk: 1, 2 or 4
//   STAGES             pipeline stages, in a ring, a multiple of JOINED
//   LAST_TOKENS        of the tiles of the last rows, where they have fewer: a multiple of 16; else 0. SPLIT is 1
//   EXPERTS, GATED     see weight_mm_experts_large_sm90.cuh; undefined without experts
//
// A tile computes the transpose of out. Rows of the weight are the first operand of the product, which threads unpack
// in registers. Tokens are the second, which the TMA copies to shared memory. For the 16 K of an instruction a thread
// holds four of a row, as two adjacent pairs: one byte of each eight codes (two bytes at 8 bits). So the four threads
// of a row read the same words.
//
// Small products are limited by the time to unpack, to multiply, and to wait for both. So warp groups of a block may
// take turns at chunks of the same rows, and blocks of a cluster may split a tile's K. At the end of a tile they
// exchange their sums through shared memory, and each block adds and finishes an equal share. Large products whose
// tiles don't divide evenly among clusters end with tiles that two blocks share, where otherwise each block has its
// own, or the last rows of the weight have smaller tiles (LAST_TOKENS).

// ---- results --------------------------------------------------------------------------------------------------------

// Copies eight results of a token between global memory and 16 bytes of shared memory: those from `first` on, up to
// `end`.
DEVICE void copy_eight(unsigned short *to, const unsigned short *from, int first, int end, bool wide) {
    if (wide && first <= 0 && end >= 8) {
        *(uint4 *)to = *(const uint4 *)from;
    } else {
        for (int i = max(first, 0); i < min(end, 8); ++i) to[i] = from[i];
    }
}

// Scale and bias of a thread's two rows, lane / 4 of those from `row` on and the one below.
struct Rows {
    float scale[2], bias[2];

    MEMBER Rows() {}
    MEMBER Rows(const Epilogue &epilogue, const Shape &shape, int row, int above = 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = above + own_row(shape, row + (int)threadIdx.x % 32 / 4, i);
            scale[i] = (GROUP ? 1.0f : number_at(epilogue.scale, own, SCALE)) / UNIT;
            if (SCALE == E4M3 && epilogue.global_scale) scale[i] /= *epilogue.global_scale;
            bias[i] = epilogue.bias ? number_at(epilogue.bias, own, OUT) : 0.0f;
        }
    }
};

// Turns a warp's sums of 16 rows by 16 tokens into results, transposed through shared memory.
DEVICE void finish(unsigned char *box, const Epilogue &epilogue, const Shape &shape, const Corner &from,
                   const Rows &rows, const float (&sums)[8], int row, int token) {
    const int lane = threadIdx.x % 32;
    // The order of the 8 x 8 matrices: rows 0..7 and 8..15 of eight tokens, then those of the next eight.
    const uint32 matrix = shared_address(box) + (lane / 16 * 8 + lane % 8) * BOX_PITCH + lane / 8 % 2 * 16;
    unsigned short *mine = (unsigned short *)(box + lane / 2 * BOX_PITCH + lane % 2 * 16);
    const int column = row + lane % 2 * 8, own = token + lane / 2, skipped = from.row - column;
    const int count = own >= from.token && own < shape.m ? shape.n - column : 0;
    const long long at = (long long)own * shape.n + column;
    uint32 residual[4] = {};
    if (epilogue.residual) {
        copy_eight(mine, (const unsigned short *)epilogue.residual + at, skipped, count, epilogue.wide);
        __syncwarp();
        load_matrices_transposed(matrix, residual);
        __syncwarp();
    }
    uint32 result[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int first = token + i / 2 * 8 + lane % 4 * 2;
        float2 x = {sums[i * 2] * rows.scale[i % 2], sums[i * 2 + 1] * rows.scale[i % 2]};
        if (epilogue.token_scale) {
            x.x *= epilogue.token_scale[min(first, shape.m - 1)];
            x.y *= epilogue.token_scale[min(first + 1, shape.m - 1)];
        }
        x.x += rows.bias[i % 2], x.y += rows.bias[i % 2];
        if (epilogue.residual) x.x += unpacked(residual[i] & 0xffff), x.y += unpacked(residual[i] >> 16);
        result[i] = packed<OUT>(x.x, x.y);
    }
    store_matrices_transposed(matrix, result);
    __syncwarp();
    copy_eight(epilogue.out + at, mine, skipped, count, epilogue.wide);
    __syncwarp();
}

// The same for a warp group's 64 rows, aligned and without residual. Its threads exchange the results of 16 tokens through
// shared memory, since stores of whole lines of 128 bytes take a quarter of the time of stores of 32 bytes. It has few
// instructions: each runs once a tile, so fetching it costs most.
template <bool SCALED, int COUNT>
DEVICE void finish_lines(unsigned char *lines, const Epilogue &epilogue, const Shape &shape, const Corner &from,
                         const Rows &rows, const float (&sums)[COUNT], int row, int token) {
    const int thread = threadIdx.x % 128, lane = thread % 32, own = thread / 8, column = row + thread % 8 * 8;
    const uint32 matrix = shared_address(lines) + (lane / 16 * 8 + lane % 8) * LINE_PITCH + thread / 32 * 32 + lane / 8 % 2 * 16;
    const unsigned char *mine = lines + own * LINE_PITCH + thread % 8 * 16;
    unsigned short *to = epilogue.out + (long long)(token + own) * shape.n + column;
    const int first = from.token - token - own;
    const int end = column >= from.row ? shape.m - token - own : 0;
    const int barrier = 4 + threadIdx.x / 128;
#pragma unroll
    for (int j = 0; j < COUNT / 8; ++j, to += 16ll * shape.n) {
        uint32 result[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scale = rows.scale[i % 2], bias = rows.bias[i % 2];
            float2 two = {sums[j * 8 + i * 2], sums[j * 8 + i * 2 + 1]};
            if constexpr (SCALED) {
                const int first = token + j * 16 + i / 2 * 8 + lane % 4 * 2;
                two.x *= epilogue.token_scale[min(first, shape.m - 1)];
                two.y *= epilogue.token_scale[min(first + 1, shape.m - 1)];
            }
            result[i] = packed<OUT>(fmaf(two.x, scale, bias), fmaf(two.y, scale, bias));
        }
        store_matrices_transposed(matrix + j % 2 * LINE_BYTES, result);
        named_barrier_sync(barrier, 128);  // also: all have read the other half
        if (j * 16 >= first && j * 16 < end) *(uint4 *)to = *(const uint4 *)(mine + j % 2 * LINE_BYTES);
    }
    if (COUNT / 8 % 2) named_barrier_sync(barrier, 128);  // the next tile begins with the half that was read last
}

// Finishes the warp's rows from `row` on, and tokens from `token` on, whose sums it has.
template <int COUNT>
DEVICE void finish_all(unsigned char *boxes, const Epilogue &epilogue, const Shape &shape, const Corner &from,
                       const Rows (&factors)[SUBTILES], const float (&sums)[SUBTILES][COUNT], int row, int token) {
    const bool plain = !OVERLAP && epilogue.wide && !epilogue.residual;
    const int warp = threadIdx.x / 32, above = warp % 4 * 16;
    unsigned char *lines = boxes + warp / 4 * 2 * LINE_BYTES, *box = lines + warp % 4 * BOX_BYTES;
#pragma unroll
    for (int subtile = 0; subtile < SUBTILES; ++subtile, row += 64) {
        const Rows &rows = factors[subtile];
        if (plain && row - above + 64 <= shape.n) {
            if (epilogue.token_scale) finish_lines<true>(lines, epilogue, shape, from, rows, sums[subtile], row - above, token);
            else finish_lines<false>(lines, epilogue, shape, from, rows, sums[subtile], row - above, token);
            continue;
        }
#pragma unroll 1
        for (int j = 0; j < COUNT / 8 && token + j * 16 < shape.m; ++j) {
            float square[8];
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                if (i / 8 == j) square[i % 8] = sums[subtile][i];
            finish(box, epilogue, shape, from, rows, square, row, token + j * 16);
        }
    }
}

// ---- sums that blocks of a cluster or warp groups of a block share --------------------------------------------------

// PARTS blocks share a tile's sums, for each of BESIDES tiles of the cluster. A block's index among them is `part`. It
// finishes the squares of 16 rows by 16 tokens whose unit of rows is `part` modulo PARTS.
template <int PARTS, int BESIDES>
struct Exchange {
    static constexpr int OWN = TOKENS / 16 * UNITS / PARTS, SOURCES = PARTS * LANES;
    typedef float4 Part[SOURCES][2][32];  // sums of a square
    Shared &shared;
    Part *parts;
    const uint32 rank, part = rank / BESIDES;

    MEMBER Exchange(Shared &shared, void *parts, uint32 rank) : shared(shared), parts((Part *)parts), rank(rank) {}

    // Arrives at the barrier `sums_read` of all blocks that exchange: lane i of each warp at that of the i-th block.
    MEMBER void leave() const {
        __syncwarp();
        const int lane = threadIdx.x % 32;
        if (lane < PARTS) barrier_arrive(shared_address(&shared.sums_read), lane * BESIDES + rank % BESIDES);
    }

    // Each warp sends its sums to the blocks that finish them, or stores them if its own block does.
    MEMBER void send(const float (&sums)[SUBTILES][SUMS]) const {
        if (PARTS > 1 && threadIdx.x == 0)
            barrier_expect(shared_address(shared.sums_arrived), OWN * sizeof(Part) / PARTS * (PARTS - 1));
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, turn = warp / (WARPS / LANES);
#pragma unroll
        for (int subtile = 0; subtile < SUBTILES; ++subtile) {
            const int unit = (warp % (WARPS / LANES) / 4 * SUBTILES + subtile) * 4 + warp % 4;
            const uint32 block = unit % PARTS * BESIDES + rank % BESIDES;
#pragma unroll
            for (int j = 0; j < TOKENS / 16; ++j) {
                float4 *to = parts[j * (UNITS / PARTS) + unit / PARTS][part * LANES + turn][0] + lane;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float *from = &sums[subtile][j * 8 + i * 4];
                    const float4 four = make_float4(from[0], from[1], from[2], from[3]);
                    if (PARTS == 1 || unit % PARTS == part) to[i * 32] = four;
                    else ::send(shared_address(to + i * 32), block, four, shared_address(shared.sums_arrived));
                }
            }
        }
    }

    // Exchanges a tile's sums, adds them in the order of K, and finishes the block's squares. A warp's squares have the
    // same rows. `read` is the parity of `sums_read` at which nobody needs what is in place of `parts`.
    MEMBER void finish(const float (&sums)[SUBTILES][SUMS], const Epilogue &epilogue, const Shape &shape,
                       const Schedule &schedule, uint32 parity, uint32 read) const {
        static_assert(PARTS == 1 || WARPS % (UNITS / PARTS) == 0, "");
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int row = schedule.row + (warp % (UNITS / PARTS) * PARTS + part) * 16;
        if constexpr (PARTS == 1) named_barrier_sync(1, WARPS * 32);
        else barrier_wait(shared_address(&shared.sums_read), read);
        send(sums);
        const Rows rows(epilogue, shape, row);  // loaded while the sums arrive
        named_barrier_sync(1, WARPS * 32);
        if constexpr (PARTS > 1) barrier_wait_after(shared_address(shared.sums_arrived), parity);
        for (int own = warp; own < OWN; own += WARPS) {
            const int token = schedule.token + own / (UNITS / PARTS) * 16;
            if (row >= shape.n || token >= shape.m) continue;
            float square[8] = {};
#pragma unroll
            for (int source = 0; source < SOURCES; ++source) {
#pragma unroll
                for (int i = 0; i < 8; i += 4) {
                    const float4 more = parts[own][source][i / 4][lane];
                    square[i] += more.x, square[i + 1] += more.y, square[i + 2] += more.z, square[i + 3] += more.w;
                }
            }
            __syncwarp();
            unsigned char *box = (unsigned char *)parts[own][0];  // its sums are no longer needed
            ::finish(box, epilogue, shape, schedule.own(), rows, square, row, token);
        }
        if (CLUSTER > 1 && schedule.more()) leave();  // else nobody waits, and other blocks may have exited
    }
};

DEVICE void add(float4 &sum, const float4 &x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// The same for blocks whose warps have rows of their own: a block finishes some of the tokens for all rows of the tile. So
// a warp keeps its own sums in registers, and results leave as those of other tiles do. Two blocks may both finish 16
// tokens in the middle, to the same bits.
template <int PARTS, int BESIDES>
struct Shares {
    static constexpr int SQUARES = TOKENS / 16, SHARE = (SQUARES + PARTS - 1) / PARTS, COUNT = SHARE * 8;
    static constexpr int PHASES = SHARE % 2 ? 1 : PHASES_MOST, PHASE = COUNT / PHASES;  // sums that are finished while others arrive
    typedef float4 Part[COUNT / 4][32];  // a warp's sums in a subtile
    static constexpr int BYTES = WARPS * SUBTILES * (PARTS - 1) * sizeof(Part);
    static_assert(BYTES <= STAGES * STAGE_BYTES, "");

    static MEMBER int first(int part) { return min(part * SHARE, SQUARES - SHARE) * 8; }  // sum

    static MEMBER void finish(Shared &shared, const float (&sums)[SUBTILES][SUMS], const Epilogue &epilogue,
                              const Shape &shape, const Schedule &schedule, uint32 rank, int row) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = rank / BESIDES;
        Part *parts = (Part *)shared.stage + warp * SUBTILES * (PARTS - 1);
        const uint32 arrived = shared_address(shared.sums_arrived), there = shared_address(&parts[0][0][lane]);
        Exchange<PARTS, BESIDES>(shared, parts, rank).leave();
        Rows rows[SUBTILES];  // loaded while others finish
#pragma unroll
        for (int i = 0; i < SUBTILES; ++i) rows[i] = Rows(epilogue, shape, row + i * 64);
        barrier_wait(shared_address(&shared.sums_read), 0);  // nobody reads the ring
        for (int phase = 0; threadIdx.x == 0 && phase < PHASES; ++phase) barrier_expect(arrived + phase * 8, BYTES / PHASES);
        float own[PHASES][SUBTILES][PHASE];
        // Each instruction runs once a tile, so fetching it costs most. With a branch for each `part`, all registers and
        // distances are constants.
#pragma unroll
        for (int mine = 0; mine < PARTS; ++mine) {
            if (mine != part) continue;
#pragma unroll
            for (int j = 0; j < PHASES * PARTS * SUBTILES * PHASE; j += 4) {
                const int phase = j / (PARTS * SUBTILES * PHASE), to = j / (SUBTILES * PHASE) % PARTS;
                const int subtile = j / PHASE % SUBTILES, i = phase * PHASE + j % PHASE;
                const float *from = &sums[subtile][first(to) + i];
                float *kept = &own[phase][subtile][j % PHASE];
                if (to == mine) {
                    kept[0] = from[0], kept[1] = from[1], kept[2] = from[2], kept[3] = from[3];
                } else {
                    const int other = subtile * (PARTS - 1) + mine - (mine > to), block = to * BESIDES + rank % BESIDES;
                    const uint32 at = in_block(there, block) + other * (uint32)sizeof(Part) + i / 4 * 512;
                    send(at, in_block(arrived, block) + phase * 8, make_float4(from[0], from[1], from[2], from[3]));
                }
            }
        }
#pragma unroll
        for (int phase = 0; phase < PHASES; ++phase) {
            barrier_wait_after(arrived + phase * 8, 0);
#pragma unroll
            for (int j = 0; j < SUBTILES * PHASE; j += 4) {
                float *mine = &own[phase][j / PHASE][j % PHASE];
                const int i = (phase * PHASE + j % PHASE) / 4;
                const float4 kept = make_float4(mine[0], mine[1], mine[2], mine[3]);
                float4 sum = kept;
                if (PARTS == 2) add(sum, parts[j / PHASE][i][lane]);
#pragma unroll
                for (int source = 0; PARTS > 2 && source < PARTS; ++source) {  // in the order of K; two sums commute
                    const int other = j / PHASE * (PARTS - 1) + source - (source > part);
                    const float4 more = source == part ? kept : parts[other][i][lane];
                    if (source) add(sum, more);
                    else sum = more;
                }
                mine[0] = sum.x, mine[1] = sum.y, mine[2] = sum.z, mine[3] = sum.w;
            }
            const int token = schedule.token + (first(part) + phase * PHASE) * 2;
            finish_all(shared.box, epilogue, shape, schedule.own(), rows, own[phase], row, token);
        }
    }
};

// Both blocks hold sums of the same 64 rows, and each block finishes the rows of two warps. It sends the sums of the
// other two warps to the other block, and adds the sums that it receives. Returns whether the warp has rows to finish.
DEVICE bool merge(Shared &shared, float (&sums)[SUMS], uint32 rank, uint32 parity) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32 sums_arrived = shared_address(shared.sums_arrived), sums_read = shared_address(&shared.sums_read);
    float4(*other)[1][2][32] = (float4(*)[1][2][32])shared.part[warp % 2 * (TOKENS / 16)];
    if (warp / 2 != rank) {
        barrier_wait(sums_read, parity ^ 1);
#pragma unroll
        for (int i = 0; i < SUMS / 4; ++i) {
            const float4 four = make_float4(sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2], sums[i * 4 + 3]);
            send(shared_address(&other[i / 2][0][i % 2][lane]), rank ^ 1, four, sums_arrived);
        }
        return false;
    }
    if (lane == 0) barrier_expect(sums_arrived, SUMS * 128);
    barrier_wait_after(sums_arrived, parity);
#pragma unroll
    for (int i = 0; i < SUMS / 4; ++i) {
        const float4 four = other[i / 2][0][i % 2][lane];
        sums[i * 4] += four.x, sums[i * 4 + 1] += four.y, sums[i * 4 + 2] += four.z, sums[i * 4 + 3] += four.w;
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(sums_read, rank ^ 1);
    return true;
}

#if EXPERTS
DEVICE void count_tiles(int *tiles, const int *ends, int m);
DEVICE void finish_pairs(unsigned char *box, const Epilogue &epilogue, const Shape &shape, const Schedule &schedule,
                         const float (&sums)[SUMS], int row);
#endif

// Computes a tile of COUNT * 2 tokens.
template <int COUNT>
DEVICE void multiply_tile(Shared &shared, Consumer &consumer, const Epilogue &epilogue, const Shape &shape,
                          const Schedule &schedule, uint32 rank, int below, uint32 parity) {
    float sums[SUBTILES][COUNT] = {}, totals[SUBTILES][COUNT] = {};
    const int row = schedule.row + below;
    Rows rows[SUBTILES];
#pragma unroll
    for (int i = 0; i < SUBTILES && ROWS_FIRST; ++i) rows[i] = Rows(epilogue, shape, row + i * 64);
    consumer.sum(sums, totals, row + threadIdx.x % 32 / 4, schedule.first, schedule.last, schedule.divided, schedule.above);
    float(&result)[SUBTILES][COUNT] = FLUSH ? totals : sums;
    if constexpr (COUNT == SUMS && BESIDE_RING) {
        const Exchange<SPLIT, BESIDE> exchange(shared, shared.part, rank);
        exchange.finish(result, epilogue, shape, schedule, parity, parity ^ 1);
        return;
    }
    if constexpr (COUNT == SUMS && (ONCE || TAIL)) {
        if (ONCE || schedule.divided) {
            Shares<ONCE ? SPLIT : BESIDE, ONCE ? BESIDE : 1>::finish(shared, result, epilogue, shape, schedule, rank, row);
            return;
        }
    }
    if constexpr (OVERLAP) {
        if (shares(rank) && !merge(shared, result[0], rank, parity)) return;
    }
#pragma unroll
    for (int i = 0; i < SUBTILES && !ROWS_FIRST; ++i) rows[i] = Rows(epilogue, shape, row + i * 64);
    finish_all(shared.box, epilogue, shape, schedule.own(), rows, result, row, schedule.token);
}

DEVICE void consume(Shared &shared, const Epilogue &epilogue, const signed char *zero, const Shape &shape,
                    uint32 rank) {
    const int warp = threadIdx.x / 32, below = (warp % (WARPS / LANES) / 4 * 64 * SUBTILES + warp % 4 * 16) / SPREAD;
    Consumer consumer(shared, epilogue.scale, zero, shape, rank);
    if (ORDERED && threadIdx.x >= 128) named_barrier_arrive(2, WARPS * 32);  // the first group begins
    uint32 parity = 0;
    for (Schedule schedule(shape, rank); schedule.take(); parity ^= 1) {
#if EXPERTS
        float sums[SUBTILES][SUMS] = {}, totals[SUBTILES][SUMS] = {};
        const int row = schedule.row + below + threadIdx.x % 32 / 4;
        consumer.sum(sums, totals, row, schedule.first, schedule.last, schedule.divided, schedule.above);
#pragma unroll
        for (int i = 0; i < SUBTILES; ++i)
            finish_pairs(shared.box + warp * BOX_BYTES, epilogue, shape, schedule, FLUSH ? totals[i] : sums[i],
                         schedule.row + below + i * (64 / SPREAD));
#else
        if (LAST_TOKENS && schedule.is_last)
            multiply_tile<LAST_TOKENS ? LAST_TOKENS / 2 : SUMS>(shared, consumer, epilogue, shape, schedule, rank, below, parity);
        else multiply_tile<SUMS>(shared, consumer, epilogue, shape, schedule, rank, below, parity);
#endif
    }
}

// Grid: a multiple of CLUSTER blocks. codes [n, bytes]: tensor map in boxes of BOX_ROWS rows of PITCH bytes, swizzled
// over PITCH bytes. x [m, k]: tensor map in boxes of TOKENS / BESIDE rows of 64 elements; x_last in boxes of LAST_TOKENS
// / BESIDE rows. scale and zero [n, groups].
// bias [n], residual [m, n], token_scale [m] and global_scale [1], which divides the scales, may be null.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    weight_mm(const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap x,
#if LAST_TOKENS
              const __grid_constant__ TensorMap x_last,
#endif
              const void *scale,
              const signed char *zero, const void *bias, const void *residual, const float *token_scale,
              const float *global_scale, unsigned short *out, int m, int n, int chunks, int groups, int rows,
              int columns, int band, int wide
#if LAST_TOKENS
              , int full, int last_columns
#endif
#if EXPERTS
              , const int *order, const int *ends
#endif
              ) {
    DYNAMIC_SHARED(memory);
    Shared &shared = *(Shared *)memory;
    Shape shape = {m, n, chunks, groups, rows, columns, band};
    Epilogue epilogue = {scale, bias, residual, token_scale, global_scale, out, wide};
#if LAST_TOKENS
    shape.full = full, shape.last_columns = last_columns;
#else
    const TensorMap &x_last = x;
#endif
#if EXPERTS
    shape.ends = ends, shape.tiles = (const int *)(memory + TILES_AT), epilogue.order = order;
#endif
    const uint32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        if (shared_address(memory) % 1024 != 0) __trap();  // the swizzle depends on the address
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.full[i]), 1);
            barrier_init(shared_address(&shared.empty[i]), WARPS / LANES * BESIDE);
        }
        for (int i = 0; i < PHASES_MOST; ++i) barrier_init(shared_address(&shared.sums_arrived[i]), OVERLAP ? 2 : 1);
        barrier_init(shared_address(&shared.sums_read), OVERLAP ? 2 : WARPS * (TAIL ? BESIDE : SPLIT));
        barrier_init_fence();
        prefetch(codes), prefetch(x);
        if constexpr (LAST_TOKENS > 0) prefetch(x_last);
    }
    if (!EXPERTS && threadIdx.x == GROUPS * 128) fetch(codes, epilogue, shape, rank);
    __syncwarp();
    cluster_arrive();
    if (CODES == LOOKUP && threadIdx.x < GROUPS * 128) {  // the producer doesn't wait for it
        fill_lookup(memory + LOOKUP_AT, GROUPS * 128);
        named_barrier_sync(1, WARPS * 32);
    }
    cluster_wait();  // all barriers are initialised
    wait_for_previous();
#if EXPERTS
    if (threadIdx.x < 32) count_tiles((int *)(memory + TILES_AT), ends, m);
    named_barrier_sync(8, THREADS);  // not 1, where the others may still wait for the table
#endif

    if (threadIdx.x >= GROUPS * 128) {
        give_registers<GROUPS == 2 ? 40 : 32>();
        if (threadIdx.x == GROUPS * 128) {
            produce(shared, codes, x, x_last, shape, rank);
            let_next_start();  // not earlier, since its copies would delay these
        }
    } else {
        take_registers<GROUPS == 2 ? 232 : GROUPS == 3 ? 160 : 112>();
        consume(shared, epilogue, zero, shape, rank);
    }
    __syncwarp();
    // Other blocks of the cluster may still arrive at this block's barriers.
    if constexpr (BESIDE > 1) cluster_sync();
}
