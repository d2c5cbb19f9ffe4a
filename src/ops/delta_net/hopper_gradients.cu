// Gradients of the gated delta rule but for v, on wgmma (compute capability 9.0; K = V = 128, chunks of 64): what delta_gradients of
// backward.cu computes, with its formulas, rounding and outputs.
//
// A block takes one chunk and the value heads of HEAD_RUN key heads, one after the other (an "item" each). Two warpgroups, each with
// half of the columns; H belongs to the first one, J to the second. What the next item needs is under way as soon as the tile that it
// takes the place of is read: the bytes decide, so they must flow all the time. An item j:
//   R = k S^T | dq = dO S, dk = dV S | U = T R     meanwhile: the numbers a token of item j - 1, <S, dS>
//                                                  S and T are read: those of j + 1, and q and k of the next key head
//   H or J, of dO or dV, and U | U dS              dO and dV are read: those of j + 1
//   dq += H k, dk += J k | U dS + H^T q + J^T k    dS and v are read: dS of j + 1, v of j + 2
// Grid batch * chunks * ceil(key heads / HEAD_RUN). Shared: k | q, twice | S | dS | v, then R, then U, twice | dO | dV | T | H | J |
// series, twice | dots | diagonal | <S, dS> of each warp, twice | alpha and more of each lane of warp 0 | sums of q dq and k dk over
// the group, a copy for each warpgroup.
#ifndef HEAD_RUN
#define HEAD_RUN 1
#endif


constexpr int WARPGROUP = 128, GRAD_THREADS = 2 * WARPGROUP, GRAD_WARPS = GRAD_THREADS / 32;
constexpr int PANEL = CHUNK * LINE, ROWS_TILE = 2 * PANEL, SQUARE_TILE = PANEL;        // tokens x 64, x K or V, x tokens
constexpr int STATE_PANEL = VALUE_DIM * LINE, STATE_TILE = 2 * STATE_PANEL;            // V x 64, V x K
constexpr int SERIES = 4 * CHUNK;                                                      // floats: c, beta, rq, rk
constexpr int DOTS = 4 * CHUNK;                                                        // of half the columns
constexpr int KEYS_AT = 0, S_AT = KEYS_AT + 4 * ROWS_TILE, DS_AT = S_AT + STATE_TILE, V_AT = DS_AT + STATE_TILE, DO_AT = V_AT + 2 * ROWS_TILE,
              DV_AT = DO_AT + ROWS_TILE, T_AT = DV_AT + ROWS_TILE, H_AT = T_AT + SQUARE_TILE, J_AT = H_AT + SQUARE_TILE,
              SERIES_AT = J_AT + SQUARE_TILE, DOTS_AT = SERIES_AT + 2 * SERIES * 4, DIAGONAL_AT = DOTS_AT + 2 * DOTS * 4,
              THROUGH_AT = DIAGONAL_AT + CHUNK * 4, GATES_AT = THROUGH_AT + 2 * GRAD_WARPS * 4, ALONG_AT = GATES_AT + 32 * 16,
              GRADIENTS_SHARED = ALONG_AT + 4 * CHUNK * 4;
static_assert(CHUNK == 64 && KEY_DIM == 128 && VALUE_DIM == 128, "a warpgroup's 64 rows, and two panels of 64 columns");
static_assert(GRADIENTS_SHARED <= 227 * 1024, "shared memory of a block");

extern __shared__ __align__(1024) u8 tiles[];

// The compiler may not know this value: else it keeps what follows from it in registers all along the loop, and spills.
__device__ __forceinline__ int fresh(int x) { asm volatile("" : "+r"(x)); return x; }
// The compiler may not move loads and stores across this: loads far ahead of their use take registers.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

