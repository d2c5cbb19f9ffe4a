// Backward of the scan: ssd_dt again, the gradients of the states from the last chunk to the first, then x (with the
// products inside a chunk), B and C (with the products that cross chunks), and last dt, A, D and the bias.
//
// With E_ts = dy_t x_s and G_ts = C_t B_s:
//   dx_s = sum_t G L dt_s dy_t + D dy_s + dt_s 2^(c_Q - c_s) dH B_s
//   dB_s = sum over heads ( sum_t E L dt_s C_t + dt_s 2^(c_Q - c_s) dH^T x_s ),   dC_t likewise with B_s, 2^(c_t) H^T dy_t
//   ddt_s = sum_t E G L + 2^(c_Q - c_s) x_s dH B_s  + A da_s
//   da_u = what flows over the border before u: pairs (s < u <= t) inside the chunk, H to t >= u, s < u to dH, H to dH.

extern "C" __global__ void __launch_bounds__(STATE_THREADS) ssd_dstates(const bf16* xbc, const bf16* dy, const float* dt, const float* cum,
    const bf16* states, bf16* dstates, float* dots, int seq, int heads, int groups, int chunks) {
    const Shape s = {seq, heads, groups, chunks};
    pass_states<true>(dy, s.inner(), xbc + s.inner() + groups * STATE, s.width(), dt, cum, states, dstates, dots, s);
}

