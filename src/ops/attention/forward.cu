// Attention forward (FlashAttention-2, Dao 2023): a block owns FWD_ROWS query rows of one head and walks the
// key tiles upward, with an online softmax (Milakov and Gimelshein 2018). Each warp owns FWD_M * 16 rows, so
// probabilities pass from the first product to the second in registers. With WINDOW (keys that a row sees at most, 0: all)
// tiles that no row sees are never loaded. With SINKS every head has one more logit in its denominator, which comes last.
constexpr int FWD_THREADS = FWD_WARPS * 32;
constexpr int FWD_ROWS = FWD_WARPS * FWD_M * 16;

// Grid: q tiles * batch * q_heads, the heaviest (last) q tile first. Shared: q tile, then two stages of k
// and v tiles.
#if !SINKS
extern "C" __global__ void __launch_bounds__(FWD_THREADS, FWD_BLOCKS_PER_SM) attention_fwd(
    const bf16* q, const bf16* k, const bf16* v, const unsigned* words, bf16* o, float* lse,
    int batch, int q_len, int kv_len, int q_heads, int kv_heads, int start0, int len0, int start1,
    float scale, unsigned seed_offset, unsigned draw, unsigned threshold, float keep_scale)
#else
extern "C" __global__ void __launch_bounds__(FWD_THREADS, FWD_BLOCKS_PER_SM) attention_fwd_sinks(
    const bf16* q, const bf16* k, const bf16* v, const bf16* sinks, const unsigned* words, bf16* o, float* lse,
    int batch, int q_len, int kv_len, int q_heads, int kv_heads, int start0, int len0, int start1,
    float scale, unsigned seed_offset, unsigned draw, unsigned threshold, float keep_scale)
