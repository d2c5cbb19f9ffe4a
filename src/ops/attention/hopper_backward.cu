// Attention backward on wgmma in one launch, without atomics: some blocks own 64 rows of dq, the others 64 rows of dk and dv, and
// all recompute the probabilities from the saved log-sum-exp. Every sum has one owner and a fixed order, so results are the same
// bits every time.
//
// CLUSTER query heads of a group are a cluster of blocks: each forms dk and dv of its own head (or, group / CLUSTER of them, of its
// own heads in turn), and the sums over the group meet through distributed shared memory.
// DELTA: blocks form delta = do . o of the rows themselves: more to read, but no launch before this one (short sequences).

struct Given {
    const bf16 *q, *k, *v, *o, *d_o;
    const float *lse, *delta;
    int len, q_heads, kv_heads;
    float scale;
};

__device__ __forceinline__ float dot8(uint4 x, uint4 y) {
    return bf16_lo(x.x) * bf16_lo(y.x) + bf16_hi(x.x) * bf16_hi(y.x) + bf16_lo(x.y) * bf16_lo(y.y) + bf16_hi(x.y) * bf16_hi(y.y)
         + bf16_lo(x.z) * bf16_lo(y.z) + bf16_hi(x.z) * bf16_hi(y.z) + bf16_lo(x.w) * bf16_lo(y.w) + bf16_hi(x.w) * bf16_hi(y.w);
}

// dq of the 64 rows of tile `own`: walks the key tiles upward. Shared: q and do tiles, two stages of k and v tiles.
__device__ __forceinline__ void dq_block(u8* shared, const Given& g, bf16* dq, int head_of_all, int own) {
    constexpr int STAGE = 2 * TILE;
    u8* const q_tile = shared;
    u8* const do_tile = q_tile + TILE;
    u8* const kv_tiles = do_tile + TILE;

    const int len = g.len, b = head_of_all / g.q_heads, h = head_of_all % g.q_heads, row0 = own * ROWS;
    const i64 first = ((i64)b * len * g.q_heads + h) * D;
    const int q_stride = g.q_heads * D, kv_stride = g.kv_heads * D;
    const i64 kv_first = (i64)b * len * kv_stride + h / (g.q_heads / g.kv_heads) * D;
    const int lane = threadIdx.x & 31, in_tile = threadIdx.x / 32 * 16 + (lane >> 2), my_row = row0 + in_tile;   // + 8
    const float scale_log2 = g.scale * LOG2E;

    const auto load = [&](int t) {
        if (t <= own) {
            u8* const tile = kv_tiles + (t & 1) * STAGE;
            load_tile<false>(tile, g.k + kv_first, t * ROWS, len, kv_stride);
            load_tile<false>(tile + TILE, g.v + kv_first, t * ROWS, len, kv_stride);
        }
        cp_async_commit();
    };
    // Tile t is there, and no product reads the other stage any more.
    const auto step = [&](int t) {
        wgmma_wait<0>();
        if (t == 0) cp_async_wait<1>();
        else cp_async_wait<0>();
        proxy_fence();
        __syncthreads();
        if (t > 0) load(t + 1);
    };
    // Rows beyond the end repeat the last one; they are not stored.
#if DELTA
    uint4 o_row[2][D / 32];                      // a quarter of this thread's rows
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int c = 0; c < D / 32; ++c)
            o_row[half][c] = *reinterpret_cast<const uint4*>(
                g.o + first + (i64)min(my_row + half * 8, len - 1) * q_stride + (c * 4 + (lane & 3)) * 8);
#endif
    load_tile<false>(q_tile, g.q + first, row0, len, q_stride);
    load_tile<false>(do_tile, g.d_o + first, row0, len, q_stride);
    load(0);
    load(1);
    step(0);

    float row_lse[2], row_delta[2];              // lse in powers of two
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i64 at = (i64)head_of_all * len + min(my_row + half * 8, len - 1);
        row_lse[half] = g.lse[at] * LOG2E;
