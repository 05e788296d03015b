// Instructions of sm_90a beyond those of ptx.cuh: barriers in shared memory, tiles copied by the tensor memory
// accelerator (TMA), products of warpgroups (four warps), clusters of blocks. Addresses are of shared memory, in bytes.

typedef unsigned int uint32;
typedef unsigned long long uint64;

// What cuTensorMapEncodeTiled of the driver writes: a matrix in memory, and the boxes that are copied of it.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

DEVICE uint32 shared_address(const void *p) { return (uint32)__cvta_generic_to_shared(p); }

// ---- barriers --------------------------------------------------------------------------------------------------------

DEVICE void barrier_init(uint32 barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other blocks of the cluster, and to the TMA.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival; the phase also waits for as many bytes.
DEVICE void barrier_expect(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival at the barrier that lies at the same address in block `rank` of the cluster. It orders nothing but what
// the TMA and products do to shared memory: with the scope of a cluster the compiler would flush all memory here.
DEVICE void barrier_arrive(uint32 barrier, uint32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Until the phase of that parity is over. Of a new barrier the one before the first, of parity 1, is.
DEVICE void barrier_wait(uint32 barrier, uint32 parity) {
    uint32 over;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!over);
}

// The same where what other blocks of the cluster sent to this one's shared memory is read after the wait.
DEVICE void barrier_wait_after(uint32 barrier, uint32 parity) {
    uint32 over;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!over);
}

// Meeting of `threads` of a block, whole warps, at barrier 1..15.
DEVICE void meet(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// The same, without waiting for the others.
DEVICE void come(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- clusters --------------------------------------------------------------------------------------------------------

DEVICE uint32 cluster_rank() {
    uint32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Meeting of all threads of the cluster.
DEVICE void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same in two steps: all have come before a thread's wait is over. What was written before isn't ordered by it, but for
// barriers and barrier_init_fence.
DEVICE void cluster_come() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_await() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// 16 bytes to the same address in block `rank` of the cluster, which count for the barrier that lies at `barrier` there.
DEVICE void send(uint32 address, uint32 rank, float4 x, uint32 barrier) {
    asm volatile(
        "{\n.reg .b32 to, at;\n"
        "mapa.shared::cluster.u32 to, %0, %2;\n"
        "mapa.shared::cluster.u32 at, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, [at];\n}" ::"r"(address),
        "r"(barrier), "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
        : "memory");
}

// ---- launches that overlap -------------------------------------------------------------------------------------------

// Until all that was launched before on the stream is done and seen, where the launch did not wait for that itself.
DEVICE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The next launch that asks for it may take multiprocessors as they get free. Only after wait_for_previous: what comes
// next may read what was written two launches before.
DEVICE void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- TMA -------------------------------------------------------------------------------------------------------------

DEVICE void prefetch(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `bytes` of global memory to shared, a multiple of 16 between addresses that are; they count for `barrier`.
DEVICE void load_bulk(uint32 to, const void *from, uint32 bytes, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
}

// The box of `map` that begins at column x, row y, to shared memory; its bytes count for `barrier`. What lies outside
// of the matrix is zero, and counts.
DEVICE void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// That box into the L2.
DEVICE void prefetch_box(const TensorMap &map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x), "r"(y) : "memory");
}

// A box to every block of the cluster that has a bit in `blocks`, at the same addresses.
DEVICE void load_box(const TensorMap &map, int x, int y, uint32 to, uint32 barrier, unsigned short blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
}

// Shared memory to the box of `map` at column x, row y; what lies outside of the matrix isn't written.
DEVICE void store_box(const TensorMap &map, int x, int y, uint32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
                 "r"(x), "r"(y), "r"(from)
                 : "memory");
}
DEVICE void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last `PENDING` committed stores of this thread have read their shared memory.
template <int PENDING>
DEVICE void store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Between this thread's writes to shared memory and the TMA's reading of them.
DEVICE void fence_for_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- products of warpgroups --------------------------------------------------------------------------------------------

// Rows of 128 bytes, in groups of eight 1024 bytes apart, the 16-byte chunks of a row permuted as the TMA's 128-byte
// swizzle does (chunk ^ row % 8): the lower half of a product's operand, and the upper. 32 bytes further along K: + 2.
DEVICE uint32 operand(uint32 address) { return (address >> 4 & 0x3fff) | 1 << 16; }
static constexpr uint32 OPERAND_HIGH = 1 << 30 | 1024 >> 4;

// Before the first product that adds to registers which were read or written since.
DEVICE void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until all but the last `PENDING` committed groups of products are done.
template <int PENDING>
DEVICE void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A register that products, which the compiler doesn't follow, read or write until here.
DEVICE void in_use(float &x) { asm volatile("" : "+f"(x)::"memory"); }
DEVICE void in_use(uint32 &x) { asm volatile("" : "+r"(x)::"memory"); }

template <int REGISTERS>
DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Four 8x8 matrices of 16-bit elements, a lane's two of each in one word, to shared memory: lane i gives the address of
// row i % 8 of matrix i / 8.
DEVICE void store_matrices(uint32 address, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}

// The same, each matrix transposed; and back from there.
DEVICE void store_matrices_turned(uint32 address, const uint32 (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]),
                 "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
DEVICE void load_matrices_turned(uint32 address, uint32 (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

DEVICE uint4 shared_vector(uint32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
DEVICE void store_pair(uint32 address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
