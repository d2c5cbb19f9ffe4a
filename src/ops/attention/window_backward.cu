// Attention backward in a narrow window: one kernel owns rows of dq and forms delta = do . o for all, one owns rows of dk and dv, one
// sums the sinks' gradients. The first two recompute the probabilities from the saved log-sum-exp. Every sum has one owner and a fixed order.

// dq of one strip of one head. first_strip: the first strip of keys, or below 0 where the sequence begins after it.
__device__ __forceinline__ void strip_dq(float (&acc)[1][D / 8][4], const u32 (&q)[1][D / 16][4], const u32 (&d_o)[1][D / 16][4],
                                         const float (&row_lse)[2], const float (&row_delta)[2], const Lane& k_cols,
                                         const Lane& v_cols, const Lane& k_rows, int first_strip, float scale_log2) {
    const int lane = threadIdx.x & 31, row = lane >> 2, col = (lane & 3) * 2;
    zero(acc[0]);
    #pragma unroll (STRIPS > 3 ? 2 : 1)                  // more take more than 128 registers
    for (int t = max(-first_strip, 0); t < STRIPS; ++t) {
        const int back = BACK - t;
        float p[1][2][4], dp[1][2][4];
        scores(p, q, k_cols, t);
        scores(dp, d_o, v_cols, t);
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int e = 0; e < 4; ++e)
                p[0][n][e] = exp2_fast(fmaf(p[0][n][e], scale_log2, -row_lse[e >> 1])) * (dp[0][n][e] - row_delta[e >> 1]);
        if (cut(back)) {
            #pragma unroll
            for (int n = 0; n < 2; ++n)
                #pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (!visible(back * STRIP + row + (e & 2) * 4 - (col + n * 8 + (e & 1)))) p[0][n][e] = 0.f;
        }
        u32 a[1][4];
        pack(a[0], p[0]);
        accumulate(acc, a, k_rows, t);
    }
}

