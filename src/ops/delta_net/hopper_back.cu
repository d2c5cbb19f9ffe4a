// delta_pass_back on wgmma, for compute capability 9.0 and K = V = 128: the same mathematics (backward.cu), sums and roundings.
//
// A block walks the chunks of one value head and half of its columns of V, from the last to the first. Its first warpgroup has all
// the products, transposed (64 columns of V are M), so that every accumulator is the next product's left operand from registers:
//   X^T = dS k^T, dU^T = X^T e^(c_Q - c) rk + dO^T P, dR^T = dU^T T, dS <- e^(c_Q) dS + (dO e^c rq)^T q - (dV e^c rk)^T k.
// Products are queued so that the tensor core has work while elements are scaled and rounded:
//   X (left half of K, right half) | its factors, then dO^T P added to it | dS += .. q | dR | dS += .. k (left half, right half)
// and what stands between two links of the chain runs beside the product queued before. Only at a chunk's end nothing is queued:
// without such a point in the loop ptxas makes every product wait for the one before.
// The second warpgroup moves memory: tiles in, factors of tokens, dS and dV out.
static_assert(CHUNK == 64 && KEY_DIM == 128 && VALUE_DIM == 128, "the tiles of one warpgroup's products");

constexpr int GROUP = 128, BACK_THREADS = 2 * GROUP;
constexpr int HALF_V = VALUE_DIM / 2;
constexpr int PANEL = CHUNK * LINE;              // 64 columns of 64 rows
constexpr int KEY_TILE = 2 * PANEL;              // k, q; dS [64 of V, K]
// Chunks in flight: k is read last, and the next chunk's P and dO before that.
constexpr int KEY_SLOTS = 4, SLOTS = 3;
// Of a chunk, floats: c, beta, rq, rk as loaded; and the factors of X, of dR for dV, of dR for dS, of dO for dS; e^(c_Q).
constexpr int SERIES = 4 * CHUNK, FACTORS = 4 * CHUNK + 4;
constexpr int OF_X = 0, OF_DV = CHUNK, OF_BY_K = 2 * CHUNK, OF_BY_Q = 3 * CHUNK, OF_STATE = 4 * CHUNK;
constexpr int AT_K = 0, AT_Q = AT_K + KEY_SLOTS * KEY_TILE, AT_T = AT_Q + SLOTS * KEY_TILE, AT_P = AT_T + SLOTS * PANEL, AT_DO = AT_P + SLOTS * PANEL,
              AT_DS = AT_DO + SLOTS * PANEL, AT_DV = AT_DS + KEY_TILE, AT_SERIES = AT_DV + PANEL, AT_FACTORS = AT_SERIES + SLOTS * SERIES * 4;
constexpr int BACK_SHARED = AT_FACTORS + SLOTS * FACTORS * 4;
// Barriers. FULL: the next chunk is there, and dS and the previous dV have left their tiles. DS_READY, DV_READY: they are in them.
// DRAINED: of this chunk only k is still read. OWN: among the second warpgroup.
constexpr int FULL = 1, DS_READY = 2, DRAINED = 3, DV_READY = 4, OWN = 5;