// Gradient of x, and of B and C inside the chunk. A block takes one chunk and `block_heads` heads of one group; a warp
// owns 16 rows s. B C^T and the sum over heads of E L dt (F) stay in registers, transposed: row s, column t.
// Shared: B | two stages of (x, dy, dH, dt, c), before and after them C and F | column sums.
// Per head and token: `row_sums` (sum_s E G L dt_s, for t), `col_sums` (sum_t E G L, for s), `skips` (dy_s x_s).
// part_b, part_c: f32 [parts of a group][batch * seq][groups * STATE].
constexpr int DX_STAGE = 2 * X_TILE + S_TILE + CHUNK * 8;
constexpr int DX_REGION = 2 * DX_STAGE > M_TILE + F_TILE ? 2 * DX_STAGE : M_TILE + F_TILE;
extern "C" __global__ void __launch_bounds__(CHUNK * 2, 1) ssd_dx(const bf16* xbc, const bf16* dy, const bf16* d, const float* dt,
    const float* cum, const bf16* dstates, bf16* dxbc, float* row_sums, float* col_sums, float* skips, float* part_b, float* part_c,
    int block_heads, int batch, int seq, int heads, int groups, int chunks) {
    constexpr int THREADS = CHUNK * 2;
    const Shape s = {seq, heads, groups, chunks};
    const int parts = heads / block_heads, part = blockIdx.x % parts, bc = blockIdx.x / parts, b = bc / chunks, c = bc % chunks;
    const int h0 = part * block_heads, g = h0 / (heads / groups);
    const int t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, row = warp * 16 + (lane >> 2);
    u8 *stages = shared + M_TILE, *ftile = stages + M_TILE;
    float* red = reinterpret_cast<float*>(stages + DX_REGION);   // [WARPS][CHUNK]
    const bf16* chunk = xbc + ((i64)b * seq + t0) * s.width();
    const bf16* dchunk = dy + ((i64)b * seq + t0) * s.inner();
    const bf16* cmat = chunk + s.inner() + (groups + g) * STATE;
    load_tile<CHUNK, STATE, THREADS>(shared, chunk + s.inner() + g * STATE, s.width(), valid);
    load_tile<CHUNK, STATE, THREADS>(stages, cmat, s.width(), valid);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const u32 bm = smem_addr(shared), cm = smem_addr(stages);
    float bct[TOKEN_TILES][8], f[TOKEN_TILES][8];
    clear(bct);
    clear(f);
    #pragma unroll 2
    for (int k = 0; k < STATE / 16; ++k) {
        u32 a[4];
        ldsm_x4(a, bm + by_rows<N_ROW>(warp * 16, k * 16));
        #pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            if (j < warp) continue;
            u32 fb[4];
            ldsm_x4(fb, cm + by_cols<N_ROW>(j * 16, k * 16));
            mma_pair(bct[j], a, fb);
        }
    }
    __syncthreads();
    const auto prefetch = [&](int i) {
        if (i < block_heads) {
            const int h = h0 + i;
            u8* stage = stages + (i & 1) * DX_STAGE;
            load_tile<CHUNK, HEAD_DIM, THREADS>(stage, chunk + h * HEAD_DIM, s.width(), valid);
            load_tile<CHUNK, HEAD_DIM, THREADS>(stage + X_TILE, dchunk + h * HEAD_DIM, s.inner(), valid);
            load_tile<HEAD_DIM, STATE, THREADS>(stage + 2 * X_TILE, dstates + s.state(b, c, h), STATE, HEAD_DIM);
            load_series<THREADS>(reinterpret_cast<float*>(stage + 2 * X_TILE + S_TILE), dt + s.series(b, h) + t0,
                cum + s.series(b, h) + t0);
        }
        cp_async_commit();
    };
    prefetch(0);
    #pragma unroll 1
    for (int i = 0; i < block_heads; ++i) {
        prefetch(i + 1);
        cp_async_wait<1>();
        __syncthreads();
        const int h = h0 + i;
        const i64 series = s.series(b, h) + t0;
        const u8* stage = stages + (i & 1) * DX_STAGE;
        const u32 x = smem_addr(stage), dyt = smem_addr(stage + X_TILE), st = smem_addr(stage + 2 * X_TILE);
        const float* dts = reinterpret_cast<const float*>(stage + 2 * X_TILE + S_TILE);
        const float *cs = dts + CHUNK, own_c[2] = {cs[row], cs[row + 8]}, own_dt[2] = {dts[row], dts[row + 8]};
        float acc[HEAD_DIM / 16][8];
        clear(acc);
        #pragma unroll 2
        for (int k = 0; k < STATE / 16; ++k) {
            u32 a[4];
            ldsm_x4(a, bm + by_rows<N_ROW>(warp * 16, k * 16));
            #pragma unroll
            for (int p = 0; p < HEAD_DIM / 16; ++p) {
                u32 fb[4];
                ldsm_x4(fb, st + by_cols<N_ROW>(p * 16, k * 16));
                mma_pair(acc[p], a, fb);
            }
        }
        const float out_decay[2] = {own_dt[0] * exp2_fast(cs[CHUNK - 1] - own_c[0]), own_dt[1] * exp2_fast(cs[CHUNK - 1] - own_c[1])};
        #pragma unroll
        for (int p = 0; p < HEAD_DIM / 16; ++p)
            #pragma unroll
            for (int e = 0; e < 8; ++e) acc[p][e] *= out_decay[(e >> 1) & 1];
        float col_sum[2] = {0.f, 0.f};
        #pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            if (j < warp) continue;
            float ev[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, w[8];
            #pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; ++k) {
                u32 a[4], fb[4];
                ldsm_x4(a, x + by_rows<P_ROW>(warp * 16, k * 16));
                ldsm_x4(fb, dyt + by_cols<P_ROW>(j * 16, k * 16));
                mma_pair(ev, a, fb);
            }
            float below[4] = {0.f, 0.f, 0.f, 0.f};
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int r = (e >> 1) & 1, from = row + row_of(e), t = j * 16 + 2 * quad + col_of(e);
                const float l = from <= t ? exp2_fast(cs[t] - own_c[r]) : 0.f;
                if (from == t) skips[series + t] = ev[e];
                const float gl = bct[j][e] * l, z = ev[e] * gl;
                col_sum[r] += z;
                below[(e & 1) + (e >> 2) * 2] += z * own_dt[r];
                f[j][e] += ev[e] * l * own_dt[r];
                w[e] = gl * own_dt[r];
            }
            #pragma unroll
            for (int e = 0; e < 4; ++e) {
                #pragma unroll
                for (int o = 4; o < 32; o <<= 1) below[e] += __shfl_xor_sync(0xffffffffu, below[e], o);
                if (lane < 4) red[warp * CHUNK + j * 16 + 2 * quad + (e & 1) + (e >> 1) * 8] = below[e];
            }
            u32 a[4];
            as_operand(a, w);
            #pragma unroll
            for (int p = 0; p < HEAD_DIM / 16; ++p) {
                u32 fb[4];
                ldsm_x4_t(fb, dyt + by_rows<P_ROW>(j * 16, p * 16));
                mma_pair(acc[p], a, fb);
            }
        }
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            #pragma unroll
            for (int o = 1; o < 4; o <<= 1) col_sum[r] += __shfl_xor_sync(0xffffffffu, col_sum[r], o);
            if (quad == 0) col_sums[series + row + 8 * r] = col_sum[r];
        }
        const float skip = to_f32(d[h]);
        bf16* out = dxbc + ((i64)b * seq + t0) * s.width() + h * HEAD_DIM + 2 * quad;
        #pragma unroll
        for (int p = 0; p < HEAD_DIM / 16; ++p)
            #pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const int t = row + row_of(e), col = p * 16 + col_of(e);
                const u32 own = *reinterpret_cast<const u32*>(stage + X_TILE + t * P_ROW + (col + 2 * quad) * 2);
                if (t < valid)
                    *reinterpret_cast<u32*>(out + (i64)t * s.width() + col) =
                        pack_bf16(acc[p][e] + skip * bf16_lo(own), acc[p][e + 1] + skip * bf16_hi(own));
            }
        __syncthreads();
        // Column t was summed by the warps of rows s <= t, in order.
        if (threadIdx.x < CHUNK) {
            float sum = 0.f;
            for (int w = 0; w <= threadIdx.x / 16; ++w) sum += red[w * CHUNK + threadIdx.x];
            row_sums[series + threadIdx.x] = sum;
        }
    }

    // F is whole: dB_s = sum_t F C_t from registers, dC_t = sum_s F B_s by way of shared memory.
    load_tile<CHUNK, STATE, THREADS>(stages, cmat, s.width(), valid);
    cp_async_commit();
    u32 fa[TOKEN_TILES][4];
    #pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) {
        as_operand(fa[j], f[j]);
        #pragma unroll
        for (int e = 0; e < 4; ++e)
            *reinterpret_cast<u32*>(ftile + (row + (e & 1) * 8) * T_ROW + (j * 16 + (e >> 1) * 8 + 2 * quad) * 2) = fa[j][e];
    }
    cp_async_wait<0>();
    __syncthreads();
    const int group_part = part % (heads / groups / block_heads);
    const i64 first = ((i64)group_part * batch + b) * seq + t0;
    const u32 ft = smem_addr(ftile);
    #pragma unroll 1
    for (int n = 0; n < STATE; n += 16) {
        float db[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, dc[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
        #pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            u32 fb[4];
            if (j >= warp) {
                ldsm_x4_t(fb, cm + by_rows<N_ROW>(j * 16, n));
                mma_pair(db, fa[j], fb);
            }
            if (j <= warp) {
                u32 a[4];
                ldsm_x4_t(a, ft + by_cols<T_ROW>(j * 16, warp * 16));
                ldsm_x4_t(fb, bm + by_rows<N_ROW>(j * 16, n));
                mma_pair(dc, a, fb);
            }
        }
        #pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const int t = row + row_of(e);
            const i64 at = (first + t) * groups * STATE + g * STATE + n + 2 * quad + col_of(e);
            if (t < valid) {
                *reinterpret_cast<float2*>(part_b + at) = make_float2(db[e], db[e + 1]);
                *reinterpret_cast<float2*>(part_c + at) = make_float2(dc[e], dc[e + 1]);
            }
        }
    }
}

