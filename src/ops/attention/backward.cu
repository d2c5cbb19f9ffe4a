// Attention backward without atomics (FlashAttention-2, Dao 2023, in two passes): one kernel owns rows of dq,
// one owns rows of dk and dv, and both recompute the probabilities from the saved log-sum-exp. Every sum has
// one owner and a fixed order, so results are the same bits every time.
constexpr int DQ_THREADS = DQ_WARPS * 32;
constexpr int DQ_ROWS = DQ_WARPS * DQ_M * 16;
constexpr int DKV_THREADS = DKV_WARPS * 32;
constexpr int DKV_ROWS = DKV_WARPS * 16;

// delta[b, h, i] = do . o of that row: one warp a row and head, four values a lane at a time.
extern "C" __global__ void __launch_bounds__(256) attention_delta(
    const bf16* o, const bf16* d_o, float* delta, int batch, int q_len, int q_heads) {
    const i64 item = (i64)blockIdx.x * 8 + (threadIdx.x >> 5);           // row * q_heads + h, as o lies in memory
    if (item >= (i64)batch * q_len * q_heads) return;
    float sum = 0.f;
    #pragma unroll
    for (int at = (threadIdx.x & 31) * 4; at < MEM_DIM_V; at += 128) {
        const uint2 x = *reinterpret_cast<const uint2*>(o + item * MEM_DIM_V + at);
        const uint2 y = *reinterpret_cast<const uint2*>(d_o + item * MEM_DIM_V + at);
        sum += bf16_lo(x.x) * bf16_lo(y.x) + bf16_hi(x.x) * bf16_hi(y.x) + bf16_lo(x.y) * bf16_lo(y.y) + bf16_hi(x.y) * bf16_hi(y.y);
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) {
        const i64 row = item / q_heads;
        const int h = item % q_heads, b = row / q_len, i = row % q_len;
        delta[((i64)b * q_heads + h) * q_len + i] = sum;
    }
}