#if DELTA
        float sum = 0.f;
        #pragma unroll
        for (int c = 0; c < D / 32; ++c)
            sum += dot8(o_row[half][c], *reinterpret_cast<const uint4*>(do_tile + piece_at(in_tile + half * 8, c * 4 + (lane & 3))));
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        row_delta[half] = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
#else
        row_delta[half] = g.delta[at];
#endif
    }

    const u64 q_desc = descriptor(q_tile), do_desc = descriptor(do_tile), kv_desc = descriptor(kv_tiles);
    float acc[D / 8][4], s[ROWS / 8][4], dp[ROWS / 8][4];
    u32 ds[ROWS / 16][4];
    zero(acc);
    pin(acc);                                    // or the compiler sets it between the products, and makes those wait
    for (int t = 0; t <= own; ++t) {
        if (t > 0) step(t);
        const u64 k_desc = kv_desc + (t & 1) * 2 * TILE_STEP;
        wgmma_fence();
        scores(s, q_desc, k_desc);
        wgmma_commit();
        scores(dp, do_desc, k_desc + TILE_STEP);
        wgmma_commit();
        wgmma_wait<1>();
        pin(s);
        const int limit = my_row - t * ROWS - (lane & 3) * 2;
        #pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (t == own && n * 8 + (e & 1) > limit + (e < 2 ? 0 : 8)) s[n][e] = minus_infinity();
                s[n][e] = exp2_fast(fmaf(s[n][e], scale_log2, -row_lse[e >> 1]));
            }
        wgmma_wait<0>();
        pin(dp);
        #pragma unroll
        for (int n = 0; n < ROWS / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e] - row_delta[e >> 1];
        pack(ds, s);
        wgmma_fence();
        accumulate(acc, ds, k_desc);
        wgmma_commit();
    }
    wgmma_wait<0>();
    pin(acc);
    store_tile(q_tile, acc, g.scale, g.scale, dq + first, row0, len, q_stride);
}

// The same place in the shared memory of a block of the cluster.
__device__ __forceinline__ float4 load_of_block(const float* source, int block) {
    u32 there;
    float4 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(smem_addr(source)), "r"(block));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(there));
    return x;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

constexpr int SUM_STRIDE = D + 8;                // floats: four rows of a warp's pairs hit all banks once

