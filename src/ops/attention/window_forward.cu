// Attention forward in a narrow window: a block owns 128 query rows of the heads that share a key head. The keys and values that these
// rows see (128 + WINDOW) stay in shared memory for all of the heads, and each warp takes a strip of rows of one head after the other,
// with all its scores in registers: one pass, no online softmax, and no barrier between warps once keys and values are there. A copy
// of the next head's rows runs meanwhile.

// The warp's strip of one head. first_strip: the first strip of the block's keys, below 0 where the sequence begins after it.
// keys: in shared memory, values KEYS rows on. `between` waits for these.
template <typename Between>
__device__ __forceinline__ void strip_forward(float (&acc)[1][D / 8][4], float (&top)[2], float (&sum)[2], const u32 (&q)[1][D / 16][4],
                                              u32 keys, int first_strip, float scale_log2, Between between) {
    const int thread = anew(threadIdx.x), lane = thread & 31, warp = thread >> 5, row = lane >> 2, col = (lane & 3) * 2;
    const Lane k = lane_cols(keys + warp * STRIP_BYTES, lane);
    float s[STRIPS][1][2][4];
    #pragma unroll
    for (int t = 0; t < STRIPS; ++t) {
        scores(s[t], q, k, t);
        const int back = BACK - t;
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (cut(back) && !visible(back * STRIP + row + (e & 2) * 4 - (col + n * 8 + (e & 1)))) s[t][0][n][e] = minus_infinity();
            }
    }
    if (first_strip < 0) {
        #pragma unroll
        for (int t = 0; t < BACK; ++t)
            #pragma unroll
            for (int n = 0; n < 2; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (first_strip + warp + t < 0) s[t][0][n][e] = minus_infinity();
    }
    u32 p[STRIPS][1][4];
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = minus_infinity();                   // every row sees its own key
        #pragma unroll
        for (int t = 0; t < STRIPS; ++t)
            #pragma unroll
            for (int n = 0; n < 2; ++n) most = fmaxf(most, fmaxf(s[t][0][n][2 * half], s[t][0][n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        const float shift = most * scale_log2;
        float even = 0.f, odd = 0.f;
        #pragma unroll
        for (int t = 0; t < STRIPS; ++t)
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float a = exp2_fast(fmaf(s[t][0][n][2 * half], scale_log2, -shift));
                const float b = exp2_fast(fmaf(s[t][0][n][2 * half + 1], scale_log2, -shift));
                even += a;
                odd += b;
                p[t][0][2 * n + half] = pack_bf16(a, b);
            }
        float all = even + odd;
        all += __shfl_xor_sync(0xffffffffu, all, 1);
        all += __shfl_xor_sync(0xffffffffu, all, 2);
        top[half] = most;
        sum[half] = all;
    }
    between();
    const int again = anew(threadIdx.x);
    const Lane v = lane_rows(keys + (KEYS + (again >> 5) * STRIP) * LINE, again & 31);
    zero(acc[0]);
    #pragma unroll
    for (int t = 0; t < STRIPS; ++t) accumulate(acc, p[t], v, t);
}

// Shared: keys, values, then a strip of q and one of o a warp.
#if SINKS
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention_fwd_window_sinks(
    const bf16* q, const bf16* k, const bf16* v, const bf16* sinks, bf16* o, float* lse,
    int len, int q_heads, int kv_heads, int heads, float scale)
#else
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention_fwd_window(
    const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse,
    int len, int q_heads, int kv_heads, int heads, float scale)
#endif
{
    extern __shared__ __align__(16) u8 shared[];
    u8* const k_tile = shared;
    u8* const v_tile = k_tile + KEYS * LINE;
    u8* const strips = v_tile + KEYS * LINE;             // of a warp: q, then o

    const Owned own(ROWS, q_heads / kv_heads, heads);
    const int q_stride = q_heads * D, k_stride = kv_heads * D;
    const i64 kv_first = (i64)own.b * len * k_stride + own.kv_head * D;
    // Indices are read anew where they are used: scores leave no registers for what depends on them.
    const auto load_q = [&](int i) {
        const int warp = anew(threadIdx.x) >> 5;
        const i64 first = ((i64)anew(blockIdx.z) * len * q_heads + anew(blockIdx.y) * heads + i) * D;
        load_strip(strips + warp * 2 * STRIP_BYTES, q + first, anew(blockIdx.x) * ROWS + warp * STRIP, len, q_stride);
    };

    load_q(0);
    load_rows<KEYS, THREADS, false>(k_tile, k + kv_first, own.row0 - BACK * STRIP, len, k_stride);
    cp_async_commit();
    load_rows<KEYS, THREADS, false>(v_tile, v + kv_first, own.row0 - BACK * STRIP, len, k_stride);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();                                     // q and keys are there

    for (int i = 0; i < heads; ++i) {
        if (i > 0) {
            cp_async_wait<0>();
            __syncwarp();
        }
        const int thread = anew(threadIdx.x);
        u32 a[1][D / 16][4];
        load_fragments(a[0], lane_rows(smem_addr(strips) + (thread >> 5) * 2 * STRIP_BYTES, thread & 31));
        __syncwarp();                                    // every lane has read the strip
        if (i + 1 < heads) load_q(i + 1);
        cp_async_commit();
        const auto values_there = [&]() {
            if (i > 0) return;
            cp_async_wait<1>();                          // all but the next strip
            __syncthreads();
        };
        float acc[1][D / 8][4], top[2], sum[2];
        strip_forward(acc, top, sum, a, smem_addr(k_tile), blockIdx.x * WARPS - BACK, scale * LOG2E, values_there);

        const int now = anew(threadIdx.x), lane = now & 31, warp = now >> 5, row0 = anew(blockIdx.x) * ROWS + warp * STRIP;
        const int head = anew(blockIdx.y) * heads + i;
        const i64 b = anew(blockIdx.z);
        float inverse[2];
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            float all = sum[half], most = top[half] * scale, factor = 1.f;
#if SINKS
            const float sink = to_f32(sinks[head]), own_most = most;
            most = fmaxf(own_most, sink);
            factor = exp2_fast((own_most - most) * LOG2E);
            all = fmaf(all, factor, exp2_fast((sink - most) * LOG2E));
#endif
            inverse[half] = __fdividef(factor, all);     // the exact division takes registers
            const int row = row0 + (lane >> 2) + half * 8;
            if ((lane & 3) == 0 && row < len) lse[(b * q_heads + head) * len + row] = most + logf(all);
        }
        store_strip(strips + (warp * 2 + 1) * STRIP_BYTES, acc[0], inverse[0], inverse[1], o + (b * len * q_heads + head) * D, row0, len, q_stride);
    }
}