#endif
{
    extern __shared__ __align__(16) u8 shared[];
    constexpr int K_TILE = FWD_KV * QK_BYTES, STAGE = K_TILE + FWD_KV * row_bytes(PART_V);
    u8* const q_tile = shared;
    u8* const kv_tiles = shared + FWD_ROWS * QK_BYTES;    // a stage: k, then v

    const Rows rows{start0, len0, start1};
    const QueryBlock<FWD_ROWS> own(blockIdx.x / WIDE, batch, q_len, kv_len, q_heads, kv_heads);
    const int row0 = own.row0, last_row = min(row0 + FWD_ROWS, q_len) - 1;
    const int k_stride = kv_heads * MEM_DIM, v_stride = kv_heads * MEM_DIM_V;
    k += (i64)own.kv_row * k_stride + own.kv_head * MEM_DIM;
    v += (i64)own.kv_row * v_stride + own.kv_head * MEM_DIM_V + blockIdx.x % WIDE * PART_V;

    const int seen = min(rows.highest(row0, last_row) + 1, kv_len);      // keys that some row sees
    const int tiles = (seen + FWD_KV - 1) / FWD_KV;
    const int all_see = min(rows.lowest(row0, last_row) + 1, kv_len);    // keys that every row sees
#if WINDOW
    const int first = rows.first_seen(row0, last_row) / FWD_KV;          // tile
    const int below = rows.highest(row0, last_row) - (WINDOW - 1);       // keys before this one are not seen by every row
#else
    constexpr int first = 0;
#endif

    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int warp_row = warp * FWD_M * 16;                              // within the block
    const int my_row = row0 + warp_row + (lane >> 2);                    // + 16 m, + 8
    const u32 q_addr = smem_addr(q_tile) + warp_row * QK_BYTES + lane_rows<HEAD_DIM>(lane);
    const u32 kv_addr = smem_addr(kv_tiles);
    const float scale_log2 = scale * LOG2E;
#if DROPOUT
    const Keep keep(words, seed_offset, draw, threshold);
    const u64 element0 = ((u64)own.head_of_all * q_len + my_row) * kv_len;
#endif

    load_rows<HEAD_DIM, FWD_ROWS, FWD_THREADS, false>(q_tile, q + own.first * MEM_DIM, row0, q_len, q_heads * MEM_DIM);
    u8* const first_stage = kv_tiles + (first & 1) * STAGE;
    load_rows<HEAD_DIM, FWD_KV, FWD_THREADS, false>(first_stage, k, first * FWD_KV, kv_len, k_stride);
    load_rows<PART_V, FWD_KV, FWD_THREADS, false>(first_stage + K_TILE, v, first * FWD_KV, kv_len, v_stride);
    cp_async_commit();

    float acc[FWD_M][PART_V / 8][4];
    float row_max[FWD_M][2], row_sum[FWD_M][2];                          // of unscaled scores; sum of own columns
    #pragma unroll
    for (int m = 0; m < FWD_M; ++m) {
        #pragma unroll
        for (int n = 0; n < PART_V / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.f;
        row_max[m][0] = row_max[m][1] = minus_infinity();
        row_sum[m][0] = row_sum[m][1] = 0.f;
    }

    for (int t = first; t < tiles; ++t) {
        const u32 stage = (t & 1) * STAGE;
        cp_async_wait<0>();
        __syncthreads();                          // tile t is there, and every warp has left tile t - 1
        if (t + 1 < tiles) {
            u8* next = kv_tiles + ((t + 1) & 1) * STAGE;
            load_rows<HEAD_DIM, FWD_KV, FWD_THREADS, false>(next, k, (t + 1) * FWD_KV, kv_len, k_stride);
            load_rows<PART_V, FWD_KV, FWD_THREADS, false>(next + K_TILE, v, (t + 1) * FWD_KV, kv_len, v_stride);
            cp_async_commit();
        }

        float s[FWD_M][FWD_KV / 8][4];
        scores<HEAD_DIM, FWD_M, FWD_KV>(s, q_addr, kv_addr + stage + lane_cols<HEAD_DIM>(lane));

        const int col0 = t * FWD_KV + (lane & 3) * 2;
#if WINDOW
        const bool masked = (t + 1) * FWD_KV > all_see || t * FWD_KV < below;
#else
        const bool masked = (t + 1) * FWD_KV > all_see;
#endif
        if (masked) {
            #pragma unroll
            for (int m = 0; m < FWD_M; ++m) {
                // Without a window key 0 is seen by every row (also by those beyond q_len), so after tile 0 no maximum is -inf.
                const int limit0 = min(rows.position(my_row + m * 16), kv_len - 1);
                const int limit8 = min(rows.position(my_row + m * 16 + 8), kv_len - 1);
                #pragma unroll
                for (int n = 0; n < FWD_KV / 8; ++n)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (col0 + n * 8 + (e & 1) > (e < 2 ? limit0 : limit8)) s[m][n][e] = minus_infinity();
#if WINDOW
                const int least0 = rows.position(my_row + m * 16) - (WINDOW - 1);
                const int least8 = rows.position(my_row + m * 16 + 8) - (WINDOW - 1);
                #pragma unroll
                for (int n = 0; n < FWD_KV / 8; ++n)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (col0 + n * 8 + (e & 1) < (e < 2 ? least0 : least8)) s[m][n][e] = minus_infinity();
#endif
            }
        }
        #pragma unroll
        for (int m = 0; m < FWD_M; ++m)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = row_max[m][half];
                #pragma unroll
                for (int n = 0; n < FWD_KV / 8; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
#if WINDOW
                // A row may see no key so far: 2^(-inf - 0) is 0 where 2^(-inf + inf) would be NaN.
                const float shift = top == minus_infinity() ? 0.f : top * scale_log2;
                const float shrink = exp2_fast(fmaf(row_max[m][half], scale_log2, -shift));
#else
                const float shrink = exp2_fast((row_max[m][half] - top) * scale_log2);
                const float shift = top * scale_log2;
#endif
                row_max[m][half] = top;
                float sum = row_sum[m][half] * shrink;
                #pragma unroll
                for (int n = 0; n < FWD_KV / 8; ++n)
                    #pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        s[m][n][e] = exp2_fast(fmaf(s[m][n][e], scale_log2, -shift));
                        sum += s[m][n][e];
                    }
                row_sum[m][half] = sum;
                #pragma unroll
                for (int n = 0; n < PART_V / 8; ++n) {
                    acc[m][n][2 * half] *= shrink;
                    acc[m][n][2 * half + 1] *= shrink;
                }
#if DROPOUT
                const u64 element = element0 + (u64)(m * 16 + half * 8) * kv_len + col0;
                #pragma unroll
                for (int n = 0; n < FWD_KV / 8; ++n) {
                    bool first, second;
                    keep.two(element + n * 8, first, second);
                    if (!first) s[m][n][2 * half] = 0.f;
                    if (!second) s[m][n][2 * half + 1] = 0.f;
                }
#endif
            }
        accumulate<PART_V, FWD_M, FWD_KV>(acc, s, kv_addr + stage + K_TILE + lane_rows<PART_V>(lane));
    }

    const int again = block_again(), part = again % WIDE;
    const QueryBlock<FWD_ROWS> mine(again / WIDE, batch, q_len, kv_len, q_heads, kv_heads);
    const int warp_row0 = mine.row0 + warp_row;
    #pragma unroll
    for (int m = 0; m < FWD_M; ++m) {
        float inverse[2];
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = row_sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
#if SINKS
            const float sink = to_f32(sinks[mine.head_of_all % q_heads]), own_top = row_max[m][half] * scale;
            const float top = fmaxf(own_top, sink), factor = exp2_fast((own_top - top) * LOG2E);
            sum = fmaf(sum, factor, exp2_fast((sink - top) * LOG2E));
            inverse[half] = keep_scale * factor / sum;
#else
            const float top = row_max[m][half] * scale;
            inverse[half] = keep_scale / sum;
#endif
            const int i = warp_row0 + (lane >> 2) + m * 16 + half * 8;
            if ((lane & 3) == 0 && i < q_len && part == 0)
                lse[(i64)mine.head_of_all * q_len + i] = top + logf(sum);
        }
        // Value rows are no wider than query rows, so the fragment's own q rows hold them.
        store_rows<PART_V>(q_tile + (warp_row + m * 16) * QK_BYTES, acc[m], inverse[0], inverse[1],
                           o + mine.first * MEM_DIM_V + part * PART_V, warp_row0 + m * 16, q_len, q_heads * MEM_DIM_V);
    }
}