// Four 8x8 blocks to shared memory, as ldmatrix reads them; transposed.
__device__ __forceinline__ void stsm_x4(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
        :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void stsm_x4_t(u32 addr, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
        :: "r"(addr), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
// The compiler may not compute these later.
template <int N> __device__ __forceinline__ void pin(u32 (&a)[N][4]) {
    #pragma unroll
    for (int j = 0; j < N; ++j)
        #pragma unroll
        for (int c = 0; c < 4; ++c) asm volatile("" : "+r"(a[j][c]) :: "memory");
}
#define F4(x, j) "+f"(x[j][0]), "+f"(x[j][1]), "+f"(x[j][2]), "+f"(x[j][3])
// [lo, hi] [64 x 128] += A [64 x 16] B [16 x 128], A a fragment in registers, B summed over its rows. Asynchronous.
__device__ __forceinline__ void mma_wide(float (&lo)[8][4], float (&hi)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
        : F4(lo, 0), F4(lo, 1), F4(lo, 2), F4(lo, 3), F4(lo, 4), F4(lo, 5), F4(lo, 6), F4(lo, 7),
          F4(hi, 0), F4(hi, 1), F4(hi, 2), F4(hi, 3), F4(hi, 4), F4(hi, 5), F4(hi, 6), F4(hi, 7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef F4

// Factors of this lane's columns (tokens) of an accumulator: column e & 1 of tile j is number 2 j + (e & 1).
__device__ __forceinline__ void own_tokens(float (&w)[CHUNK / 4], const float* factors) {
    #pragma unroll
    for (int j = 0; j < CHUNK / 8; ++j) {
        const float2 pair = *reinterpret_cast<const float2*>(factors + j * 8 + 2 * (threadIdx.x & 3));
        w[2 * j] = pair.x;
        w[2 * j + 1] = pair.y;
    }
}

// Grid batch * value heads * 2, BACK_THREADS threads, BACK_SHARED bytes.
extern "C" __global__ void __launch_bounds__(BACK_THREADS, 1) delta_pass_back_wgmma(const bf16* qkv, const float* cum, const float* betas,
    const float* rqs, const float* rks, const bf16* tris, const bf16* atts, const bf16* dout, bf16* dstates, bf16* dqkv,
    int seq, int key_heads, int value_heads, int chunks) {
    extern __shared__ __align__(1024) u8 tiles[];
    const Shape s = {seq, key_heads, value_heads, chunks};
    const int head = blockIdx.x >> 1, b = head / value_heads, h = head % value_heads, kh = h / s.group();
    const int v0 = h * VALUE_DIM + (blockIdx.x & 1) * HALF_V;    // of the columns of dO, and of v's in qkv
    for (int i = threadIdx.x; i < 2 * SLOTS * PANEL / 16; i += BACK_THREADS)
        *reinterpret_cast<uint4*>(tiles + AT_T + i * 16) = make_uint4(0, 0, 0, 0);
    proxy_fence();
    __syncthreads();

    // Chunk i of the walk is chunk chunks - 1 - i of the sequence.
    if (threadIdx.x < GROUP) {
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        const u64 k_tiles = descriptor<CHUNK>(tiles + AT_K), q_tiles = descriptor<CHUNK>(tiles + AT_Q), t_tiles = descriptor<CHUNK>(tiles + AT_T),
                  p_tiles = descriptor<CHUNK>(tiles + AT_P);
        // What this lane gives to stmatrix and ldmatrix: dS [its 16 of V, 16 of K], dO and dV [16 tokens, its 16 of V] transposed.
        const u32 ds_at = smem_addr(tiles + AT_DS) + piece_at<CHUNK>(warp * 16 + (lane & 15), lane >> 4);
        const int values_at = piece_at<CHUNK>((lane & 7) + (lane >> 4) * 8, warp * 2 + ((lane >> 3) & 1));
        const u32 do_at = smem_addr(tiles + AT_DO) + values_at, dv_at = smem_addr(tiles + AT_DV) + values_at;
        const float* factors = reinterpret_cast<const float*>(tiles + AT_FACTORS);

        // dS, columns 0..63 and 64..127 of K; X, then dR; the local part.
        float lo[8][4], hi[8][4], x[8][4], local[8][4], w[CHUNK / 4];
        u32 da[4][4], by_q[4][4];
        zero(lo);
        zero(hi);
        zero(x);
        zero(local);
        pin(lo);
        pin(hi);
        pin(x);
        pin(local);
        // dO^T of the chunk in a slot, its operand for dS, and the local part.
        const auto ahead = [&](int slot) {
            #pragma unroll
            for (int m = 0; m < 4; ++m) ldsm_x4_t(da[m], do_at + slot * PANEL + m * 16 * LINE);
            pin(da);
        };
        const auto weigh = [&](int slot) {
            own_tokens(w, factors + slot * FACTORS + OF_BY_Q);
            #pragma unroll
            for (int m = 0; m < 4; ++m)
                #pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int j = 2 * m + (r >> 1);
                    by_q[m][r] = pack_bf16(bf16_lo(da[m][r]) * w[2 * j], bf16_hi(da[m][r]) * w[2 * j + 1]);
                }
            pin(by_q);
        };
        const auto from_q = [&](u64 q_tile) {
            #pragma unroll
            for (int m = 0; m < 4; ++m) {
                mma_rs<1>(lo, by_q[m], q_tile + row_step(m), 1);
                mma_rs<1>(hi, by_q[m], q_tile + HALF_STEP + row_step(m), 1);
            }
            wgmma_commit();
        };
        // Half of dS as the operand of X, and on its way out.
        u32 held[4][4], held_hi[4][4];
        const auto hold = [&](u32 (&a)[4][4], const float (&acc)[8][4], u32 at) {
            #pragma unroll
            for (int n = 0; n < 4; ++n) {
                fragment(a[n], acc[2 * n], acc[2 * n + 1]);
                stsm_x4(at ^ (n << 5), a[n]);
            }
            pin(a);
        };
        bar_wait<BACK_THREADS>(FULL);
        ahead(0);
        wgmma_wait<0>();
        pin(local);
        weigh(0);
        hold(held, lo, ds_at);
        int slot = 0;
        #pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
            const int next = slot == SLOTS - 1 ? 0 : slot + 1;
            const u64 k_tile = k_tiles + (i & (KEY_SLOTS - 1)) * (KEY_TILE >> 4), q_tile = q_tiles + slot * (KEY_TILE >> 4);
            const u64 t_tile = t_tiles + slot * (PANEL >> 4);
            const float* own = factors + slot * FACTORS;
            // X^T, from the left half of K while the right one is rounded.
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < 4; ++n) mma_rs<0>(x, held[n], k_tile + column_step<CHUNK>(n), n > 0);
            wgmma_commit();
            hold(held_hi, hi, ds_at + PANEL);
            wgmma_fence();
            #pragma unroll
            for (int n = 0; n < 4; ++n) mma_rs<0>(x, held_hi[n], k_tile + column_step<CHUNK>(4 + n), 1);
            wgmma_commit();
            bar_arrive<BACK_THREADS>(DS_READY);
            // Beside it: dS decays. Then its part from q, which waits for nothing.
            const float decay = own[OF_STATE];
            #pragma unroll
            for (int j = 0; j < 8; ++j)
                #pragma unroll
                for (int e = 0; e < 4; ++e) {
                    lo[j][e] *= decay;
                    hi[j][e] *= decay;
                }
            pin(lo);
            pin(hi);
            // dU^T.
            own_tokens(w, own + OF_X);
            wgmma_wait<0>();
            pin(x);
            u32 du[4][4];
            #pragma unroll
            for (int j = 0; j < 8; ++j)
                #pragma unroll
                for (int e = 0; e < 4; ++e) x[j][e] *= w[2 * j + (e & 1)];
            wgmma_fence();
            #pragma unroll
            for (int m = 0; m < 4; ++m) mma_rs<1>(x, da[m], p_tiles + slot * (PANEL >> 4) + row_step(m), 1);
            wgmma_commit();
            from_q(q_tile);
            wgmma_wait<1>();
            pin(x);
            #pragma unroll
            for (int m = 0; m < 4; ++m) fragment(du[m], x[2 * m], x[2 * m + 1]);
            pin(du);
            // dR^T, in place of X; behind it the next chunk's local part (after the last chunk: of what lies there, for nobody).
            wgmma_fence();
            #pragma unroll
            for (int m = 0; m < 4; ++m) mma_rs<1>(x, du[m], t_tile + row_step(m), m > 0);
            wgmma_commit();
            bar_wait<BACK_THREADS>(FULL);
            ahead(next);
            own_tokens(w, own + OF_BY_K);
            wgmma_wait<0>();
            pin(x);
            bar_arrive<BACK_THREADS>(DRAINED);   // of this chunk only k is read from here on
            u32 by_k[4][4];
            #pragma unroll
            for (int m = 0; m < 4; ++m)
                #pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int j = 2 * m + (r >> 1), e = 2 * (r & 1);
                    by_k[m][r] = pack_bf16(x[j][e] * w[2 * j], x[j][e + 1] * w[2 * j + 1]);
                }
            pin(by_k);
            wgmma_fence();
            #pragma unroll
            for (int m = 0; m < 4; ++m) mma_rs<1>(lo, by_k[m], k_tile + row_step(m), 1);
            wgmma_commit();
            #pragma unroll
            for (int m = 0; m < 4; ++m) mma_rs<1>(hi, by_k[m], k_tile + HALF_STEP + row_step(m), 1);
            wgmma_commit();
            // Beside it: dV.
            own_tokens(w, own + OF_DV);
            #pragma unroll
            for (int m = 0; m < 4; ++m) {
                u32 dv[4];
                #pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int j = 2 * m + (r >> 1), e = 2 * (r & 1);
                    dv[r] = pack_bf16(x[j][e] * w[2 * j], x[j][e + 1] * w[2 * j + 1]);
                }
                stsm_x4_t(dv_at + m * 16 * LINE, dv);
            }
            bar_arrive<BACK_THREADS>(DV_READY);
            wgmma_wait<2>();
            pin(local);
            weigh(next);
            wgmma_wait<1>();
            pin(lo);
            hold(held, lo, ds_at);
            wgmma_wait<0>();
            pin(hi);
            slot = next;
        }
        wgmma_wait<0>();
        pin(lo);
        pin(hi);
        pin(local);
    } else {
        const int me = threadIdx.x - GROUP;
        // This thread's pieces: of k, q and dS (rows wide_row + 8 n); of dO and dV (rows row + 16 n).
        const int wide_row = me >> 4, wide_piece = me & 15, row = me >> 3, piece = me & 7;
        const int wide_at = piece_at<CHUNK>(wide_row, wide_piece), values_at = piece_at<CHUNK>(row, piece);
        // Of T and of P: 16-row block n has 2 n + 2 pieces a row up to the diagonal. All take one of block 3; of blocks 2 and 0; and of
        // block 1 of either T or P.
        const bool block2 = me < 96;
        const int rows[3] = {48 + row, block2 ? 32 + me / 6 : (me - 96) >> 1, 16 + ((me & 63) >> 2)};
        const int pieces[3] = {piece, block2 ? me % 6 : me & 1, me & 3};
        const int width = s.width(), values_width = s.value_width();
        const i64 token0 = (i64)b * seq, own0 = s.series(b, h), keyed0 = s.key_series(b, kh);
        const auto load = [&](int i, int slot) {
            if (i < chunks) {
                const int c = chunks - 1 - i, t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
                u8* const k_to = tiles + AT_K + (i & (KEY_SLOTS - 1)) * KEY_TILE + wide_at;
                u8* const q_to = tiles + AT_Q + slot * KEY_TILE + wide_at;
                const bf16* const q_from = qkv + (token0 + t0) * width + kh * KEY_DIM + wide_piece * 8;
                #pragma unroll
                for (int n = 0; n < CHUNK / 8; ++n) {
                    const int r = wide_row + n * 8;
                    const bf16* const from = q_from + (i64)min(r, valid - 1) * width;
                    cp_async16_zfill(k_to + n * 8 * LINE, from + s.key_width(), r < valid);
                    cp_async16_zfill(q_to + n * 8 * LINE, from, r < valid);
                }
                const i64 square = s.item(b, c, h) * CHUNK * CHUNK;
                u8 *const t_to = tiles + AT_T + slot * PANEL, *const p_to = tiles + AT_P + slot * PANEL;
                #pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const int at = piece_at<CHUNK>(rows[n], pieces[n]), from = rows[n] * CHUNK + pieces[n] * 8;
                    cp_async16(t_to + at, tris + square + from);
                    cp_async16(p_to + at, atts + square + from);
                }
                const bool of_t = me < 64;
                const bf16* const from = (of_t ? tris : atts) + square + rows[2] * CHUNK + pieces[2] * 8;
                cp_async16((of_t ? t_to : p_to) + piece_at<CHUNK>(rows[2], pieces[2]), from);
                u8* const do_to = tiles + AT_DO + slot * PANEL + values_at;
                const bf16* const do_from = dout + (token0 + t0) * values_width + v0 + piece * 8;
                #pragma unroll
                for (int n = 0; n < CHUNK / 16; ++n) {
                    const int r = row + n * 16;
                    cp_async16_zfill(do_to + n * 16 * LINE, do_from + (i64)min(r, valid - 1) * values_width, r < valid);
                }
                if (me < CHUNK) {
                    const int which = me / (CHUNK / 4), at = me % (CHUNK / 4) * 4;
                    const float* const from = which == 0 ? cum + own0 : which == 1 ? betas + own0 : which == 2 ? rqs + keyed0 : rks + keyed0;
                    cp_async16(tiles + AT_SERIES + (slot * SERIES + which * CHUNK + at) * 4, from + t0 + at);
                }
            }
            cp_async_commit();
        };
        // This thread's copies into the slot have come: shows them to the tensor core, and forms the factors of tokens.
        const auto come = [&](int slot) {
            proxy_fence();
            bar_wait<GROUP>(OWN);
            if (me < CHUNK) {
                const float* const in = reinterpret_cast<const float*>(tiles + AT_SERIES) + slot * SERIES;
                float* const out = reinterpret_cast<float*>(tiles + AT_FACTORS) + slot * FACTORS;
                const float c = in[me], beta = in[CHUNK + me], rq = in[2 * CHUNK + me], rk = in[3 * CHUNK + me], last = in[CHUNK - 1];
                const float grown = exp2_fast(c);
                out[OF_X + me] = exp2_fast(last - c) * rk;
                out[OF_DV + me] = beta;
                out[OF_BY_K + me] = -(beta * grown * rk);
                out[OF_BY_Q + me] = grown * rq;
                if (me == 0) out[OF_STATE] = exp2_fast(last);
            }
        };
        for (int i = 0; i < SLOTS; ++i) load(i, i);
        cp_async_wait<SLOTS - 1>();
        come(0);
        bar_arrive<BACK_THREADS>(FULL);
        int slot = 0;
        #pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
            const int next = slot == SLOTS - 1 ? 0 : slot + 1, c = chunks - 1 - i;
            cp_async_wait<1>();                  // chunk i + 1, not i + 2
            if (i + 1 < chunks) come(next);
            // dS out of shared memory, then FULL.
            bar_wait<BACK_THREADS>(DS_READY);
            uint4 ds[CHUNK / 8];
            #pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n) ds[n] = *reinterpret_cast<const uint4*>(tiles + AT_DS + wide_at + n * 8 * LINE);
            bar_arrive<BACK_THREADS>(FULL);
            bf16* const ds_to = dstates + (s.item(b, c, h) * VALUE_DIM + (blockIdx.x & 1) * HALF_V) * KEY_DIM + me * 8;
            #pragma unroll
            for (int n = 0; n < CHUNK / 8; ++n) *reinterpret_cast<uint4*>(ds_to + n * 8 * KEY_DIM) = ds[n];
            bar_wait<BACK_THREADS>(DRAINED);
            load(i + SLOTS, slot);
            bar_wait<BACK_THREADS>(DV_READY);
            const int t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
            bf16* const dv_to = dqkv + (token0 + t0) * width + 2 * s.key_width() + v0 + piece * 8;
            #pragma unroll
            for (int n = 0; n < CHUNK / 16; ++n) {
                const int r = row + n * 16;
                const uint4 dv = *reinterpret_cast<const uint4*>(tiles + AT_DV + values_at + n * 16 * LINE);
                if (r < valid) *reinterpret_cast<uint4*>(dv_to + (i64)r * width) = dv;
            }
            slot = next;
        }
    }
}
