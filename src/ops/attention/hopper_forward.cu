// Attention forward on wgmma: a block owns 64 query rows of one head and walks the key tiles upward, with an online softmax. The
// scores of the next key tile are formed while the values of this one are summed (Shah et al., "FlashAttention-3", 2024).

// Grid: q tiles * batch * q_heads, the heaviest (last) q tile first. Shared: a q tile, two k tiles, two v tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_fwd_wgmma(
    const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse, int batch, int len, int q_heads, int kv_heads, float scale) {
    extern __shared__ __align__(1024) u8 shared[];
    u8* const q_tile = shared;
    u8* const k_tiles = q_tile + TILE;
    u8* const v_tiles = k_tiles + 2 * TILE;

    const int heads = batch * q_heads, head_of_all = blockIdx.x % heads;
    const int tiles = (len + ROWS - 1) / ROWS - blockIdx.x / heads;      // that some row sees
    const int row0 = (tiles - 1) * ROWS;
    const int b = head_of_all / q_heads, h = head_of_all % q_heads;
    const i64 first = ((i64)b * len * q_heads + h) * D;
    const int q_stride = q_heads * D, kv_stride = kv_heads * D;
    k += (i64)b * len * kv_stride + h / (q_heads / kv_heads) * D;
    v += (i64)b * len * kv_stride + h / (q_heads / kv_heads) * D;

    const int lane = threadIdx.x & 31, my_row = row0 + threadIdx.x / 32 * 16 + (lane >> 2);      // + 8
    const float scale_log2 = scale * LOG2E;

    // Loads in the order of their use, ahead of it: keys of tile t with values of tile t - 1.
    const auto load = [&](int t) {
        if (t < tiles) load_tile<false>(k_tiles + (t & 1) * TILE, k, t * ROWS, len, kv_stride);
        if (t > 0 && t <= tiles) load_tile<false>(v_tiles + (t - 1 & 1) * TILE, v, (t - 1) * ROWS, len, kv_stride);
        cp_async_commit();
    };
    // Keys of tile t and values of tile t - 1 are there, and all warps have left step t - 1.
    const auto step = [&](int t) {
        if (t == 0) cp_async_wait<1>();
        else cp_async_wait<0>();
        proxy_fence();
        __syncthreads();
        if (t > 0) load(t + 1);
    };
    load_tile<false>(q_tile, q + first, row0, len, q_stride);
    load(0);
    load(1);

    const u64 q_desc = descriptor(q_tile), k_desc = descriptor(k_tiles), v_desc = descriptor(v_tiles);
    float acc[D / 8][4], s[ROWS / 8][4];
    u32 p[ROWS / 16][4];
    float row_max[2] = {minus_infinity(), minus_infinity()}, row_sum[2] = {0.f, 0.f}, shrink[2];
    zero(acc);

    // Scores of tile t to probabilities; what earlier sums shrink by.
    const auto softmax = [&](int t) {
        if (t == tiles - 1) {                    // the diagonal; it hides keys beyond the end too
            const int limit = my_row - t * ROWS - (lane & 3) * 2;
            #pragma unroll
            for (int n = 0; n < ROWS / 8; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (n * 8 + (e & 1) > limit + (e < 2 ? 0 : 8)) s[n][e] = minus_infinity();
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Key 0 is seen by every row, so after tile 0 no maximum is -inf.
            float top = row_max[half];
            #pragma unroll
            for (int n = 0; n < ROWS / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            shrink[half] = exp2_fast((row_max[half] - top) * scale_log2);
            const float shift = top * scale_log2;
            row_max[half] = top;
            float sum = row_sum[half] * shrink[half];
            #pragma unroll
            for (int n = 0; n < ROWS / 8; ++n)
                #pragma unroll
                for (int e = 2 * half; e < 2 * half + 2; ++e) {
                    s[n][e] = exp2_fast(fmaf(s[n][e], scale_log2, -shift));
                    sum += s[n][e];
                }
            row_sum[half] = sum;
        }
    };

    step(0);
    wgmma_fence();
    scores(s, q_desc, k_desc);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
    softmax(0);
    pack(p, s);
    for (int t = 1; t < tiles; ++t) {
        step(t);
        wgmma_fence();
        scores(s, q_desc, k_desc + (t & 1) * TILE_STEP);
        wgmma_commit();
        accumulate(acc, p, v_desc + (t - 1 & 1) * TILE_STEP);
        wgmma_commit();
        wgmma_wait<1>();
        pin(s);
        softmax(t);
        wgmma_wait<0>();
        pin(acc);
        #pragma unroll
        for (int n = 0; n < D / 8; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) acc[n][e] *= shrink[e >> 1];
        pack(p, s);
    }
    step(tiles);
    wgmma_fence();
    accumulate(acc, p, v_desc + (tiles - 1 & 1) * TILE_STEP);
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);

    float inverse[2];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = row_sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        inverse[half] = 1.f / sum;
        const int i = my_row + half * 8;
        if ((lane & 3) == 0 && i < len) lse[(i64)head_of_all * len + i] = row_max[half] * scale + logf(sum);
    }
    store_tile(q_tile, acc, inverse[0], inverse[1], o + first, row0, len, q_stride);
}
