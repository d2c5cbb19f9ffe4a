// Forward of the scan: ssd_dt, then the states at every chunk's start, then all outputs at once.

extern "C" __global__ void __launch_bounds__(STATE_THREADS) ssd_states(const bf16* xbc, const float* dt, const float* cum,
    bf16* states, int seq, int heads, int groups, int chunks) {
    const Shape s = {seq, heads, groups, chunks};
    pass_states<false>(xbc, s.width(), xbc + s.inner(), s.width(), dt, cum, nullptr, states, nullptr, s);
}

// y_t = sum_{s <= t} (C_t B_s) L_ts dt_s x_s + 2^c_t H C_t + D x_t. A block takes one chunk and `block_heads` heads of
// one group: C B^T is computed once and kept in registers, a warp's 16 rows of it. Shared: C | B, then two stages
// of (x, H, dt, c).
constexpr int OUT_STAGE = X_TILE + S_TILE + CHUNK * 8;
#if __CUDA_ARCH__ == 900
constexpr int OUT_BLOCKS = STATE <= 128 ? 2 : 1; // resident blocks that registers and shared memory allow
#else
constexpr int OUT_BLOCKS = 1;
#endif
extern "C" __global__ void __launch_bounds__(CHUNK * 2, OUT_BLOCKS) ssd_out(const bf16* xbc, const bf16* d, const float* dt,
    const float* cum, const bf16* states, bf16* y, int block_heads, int seq, int heads, int groups, int chunks) {
    constexpr int THREADS = CHUNK * 2;
    const Shape s = {seq, heads, groups, chunks};
    const int parts = heads / block_heads, part = blockIdx.x % parts, bc = blockIdx.x / parts, b = bc / chunks, c = bc % chunks;
    const int h0 = part * block_heads, g = h0 / (heads / groups);
    const int t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, row = warp * 16 + (lane >> 2);
    u8* stages = shared + M_TILE;
    const bf16* chunk = xbc + ((i64)b * seq + t0) * s.width();
    load_tile<CHUNK, STATE, THREADS>(shared, chunk + s.inner() + (groups + g) * STATE, s.width(), valid);
    load_tile<CHUNK, STATE, THREADS>(stages, chunk + s.inner() + g * STATE, s.width(), valid);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const u32 cm = smem_addr(shared), bm = smem_addr(stages);
    float cb[TOKEN_TILES][8];
    clear(cb);
    #pragma unroll
    for (int k = 0; k < STATE / 16; ++k) {
        u32 a[4];
        ldsm_x4(a, cm + by_rows<N_ROW>(warp * 16, k * 16));
        #pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            if (j > warp) continue;
            u32 fb[4];
            ldsm_x4(fb, bm + by_cols<N_ROW>(j * 16, k * 16));
            mma_pair(cb[j], a, fb);
        }
    }
    u32 scores[TOKEN_TILES][4];                  // rounded: half the registers, so that two blocks fit
    #pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j) as_operand(scores[j], cb[j]);
    __syncthreads();
    const i64 series = s.series(b, h0) + t0;
    const auto prefetch = [&](int i) {
        if (i < block_heads) {
            const int h = h0 + i;
            u8* stage = stages + (i & 1) * OUT_STAGE;
            load_tile<CHUNK, HEAD_DIM, THREADS>(stage, chunk + h * HEAD_DIM, s.width(), valid);
            load_tile<HEAD_DIM, STATE, THREADS>(stage + X_TILE, states + s.state(b, c, h), STATE, HEAD_DIM);
            load_series<THREADS>(reinterpret_cast<float*>(stage + X_TILE + S_TILE), dt + series + (i64)i * chunks * CHUNK,
                cum + series + (i64)i * chunks * CHUNK);
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
        const u8* stage = stages + (i & 1) * OUT_STAGE;
        const u32 x = smem_addr(stage), st = smem_addr(stage + X_TILE);
        const float* dts = reinterpret_cast<const float*>(stage + X_TILE + S_TILE);
        const float *cs = dts + CHUNK, ct[2] = {cs[row], cs[row + 8]};
        float acc[HEAD_DIM / 16][8];
        clear(acc);
        #pragma unroll 1
        for (int k = 0; k < STATE / 16; ++k) {
            u32 a[4];
            ldsm_x4(a, cm + by_rows<N_ROW>(warp * 16, k * 16));
            #pragma unroll
            for (int p = 0; p < HEAD_DIM / 16; ++p) {
                u32 fb[4];
                ldsm_x4(fb, st + by_cols<N_ROW>(p * 16, k * 16));
                mma_pair(acc[p], a, fb);
            }
        }
        const float skip = to_f32(d[h]), in[2] = {exp2_fast(ct[0]), exp2_fast(ct[1])};
        #pragma unroll
        for (int p = 0; p < HEAD_DIM / 16; ++p)
            #pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const u32 own = *reinterpret_cast<const u32*>(
                    stage + (row + row_of(e)) * P_ROW + (p * 16 + col_of(e) + 2 * quad) * 2);
                acc[p][e] = acc[p][e] * in[(e >> 1) & 1] + skip * bf16_lo(own);
                acc[p][e + 1] = acc[p][e + 1] * in[(e >> 1) & 1] + skip * bf16_hi(own);
            }
        #pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            if (j > warp) continue;
            u32 a[4];
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int from = j * 16 + half * 8 + 2 * quad;
                const float2 cf = *reinterpret_cast<const float2*>(cs + from), df = *reinterpret_cast<const float2*>(dts + from);
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const u32 v = scores[j][half * 2 + r];
                    const int t = row + 8 * r;
                    a[half * 2 + r] = pack_bf16(from <= t ? bf16_lo(v) * exp2_fast(ct[r] - cf.x) * df.x : 0.f,
                        from + 1 <= t ? bf16_hi(v) * exp2_fast(ct[r] - cf.y) * df.y : 0.f);
                }
            }
            #pragma unroll
            for (int p = 0; p < HEAD_DIM / 16; ++p) {
                u32 fb[4];
                ldsm_x4_t(fb, x + by_rows<P_ROW>(j * 16, p * 16));
                mma_pair(acc[p], a, fb);
            }
        }
        bf16* out = y + ((i64)b * seq + t0 + row) * s.inner() + h * HEAD_DIM + 2 * quad;
        #pragma unroll
        for (int p = 0; p < HEAD_DIM / 16; ++p)
            #pragma unroll
            for (int e = 0; e < 8; e += 2)
                if (row + row_of(e) < valid)
                    *reinterpret_cast<u32*>(out + row_of(e) * s.inner() + p * 16 + col_of(e)) = pack_bf16(acc[p][e], acc[p][e + 1]);
        __syncthreads();
    }
}
