// Forward of the gated delta rule: delta_prepare, then one pass over the chunks.
//
//   U = T beta (V - e^c K S^T),  o_t = e^(c_t) S q_t + sum_{s <= t} P_ts u_s,  S' = e^(c_Q) S + sum_s e^(c_Q - c_s) u_s k_s^T
// with P the masked q k^T.
// Grid batch * value heads * (V / SLICE); a warp for each 16 columns. Shared: two stages.
extern "C" __global__ void __launch_bounds__(PASS_THREADS) delta_pass(const bf16* qkv, const float* cum, const float* betas, const float* rqs,
    const float* rks, const bf16* tris, const bf16* atts, bf16* o, bf16* states, int seq, int key_heads, int value_heads, int chunks) {
    const Shape s = {seq, key_heads, value_heads, chunks};
    const Pass p(s);
    const int warp = threadIdx.x >> 5;
    const bf16* v = qkv + (i64)p.b * seq * s.width() + 2 * s.key_width() + p.h * VALUE_DIM + p.v0 - warp * 16;
    const auto prefetch = [&](int c) {
        if (c < chunks) Stage(c).load(s, p, c, qkv, v, s.width(), cum, betas, rqs, rks, tris, atts);
        cp_async_commit();
    };
    float acc[K_TILES][8];
    clear(acc);
    prefetch(0);
    #pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
        prefetch(c + 1);
        cp_async_wait<1>();
        __syncthreads();
        const Stage stage(c);
        const u32 kt = stage.k(), qt = stage.q(), tri = stage.tri(), att = stage.att();
        const float* cs = stage.series();
        const float last = cs[CHUNK - 1];
        u32 held[K_TILES][4], ra[TOKEN_TILES][4], ua[TOKEN_TILES][4], weighed[TOKEN_TILES][4];
        hold(held, acc, states + s.item(p.b, c, p.h) * VALUE_DIM * KEY_DIM, p.v0);
        #pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            float r[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f}, out[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            float u[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
            #pragma unroll
            for (int n = 0; n < K_TILES; ++n) {
                u32 fb[4];
                ldsm_x4(fb, kt + by_cols<K_ROW>(j * 16, n * 16));
                mma_pair(r, held[n], fb);
                ldsm_x4(fb, qt + by_cols<K_ROW>(j * 16, n * 16));
                mma_pair(out, held[n], fb);
            }
            float ct[4], beta[4], rq[4], rk[4];
            own_columns(ct, cs, j);
            own_columns(beta, cs + CHUNK, j);
            own_columns(rq, cs + 2 * CHUNK, j);
            own_columns(rk, cs + 3 * CHUNK, j);
            u32 values[4];
            ldsm_x4_t(values, smem_addr(stage.rows()) + by_cols<SLICE_ROW>(j * 16, warp * 16));
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const int t = column_of(e);
                const float in = exp2_fast(ct[t]);
                r[e] = beta[t] * (element(values, e) - in * rk[t] * r[e]);
                out[e] *= in * rq[t];
            }
            as_operand(ra[j], r);
            #pragma unroll
            for (int m = 0; m <= j; ++m) {
                u32 fb[4];
                ldsm_x4(fb, tri + by_cols<F_ROW>(j * 16, m * 16));
                mma_pair(u, ra[m], fb);
            }
            as_operand(ua[j], u);
            #pragma unroll
            for (int m = 0; m <= j; ++m) {
                u32 fb[4];
                ldsm_x4(fb, att + by_cols<F_ROW>(j * 16, m * 16));
                mma_pair(out, ua[m], fb);
            }
            #pragma unroll
            for (int e = 0; e < 8; ++e) u[e] *= exp2_fast(last - ct[column_of(e)]) * rk[column_of(e)];
            as_operand(weighed[j], u);
            __syncwarp();                        // the tile's values are read
            stage.put(j, out);
        }
        __syncwarp();
        const int t0 = c * CHUNK;
        stage.write(o + ((i64)p.b * seq + t0) * s.value_width() + p.h * VALUE_DIM + p.v0, s.value_width(), min(CHUNK, seq - t0));
        const float decay = exp2_fast(last);
        #pragma unroll
        for (int n = 0; n < K_TILES; ++n) {
            #pragma unroll
            for (int e = 0; e < 8; ++e) acc[n][e] *= decay;
            #pragma unroll
            for (int m = 0; m < TOKEN_TILES; ++m) {
                u32 fb[4];
                ldsm_x4_t(fb, kt + by_rows<K_ROW>(m * 16, n * 16));
                mma_pair(acc[n], weighed[m], fb);
            }
        }
        __syncthreads();
    }
}