// A block owns what a forward block owns: keys and values stay in shared memory, a warp takes a strip of one head after the other. Shared: keys, values, then strips of q, do and dq a warp. `delta` f32 [b, q_heads, len].
// For compute capability 10 NVRTC 13.0 allots two blocks' 128 registers so that up to 128 bytes are spilled; for 8.0 and 9.0 it finds room.
#if __CUDA_ARCH__ >= 1000
constexpr int DQ_BLOCKS_PER_SM = 1;
#else
constexpr int DQ_BLOCKS_PER_SM = BLOCKS_PER_SM;
#endif
extern "C" __global__ void __launch_bounds__(THREADS, DQ_BLOCKS_PER_SM) attention_dq_window(
    const bf16* q, const bf16* k, const bf16* v, const bf16* o, const float* lse, const bf16* d_o, float* delta, bf16* dq,
    int len, int q_heads, int kv_heads, int heads, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u8* const k_tile = shared;
    u8* const v_tile = k_tile + KEYS * LINE;
    u8* const q_strip = v_tile + KEYS * LINE + warp * 3 * STRIP_BYTES;
    u8* const do_strip = q_strip + STRIP_BYTES;
    u8* const dq_strip = do_strip + STRIP_BYTES;

    const Owned own(ROWS, q_heads / kv_heads, heads);
    const int row0 = own.row0 + warp * STRIP;            // of this warp
    const int q_stride = q_heads * D, k_stride = kv_heads * D;
    const i64 kv_first = (i64)own.b * len * k_stride + own.kv_head * D;
    const i64 q_first = (i64)own.b * len * q_stride + own.first_head * D;
    const i64 row_first = ((i64)own.b * q_heads + own.first_head) * len;         // in lse and delta

    // The strip's o, in the pieces that this lane also reads of do: rows 4 i + lane / 8.
    uint4 o_pieces[STRIP / 4];
    const auto load_o = [&](int head) {
        const int piece = anew(lane);
        #pragma unroll
        for (int i = 0; i < STRIP / 4; ++i) {
            const int row = min(row0 + i * 4 + piece / PIECES, len - 1);
            o_pieces[i] = *reinterpret_cast<const uint4*>(o + q_first + head * D + (i64)row * q_stride + piece % PIECES * 8);
        }
    };
    load_strip(q_strip, q + q_first, row0, len, q_stride);
    load_strip(do_strip, d_o + q_first, row0, len, q_stride);
    load_o(0);
    load_rows<KEYS, THREADS, false>(k_tile, k + kv_first, own.row0 - BACK * STRIP, len, k_stride);
    load_rows<KEYS, THREADS, false>(v_tile, v + kv_first, own.row0 - BACK * STRIP, len, k_stride);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();

    const Lane q_lane = lane_rows(smem_addr(q_strip), lane), do_lane = lane_rows(smem_addr(do_strip), lane);
    const u32 keys = smem_addr(k_tile) + warp * STRIP_BYTES;
    const Lane k_cols = lane_cols(keys, lane), v_cols = lane_cols(keys + KEYS * LINE, lane), k_rows = lane_rows(keys, lane);
    const int first_strip = row0 / STRIP - BACK;         // of the keys
    const float scale_log2 = scale * LOG2E;

    for (int i = 0; i < own.heads; ++i) {
        float row_lse[2], row_delta[2];                  // lse in powers of two
        const int row = row0 + (lane >> 2);              // + 8
        #pragma unroll
        for (int half = 0; half < 2; ++half) row_lse[half] = lse[row_first + (i64)i * len + min(row + half * 8, len - 1)] * LOG2E;
        if (i > 0) {
            cp_async_wait<0>();
            __syncwarp();
        }
        u32 q_a[1][D / 16][4], do_a[1][D / 16][4];
        load_fragments(q_a[0], q_lane);
        load_fragments(do_a[0], do_lane);
        float sums[STRIP / 4];                           // delta of rows 4 j + lane / 8
        #pragma unroll
        for (int j = 0; j < STRIP / 4; ++j) {
            const uint4 x = o_pieces[j];
            const uint4 y = *reinterpret_cast<const uint4*>(do_strip + piece_at(j * 4 + lane / PIECES, lane % PIECES));
            const float low = bf16_lo(x.x) * bf16_lo(y.x) + bf16_lo(x.y) * bf16_lo(y.y) + bf16_lo(x.z) * bf16_lo(y.z) + bf16_lo(x.w) * bf16_lo(y.w);
            const float high = bf16_hi(x.x) * bf16_hi(y.x) + bf16_hi(x.y) * bf16_hi(y.y) + bf16_hi(x.z) * bf16_hi(y.z) + bf16_hi(x.w) * bf16_hi(y.w);
            sums[j] = low + high;
            #pragma unroll
            for (int across = 1; across < PIECES; across *= 2) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], across);
        }
        __syncwarp();                                    // every lane has read the strips
        if (i + 1 < own.heads) {
            load_strip(q_strip, q + q_first + (i + 1) * D, row0, len, q_stride);
            load_strip(do_strip, d_o + q_first + (i + 1) * D, row0, len, q_stride);
            cp_async_commit();
        }
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Row r = lane / 4 + 8 half is row r % 4 of sums[r / 4].
            const int holder = (lane >> 2 & 3) * PIECES;
            const float early = __shfl_sync(0xffffffffu, sums[2 * half], holder), late = __shfl_sync(0xffffffffu, sums[2 * half + 1], holder);
            row_delta[half] = lane < 16 ? early : late;
            if ((lane & 3) == 0 && row + half * 8 < len) delta[row_first + (i64)i * len + row + half * 8] = row_delta[half];
        }

        float acc[1][D / 8][4];
        strip_dq(acc, q_a, do_a, row_lse, row_delta, k_cols, v_cols, k_rows, first_strip, scale_log2);
        if (i + 1 < own.heads) load_o(i + 1);            // under way while dq is written
        store_strip(dq_strip, acc[0], scale, scale, dq + q_first + i * D, row0, len, q_stride);
    }
}