// Starts the copy of ROWS rows of 128 elements; zeros in place of rows from `valid` on. Thread t copies piece t % 16 of rows t / 16,
// 16 more and so on.
template <int ROWS>
__device__ __forceinline__ void load_rows(u8* tile, const bf16* src, int stride, int valid) {
    const int thread = fresh(threadIdx.x), c = thread & 15, r = thread >> 4;
    u8* const to = tile + piece_at<ROWS>(r, c);
    const bf16* const from = src + c * 8;
    #pragma unroll
    for (int i = 0; i < ROWS; i += GRAD_THREADS / 16)
        cp_async16_zfill(to + i * LINE, from + (i64)min(r + i, valid - 1) * stride, r + i < valid);
}
// The same of a whole matrix without gaps between rows.
template <int ROWS>
__device__ __forceinline__ void load_whole(u8* tile, const bf16* src) {
    const int thread = fresh(threadIdx.x), c = thread & 15, r = thread >> 4;
    u8* const to = tile + piece_at<ROWS>(r, c);
    const bf16* const from = src + thread * 8;
    #pragma unroll
    for (int i = 0; i < ROWS; i += GRAD_THREADS / 16) cp_async16(to + i * LINE, from + i * KEY_DIM);
}
// And of 64 rows of 64 elements.
__device__ __forceinline__ void load_square(u8* tile, const bf16* src) {
    const int thread = fresh(threadIdx.x), c = thread & 7, r = thread >> 3;
    u8* const to = tile + piece_at<CHUNK>(r, c);
    const bf16* const from = src + thread * 8;
    #pragma unroll
    for (int i = 0; i < CHUNK; i += GRAD_THREADS / 8) cp_async16(to + i * LINE, from + i * CHUNK);
}

// acc[64 x 64] = (add: +=) A B, summed over 16 STEPS: over the columns of tiles of RA and RB rows, or, TA, TB = 1, over their rows.
template <int STEPS, int RA, int TA, int RB, int TB>
__device__ __forceinline__ void product(float (&acc)[8][4], u64 a, u64 b, int add) {
    #pragma unroll
    for (int k = 0; k < STEPS; ++k)
        mma_ss<TA, TB>(acc, a + (TA ? row_step(k) : column_step<RA>(k)), b + (TB ? row_step(k) : column_step<RB>(k)), k ? 1 : add);
}
// The part of a descriptor that the number of rows decides.
template <int R> __device__ __forceinline__ constexpr u64 descriptor_of_rows() { return (u64)((R * LINE) >> 4) << 16; }
// Where this thread's elements of an accumulator lie in a panel of 64 rows. `own`: byte of its row and, swizzled, of its elements of the
// first 8 columns; j: the tile of 8 columns, x = 1: eight rows down.
__device__ __forceinline__ u32* place(int own, int j, int x) { return reinterpret_cast<u32*>(tiles + (own ^ (j << 4)) + x * 8 * LINE); }
// Rounds an accumulator and puts it there.
__device__ __forceinline__ void put(int own, const float (&acc)[8][4]) {
    #pragma unroll
    for (int j = 0; j < 8; ++j)
        #pragma unroll
        for (int x = 0; x < 2; ++x) *place(own, j, x) = pack_bf16(acc[j][2 * x], acc[j][2 * x + 1]);
}
// Row dots of an accumulator with a panel, of rows `row` and row + 8.
__device__ __forceinline__ void panel_dots(float* out, const float (&acc)[8][4], int own, int row) {
    float dot[2] = {0.f, 0.f};
    #pragma unroll
    for (int j = 0; j < 8; ++j)
        #pragma unroll
        for (int x = 0; x < 2; ++x) {
            const u32 v = *place(own, j, x);
            dot[x] += acc[j][2 * x] * bf16_lo(v) + acc[j][2 * x + 1] * bf16_hi(v);
        }
    #pragma unroll
    for (int x = 0; x < 2; ++x) {
        #pragma unroll
        for (int o = 1; o < 4; o <<= 1) dot[x] += __shfl_xor_sync(0xffffffffu, dot[x], o);
        if ((threadIdx.x & 3) == 0) out[row + 8 * x] = dot[x];
    }
}
__device__ __forceinline__ void scale_rows(float (&acc)[8][4], float factor0, float factor8) {
    #pragma unroll
    for (int j = 0; j < 8; ++j)
        #pragma unroll
        for (int e = 0; e < 4; ++e) acc[j][e] *= e < 2 ? factor0 : factor8;
}
__device__ __forceinline__ void add_to(float (&sum)[8][4], const float (&acc)[8][4]) {
    #pragma unroll
    for (int j = 0; j < 8; ++j)
        #pragma unroll
        for (int e = 0; e < 4; ++e) sum[j][e] += acc[j][e];
}
__device__ __forceinline__ float2 both_halves(const float* dots, int which, int t) {
    const float* const at = dots + which * CHUNK + t;
    const float2 x = *reinterpret_cast<const float2*>(at), y = *reinterpret_cast<const float2*>(at + DOTS);
    return make_float2(x.x + y.x, x.y + y.y);
}