// dq: a block owns DQ_ROWS query rows of one head and walks the key tiles upward.
// Grid: q tiles * batch * q_heads, the heaviest (last) q tile first. Shared: q and do tiles, then two stages
// of k and v tiles.
extern "C" __global__ void __launch_bounds__(DQ_THREADS, DQ_BLOCKS_PER_SM) attention_dq(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_o, const float* lse, const float* delta,
    const unsigned* words, bf16* dq,
    int batch, int q_len, int kv_len, int q_heads, int kv_heads, int start0, int len0, int start1,
    float scale, unsigned seed_offset, unsigned draw, unsigned threshold, float keep_scale) {
    extern __shared__ __align__(16) u8 shared[];
    constexpr int K_TILE = DQ_KV * QK_BYTES, STAGE = K_TILE + DQ_KV * V_BYTES;
    u8* const q_tile = shared;
    u8* const do_tile = shared + DQ_ROWS * QK_BYTES;
    u8* const kv_tiles = do_tile + DQ_ROWS * V_BYTES;                    // a stage: k, then v

    const Rows rows{start0, len0, start1};
    const QueryBlock<DQ_ROWS> own(blockIdx.x / WIDE, batch, q_len, kv_len, q_heads, kv_heads);
    const int row0 = own.row0, last_row = min(row0 + DQ_ROWS, q_len) - 1;
    const int q_stride = q_heads * MEM_DIM, o_stride = q_heads * MEM_DIM_V;
    const int k_stride = kv_heads * MEM_DIM, v_stride = kv_heads * MEM_DIM_V;
    k += (i64)own.kv_row * k_stride + own.kv_head * MEM_DIM;
    v += (i64)own.kv_row * v_stride + own.kv_head * MEM_DIM_V;

    const int seen = min(rows.highest(row0, last_row) + 1, kv_len);
    const int tiles = (seen + DQ_KV - 1) / DQ_KV;
    const int all_see = min(rows.lowest(row0, last_row) + 1, kv_len);
#if WINDOW
    const int first = rows.first_seen(row0, last_row) / DQ_KV;           // tile
    const int below = rows.highest(row0, last_row) - (WINDOW - 1);       // keys before this one are not seen by every row
#else
    constexpr int first = 0;
#endif

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_row = warp * DQ_M * 16;
    const int my_row = row0 + warp_row + (lane >> 2);
    const float scale_log2 = scale * LOG2E;
    const u32 q_addr = smem_addr(q_tile) + warp_row * QK_BYTES + lane_rows<HEAD_DIM>(lane);
    const u32 do_addr = smem_addr(do_tile) + warp_row * V_BYTES + lane_rows<HEAD_DIM_V>(lane);
    const u32 kv_addr = smem_addr(kv_tiles);
#if DROPOUT
    const Keep keep(words, seed_offset, draw, threshold);
    const u64 element0 = ((u64)own.head_of_all * q_len + my_row) * kv_len;
#endif

    load_rows<HEAD_DIM, DQ_ROWS, DQ_THREADS, false>(q_tile, q + own.first * MEM_DIM, row0, q_len, q_stride);
    load_rows<HEAD_DIM_V, DQ_ROWS, DQ_THREADS, false>(do_tile, d_o + own.first * MEM_DIM_V, row0, q_len, o_stride);
    u8* const first_stage = kv_tiles + (first & 1) * STAGE;
    load_rows<HEAD_DIM, DQ_KV, DQ_THREADS, false>(first_stage, k, first * DQ_KV, kv_len, k_stride);
    load_rows<HEAD_DIM_V, DQ_KV, DQ_THREADS, false>(first_stage + K_TILE, v, first * DQ_KV, kv_len, v_stride);
    cp_async_commit();

    float acc[DQ_M][PART_QK / 8][4];
    float row_lse[DQ_M][2], row_delta[DQ_M][2];                          // lse in powers of two
    #pragma unroll
    for (int m = 0; m < DQ_M; ++m) {
        #pragma unroll
        for (int n = 0; n < PART_QK / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Rows beyond q_len have q = do = 0: p = 1, dp = 0, ds = 0.
            const int i = my_row + m * 16 + half * 8;
            const i64 at = (i64)own.head_of_all * q_len + i;
            row_lse[m][half] = i < q_len ? lse[at] * LOG2E : 0.f;
            row_delta[m][half] = i < q_len ? delta[at] : 0.f;
        }
    }

    for (int t = first; t < tiles; ++t) {
        const u32 stage = (t & 1) * STAGE;
        cp_async_wait<0>();
        __syncthreads();                          // tile t is there, and every warp has left tile t - 1
        if (t + 1 < tiles) {
            u8* next = kv_tiles + ((t + 1) & 1) * STAGE;
            load_rows<HEAD_DIM, DQ_KV, DQ_THREADS, false>(next, k, (t + 1) * DQ_KV, kv_len, k_stride);
            load_rows<HEAD_DIM_V, DQ_KV, DQ_THREADS, false>(next + K_TILE, v, (t + 1) * DQ_KV, kv_len, v_stride);
            cp_async_commit();
        }

        float p[DQ_M][DQ_KV / 8][4], dp[DQ_M][DQ_KV / 8][4];
        scores<HEAD_DIM, DQ_M, DQ_KV>(p, q_addr, kv_addr + stage + lane_cols<HEAD_DIM>(lane));
        scores<HEAD_DIM_V, DQ_M, DQ_KV>(dp, do_addr, kv_addr + stage + K_TILE + lane_cols<HEAD_DIM_V>(lane));

        const int col0 = t * DQ_KV + (lane & 3) * 2;
#if WINDOW
        const bool masked = (t + 1) * DQ_KV > all_see || t * DQ_KV < below;
#else
        const bool masked = (t + 1) * DQ_KV > all_see;
#endif
        if (masked) {
            #pragma unroll
            for (int m = 0; m < DQ_M; ++m) {
                const int limit0 = min(rows.position(my_row + m * 16), kv_len - 1) - col0;
                const int limit8 = min(rows.position(my_row + m * 16 + 8), kv_len - 1) - col0;
                #pragma unroll
                for (int n = 0; n < DQ_KV / 8; ++n)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (n * 8 + (e & 1) > (e < 2 ? limit0 : limit8)) p[m][n][e] = minus_infinity();
#if WINDOW
                const int least0 = rows.position(my_row + m * 16) - (WINDOW - 1) - col0;
                const int least8 = rows.position(my_row + m * 16 + 8) - (WINDOW - 1) - col0;
                #pragma unroll
                for (int n = 0; n < DQ_KV / 8; ++n)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (n * 8 + (e & 1) < (e < 2 ? least0 : least8)) p[m][n][e] = minus_infinity();
#endif
            }
        }
        #pragma unroll
        for (int m = 0; m < DQ_M; ++m)
            #pragma unroll
            for (int n = 0; n < DQ_KV / 8; ++n)
                #pragma unroll
                for (int half = 0; half < 2; ++half) {
#if DROPOUT
                    bool first, second;
                    keep.two(element0 + (u64)(m * 16 + half * 8) * kv_len + col0 + n * 8, first, second);
                    dp[m][n][2 * half] = first ? dp[m][n][2 * half] * keep_scale : 0.f;
                    dp[m][n][2 * half + 1] = second ? dp[m][n][2 * half + 1] * keep_scale : 0.f;
#endif
                    #pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e)
                        p[m][n][e] = exp2_fast(fmaf(p[m][n][e], scale_log2, -row_lse[m][half])) * (dp[m][n][e] - row_delta[m][half]);
                }
        accumulate<PART_QK, DQ_M, DQ_KV, HEAD_DIM>(acc, p, kv_addr + stage + lane_rows<HEAD_DIM>(lane) + blockIdx.x % WIDE * (PART_QK * 2));
    }
    const int again = block_again();
    const QueryBlock<DQ_ROWS> mine(again / WIDE, batch, q_len, kv_len, q_heads, kv_heads);
    #pragma unroll
    for (int m = 0; m < DQ_M; ++m)
        store_rows<PART_QK>(q_tile + (warp_row + m * 16) * QK_BYTES, acc[m], scale, scale, dq + mine.first * MEM_DIM + again % WIDE * PART_QK, mine.row0 + warp_row + m * 16, q_len, q_stride);
}