// dk and dv: a block owns DKV_WARPS * DKV_M * 16 keys of one key head, DKV_M strips a warp, and takes the query heads of the group one after the
// other: the queries that see these keys lie in shared memory, with those of the next head on their way. Scores are transposed,
// k q^T, so that probabilities and their gradients are operands of the second products straight from registers; k and v are
// operands in registers throughout. Queries that see a strip begin at the strip itself. With two strips a warp, each fragment of q
// and do that is read from shared memory, of which these products would else be a matter, serves both.
// Shared: two stages of q and do, then of lse and delta.
constexpr int DKV_THREADS = DKV_WARPS * 32, DKV_KEYS = DKV_WARPS * DKV_M * STRIP, QUERIES = DKV_KEYS + BACK * STRIP;
constexpr int DKV_STAGE = 2 * QUERIES * LINE;
// Eight warps fill the registers of a multiprocessor; more blocks where they are small.
constexpr int DKV_BLOCKS_PER_SM = DKV_WARPS < 8 ? 8 / DKV_WARPS : 1;

// Rows row0 + lane / 4 and 8 more of a matrix as operand A, straight from memory: read once.
__device__ __forceinline__ void fetch_fragments(u32 (&a)[D / 16][4], const bf16* matrix, int row0, int rows, int stride) {
    const int lane = threadIdx.x & 31;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bf16* const row = matrix + (i64)min(row0 + (lane >> 2) + half * 8, rows - 1) * stride + (lane & 3) * 2;
        #pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            a[k][half] = *reinterpret_cast<const u32*>(row + k * 16);
            a[k][2 + half] = *reinterpret_cast<const u32*>(row + k * 16 + 8);
        }
    }
}