extern "C" __global__ void __launch_bounds__(GRAD_THREADS, 1) delta_gradients_wgmma(const bf16* qkv, const bf16* proj, const bf16* a_log,
    const bf16* dt_bias, const bf16* states, const bf16* dout, const float* cum, const float* betas, const float* rqs, const float* rks,
    const bf16* tris, const bf16* dstates, bf16* dqkv, bf16* dba, float* partial, int proj_width,
    int seq, int key_heads, int value_heads, int chunks) {
    const Shape s = {seq, key_heads, value_heads, chunks};
    const int runs = (key_heads + HEAD_RUN - 1) / HEAD_RUN;
    const int b = blockIdx.x / runs / chunks, c = blockIdx.x / runs % chunks, first_key = blockIdx.x % runs * HEAD_RUN;
    const int keys = min(HEAD_RUN, key_heads - first_key), group = s.group(), items = keys * group, first_head = first_key * group;
    const int valid = min(CHUNK, seq - c * CHUNK);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3;
    float* const all_series = reinterpret_cast<float*>(tiles + SERIES_AT);
    // Rows of dots: q dq, k past, k (dS's term), k future; of each half of the columns.
    float* const dots = reinterpret_cast<float*>(tiles + DOTS_AT);
    float* const diagonal = reinterpret_cast<float*>(tiles + DIAGONAL_AT);
    float* const through = reinterpret_cast<float*>(tiles + THROUGH_AT);

    const auto token = [&]() { return (i64)fresh(b) * seq + fresh(c) * CHUNK; };
    // q and k of the block's key head n.
    const auto load_keys = [&](int n) {
        const bf16* from = qkv + token() * s.width() + (first_key + n) * KEY_DIM;
        u8* const to = tiles + KEYS_AT + (n & 1) * 2 * ROWS_TILE;
        load_rows<CHUNK>(to, from + s.key_width(), s.width(), valid);
        load_rows<CHUNK>(to + ROWS_TILE, from, s.width(), valid);
    };
    // Of item j, which belongs to the block's key head n.
    const auto load_start = [&](int j, int n) {
        const i64 item = s.item(fresh(b), c, first_head + j);
        load_whole<VALUE_DIM>(tiles + S_AT, states + item * VALUE_DIM * KEY_DIM);
        load_square(tiles + T_AT, tris + item * CHUNK * CHUNK);
        if (threadIdx.x < CHUNK) {               // a quarter for each of c, beta, rq, rk
            const int which = threadIdx.x / (CHUNK / 4), at = threadIdx.x % (CHUNK / 4) * 4;
            const i64 mine = s.series(fresh(b), first_head + j) + c * CHUNK, keyed = s.key_series(fresh(b), first_key + n) + c * CHUNK;
            const float* from = which == 0 ? cum + mine : which == 1 ? betas + mine : which == 2 ? rqs + keyed : rks + keyed;
            cp_async16(all_series + (j & 1) * SERIES + which * CHUNK + at, from + at);
        }
    };
    const auto value_columns = [&](int j) { return token() * s.width() + 2 * s.key_width() + (first_head + j) * VALUE_DIM; };
    const auto load_gradients = [&](int j) {
        load_rows<CHUNK>(tiles + DO_AT, dout + token() * s.value_width() + (first_head + j) * VALUE_DIM, s.value_width(), valid);
        load_rows<CHUNK>(tiles + DV_AT, dqkv + value_columns(j), s.width(), valid);
    };
    const auto load_values = [&](int j) { load_rows<CHUNK>(tiles + V_AT + (j & 1) * ROWS_TILE, qkv + value_columns(j), s.width(), valid); };
    const auto load_dstate = [&](int j) {
        load_whole<VALUE_DIM>(tiles + DS_AT, dstates + s.item(fresh(b), c, first_head + j) * VALUE_DIM * KEY_DIM);
    };

    // Three groups of copies an item, always: S, T, series, keys | dO, dV | dS, v.
    load_keys(0);
    load_start(0, 0);
    load_values(0);
    cp_async_commit();
    load_gradients(0);
    cp_async_commit();
    load_dstate(0);
    if (items > 1) load_values(1);
    cp_async_commit();

    float dq_all[8][4], dk_all[8][4];
    zero(dq_all);
    zero(dk_all);
    // What warp 0 needs for the numbers a token, fetched an item ahead, a place for each lane: alpha of tokens 2 lane and 2 lane + 1,
    // a_log, dt_bias.
    float4* const gates = reinterpret_cast<float4*>(tiles + GATES_AT) + lane;
    // dbeta, dalpha, da_log and d(dt_bias) of item j, by one warp, a lane two tokens.
    const auto finish = [&](int j) {
        const float *cs = all_series + (j & 1) * SERIES, *beta = cs + CHUNK;
        const int h = first_head + j, t = 2 * fresh(lane);
        const float2 by_q = both_halves(dots, 0, t), past = both_halves(dots, 1, t), end = both_halves(dots, 2, t), future = both_halves(dots, 3, t);
        const float dc[2] = {by_q.x + past.x - future.x, by_q.y + past.y - future.y};
        const float upto = warp_scan(dc[0] + dc[1]), whole = __shfl_sync(0xffffffffu, upto, 31);
        float before = __shfl_up_sync(0xffffffffu, upto, 1), carried = 0.f;
        if (lane == 0) before = 0.f;
        #pragma unroll
        for (int w = 0; w < GRAD_WARPS; ++w) carried += through[(j & 1) * GRAD_WARPS + w];
        const float ends = warp_sum(end.x + end.y) + carried * exp2_fast(cs[CHUNK - 1]);
        float da_log = 0.f, dbias = 0.f;
        const float4 gate = *gates;
        const float a = -expf(gate.z);
        #pragma unroll
        for (int x = 0; x < 2; ++x) {
            if (t + x >= valid) continue;
            // A suffix sum, as whole minus exclusive prefix.
            const float dg = whole - (x ? before + dc[0] : before) + ends, y = (x ? gate.y : gate.x) + gate.w;
            const float dalpha = dg * a / (1.f + expf(-y));
            da_log += dg * a * softplus(y);
            dbias += dalpha;
            // dbeta beta (1 - beta); beta is positive, if only just.
            const float db = diagonal[t + x] / fmaxf(beta[t + x], 1e-30f) * (1.f - beta[t + x]);
            bf16* out = dba + (token() + t + x) * 2 * value_heads + h;
            out[0] = to_bf16(db);
            out[value_heads] = to_bf16(dalpha);
        }
        da_log = warp_sum(da_log);
        dbias = warp_sum(dbias);
        if (lane == 0) {
            float* out = partial + (i64)(fresh(b) * chunks + c) * 2 * value_heads + h;
            out[0] = da_log;
            out[value_heads] = dbias;
        }
    };

    const u64 base = descriptor<CHUNK>(tiles);
    const auto tile_at = [&](int byte) { return base + (byte >> 4); };
    const auto state_at = [&](int byte) { return base + (byte >> 4) + (descriptor_of_rows<VALUE_DIM>() - descriptor_of_rows<CHUNK>()); };
    int i = 0, n = 0;                            // the item's value head in the group, its key head in the block
    #pragma unroll 1
    for (int j = 0; j < items; ++j) {
        const int half = fresh(warp >> 2), row = (fresh(warp) & 3) * 16 + (lane >> 2), own = row * LINE + ((row & 7) << 4) + quad * 4;
        const int k_at = KEYS_AT + (n & 1) * 2 * ROWS_TILE, q_at = k_at + ROWS_TILE, v_at = V_AT + (j & 1) * ROWS_TILE, panel = half * PANEL;
        const float *cs = all_series + (j & 1) * SERIES, *beta = cs + CHUNK, *rq = cs + 2 * CHUNK, *rk = cs + 3 * CHUNK;
        cp_async_wait<1>();                      // all but dS
        proxy_fence();
        __syncthreads();
        float dq[8][4], dk[8][4], work[8][4], future[8][4];
        wgmma_fence();
        product<8, CHUNK, 0, VALUE_DIM, 0>(work, tile_at(k_at), state_at(S_AT) + half * HALF_STEP, 0);
        wgmma_commit();
        product<8, CHUNK, 0, VALUE_DIM, 1>(dq, tile_at(DO_AT), state_at(S_AT + half * STATE_PANEL), 0);
        product<8, CHUNK, 0, VALUE_DIM, 1>(dk, tile_at(DV_AT), state_at(S_AT + half * STATE_PANEL), 0);
        wgmma_commit();
        float4 gate = make_float4(0.f, 0.f, 0.f, 0.f);
        if (warp == 0) {
            const int h = first_head + j, t = 2 * fresh(lane);
            const bf16* const raw = proj + (token() + t + 1) * proj_width - value_heads + h;
            if (t < valid) gate.x = to_f32(raw[0]);
            if (t + 1 < valid) gate.y = to_f32(raw[proj_width]);
            gate.z = to_f32(a_log[h]);
            gate.w = to_f32(dt_bias[h]);
            if (j > 0) finish(j - 1);
            __syncwarp();
        }
        const float in[2] = {exp2_fast(cs[row]), exp2_fast(cs[row + 8])};
        wgmma_wait<1>();
        pin(work);
        // R = beta (V - e^c K S^T) over this warpgroup's columns of V, then U = T R over R.
        const int values = v_at + panel + own;
        {
            const float w[2] = {in[0] * rk[row], in[1] * rk[row + 8]}, by[2] = {beta[row], beta[row + 8]};
            #pragma unroll
            for (int m = 0; m < 8; ++m)
                #pragma unroll
                for (int x = 0; x < 2; ++x) {
                    u32* const at = place(values, m, x);
                    const u32 v = *at;
                    *at = pack_bf16(by[x] * (bf16_lo(v) - w[x] * work[m][2 * x]), by[x] * (bf16_hi(v) - w[x] * work[m][2 * x + 1]));
                }
        }
        proxy_fence();
        bar_wait<WARPGROUP>(1 + half);
        wgmma_fence();
        product<4, CHUNK, 0, CHUNK, 1>(work, tile_at(T_AT), tile_at(v_at + panel), 0);
        wgmma_commit();
        {
            // <S, dS>: the pieces that this thread copied itself.
            cp_async_wait<0>();
            proxy_fence();
            const int at = piece_at<VALUE_DIM>(threadIdx.x >> 4, threadIdx.x & 15);
            float sum = 0.f;
            #pragma unroll
            for (int m = 0; m < VALUE_DIM; m += GRAD_THREADS / 16) {
                float x[8], y[8];
                load8(reinterpret_cast<const bf16*>(tiles + DS_AT + at + m * LINE), x);
                load8(reinterpret_cast<const bf16*>(tiles + S_AT + at + m * LINE), y);
                #pragma unroll
                for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
            }
            sum = warp_sum(sum);
            if (lane == 0) through[(j & 1) * GRAD_WARPS + warp] = sum;   // the last item's may still be read
        }
        if (warp == 0) *gates = gate;
        wgmma_wait<0>();
        pin(work);
        pin(dq);
        pin(dk);
        bar_wait<WARPGROUP>(1 + half);           // R is read
        put(values, work);
        proxy_fence();
        scale_rows(dq, in[0] * rq[row], in[1] * rq[row + 8]);
        scale_rows(dk, -in[0] * rk[row], -in[1] * rk[row + 8]);
        pin(dq);                                 // now, not between the products that add to them
        pin(dk);
        __syncthreads();                         // U is whole, S and T are read, dS is there
        wgmma_fence();
        product<8, CHUNK, 0, CHUNK, 0>(work, tile_at(DO_AT + half * ROWS_TILE), tile_at(v_at), 0);
        wgmma_commit();
        product<8, CHUNK, 0, VALUE_DIM, 1>(future, tile_at(v_at), state_at(DS_AT + half * STATE_PANEL), 0);
        wgmma_commit();
        if (j + 1 < items) load_start(j + 1, i + 1 == group ? n + 1 : n);
        if (i == 0 && n + 1 < keys) load_keys(n + 1);                // in place of key head n - 1
        cp_async_commit();
        wgmma_wait<1>();
        pin(work);
        {
            // H of the first warpgroup, -J of the second, which has no diagonal.
            const float ct[2] = {cs[row], cs[row + 8]}, by[2] = {half ? -rk[row] : rq[row], half ? -rk[row + 8] : rq[row + 8]};
            const int diagonal_at = row - 2 * quad, limit = diagonal_at - half;     // columns, less those of the row and quad
            if (half)
                #pragma unroll
                for (int m = 0; m < 8; ++m)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (m * 8 + (e & 1) - 8 * (e >> 1) == diagonal_at) diagonal[row + 8 * (e >> 1)] = work[m][e];
            #pragma unroll
            for (int m = 0; m < 8; ++m) {
                const int from = m * 8 + 2 * quad;
                keep_order();
                const float2 c_from = *reinterpret_cast<const float2*>(cs + from), rk_from = *reinterpret_cast<const float2*>(rk + from);
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int x = e >> 1, at = m * 8 + (e & 1) - 8 * x;
                    const float decay = exp2_fast(ct[x] - (e & 1 ? c_from.y : c_from.x)) * (e & 1 ? rk_from.y : rk_from.x);
                    work[m][e] *= at <= limit ? decay * by[x] : 0.f;
                }
            }
            put(H_AT + half * SQUARE_TILE + own, work);
        }
        proxy_fence();
        __syncthreads();                         // H and J are whole, dO and dV are read
        wgmma_fence();
        product<4, CHUNK, 0, CHUNK, 1>(dq, tile_at(H_AT), tile_at(k_at + panel), 1);
        product<4, CHUNK, 0, CHUNK, 1>(dk, tile_at(J_AT), tile_at(k_at + panel), 1);
        wgmma_commit();
        if (j + 1 < items) load_gradients(j + 1);
        cp_async_commit();
        float* const my_dots = dots + half * DOTS;
        const int k_own = k_at + panel + own, q_own = q_at + panel + own;
        wgmma_wait<1>();
        pin(future);
        scale_rows(future, exp2_fast(cs[CHUNK - 1] - cs[row]) * rk[row], exp2_fast(cs[CHUNK - 1] - cs[row + 8]) * rk[row + 8]);
        panel_dots(my_dots + 2 * CHUNK, future, k_own, row);
        pin(future);
        wgmma_fence();
        product<4, CHUNK, 1, CHUNK, 1>(future, tile_at(H_AT), tile_at(q_at + panel), 1);
        product<4, CHUNK, 1, CHUNK, 1>(future, tile_at(J_AT), tile_at(k_at + panel), 1);
        wgmma_commit();
        wgmma_wait<1>();
        pin(dq);
        pin(dk);
        panel_dots(my_dots, dq, q_own, row);
        panel_dots(my_dots + CHUNK, dk, k_own, row);
        add_to(dq_all, dq);
        add_to(dk_all, dk);
        wgmma_wait<0>();
        pin(future);
        panel_dots(my_dots + 3 * CHUNK, future, k_own, row);
        add_to(dk_all, future);
        __syncthreads();                         // the dots are whole; dS, U, H and J are read
        if (j + 1 < items) load_dstate(j + 1);
        if (j + 2 < items) load_values(j + 2);
        cp_async_commit();
        float* const along = reinterpret_cast<float*>(tiles + ALONG_AT) + half * 2 * CHUNK;
        if (quad == 0) {
            #pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int t = row + 8 * x;
                const float by_q = dots[t] + dots[DOTS + t];
                const float by_k = (dots[CHUNK + t] + dots[DOTS + CHUNK + t]) + (dots[3 * CHUNK + t] + dots[DOTS + 3 * CHUNK + t]);
                along[t] = i ? along[t] + by_q : by_q;
                along[CHUNK + t] = i ? along[CHUNK + t] + by_k : by_k;
            }
        }
        __syncwarp();
        if (++i < group) continue;
        // The key head's last: through the scaling to length 1: dx - (r / scale)^2 x (x dx).
        #pragma unroll
        for (int x = 0; x < 2; ++x) {
            const int t = row + 8 * x;
            const float wq = rq[t] * rq[t] * KEY_DIM * along[t], wk = rk[t] * rk[t] * along[CHUNK + t];
            if (t >= valid) continue;
            bf16* const out = dqkv + (token() + t) * s.width() + (first_key + n) * KEY_DIM + half * 64 + 2 * quad;
            #pragma unroll
            for (int m = 0; m < 8; ++m) {
                const u32 q = *place(q_own, m, x), k = *place(k_own, m, x);
                *reinterpret_cast<u32*>(out + m * 8) = pack_bf16(dq_all[m][2 * x] - wq * bf16_lo(q), dq_all[m][2 * x + 1] - wq * bf16_hi(q));
                *reinterpret_cast<u32*>(out + s.key_width() + m * 8) =
                    pack_bf16(dk_all[m][2 * x] - wk * bf16_lo(k), dk_all[m][2 * x + 1] - wk * bf16_hi(k));
            }
        }
        zero(dq_all);
        zero(dk_all);
        i = 0;
        ++n;
    }
    if (warp == 0) finish(items - 1);
}
