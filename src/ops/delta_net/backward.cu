// Backward of the gated delta rule: delta_prepare again, the gradients of v and of the states from the last chunk to the
// first, then all the others, chunk by chunk.

//   dU_s = sum_{t >= s} P_ts dO_t + e^(c_Q - c_s) dS k_s,  dR = T^T dU,  dV = beta dR,
//   dS <- e^(c_Q) dS + sum_t e^(c_t) (dO_t q_t^T - dV_t k_t^T)
// dstates: dS at every chunk's end. dV goes to its columns of dqkv. Grid and shared memory as of the forward's pass.
extern "C" __global__ void __launch_bounds__(PASS_THREADS) delta_pass_back(const bf16* qkv, const float* cum, const float* betas,
    const float* rqs, const float* rks, const bf16* tris, const bf16* atts, const bf16* dout, bf16* dstates, bf16* dqkv,
    int seq, int key_heads, int value_heads, int chunks) {
    const Shape s = {seq, key_heads, value_heads, chunks};
    const Pass p(s);
    const int warp = threadIdx.x >> 5;
    const bf16* rows = dout + (i64)p.b * seq * s.value_width() + p.h * VALUE_DIM + p.v0 - warp * 16;
    const auto prefetch = [&](int c) {
        if (c >= 0) Stage(c).load(s, p, c, qkv, rows, s.value_width(), cum, betas, rqs, rks, tris, atts);
        cp_async_commit();
    };
    float acc[K_TILES][8];
    clear(acc);
    prefetch(chunks - 1);
    #pragma unroll 1
    for (int c = chunks - 1; c >= 0; --c) {
        prefetch(c - 1);
        cp_async_wait<1>();
        __syncthreads();
        const Stage stage(c);
        const u32 kt = stage.k(), qt = stage.q(), tri = stage.tri(), att = stage.att();
        const float* cs = stage.series();
        const float last = cs[CHUNK - 1];
        // Operands: dO, dU, and dO and dV as they enter dS.
        u32 held[K_TILES][4], da[TOKEN_TILES][4], du[TOKEN_TILES][4], by_q[TOKEN_TILES][4], by_k[TOKEN_TILES][4];
        hold(held, acc, dstates + s.item(p.b, c, p.h) * VALUE_DIM * KEY_DIM, p.v0);
        #pragma unroll
        for (int j = TOKEN_TILES - 1; j >= 0; --j) {
            float x[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, dr[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            #pragma unroll
            for (int n = 0; n < K_TILES; ++n) {
                u32 fb[4];
                ldsm_x4(fb, kt + by_cols<K_ROW>(j * 16, n * 16));
                mma_pair(x, held[n], fb);
            }
            float ct[4], beta[4], rq[4], rk[4], q_in[8];
            own_columns(ct, cs, j);
            own_columns(beta, cs + CHUNK, j);
            own_columns(rq, cs + 2 * CHUNK, j);
            own_columns(rk, cs + 3 * CHUNK, j);
            ldsm_x4_t(da[j], smem_addr(stage.rows()) + by_cols<SLICE_ROW>(j * 16, warp * 16));
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int t = column_of(e);
                x[e] *= exp2_fast(last - ct[t]) * rk[t];
                q_in[e] = element(da[j], e) * exp2_fast(ct[t]) * rq[t];
            }
            as_operand(by_q[j], q_in);
            #pragma unroll
            for (int m = j; m < TOKEN_TILES; ++m) {
                u32 fb[4];
                ldsm_x4_t(fb, att + by_rows<F_ROW>(m * 16, j * 16));
                mma_pair(x, da[m], fb);
            }
            as_operand(du[j], x);
            #pragma unroll
            for (int m = j; m < TOKEN_TILES; ++m) {
                u32 fb[4];
                ldsm_x4_t(fb, tri + by_rows<F_ROW>(m * 16, j * 16));
                mma_pair(dr, du[m], fb);
            }
            #pragma unroll
            for (int e = 0; e < 8; ++e) dr[e] *= beta[column_of(e)];
            __syncwarp();                        // the tile's dO is read
            stage.put(j, dr);
            #pragma unroll
            for (int e = 0; e < 8; ++e) dr[e] *= -exp2_fast(ct[column_of(e)]) * rk[column_of(e)];
            as_operand(by_k[j], dr);
        }
        __syncwarp();
        const int t0 = c * CHUNK;
        stage.write(dqkv + ((i64)p.b * seq + t0) * s.width() + 2 * s.key_width() + p.h * VALUE_DIM + p.v0, s.width(), min(CHUNK, seq - t0));
        const float decay = exp2_fast(last);
        #pragma unroll
        for (int n = 0; n < K_TILES; ++n) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) acc[n][e] *= decay;
            #pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m) {
                u32 fb[4];
                ldsm_x4_t(fb, qt + by_rows<K_ROW>(m * 16, n * 16));
                mma_pair(acc[n], by_q[m], fb);
                ldsm_x4_t(fb, kt + by_rows<K_ROW>(m * 16, n * 16));
                mma_pair(acc[n], by_k[m], fb);
            }
        }
        __syncthreads();
    }
}