// dk and dv of the 64 keys of tile `own`: walks the query tiles upward, for `heads` query heads in turn, the first one
// `head_of_all`. Transposed scores k q^T, so that probabilities and their gradients are left operands of the second products
// straight from registers. Shared: k and v tiles, two stages of q and do tiles, (an o tile,) two stages of lse and delta rows; at
// the end the fp32 sums.
__device__ __forceinline__ void dkv_block(u8* shared, const Given& g, bf16* dk, bf16* dv, int head_of_all, int heads, int own) {
    constexpr int STAGE = 2 * TILE;
    u8* const k_tile = shared;
    u8* const v_tile = k_tile + TILE;
    u8* const q_tiles = v_tile + TILE;
    u8* const o_tile = q_tiles + 2 * STAGE;
    float* const row_values = reinterpret_cast<float*>(o_tile + DELTA * TILE);   // stage s: lse at 2s, delta at 2s + 1

    const int len = g.len, b = head_of_all / g.q_heads, h = head_of_all % g.q_heads, j0 = own * ROWS;
    const int q_stride = g.q_heads * D, kv_stride = g.kv_heads * D;
    const i64 kv_first = (i64)b * len * kv_stride + h / (g.q_heads / g.kv_heads) * D;
    const int lane = threadIdx.x & 31, my_key = j0 + threadIdx.x / 32 * 16 + (lane >> 2);        // + 8
    const int tiles = (len + ROWS - 1) / ROWS;
    const float scale_log2 = g.scale * LOG2E;

    // Query tiles t of a head in turn, the next two items.
    int next_head = 0, next_t = own, next_stage = 0;
    const auto load_next = [&]() {
        if (next_head < heads) {
            u8* const tile = q_tiles + next_stage * STAGE;
            const int i0 = next_t * ROWS;
            const i64 first = ((i64)b * len * g.q_heads + h + next_head) * D;
            load_tile<true>(tile, g.q + first, i0, len, q_stride);
            load_tile<true>(tile + TILE, g.d_o + first, i0, len, q_stride);
            // Rows beyond the end get zeros: p = 1 meets do = 0, ds = 1 * (0 - 0).
            if (threadIdx.x < (DELTA ? 1 : 2) * ROWS) {
                const int which = threadIdx.x / ROWS, r = threadIdx.x % ROWS;
                const float* source = which ? g.delta : g.lse;
                const bool valid = i0 + r < len;
                cp_async4_zfill(row_values + (next_stage * 2 + which) * ROWS + r,
                                source + (i64)(head_of_all + next_head) * len + (valid ? i0 + r : 0), valid);
            }
            if (++next_t == tiles) { next_t = own; ++next_head; }
            next_stage ^= 1;
        }
        cp_async_commit();
    };
#if DELTA
    const auto load_o = [&](int head, int t) {
        if (head < heads) load_tile<true>(o_tile, g.o + ((i64)b * len * g.q_heads + h + head) * D, t * ROWS, len, q_stride);
        cp_async_commit();
    };
    // do . o of a stage's rows, two threads a row, pieces in an order that hits all banks.
    const auto form_delta = [&](int stage) {
        const int r = threadIdx.x / 2, part = threadIdx.x % 2;
        const u8* const do_tile = q_tiles + stage * STAGE + TILE;
        float sum = 0.f;
        #pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int at = piece_at(r, j / 4 * 8 + (j % 4 ^ r % 4) * 2 + part);
            sum += dot8(*reinterpret_cast<const uint4*>(do_tile + at), *reinterpret_cast<const uint4*>(o_tile + at));
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (part == 0) row_values[(stage * 2 + 1) * ROWS + r] = sum;
        __syncthreads();
    };
#endif

    load_tile<false>(k_tile, g.k + kv_first, j0, len, kv_stride);
    load_tile<false>(v_tile, g.v + kv_first, j0, len, kv_stride);
#if DELTA
    load_o(0, own);
#endif
    load_next();
    load_next();

    const u64 k_desc = descriptor(k_tile), v_desc = descriptor(v_tile), stages = descriptor(q_tiles);
    float dk_acc[D / 8][4], dv_acc[D / 8][4], s[ROWS / 8][4], dp[ROWS / 8][4];
    u32 p[ROWS / 16][4], ds[ROWS / 16][4];
    zero(dk_acc);
    zero(dv_acc);
    pin(dk_acc);                                 // as above
    pin(dv_acc);
    int stage = 0;
    bool start = true;                           // both stages are on their way
    for (int head = 0; head < heads; ++head) {
        for (int t = own; t < tiles; ++t, stage ^= 1) {
            // The item is there, and no product reads the other stage any more.
            if (start) cp_async_wait<1>();
            else cp_async_wait<0>();
            proxy_fence();
            __syncthreads();
            if (!start) load_next();
            start = false;
#if DELTA
            form_delta(stage);
            const bool last = t + 1 == tiles;
            load_o(head + last, last ? own : t + 1);
#endif
            const u64 q_desc = stages + stage * 2 * TILE_STEP, do_desc = q_desc + TILE_STEP;
            wgmma_fence();
            scores(s, k_desc, q_desc);
            wgmma_commit();
            scores(dp, v_desc, do_desc);
            wgmma_commit();
            const float* const row_lse = row_values + stage * 2 * ROWS + (lane & 3) * 2;
            wgmma_wait<1>();
            pin(s);
            const int limit = my_key - t * ROWS - (lane & 3) * 2;        // rows from here on see the key
            #pragma unroll
            for (int n = 0; n < ROWS / 8; ++n) {
                const float2 l = *reinterpret_cast<const float2*>(row_lse + n * 8);
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if (t == own && n * 8 + (e & 1) < limit + (e < 2 ? 0 : 8)) s[n][e] = minus_infinity();
                    s[n][e] = exp2_fast(fmaf(s[n][e], scale_log2, -LOG2E * (e & 1 ? l.y : l.x)));
                }
            }
            pack(p, s);
            wgmma_fence();
            accumulate(dv_acc, p, do_desc);
            wgmma_commit();
            wgmma_wait<1>();
            pin(dp);
            #pragma unroll
            for (int n = 0; n < ROWS / 8; ++n) {
                const float2 d = *reinterpret_cast<const float2*>(row_lse + ROWS + n * 8);
                #pragma unroll
                for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e] - (e & 1 ? d.y : d.x);
            }
            pack(ds, s);
            wgmma_fence();
            accumulate(dk_acc, ds, q_desc);
            wgmma_commit();
            wgmma_wait<0>();
            pin(dk_acc);
            pin(dv_acc);
        }
    }
    __syncthreads();

    // The sums of this block, dk then dv, in place of the tiles.
    float* const sums = reinterpret_cast<float*>(shared);
    float* const at = sums + (my_key - j0) * SUM_STRIDE + (lane & 3) * 2;
    constexpr int OF_DV = ROWS * SUM_STRIDE;
    #pragma unroll
    for (int n = 0; n < D / 8; ++n)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* const here = at + half * 8 * SUM_STRIDE + n * 8;
            *reinterpret_cast<float2*>(here) = make_float2(dk_acc[n][2 * half] * g.scale, dk_acc[n][2 * half + 1] * g.scale);
            *reinterpret_cast<float2*>(here + OF_DV) = make_float2(dv_acc[n][2 * half], dv_acc[n][2 * half + 1]);
        }
    meet_cluster();
    // Each block adds up its part of the rows, over the blocks in order. A warp a row, 16 bytes a lane; all of a warp's rows are read
    // before they are added: one such read takes about 200 cycles, many together little more.
    constexpr int PART = ROWS / CLUSTER, WARPS = THREADS / 32, TURNS = PART / WARPS;
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int r0 = rank * PART + threadIdx.x / 32;
    #pragma unroll
    for (int which = 0; which < 2; ++which) {
        float4 x[TURNS][CLUSTER];
        #pragma unroll
        for (int i = 0; i < TURNS; ++i)
            #pragma unroll
            for (int block = 0; block < CLUSTER; ++block) {
                const float* const source = sums + which * OF_DV + (r0 + i * WARPS) * SUM_STRIDE + lane * 4;
                x[i][block] = CLUSTER > 1 ? load_of_block(source, block) : *reinterpret_cast<const float4*>(source);
            }
        #pragma unroll
        for (int i = 0; i < TURNS; ++i) {
            float4 sum = x[i][0];
            #pragma unroll
            for (int block = 1; block < CLUSTER; ++block) {
                sum.x += x[i][block].x; sum.y += x[i][block].y; sum.z += x[i][block].z; sum.w += x[i][block].w;
            }
            const int j = j0 + r0 + i * WARPS;
            if (j < len)
                *reinterpret_cast<uint2*>((which ? dv : dk) + kv_first + (i64)j * kv_stride + lane * 4) =
                    make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
        }
    }
    meet_cluster();                              // no block leaves while others read its sums
}

// Grid: for every tile the blocks of dk and dv of all heads, then those of dq; heaviest first: the first keys and the last queries,
// and so on inwards.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 2) attention_bwd_wgmma(
    const bf16* q, const bf16* k, const bf16* v, const bf16* o, const bf16* d_o, const float* lse, const float* delta,
    bf16* dq, bf16* dk, bf16* dv, int batch, int len, int q_heads, int kv_heads, float scale) {
    extern __shared__ __align__(1024) u8 shared[];
    const Given g{q, k, v, o, d_o, lse, delta, len, q_heads, kv_heads, scale};
    const int in_turn = q_heads / kv_heads / CLUSTER, of_dq = batch * q_heads, of_dkv = of_dq / in_turn;
    const int level = blockIdx.x / (of_dkv + of_dq), rest = blockIdx.x % (of_dkv + of_dq);
    if (rest < of_dkv) dkv_block(shared, g, dk, dv, rest * in_turn, in_turn, level);
    else dq_block(shared, g, dq, rest - of_dkv, (len + ROWS - 1) / ROWS - 1 - level);
}