// What crosses chunks: blockIdx.y 0: dB_s += sum over heads dt_s 2^(c_Q - c_s) dH^T x_s, and ends[s] = 2^(c_Q - c_s) x_s dH B_s;
// 1: dC_t += sum over heads 2^(c_t) H^T dy_t, and begins[t] = 2^(c_t) dy_t H C_t. A block takes one chunk, a whole
// group and CROSS_COLS columns of the state (at most what registers hold): `ends` and `begins` are summed over blockIdx.z
// afterwards. Shared: B or C | two stages of (x or dy, dH or H, dt, c).
constexpr int CROSS_SLICE = CROSS_COLS % 64 == 0 ? 64 : CROSS_COLS % 32 == 0 ? 32 : 16;
constexpr int CROSS_ROW = (CROSS_COLS / 8 + 1) * 16;
constexpr int CROSS_M = CHUNK * CROSS_ROW, CROSS_STAGE = X_TILE + HEAD_DIM * CROSS_ROW + CHUNK * 8;
extern "C" __global__ void __launch_bounds__(CHUNK * 2, 1) ssd_cross(const bf16* xbc, const bf16* dy, const float* dt, const float* cum,
    const bf16* states, const bf16* dstates, const float* part_b, const float* part_c, bf16* dxbc, float* ends, float* begins,
    int parts, int batch, int seq, int heads, int groups, int chunks) {
    constexpr int THREADS = CHUNK * 2;
    const Shape s = {seq, heads, groups, chunks};
    const bool for_c = blockIdx.y == 1;
    const int half = blockIdx.z;
    const int g = blockIdx.x % groups, bc = blockIdx.x / groups, b = bc / chunks, c = bc % chunks;
    const int group_heads = heads / groups, t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, row = warp * 16 + (lane >> 2);
    const int col0 = s.inner() + ((for_c ? groups : 0) + g) * STATE + half * CROSS_COLS;
    const i64 first = (i64)b * seq + t0;
    const int stride = for_c ? s.inner() : s.width();
    const bf16* rows = (for_c ? dy : xbc) + first * stride;
    const bf16* state = for_c ? states : dstates;
    float* dot_out = (for_c ? begins : ends) + (i64)half * batch * heads * chunks * CHUNK;
    u8* stages = shared + CROSS_M;
    load_tile<CHUNK, CROSS_COLS, THREADS>(shared, xbc + first * s.width() + col0, s.width(), valid);
    const auto prefetch = [&](int i) {
        if (i < group_heads) {
            const int h = g * group_heads + i;
            u8* stage = stages + (i & 1) * CROSS_STAGE;
            load_tile<CHUNK, HEAD_DIM, THREADS>(stage, rows + h * HEAD_DIM, stride, valid);
            load_tile<HEAD_DIM, CROSS_COLS, THREADS>(stage + X_TILE, state + s.state(b, c, h) + half * CROSS_COLS, STATE, HEAD_DIM);
            load_series<THREADS>(reinterpret_cast<float*>(stage + X_TILE + HEAD_DIM * CROSS_ROW), dt + s.series(b, h) + t0,
                cum + s.series(b, h) + t0);
        }
        cp_async_commit();
    };
    float total[CROSS_COLS / 16][8];
    clear(total);
    prefetch(0);
    #pragma unroll 1
    for (int i = 0; i < group_heads; ++i) {
        prefetch(i + 1);
        cp_async_wait<1>();
        __syncthreads();
        const u8* stage = stages + (i & 1) * CROSS_STAGE;
        const u32 x = smem_addr(stage), st = smem_addr(stage + X_TILE);
        const float* dts = reinterpret_cast<const float*>(stage + X_TILE + HEAD_DIM * CROSS_ROW);
        const float* cs = dts + CHUNK;
        float decay[2], weight[2], dot[2] = {0.f, 0.f};
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float own = cs[row + 8 * r];
            decay[r] = exp2_fast(for_c ? own : cs[CHUNK - 1] - own);
            weight[r] = for_c ? decay[r] : decay[r] * dts[row + 8 * r];
        }
        #pragma unroll
        for (int n0 = 0; n0 < CROSS_COLS; n0 += CROSS_SLICE) {
            float acc[CROSS_SLICE / 16][8];
            clear(acc);
            #pragma unroll
            for (int k = 0; k < HEAD_DIM / 16; ++k) {
                u32 a[4];
                ldsm_x4(a, x + by_rows<P_ROW>(warp * 16, k * 16));
                #pragma unroll
                for (int n = 0; n < CROSS_SLICE / 16; ++n) {
                    u32 fb[4];
                    ldsm_x4_t(fb, st + by_rows<CROSS_ROW>(k * 16, n0 + n * 16));
                    mma_pair(acc[n], a, fb);
                }
            }
            #pragma unroll
            for (int n = 0; n < CROSS_SLICE / 16; ++n)
                #pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    const int r = (e >> 1) & 1;
                    const u32 m = *reinterpret_cast<const u32*>(
                        shared + (row + row_of(e)) * CROSS_ROW + (n0 + n * 16 + col_of(e) + 2 * quad) * 2);
                    dot[r] += acc[n][e] * bf16_lo(m) + acc[n][e + 1] * bf16_hi(m);
                    total[n0 / 16 + n][e] += weight[r] * acc[n][e];
                    total[n0 / 16 + n][e + 1] += weight[r] * acc[n][e + 1];
                }
        }
        #pragma unroll
        for (int r = 0; r < 2; ++r) {
            #pragma unroll
            for (int o = 1; o < 4; o <<= 1) dot[r] += __shfl_xor_sync(0xffffffffu, dot[r], o);
            if (quad == 0) dot_out[s.series(b, g * group_heads + i) + t0 + row + 8 * r] = dot[r] * decay[r];
        }
        __syncthreads();
    }
    // Part by part, all places of a thread at a time: place by place each load would be waited for.
    const float* part = (for_c ? part_c : part_b) + g * STATE + half * CROSS_COLS + 2 * quad;
    #pragma unroll 1
    for (int p = 0; p < parts; ++p) {
        #pragma unroll
        for (int n = 0; n < CROSS_COLS / 16; ++n)
            #pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const int t = row + row_of(e);
                if (t >= valid) continue;
                const i64 at = (((i64)p * batch + b) * seq + t0 + t) * groups * STATE + n * 16 + col_of(e);
                const float2 v = *reinterpret_cast<const float2*>(part + at);
                total[n][e] += v.x;
                total[n][e + 1] += v.y;
            }
    }
    #pragma unroll
    for (int n = 0; n < CROSS_COLS / 16; ++n)
        #pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const int t = row + row_of(e), col = n * 16 + 2 * quad + col_of(e);
            if (t < valid)
                *reinterpret_cast<u32*>(dxbc + (first + t) * s.width() + col0 + col) = pack_bf16(total[n][e], total[n][e + 1]);
        }
}