// Which keys of which kv head a block of the dk/dv kernel owns, and which part of the head's group it sums.
struct KeyBlock {
    int j0, part, b, kv_head;
    __device__ __forceinline__ KeyBlock(int block, int batch, int kv_heads, int splits) {
        const int per_tile = batch * kv_heads * splits, rest = block % per_tile;
        j0 = block / per_tile * DKV_ROWS;
        part = rest % splits;
        b = rest / splits / kv_heads;
        kv_head = rest / splits % kv_heads;
    }
};

// dk and dv: a block owns DKV_ROWS keys of one kv head and walks, for `group` of its query heads in turn, the
// query tiles upward. Each warp owns 16 keys and computes the transposed scores k q^T, so that probabilities
// and their gradients are operands of the second products straight from registers.
// Grid: kv tiles * splits * batch * kv_heads, the heaviest (first) kv tile first. With splits > 1 each block
// takes a part of the head's group and writes fp32 sums: partial dk [splits, batch * kv_len, kv_heads * d], then
// dv [splits, batch * kv_len, kv_heads * dv].
// Heads too wide for both sums in registers are launched twice, once for dk and once for dv (DKV_DK, DKV_DV).
// Shared: k and v tiles, two stages of q and do tiles, two stages of lse and delta rows.
extern "C" __global__ void __launch_bounds__(DKV_THREADS, DKV_BLOCKS_PER_SM) attention_dkv(
    const bf16* q, const bf16* k, const bf16* v, const bf16* d_o, const float* lse, const float* delta,
    const unsigned* words, bf16* dk, bf16* dv, float* partial, int splits,
    int batch, int q_len, int kv_len, int q_heads, int kv_heads, int start0, int len0, int start1,
    float scale, unsigned seed_offset, unsigned draw, unsigned threshold, float keep_scale) {
    extern __shared__ __align__(16) u8 shared[];
    constexpr bool DK = DKV_DK, DV = DKV_DV;
    constexpr int Q_TILE = DKV_Q * QK_BYTES, STAGE = Q_TILE + DKV_Q * V_BYTES;
    u8* const k_tile = shared;
    u8* const v_tile = k_tile + DKV_ROWS * QK_BYTES;
    u8* const q_tiles = v_tile + DKV_ROWS * V_BYTES;                     // a stage: q, then do
    float* const row_values = reinterpret_cast<float*>(q_tiles + 2 * STAGE);    // stage s: lse at 2s, delta at 2s + 1

    const Rows rows{start0, len0, start1};
    const int group = q_heads / kv_heads / splits;                       // query heads of this block
    const KeyBlock own(blockIdx.x / WIDE, batch, kv_heads, splits);
    const int j0 = own.j0, b = own.b, first_head = (own.kv_head * splits + own.part) * group;
    const int q_stride = q_heads * MEM_DIM, o_stride = q_heads * MEM_DIM_V;
    const int k_stride = kv_heads * MEM_DIM, v_stride = kv_heads * MEM_DIM_V;
    const int q_tiles_of_head = (q_len + DKV_Q - 1) / DKV_Q;

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int my_key = j0 + warp * 16 + (lane >> 2);                     // + 8
    const float scale_log2 = scale * LOG2E;
    const u32 k_addr = smem_addr(k_tile) + warp * 16 * QK_BYTES + lane_rows<HEAD_DIM>(lane);
    const u32 v_addr = smem_addr(v_tile) + warp * 16 * V_BYTES + lane_rows<HEAD_DIM_V>(lane);
    const u32 q_addr = smem_addr(q_tiles);
#if DROPOUT
    const Keep keep(words, seed_offset, draw, threshold);
#endif

    // First q tile from t on with a row that sees a key of this block.
    const auto seeing = [&](int t) {
#if WINDOW
        while (t < q_tiles_of_head
               && (rows.highest(t * DKV_Q, min((t + 1) * DKV_Q, q_len) - 1) < j0
                   || rows.first_seen(t * DKV_Q, min((t + 1) * DKV_Q, q_len) - 1) > j0 + DKV_ROWS - 1)) ++t;
#else
        while (t < q_tiles_of_head && rows.highest(t * DKV_Q, min((t + 1) * DKV_Q, q_len) - 1) < j0) ++t;
#endif
        return t;
    };
    const auto load_stage = [&](int stage, int head, int t) {
        u8* tile = q_tiles + stage * STAGE;
        const i64 first = (i64)b * q_len * q_heads + head;
        load_rows<HEAD_DIM, DKV_Q, DKV_THREADS, true>(tile, q + first * MEM_DIM, t * DKV_Q, q_len, q_stride);
        load_rows<HEAD_DIM_V, DKV_Q, DKV_THREADS, true>(tile + Q_TILE, d_o + first * MEM_DIM_V, t * DKV_Q, q_len, o_stride);
        if (threadIdx.x < 2 * DKV_Q) {
            const int which = threadIdx.x / DKV_Q, r = threadIdx.x % DKV_Q, i = t * DKV_Q + r;
            const float* source = which ? delta : lse;
            const bool valid = i < q_len;
            // Rows beyond q_len get zeros: p = 1 meets do = 0, ds = 1 * (0 - 0).
            cp_async4_zfill(row_values + (stage * 2 + which) * DKV_Q + r,
                            valid ? source + ((i64)b * q_heads + head) * q_len + i : source, valid);
        }
    };

    float dk_acc[1][PART_QK / 8][4], dv_acc[1][PART_V / 8][4];      // an unused one takes no registers
    #pragma unroll
    for (int n = 0; n < PART_QK / 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) dk_acc[0][n][e] = 0.f;
    #pragma unroll
    for (int n = 0; n < PART_V / 8; ++n)
        #pragma unroll
        for (int e = 0; e < 4; ++e) dv_acc[0][n][e] = 0.f;

    const int first_tile = seeing(0);
    int g = first_tile < q_tiles_of_head ? 0 : group, t = first_tile, stage = 0;
    const i64 kv_first = (i64)b * kv_len * kv_heads + own.kv_head;
    load_rows<HEAD_DIM, DKV_ROWS, DKV_THREADS, false>(k_tile, k + kv_first * MEM_DIM, j0, kv_len, k_stride);
    if (DK) load_rows<HEAD_DIM_V, DKV_ROWS, DKV_THREADS, false>(v_tile, v + kv_first * MEM_DIM_V, j0, kv_len, v_stride);
    if (g < group) load_stage(0, first_head, t);
    cp_async_commit();

    while (g < group) {
        int next_g = g, next_t = seeing(t + 1);
        if (next_t == q_tiles_of_head) { next_t = first_tile; ++next_g; }
        cp_async_wait<0>();
        __syncthreads();                          // this tile is there, and every warp has left the last one
        if (next_g < group) {
            load_stage(stage ^ 1, first_head + next_g, next_t);
            cp_async_commit();
        }
        const u32 q_now = q_addr + stage * STAGE, do_now = q_now + Q_TILE;
        const float* const lse_now = row_values + stage * 2 * DKV_Q + (lane & 3) * 2;
        const float* const delta_now = lse_now + DKV_Q;

        float p[1][DKV_Q / 8][4], dp[1][DKV_Q / 8][4];                   // [key, query]
        scores<HEAD_DIM, 1, DKV_Q>(p, k_addr, q_now + lane_cols<HEAD_DIM>(lane));
        const int i0 = t * DKV_Q + (lane & 3) * 2;
        const int last_q = min((t + 1) * DKV_Q, q_len) - 1;
#if WINDOW
        const bool masked = rows.lowest(t * DKV_Q, last_q) < j0 + DKV_ROWS - 1 || rows.highest(t * DKV_Q, last_q) - (WINDOW - 1) > j0;
#else
        const bool masked = rows.lowest(t * DKV_Q, last_q) < j0 + DKV_ROWS - 1;
#endif
        if (masked) {
            #pragma unroll
            for (int n = 0; n < DKV_Q / 8; ++n)
                #pragma unroll
                for (int odd = 0; odd < 2; ++odd) {
                    const int position = rows.position(i0 + n * 8 + odd);
                    if (my_key > position) p[0][n][odd] = minus_infinity();
                    if (my_key + 8 > position) p[0][n][2 + odd] = minus_infinity();
#if WINDOW
                    if (my_key < position - (WINDOW - 1)) p[0][n][odd] = minus_infinity();
                    if (my_key + 8 < position - (WINDOW - 1)) p[0][n][2 + odd] = minus_infinity();
#endif
                }
        }
        #pragma unroll
        for (int n = 0; n < DKV_Q / 8; ++n) {
            const float2 l = *reinterpret_cast<const float2*>(lse_now + n * 8);
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                p[0][n][e] = exp2_fast(fmaf(p[0][n][e], scale_log2, -(e & 1 ? l.y : l.x) * LOG2E));
        }
        if (DK) scores<HEAD_DIM_V, 1, DKV_Q>(dp, v_addr, do_now + lane_cols<HEAD_DIM_V>(lane));
#if DROPOUT
        const u64 element0 = (((u64)b * q_heads + first_head + g) * q_len + i0) * kv_len + my_key;
#endif
        #pragma unroll
        for (int n = 0; n < DKV_Q / 8; ++n) {
            const float2 d = *reinterpret_cast<const float2*>(delta_now + n * 8);
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
#if DROPOUT
                const bool kept = keep.one(element0 + (u64)(n * 8 + (e & 1)) * kv_len + (e & 2) * 4);
                if (DK) dp[0][n][e] = p[0][n][e] * ((kept ? dp[0][n][e] * keep_scale : 0.f) - (e & 1 ? d.y : d.x));
                if (!kept) p[0][n][e] = 0.f;
#else
                if (DK) dp[0][n][e] = p[0][n][e] * (dp[0][n][e] - (e & 1 ? d.y : d.x));
#endif
            }
        }
        if (DV) accumulate<PART_V, 1, DKV_Q, HEAD_DIM_V>(dv_acc, p, do_now + lane_rows<HEAD_DIM_V>(lane) + blockIdx.x % WIDE * (PART_V * 2));
        if (DK) accumulate<PART_QK, 1, DKV_Q, HEAD_DIM>(dk_acc, dp, q_now + lane_rows<HEAD_DIM>(lane) + blockIdx.x % WIDE * (PART_QK * 2));
        g = next_g;
        t = next_t;
        stage ^= 1;
    }
    cp_async_wait<0>();
    __syncthreads();                              // also when no query sees these keys: k and v have landed

    const int again = block_again(), column = again % WIDE;
    const KeyBlock mine(again / WIDE, batch, kv_heads, splits);
    const int warp_key = mine.j0 + warp * 16;
    const i64 out = (i64)mine.b * kv_len * kv_heads + mine.kv_head;
    if (splits == 1) {
        if (DK) store_rows<PART_QK>(k_tile + warp * 16 * QK_BYTES, dk_acc[0], scale, scale, dk + out * MEM_DIM + column * PART_QK, warp_key, kv_len, k_stride);
        if (DV) store_rows<PART_V>(v_tile + warp * 16 * V_BYTES, dv_acc[0], keep_scale, keep_scale, dv + out * MEM_DIM_V + column * PART_V, warp_key, kv_len, v_stride);
        return;
    }
    const i64 rows_of_all = (i64)batch * kv_len;
    float* const dk_part = partial + mine.part * rows_of_all * k_stride + out * MEM_DIM + column * PART_QK;
    float* const dv_part = partial + splits * rows_of_all * k_stride + mine.part * rows_of_all * v_stride + out * MEM_DIM_V + column * PART_V;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int j = warp_key + (lane >> 2) + half * 8;
        if (j >= kv_len) continue;
        const i64 k_at = (i64)j * k_stride + (lane & 3) * 2, v_at = (i64)j * v_stride + (lane & 3) * 2;
        #pragma unroll
        for (int n = 0; n < PART_QK / 8; ++n)
            if (DK && n * 8 < PART_QK - PADDING) *reinterpret_cast<float2*>(dk_part + k_at + n * 8) = make_float2(dk_acc[0][n][2 * half] * scale, dk_acc[0][n][2 * half + 1] * scale);
        #pragma unroll
        for (int n = 0; n < PART_V / 8; ++n)
            if (DV && n * 8 < PART_V - PADDING) *reinterpret_cast<float2*>(dv_part + v_at + n * 8) = make_float2(dv_acc[0][n][2 * half] * keep_scale, dv_acc[0][n][2 * half + 1] * keep_scale);
    }
}