extern "C" __global__ void __launch_bounds__(DKV_THREADS, DKV_BLOCKS_PER_SM) attention_dkv_window(
    const bf16* q, const bf16* k, const bf16* v, const float* lse, const bf16* d_o, const float* delta,
    bf16* dk, bf16* dv, int len, int q_heads, int kv_heads, int group, float scale) {
    extern __shared__ __align__(16) u8 shared[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float* const row_values = reinterpret_cast<float*>(shared + 2 * DKV_STAGE);  // stage s: lse at 2 s, delta at 2 s + 1

    // Keys from j0 on of key head blockIdx.y in sequence blockIdx.z, and the `group` query heads from blockIdx.y * group on. Indices are
    // read anew where they are used: the main loop takes all 255 registers.
    const int q_stride = q_heads * D, k_stride = kv_heads * D;

    const auto load_stage = [&](int stage, int head) {
        u8* const tile = shared + stage * DKV_STAGE;
        const int first = anew(blockIdx.x) * DKV_KEYS;
        const i64 b = anew(blockIdx.z), of_all = anew(blockIdx.y) * group + head;
        load_rows<QUERIES, DKV_THREADS, true>(tile, q + (b * len * q_heads + of_all) * D, first, len, q_stride);
        load_rows<QUERIES, DKV_THREADS, true>(tile + QUERIES * LINE, d_o + (b * len * q_heads + of_all) * D, first, len, q_stride);
        #pragma unroll
        for (int at = 0; at < 2 * QUERIES; at += DKV_THREADS) {
            const int r = at + anew(threadIdx.x);
            if (2 * QUERIES % DKV_THREADS != 0 && r >= 2 * QUERIES) break;
            const int row = first + (r < QUERIES ? r : r - QUERIES);
            // Rows beyond the end get zeros: p = 1 meets do = 0, ds = 1 * (0 - 0).
            const float* const from = (r < QUERIES ? lse : delta) + (b * q_heads + of_all) * len + min(row, len - 1);
            cp_async4_zfill(row_values + stage * 2 * QUERIES + r, from, row < len);
        }
        cp_async_commit();
    };

    load_stage(0, 0);
    const int key0 = blockIdx.x * DKV_KEYS + warp * DKV_M * STRIP;      // of this warp
    const i64 kv_first = (i64)blockIdx.z * len * k_stride + blockIdx.y * D;
    u32 k_a[DKV_M][D / 16][4], v_a[DKV_M][D / 16][4];
    float dk_acc[DKV_M][D / 8][4], dv_acc[DKV_M][D / 8][4];
    #pragma unroll
    for (int m = 0; m < DKV_M; ++m) {
        fetch_fragments(k_a[m], k + kv_first, key0 + m * STRIP, len, k_stride);
        fetch_fragments(v_a[m], v + kv_first, key0 + m * STRIP, len, k_stride);
        zero(dk_acc[m]);
        zero(dv_acc[m]);
    }
    const float scale_log2 = scale * LOG2E;
    const int row = lane >> 2, col = (lane & 3) * 2;

    for (int i = 0; i < group; ++i) {
        const int stage = i & 1;
        cp_async_wait<0>();
        __syncthreads();                                 // this head is there, and every warp has left the last one
        if (i + 1 < group) load_stage(stage ^ 1, i + 1);
        const u32 q_tile = smem_addr(shared + stage * DKV_STAGE) + warp * DKV_M * STRIP_BYTES;
        const Lane q_cols = lane_cols(q_tile, lane), q_rows = lane_rows(q_tile, lane);
        const Lane do_cols{q_cols.at + QUERIES * LINE, q_cols.turn}, do_rows{q_rows.at + QUERIES * LINE, q_rows.turn};
        const float* const lse_now = row_values + stage * 2 * QUERIES + warp * DKV_M * STRIP + col;
        #pragma unroll
        for (int t = 0; t < STRIPS + DKV_M - 1; ++t) {
            // Key strip m lies t - m strips before query strip t.
            const int from = t < STRIPS ? 0 : t - STRIPS + 1, to = t < DKV_M ? t : DKV_M - 1;
            float p[DKV_M][2][4], ds[DKV_M][2][4];       // [key, query]
            scores(p, k_a, q_cols, t, from, to);
            scores(ds, v_a, do_cols, t, from, to);
            u32 p_a[DKV_M][4], ds_a[DKV_M][4];
            #pragma unroll
            for (int m = 0; m < DKV_M; ++m) {
                if (m < from || m > to) continue;
                #pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 l = *reinterpret_cast<const float2*>(lse_now + t * STRIP + n * 8);
                    const float2 d = *reinterpret_cast<const float2*>(lse_now + QUERIES + t * STRIP + n * 8);
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        p[m][n][e] = exp2_fast(fmaf(p[m][n][e], scale_log2, -(e & 1 ? l.y : l.x) * LOG2E));
                        const int distance = (t - m) * STRIP + col + n * 8 + (e & 1) - (row + (e & 2) * 4);
                        if (cut(t - m) && !visible(distance)) p[m][n][e] = 0.f;
                        ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e & 1 ? d.y : d.x));
                    }
                }
                pack(p_a[m], p[m]);
                pack(ds_a[m], ds[m]);
            }
            accumulate(dv_acc, p_a, do_rows, t, from, to);
            accumulate(dk_acc, ds_a, q_rows, t, from, to);
            __syncwarp();                                // holds the compiler from mixing strips, for which registers are too few
        }
    }
    __syncthreads();                                     // the stages are free: each warp writes by way of two strips of its own
    u8* const strip = shared + (anew(threadIdx.x) >> 5) * 2 * STRIP_BYTES;
    const int mine = anew(blockIdx.x) * DKV_KEYS + (anew(threadIdx.x) >> 5) * DKV_M * STRIP;
    const i64 out = (i64)anew(blockIdx.z) * len * k_stride + anew(blockIdx.y) * D;
    #pragma unroll
    for (int m = 0; m < DKV_M; ++m) {
        store_strip(strip, dk_acc[m], scale, scale, dk + out, mine + m * STRIP, len, k_stride);
        store_strip(strip + STRIP_BYTES, dv_acc[m], 1.f, 1.f, dv + out, mine + m * STRIP, len, k_stride);
    }
}

// dsinks[b, h] = -sum over the rows of exp(sink - lse) * delta: a sink has no value, so nothing but delta goes back to it. One block a
// sequence and head. Not a part of the kernel above, where it would cost registers.
extern "C" __global__ void __launch_bounds__(THREADS) attention_dsinks_window(
    const float* lse, const float* delta, const bf16* sinks, float* dsinks, int len, int q_heads) {
    __shared__ float scratch[32];
    const i64 at = (i64)blockIdx.x * len;
    const float sink = to_f32(sinks[blockIdx.x % q_heads]);
    float sum = 0.f;
    #pragma unroll 8
    for (int i = threadIdx.x; i < len; i += THREADS) sum = fmaf(-exp2_fast((sink - lse[at + i]) * LOG2E), delta[at + i], sum);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) dsinks[blockIdx.x] = sum;
}