// Gradient of the raw dt, and per chunk those of a_log, D and the bias: partial [batch * chunks, 3 * heads].
// Grid (batch * chunks, heads / DDT_HEADS), CHUNK threads: a thread a token, two heads. With eight, one after the other, few blocks took long.
constexpr int DDT_HEADS = 2;
extern "C" __global__ void __launch_bounds__(CHUNK) ssd_ddt(const bf16* zxbcdt, const bf16* a_log, const bf16* dt_bias, const float* dt,
    const float* row_sums, const float* col_sums, const float* skips, const float* ends, const float* begins, const float* dots,
    bf16* ddt, float* partial, int slices, int halves, int width, int dt_col, int seq, int heads, int groups, int chunks) {
    __shared__ float scratch[DDT_HEADS][5][CHUNK / 32];
    const Shape s = {seq, heads, groups, chunks};
    const int b = blockIdx.x / chunks, c = blockIdx.x % chunks, h0 = blockIdx.y * DDT_HEADS, t = threadIdx.x;
    const int at = c * CHUNK + t, warp = t >> 5;
    float raw[DDT_HEADS] = {0.f, 0.f}, out[DDT_HEADS];
    if (at < seq) {
        const u32 two = *reinterpret_cast<const u32*>(zxbcdt + ((i64)b * seq + at) * width + dt_col + h0);
        raw[0] = bf16_lo(two);
        raw[1] = bf16_hi(two);
    }
    #pragma unroll
    for (int e = 0; e < DDT_HEADS; ++e) {
        const int h = h0 + e;
        const i64 i = s.series(b, h) + at;
        const i64 all = (i64)(gridDim.x / chunks) * heads * chunks * CHUNK;
        float end = 0.f, begin = 0.f;
        for (int n = 0; n < halves; ++n) {
            end += ends[n * all + i];
            begin += begins[n * all + i];
        }
        const float v = dt[i], direct = col_sums[i] + end, a = -expf(to_f32(a_log[h]));
        // Inside the chunk and from H: a suffix sum, as whole minus exclusive prefix; to dH: an exclusive prefix.
        const float after = row_sums[i] + begin - v * col_sums[i], before = v * end;
        const float upto_after = block_scan(after, scratch[e][0]), upto_before = block_scan(before, scratch[e][1]);
        float whole = 0.f, through = 0.f;
        for (int w = 0; w < CHUNK / 32; ++w) whole += scratch[e][0][w];
        for (int n = 0; n < slices; ++n) through += dots[(((i64)b * chunks + c) * heads + h) * slices + n];
        const float da = (whole - (upto_after - after)) + (upto_before - before) + through;
        const float x = raw[e] + to_f32(dt_bias[h]);
        out[e] = at < seq ? (direct + a * da) / (1.f + expf(-x)) : 0.f;
        const float sums[3] = {warp_sum(a * v * da), warp_sum(at < seq ? skips[i] : 0.f), warp_sum(out[e])};
        if ((t & 31) == 0)
            for (int k = 0; k < 3; ++k) scratch[e][2 + k][warp] = sums[k];
    }
    if (at < seq) *reinterpret_cast<u32*>(ddt + ((i64)b * seq + at) * heads + h0) = pack_bf16(out[0], out[1]);
    __syncthreads();
    if (t < 3 * DDT_HEADS) {
        const int e = t % DDT_HEADS, k = t / DDT_HEADS;
        float sum = 0.f;
        for (int w = 0; w < CHUNK / 32; ++w) sum += scratch[e][2 + k][w];
        partial[(i64)blockIdx.x * 3 * heads + k * heads + h0 + e] = sum;
    }
}