// dk and dv from their partial sums, in order. Eight values a thread; blockIdx.y: 0 dk, 1 dv.
extern "C" __global__ void __launch_bounds__(256) attention_dkv_sum(
    const float* partial, bf16* dk, bf16* dv, int splits, long long dk_elements, long long dv_elements) {
    const i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 8;
    const i64 elements = blockIdx.y ? dv_elements : dk_elements;
    if (at >= elements) return;
    const float* source = partial + (blockIdx.y ? splits * dk_elements : 0) + at;
    float sum[8], x[8];
    load8(source, sum);
    for (int s = 1; s < splits; ++s) {
        load8(source + s * elements, x);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += x[e];
    }
    store8((blockIdx.y ? dv : dk) + at, sum);
}

#if SINKS
// dsinks[b, h] = -sum over the rows of exp(sink - lse) * delta: a sink has no value, so nothing but delta goes back to it.
// One block a sequence and head.
extern "C" __global__ void __launch_bounds__(256) attention_dsinks(
    const float* lse, const float* delta, const bf16* sinks, float* dsinks, int q_len, int q_heads) {
    __shared__ float scratch[32];
    const i64 at = (i64)blockIdx.x * q_len;
    const float sink = to_f32(sinks[blockIdx.x % q_heads]);
    float sum = 0.f;
    for (int i = threadIdx.x; i < q_len; i += 256) sum = fmaf(-exp2_fast((sink - lse[at + i]) * LOG2E), delta[at + i], sum);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) dsinks[blockIdx.x] = sum;
}
#endif