// Sum over the warp's 64 columns of `acc` times the tile, for its rows row and row + 8: out[row] of all four lanes.
template <int TILES>
__device__ __forceinline__ void row_dots(float* out, const float (&acc)[TILES][8], const u8* tile, int row, int first) {
    const int lane = threadIdx.x & 31, quad = lane & 3;
    float dot[2] = {0.f, 0.f};
    #pragma unroll
    for (int n = 0; n < TILES; ++n)
        #pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const u32 v = *reinterpret_cast<const u32*>(tile + (row + row_of(e)) * K_ROW + (first + n * 16 + 2 * quad + col_of(e)) * 2);
            dot[(e >> 1) & 1] += acc[n][e] * bf16_lo(v) + acc[n][e + 1] * bf16_hi(v);
        }
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
        #pragma unroll
        for (int o = 1; o < 4; o <<= 1) dot[r] += __shfl_xor_sync(0xffffffffu, dot[r], o);
        if (quad == 0) out[row + 8 * r] = dot[r];
    }
}

// Gradients of q, k, the raw b and alpha, a_log and dt_bias. With E = dV U^T, J_ts = rk_t rk_s e^(c_t - c_s) E_ts (s < t) and
// H_ts = rq_t rk_s e^(c_t - c_s) dO_t u_s (s <= t), of one value head, before the norms' own gradient:
//   dq_t = rq_t e^(c_t) S^T dO_t + (H k)_t
//   dk_t = [ -rk_t e^(c_t) S^T dV_t - (J k)_t ]  +  [ rk_t e^(c_Q - c_t) dS^T u_t + (H^T q)_t - (J^T k)_t ]
//            what follows the past                  what the future follows
//   dbeta_t = E_tt / beta_t^2
//   dc_t = q_t dq_t + k_t past_t - k_t future_t, dg_r = sum_{t >= r} dc_t + sum_t k_t (dS's term)_t + e^(c_Q) <S, dS>
// A block takes one chunk and the value heads of one key head, one after the other; warp w owns 16 rows (w % 4) and half of
// the columns (w / 4). Shared: k | q | v, then R, then U | dO | dV | S, then dS | T, then H | J.
constexpr int GRAD_THREADS = 256;
constexpr int GRAD_SHARED = 2 * K_TILE + 3 * V_TILE + S_TILE + 2 * F_TILE;
extern "C" __global__ void __launch_bounds__(GRAD_THREADS, 1) delta_gradients(const bf16* qkv, const bf16* proj, const bf16* a_log,
    const bf16* dt_bias, const bf16* states, const bf16* dout, const float* cum, const float* betas, const float* rqs, const float* rks,
    const bf16* tris, const bf16* dstates, bf16* dqkv, bf16* dba, float* partial, int proj_width, int seq, int key_heads, int value_heads, int chunks) {
    constexpr int K_HALF = K_TILES / 2, V_HALF = V_TILES / 2;
    // Rows of dots: q dq, k past, k (dS's term), k future; of both halves of the columns.
    __shared__ __align__(16) float series[4][CHUNK], dots[2][4][CHUNK], diagonal[CHUNK], along[2][CHUNK], through[GRAD_THREADS / 32];
    __shared__ float sums[4][2];
    const Shape s = {seq, key_heads, value_heads, chunks};
    const int kh = blockIdx.x % key_heads, bc = blockIdx.x / key_heads, b = bc / chunks, c = bc % chunks;
    const int t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3;
    const int r = warp & 3, half = warp >> 2, row = r * 16 + (lane >> 2), token = threadIdx.x & 63;
    const int k0 = half * K_HALF * 16, v0 = half * V_HALF * 16;
    u8 *kt = shared, *qt = kt + K_TILE, *vt = qt + K_TILE, *dot = vt + V_TILE, *dvt = dot + V_TILE, *st = dvt + V_TILE, *ht = st + S_TILE, *jt = ht + F_TILE;
    const u32 ka = smem_addr(kt), qa = smem_addr(qt), va = smem_addr(vt), doa = smem_addr(dot), dva = smem_addr(dvt), sa = smem_addr(st),
              ha = smem_addr(ht), ja = smem_addr(jt);
    const i64 token0 = (i64)b * seq + t0;
    const bf16* keys = qkv + token0 * s.width() + kh * KEY_DIM;
    load_tile<CHUNK, KEY_DIM, GRAD_THREADS>(qt, keys, s.width(), valid);
    load_tile<CHUNK, KEY_DIM, GRAD_THREADS>(kt, keys + s.key_width(), s.width(), valid);
    float dq_all[K_HALF][8], dk_all[K_HALF][8], q_along = 0.f, k_along = 0.f;
    clear(dq_all);
    clear(dk_all);
    #pragma unroll 1
    for (int i = 0; i < s.group(); ++i) {
        const int h = kh * s.group() + i;
        const i64 item = s.item(b, c, h), values = token0 * s.width() + 2 * s.key_width() + h * VALUE_DIM;
        load_tile<VALUE_DIM, KEY_DIM, GRAD_THREADS>(st, states + item * VALUE_DIM * KEY_DIM, KEY_DIM, VALUE_DIM);
        load_tile<CHUNK, VALUE_DIM, GRAD_THREADS>(vt, qkv + values, s.width(), valid);
        load_tile<CHUNK, CHUNK, GRAD_THREADS>(ht, tris + item * CHUNK * CHUNK, CHUNK, CHUNK);
        load_tile<CHUNK, VALUE_DIM, GRAD_THREADS>(dot, dout + token0 * s.value_width() + h * VALUE_DIM, s.value_width(), valid);
        load_tile<CHUNK, VALUE_DIM, GRAD_THREADS>(dvt, dqkv + values, s.width(), valid);
        const i64 own = s.series(b, h) + t0, keyed = s.key_series(b, kh) + t0;
        load_series<GRAD_THREADS>(series[0], cum + own, betas + own, rqs + keyed, rks + keyed);
        cp_async_commit();
        cp_async_wait<0>();
        __syncthreads();
        const float *cs = series[0], *beta = series[1], *rq = series[2], *rk = series[3];
        const bf16* dstate = dstates + item * VALUE_DIM * KEY_DIM;
        {
            float sum = 0.f;
            #pragma unroll 2
            for (int at = threadIdx.x; at < VALUE_DIM * KEY_DIM / 8; at += GRAD_THREADS) {
                float x[8], y[8];
                load8(dstate + at * 8, x);
                load8(reinterpret_cast<const bf16*>(st + at / (KEY_DIM / 8) * K_ROW + at % (KEY_DIM / 8) * 16), y);
                #pragma unroll
                for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
            }
            sum = warp_sum(sum);
            if (lane == 0) through[warp] = sum;
        }
        const float last = cs[CHUNK - 1], ct[2] = {cs[row], cs[row + 8]};
        const float in[2] = {exp2_fast(ct[0]), exp2_fast(ct[1])};
        // R = beta (V - e^c K S^T) over V, then U = T R over R.
        float u[V_HALF][8];
        clear(u);
        #pragma unroll 2
        for (int k = 0; k < K_TILES; ++k) {
            u32 a[4];
            ldsm_x4(a, ka + by_rows<K_ROW>(r * 16, k * 16));
            #pragma unroll
            for (int n = 0; n < V_HALF; ++n) {
                u32 fb[4];
                ldsm_x4(fb, sa + by_cols<K_ROW>(v0 + n * 16, k * 16));
                mma_pair(u[n], a, fb);
            }
        }
        const auto place = [&](u8* tile, int n, int e) {
            return reinterpret_cast<u32*>(tile + (row + row_of(e)) * V_ROW + (v0 + n * 16 + 2 * quad + col_of(e)) * 2);
        };
        #pragma unroll
        for (int n = 0; n < V_HALF; ++n)
            #pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const int x = (e >> 1) & 1, t = row + 8 * x;
                const float w = in[x] * rk[t];
                const u32 v = *place(vt, n, e);
                *place(vt, n, e) = pack_bf16(beta[t] * (bf16_lo(v) - w * u[n][e]), beta[t] * (bf16_hi(v) - w * u[n][e + 1]));
            }
        __syncthreads();
        clear(u);
        #pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
            if (m > r) continue;
            u32 a[4];
            ldsm_x4(a, ha + by_rows<F_ROW>(r * 16, m * 16));
            #pragma unroll
            for (int n = 0; n < V_HALF; ++n) {
                u32 fb[4];
                ldsm_x4_t(fb, va + by_rows<V_ROW>(m * 16, v0 + n * 16));
                mma_pair(u[n], a, fb);
            }
        }
        __syncthreads();
        #pragma unroll
        for (int n = 0; n < V_HALF; ++n)
            #pragma unroll
            for (int e = 0; e < 8; e += 2) *place(vt, n, e) = pack_bf16(u[n][e], u[n][e + 1]);
        __syncthreads();
        // H and -J, every other block of a warp's row.
        #pragma unroll 1
        for (int j = half; j <= r; j += 2) {
            float dp[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, ev[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            #pragma unroll
            for (int k = 0; k < V_TILES; ++k) {
                u32 a[4], fb[4];
                ldsm_x4(fb, va + by_cols<V_ROW>(j * 16, k * 16));
                ldsm_x4(a, doa + by_rows<V_ROW>(r * 16, k * 16));
                mma_pair(dp, a, fb);
                ldsm_x4(a, dva + by_rows<V_ROW>(r * 16, k * 16));
                mma_pair(ev, a, fb);
            }
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int x = (e >> 1) & 1, t = row + 8 * x, from = j * 16 + 2 * quad + col_of(e);
                const float l = from <= t ? exp2_fast(ct[x] - cs[from]) * rk[from] : 0.f;
                if (from == t) diagonal[t] = ev[e];
                dp[e] *= l * rq[t];
                ev[e] *= from < t ? -l * rk[t] : 0.f;
            }
            #pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const int at = (row + row_of(e)) * F_ROW + (j * 16 + 2 * quad + col_of(e)) * 2;
                *reinterpret_cast<u32*>(ht + at) = pack_bf16(dp[e], dp[e + 1]);
                *reinterpret_cast<u32*>(jt + at) = pack_bf16(ev[e], ev[e + 1]);
            }
        }
        float dq[K_HALF][8], dk[K_HALF][8];
        clear(dq);
        clear(dk);
        #pragma unroll 2
        for (int k = 0; k < V_TILES; ++k) {
            u32 a[4], av[4];
            ldsm_x4(a, doa + by_rows<V_ROW>(r * 16, k * 16));
            ldsm_x4(av, dva + by_rows<V_ROW>(r * 16, k * 16));
            #pragma unroll
            for (int n = 0; n < K_HALF; ++n) {
                u32 fb[4];
                ldsm_x4_t(fb, sa + by_rows<K_ROW>(k * 16, k0 + n * 16));
                mma_pair(dq[n], a, fb);
                mma_pair(dk[n], av, fb);
            }
        }
        #pragma unroll
        for (int n = 0; n < K_HALF; ++n)
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int x = (e >> 1) & 1, t = row + 8 * x;
                dq[n][e] *= in[x] * rq[t];
                dk[n][e] *= -in[x] * rk[t];
            }
        __syncthreads();                         // S is read, H and J are whole
        load_tile<VALUE_DIM, KEY_DIM, GRAD_THREADS>(st, dstate, KEY_DIM, VALUE_DIM);
        cp_async_commit();
        #pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
            if (m > r) continue;
            u32 a[4], aj[4];
            ldsm_x4(a, ha + by_rows<F_ROW>(r * 16, m * 16));
            ldsm_x4(aj, ja + by_rows<F_ROW>(r * 16, m * 16));
            #pragma unroll
            for (int n = 0; n < K_HALF; ++n) {
                u32 fb[4];
                ldsm_x4_t(fb, ka + by_rows<K_ROW>(m * 16, k0 + n * 16));
                mma_pair(dq[n], a, fb);
                mma_pair(dk[n], aj, fb);
            }
        }
        row_dots(dots[half][0], dq, qt, row, k0);
        row_dots(dots[half][1], dk, kt, row, k0);
        #pragma unroll
        for (int n = 0; n < K_HALF; ++n)
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                dq_all[n][e] += dq[n][e];
                dk_all[n][e] += dk[n][e];
            }
        cp_async_wait<0>();
        __syncthreads();
        clear(dk);
        #pragma unroll 2
        for (int k = 0; k < V_TILES; ++k) {
            u32 a[4];
            ldsm_x4(a, va + by_rows<V_ROW>(r * 16, k * 16));
            #pragma unroll
            for (int n = 0; n < K_HALF; ++n) {
                u32 fb[4];
                ldsm_x4_t(fb, sa + by_rows<K_ROW>(k * 16, k0 + n * 16));
                mma_pair(dk[n], a, fb);
            }
        }
        #pragma unroll
        for (int n = 0; n < K_HALF; ++n)
            #pragma unroll
            for (int e = 0; e < 8; ++e) dk[n][e] *= exp2_fast(last - ct[(e >> 1) & 1]) * rk[row + row_of(e)];
        row_dots(dots[half][2], dk, kt, row, k0);
        #pragma unroll
        for (int m = 0; m < TOKEN_TILES; ++m) {
            if (m < r) continue;
            u32 a[4], aj[4];
            ldsm_x4_t(a, ha + by_cols<F_ROW>(m * 16, r * 16));
            ldsm_x4_t(aj, ja + by_cols<F_ROW>(m * 16, r * 16));
            #pragma unroll
            for (int n = 0; n < K_HALF; ++n) {
                u32 fb[4];
                ldsm_x4_t(fb, qa + by_rows<K_ROW>(m * 16, k0 + n * 16));
                mma_pair(dk[n], a, fb);
                ldsm_x4_t(fb, ka + by_rows<K_ROW>(m * 16, k0 + n * 16));
                mma_pair(dk[n], aj, fb);
            }
        }
        row_dots(dots[half][3], dk, kt, row, k0);
        #pragma unroll
        for (int n = 0; n < K_HALF; ++n)
            #pragma unroll
            for (int e = 0; e < 8; ++e) dk_all[n][e] += dk[n][e];
        __syncthreads();
        // A thread a token, in the first two warps.
        float dc = 0.f, end = 0.f, upto = 0.f;
        if (warp < 2) {
            const float by_q = dots[0][0][token] + dots[1][0][token], past = dots[0][1][token] + dots[1][1][token];
            const float future = dots[0][3][token] + dots[1][3][token];
            end = warp_sum(dots[0][2][token] + dots[1][2][token]);
            dc = by_q + past - future;
            q_along += by_q;
            k_along += past + future;
            upto = warp_scan(dc);
            if (lane == 31) {
                sums[0][warp] = upto;
                sums[1][warp] = end;
            }
        }
        __syncthreads();
        if (warp < 2) {
            if (warp == 1) upto += sums[0][0];
            float carried = 0.f;
            for (int w = 0; w < GRAD_THREADS / 32; ++w) carried += through[w];
            // A suffix sum, as whole minus exclusive prefix.
            const float dg = (sums[0][0] + sums[0][1]) - (upto - dc) + (sums[1][0] + sums[1][1]) + carried * exp2_fast(last);
            float dalpha = 0.f, da_log = 0.f;
            if (token < valid) {
                const bf16* raw = proj + (token0 + token + 1) * proj_width - 2 * value_heads + h;
                const float x = to_f32(raw[value_heads]) + to_f32(dt_bias[h]), a = -expf(to_f32(a_log[h]));
                dalpha = dg * a / (1.f + expf(-x));
                da_log = dg * a * softplus(x);
                // dbeta beta (1 - beta); beta is positive, if only just.
                const float db = diagonal[token] / fmaxf(beta[token], 1e-30f) * (1.f - beta[token]);
                bf16* out = dba + (token0 + token) * 2 * value_heads + h;
                out[0] = to_bf16(db);
                out[value_heads] = to_bf16(dalpha);
            }
            da_log = warp_sum(da_log);
            const float dbias = warp_sum(dalpha);
            if (lane == 0) {
                sums[2][warp] = da_log;
                sums[3][warp] = dbias;
            }
        }
        __syncthreads();                         // every tile is read
        if (threadIdx.x == 0) {
            float* out = partial + (i64)bc * 2 * value_heads + h;
            out[0] = sums[2][0] + sums[2][1];
            out[value_heads] = sums[3][0] + sums[3][1];
        }
    }
    if (warp < 2) {
        along[0][token] = q_along;
        along[1][token] = k_along;
    }
    __syncthreads();
    // Through the scaling to length 1: dx - (r / scale)^2 x (x dx).
    #pragma unroll
    for (int n = 0; n < K_HALF; ++n)
        #pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const int t = row + row_of(e), col = k0 + n * 16 + 2 * quad + col_of(e);
            if (t >= valid) continue;
            const float rq = series[2][t], rk = series[3][t];
            const float wq = rq * rq * KEY_DIM * along[0][t], wk = rk * rk * along[1][t];
            const u32 q = *reinterpret_cast<const u32*>(qt + t * K_ROW + col * 2), k = *reinterpret_cast<const u32*>(kt + t * K_ROW + col * 2);
            bf16* out = dqkv + (token0 + t) * s.width() + kh * KEY_DIM + col;
            *reinterpret_cast<u32*>(out) = pack_bf16(dq_all[n][e] - wq * bf16_lo(q), dq_all[n][e + 1] - wq * bf16_hi(q));
            *reinterpret_cast<u32*>(out + s.key_width()) = pack_bf16(dk_all[n][e] - wk * bf16_lo(k), dk_all[n][e + 1] - wk * bf16_hi(k));
        }
}
