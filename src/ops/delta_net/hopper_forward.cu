// The pass of the gated delta rule's forward on wgmma (compute capability 9.0), for K = V = 128 and chunks of 64 tokens:
//
//   U = T beta (V - e^c K S^T),  o_t = e^(c_t) S q_t + sum_{s <= t} P_ts u_s,  S' = e^(c_Q) S + sum_s e^(c_Q - c_s) u_s k_s^T
// with P the masked q k^T (tile.cuh, mod.rs). A block walks the chunks of one value head and 64 columns of V with two warpgroups.
// The first is the chain from state to state, everything transposed (S [V, K], R^T and U^T [V, tokens]), so that an accumulator is the
// next product's left operand and the state stays in registers in fp32. The second follows it with what no later chunk needs: the
// outputs, the states' copy to global memory; and it loads chunks ahead.
//
// HALVES: 0: products over whole chunks. 1: R, U and the state's update in halves of 32 tokens (T is zero above the diagonal), so that
// the factors of one half are applied while the tensor core has the other. 2: the same with R whole.
// SHOW_FIRST: chunk c + 1 is waited for before the loads of c + 2 begin, not after.
#ifndef SHOW_FIRST
#define SHOW_FIRST 0
#endif
#ifndef HALVES
#define HALVES 1
#endif

static_assert(CHUNK == 64 && KEY_DIM == 128 && VALUE_DIM == 128, "tiles of a warpgroup");

constexpr int COLUMNS = 64;                      // of V of a block: rows of its state
constexpr int GROUP = 128, PASS_BLOCK = 2 * GROUP;
constexpr int HALF_TILE = 64 * LINE, WIDE_TILE = 2 * HALF_TILE;      // 64 rows of 64, of 128
// A stage: k | q | T | P | v, later the outputs. Three: one in use and two chunks on their way.
constexpr int K_AT = 0, Q_AT = WIDE_TILE, T_AT = 2 * WIDE_TILE, P_AT = T_AT + HALF_TILE, V_AT = P_AT + HALF_TILE;
constexpr int STAGES = 3, PASS_STAGE_BYTES = V_AT + HALF_TILE;
// Then, two of each: the state [V, K], U^T [V, tokens], and the numbers a token.
constexpr int STATE_AT = STAGES * PASS_STAGE_BYTES, U_AT = STATE_AT + 2 * WIDE_TILE, FACTORS_AT = U_AT + 2 * HALF_TILE;
constexpr int FACTORS_BYTES = 4 * CHUNK * 4 + 16;
constexpr int PASS_SHARED = FACTORS_AT + 2 * FACTORS_BYTES;
static_assert(PASS_SHARED <= 227 * 1024, "shared memory of a block");
// Named barriers of both warpgroups; one waits, the other only arrives. Loads run a chunk ahead of U, so that takes two in turn.
constexpr int FULL = 1, STATE_READY = 2, U_READY = 3;

// Numbers a token of a chunk, in shared memory, and e^(c_Q).
struct Factors {
    float2 in[CHUNK];                            // beta, beta e^c rk
    float out[CHUNK];                            // e^(c_Q - c) rk
    float query[CHUNK];                          // e^c rq
    float decay, unused[3];
};
static_assert(sizeof(Factors) == FACTORS_BYTES, "layout of shared memory");

// Four n8 tiles of an accumulator of eight: 32 columns.
__device__ __forceinline__ float (&part(float (&acc)[8][4], int j))[4][4] { return reinterpret_cast<float (&)[4][4]>(acc[j]); }

// What a thread of the loading warpgroup fetches of them ahead: thread i of token i % 64.
struct Series { float c, last, rk, own; };       // own: beta, in the second half rq

// Starts the copy of 64 rows of COLS elements by a warpgroup; zeros in place of rows from `valid` on.
template <int COLS> __device__ __forceinline__ void load_rows(u8* tile, const bf16* src, int stride, int valid) {
    constexpr int PIECES = COLS / 8, STEP = GROUP / PIECES;          // 8 or 16 rows a pass: the swizzle of a thread's pieces is one
    const int i = threadIdx.x & (GROUP - 1), r = i / PIECES, c = i % PIECES;
    u8* const dst = tile + piece_at<64>(r, c);
    #pragma unroll
    for (int n = 0; n < 64; n += STEP)
        cp_async16_zfill(dst + n * LINE, src + (i64)min(r + n, valid - 1) * stride + c * 8, r + n < valid);
}

// Grid batch * value heads * 2, the halves of a head next to each other: they read the same k, q, T and P. Shared: PASS_SHARED.
extern "C" __global__ void __launch_bounds__(PASS_BLOCK, 1) delta_pass_wgmma(const bf16* qkv, const float* cum, const float* betas, const float* rqs,
    const float* rks, const bf16* tris, const bf16* atts, bf16* o, bf16* states, int seq, int key_heads, int value_heads, int chunks) {
    extern __shared__ __align__(1024) u8 shared[];
    const Shape s = {seq, key_heads, value_heads, chunks};
    const int half = blockIdx.x % (VALUE_DIM / COLUMNS), bh = blockIdx.x / (VALUE_DIM / COLUMNS);
    const int b = bh / value_heads, h = bh % value_heads, kh = h / s.group(), v0 = half * COLUMNS;
    const int lane = threadIdx.x & 31, quad = lane & 3, row = (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);   // + 8: of accumulators
    // Where this lane's pair of columns 8 j of `row` lies in a tile: own + (j ^ turn) * 16; rows + 8: 8 lines on.
    const int own = row * LINE + quad * 4, turn = lane >> 2;
    const auto factors = [&](int c) { return reinterpret_cast<Factors*>(shared + FACTORS_AT + (c & 1) * FACTORS_BYTES); };
    int at = 0;                                  // the stage of chunk c
    const auto following = [](int stage) { return stage + 1 == STAGES ? 0 : stage + 1; };

    if (__shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0) == 0) {
        // The chain.
        float acc[2][8][4];                      // S [V, K], halves of K: one is rounded while the tensor core still adds to the other
        zero(acc[0]);
        zero(acc[1]);
        u32 held[KEY_DIM / 16][4];               // S rounded, as left operands
        const auto hold = [&](int i) {
            pin(acc[i]);
            #pragma unroll
            for (int k = 0; k < 4; ++k) fragment(held[4 * i + k], acc[i][2 * k], acc[i][2 * k + 1]);
        };
        const auto put_state = [&](int i, int n) {           // to copy n of the state's tile
            u8* const panel = shared + STATE_AT + n * WIDE_TILE + i * HALF_TILE + own;
            #pragma unroll
            for (int j = 0; j < 8; ++j)
                #pragma unroll
                for (int e = 0; e < 2; ++e) *reinterpret_cast<u32*>(panel + ((j ^ turn) << 4) + e * 8 * LINE) = held[4 * i + j / 2][2 * (j & 1) + e];
        };
        bar_wait<PASS_BLOCK>(FULL);
        hold(0);
        put_state(0, 0);
        hold(1);
        #pragma unroll 1
        for (int c = 0; c < chunks; ++c, at = following(at)) {
            const u8* const stage = shared + at * PASS_STAGE_BYTES;
            const u64 keys = descriptor<64>(stage + K_AT), tri = descriptor<64>(stage + T_AT);
            const Factors& f = *factors(c);
            float r[CHUNK / 8][4], u[CHUNK / 8][4];        // R^T, U^T [V, tokens]
            auto &r_early = part(r, 0), &r_late = part(r, 4), &u_early = part(u, 0), &u_late = part(u, 4);     // tokens up to 31, from 32
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < KEY_DIM / 16; ++k) {
                if (HALVES == 1) mma_rs<0>(r_early, held[k], keys + column_step<64>(k), k);
                else mma_rs<0>(r, held[k], keys + column_step<64>(k), k);
            }
            wgmma_commit();
            if (HALVES == 1) {
                #pragma unroll
                for (int k = 0; k < 8; ++k) mma_rs<0>(r_late, held[k], keys + row_step(2) + column_step<64>(k), k);
                wgmma_commit();
            }
            // Meanwhile: the rest of the rounded state to the other warpgroup, v transposed, and the factors.
            put_state(1, (c & 1));
            proxy_fence();
            bar_arrive<PASS_BLOCK>(STATE_READY);
            u32 values[CHUNK / 16][4];           // 16 tokens a step; parts (tokens, V): (0, 0), (0, 8), (8, 0), (8, 8)
            float4 in[CHUNK / 8];                // of two tokens
            float2 weights[CHUNK / 8];
            const int v_row = (lane & 7) + (lane >> 4) * 8, v_piece = (row >> 4) * 2 + (lane >> 3 & 1);
            const auto take = [&](int from) {    // 32 tokens of them, n8 tiles from `from` on
                #pragma unroll
                for (int k = from / 2; k < from / 2 + 2; ++k)
                    ldsm_x4_t(values[k], smem_addr(stage + V_AT) + piece_at<64>(v_row, v_piece) + k * 16 * LINE);
                #pragma unroll
                for (int j = from; j < from + 4; ++j) in[j] = reinterpret_cast<const float4*>(f.in)[4 * j + quad];
            };
            take(0);
            if (HALVES != 1) take(4);
            const float decay = f.decay;
            #pragma unroll
            for (int j = 0; j < CHUNK / 8; ++j) weights[j] = reinterpret_cast<const float2*>(f.out)[4 * j + quad];
            // Of the same tokens: beta v; R^T = beta v - beta e^c rk r as left operands; U^T weighed by e^(c_Q - c) rk.
            float scaled[CHUNK / 8][4];
            const auto scale_values = [&](int from) {
                #pragma unroll
                for (int j = from; j < from + 4; ++j)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const u32 pair = values[j >> 1][(j & 1) * 2 + (e >> 1)];
                        scaled[j][e] = e & 1 ? __fmul_rn(in[j].z, bf16_hi(pair)) : __fmul_rn(in[j].x, bf16_lo(pair));   // not part of the fma below
                    }
            };
            u32 residual[CHUNK / 16][4], weighed[CHUNK / 16][4];
            const auto subtract = [&](int from) {
                #pragma unroll
                for (int j = from; j < from + 4; ++j)
                    #pragma unroll
                    for (int e = 0; e < 4; ++e) r[j][e] = fmaf(-(e & 1 ? in[j].w : in[j].y), r[j][e], scaled[j][e]);
                #pragma unroll
                for (int k = from / 2; k < from / 2 + 2; ++k) fragment(residual[k], r[2 * k], r[2 * k + 1]);
            };
            const auto weigh = [&](int from) {
                #pragma unroll
                for (int k = from / 2; k < from / 2 + 2; ++k) {
                    float x[2][4];
                    #pragma unroll
                    for (int i = 0; i < 2; ++i)
                        #pragma unroll
                        for (int e = 0; e < 4; ++e) x[i][e] = u[2 * k + i][e] * (e & 1 ? weights[2 * k + i].y : weights[2 * k + i].x);
                    fragment(weighed[k], x[0], x[1]);
                }
            };
            const auto decay_state = [&] {       // while the tensor core has U
                if (decay != 1.f)                // always, nearly; a block of its own, so that none of it is scheduled between those products
                    #pragma unroll
                    for (int i = 0; i < 2; ++i)
                        #pragma unroll
                        for (int j = 0; j < 8; ++j)
                            #pragma unroll
                            for (int e = 0; e < 4; ++e) acc[i][j][e] *= decay;
                pin(acc[0]);
                pin(acc[1]);
            };
            const auto update = [&](int i, int from) {               // half i of the state
                #pragma unroll
                for (int k = from / 2; k < from / 2 + 2; ++k) mma_rs<1>(acc[i], weighed[k], keys + row_step(k) + column_step<64>(4 * i), 1);
            };
            scale_values(0);
            if (HALVES != 1) scale_values(4);
#if HALVES
            // T is zero above the diagonal: early U needs early R only.
            const auto add_late = [&](int k) { mma_rs<0>(u_late, residual[k], tri + row_step(2) + column_step<64>(k), k); };
            wgmma_wait<HALVES == 1>();           // of R, the early tokens at least
            pin(r_early);
            if (HALVES == 2) pin(r_late);
            subtract(0);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < 2; ++k) mma_rs<0>(u_early, residual[k], tri + column_step<64>(k), k);
            wgmma_commit();
            add_late(0);
            add_late(1);
            wgmma_commit();
            if (HALVES == 2) {
                subtract(4);
                wgmma_fence();
                add_late(2);
                add_late(3);
                wgmma_commit();
                decay_state();
                wgmma_wait<2>();
                pin(u_early);
                weigh(0);
                wgmma_fence();
                update(0, 0);
                update(1, 0);
                wgmma_commit();
                wgmma_wait<1>();
            } else {
                decay_state();
                wgmma_wait<1>();                 // early U, and so late R
                pin(u_early);
                pin(r_late);
                weigh(0);
                wgmma_fence();
                update(0, 0);
                update(1, 0);
                wgmma_commit();
                take(4);                         // here, so that none of it is scheduled between those products
                scale_values(4);
                subtract(4);
                wgmma_fence();
                add_late(2);
                add_late(3);
                wgmma_commit();
                wgmma_wait<0>();
            }
            pin(u_late);
            weigh(4);
            wgmma_fence();
            update(0, 4);
            wgmma_commit();
            update(1, 4);
            wgmma_commit();
#else
            wgmma_wait<0>();
            pin(r);
            subtract(0);
            subtract(4);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < CHUNK / 16; ++k) mma_rs<0>(u, residual[k], tri + column_step<64>(k), k);
            wgmma_commit();
            decay_state();
            wgmma_wait<0>();
            pin(u);
            weigh(0);
            weigh(4);
            wgmma_fence();
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                update(i, 0);
                update(i, 4);
                wgmma_commit();
            }
#endif
            // While the state takes U in: U, rounded, to the other warpgroup.
            u8* const u_tile = shared + U_AT + (c & 1) * HALF_TILE + own;
            #pragma unroll
            for (int j = 0; j < CHUNK / 8; ++j) {
                *reinterpret_cast<u32*>(u_tile + ((j ^ turn) << 4)) = pack_bf16(u[j][0], u[j][1]);
                *reinterpret_cast<u32*>(u_tile + ((j ^ turn) << 4) + 8 * LINE) = pack_bf16(u[j][2], u[j][3]);
            }
            proxy_fence();
            bar_arrive<PASS_BLOCK>(U_READY + (c & 1));
            bar_wait<PASS_BLOCK>(FULL);          // the next chunk, and room for its state; after the last one too
            wgmma_wait<1>();                     // the update of the first half
            hold(0);
            put_state(0, ((c + 1) & 1));
            wgmma_wait<0>();
            hold(1);
        }
    } else {
        // Outputs, and loads. A barrier that this warpgroup waits at tells it too that it has left the last chunk as a whole.
        const int thread = threadIdx.x - GROUP, token = thread & (CHUNK - 1);
        const bool second = thread >= CHUNK;
        const bf16* const rows = qkv + (i64)b * seq * s.width();
        const auto load = [&](int c, int stage) {
            if (c < chunks) {
                u8* const to = shared + stage * PASS_STAGE_BYTES;
                const int t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
                const bf16* const first = rows + (i64)t0 * s.width();
                const i64 square = s.item(b, c, h) * CHUNK * CHUNK;
                load_rows<KEY_DIM>(to + K_AT, first + s.key_width() + kh * KEY_DIM, s.width(), valid);
                load_rows<COLUMNS>(to + V_AT, first + 2 * s.key_width() + h * VALUE_DIM + v0, s.width(), valid);
                load_rows<CHUNK>(to + T_AT, tris + square, CHUNK, CHUNK);
                load_rows<KEY_DIM>(to + Q_AT, first + kh * KEY_DIM, s.width(), valid);
                load_rows<CHUNK>(to + P_AT, atts + square, CHUNK, CHUNK);
            }
            cp_async_commit();
        };
        const float *own_c = cum + s.series(b, h), *own_rk = rks + s.key_series(b, kh) + token;
        const float* const own_other = second ? rqs + s.key_series(b, kh) + token : betas + s.series(b, h) + token;
        const auto fetch = [&](int c) {
            const int t0 = min(c, chunks - 1) * CHUNK;
            return Series{own_c[t0 + token], own_c[t0 + CHUNK - 1], own_rk[t0], own_other[t0]};
        };
        const auto put = [&](int c, const Series& x) {
            Factors& f = *factors(c);
            const float in = exp2_fast(x.c);
            if (second) {
                f.out[token] = exp2_fast(x.last - x.c) * x.rk;
                f.query[token] = in * x.own;
            } else {
                f.in[token] = make_float2(x.own, x.own * (in * x.rk));
            }
            if (thread == 0) f.decay = exp2_fast(x.last);
        };
        // Of the chunks on their way c is the first: shows it to the other warpgroup.
        const auto show = [&](int c, const Series& x) {
            put(c, x);
            cp_async_wait<SHOW_FIRST ? 0 : 1>();
            proxy_fence();
            bar_arrive<PASS_BLOCK>(FULL);
        };
        load(0, 0);
        load(1, 1);
        Series next = fetch(1);
        show(0, fetch(0));
        #pragma unroll 1
        for (int c = 0; c < chunks; ++c, at = following(at)) {
            u8* const stage = shared + at * PASS_STAGE_BYTES;
            u8* const state = shared + STATE_AT + (c & 1) * WIDE_TILE;
            const u64 queries = descriptor<64>(stage + Q_AT), held = descriptor<64>(state);
            float out[COLUMNS / 8][4];           // [tokens, V]
            bar_wait<PASS_BLOCK>(STATE_READY);   // and the other warpgroup has left the last chunk
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < KEY_DIM / 16; ++k) mma_ss<0, 0>(out, queries + column_step<64>(k), held + column_step<64>(k), k);
            wgmma_commit();
            if (SHOW_FIRST) show(c + 1, next);
            load(c + 2, following(following(at)));                   // the last chunk's stage
            const Series after = fetch(c + 2);
            bf16* const to = states + (s.item(b, c, h) * VALUE_DIM + v0) * KEY_DIM;
            #pragma unroll
            for (int n = 0; n < COLUMNS; n += GROUP * 8 / KEY_DIM) {
                const int r = n + thread / (KEY_DIM / 8), piece = thread % (KEY_DIM / 8);
                *reinterpret_cast<uint4*>(to + r * KEY_DIM + piece * 8) = *reinterpret_cast<const uint4*>(state + piece_at<64>(r, piece));
            }
            if (!SHOW_FIRST) show(c + 1, next);
            next = after;
            const float scale[2] = {factors(c)->query[row], factors(c)->query[row + 8]};
            wgmma_wait<0>();
            pin(out);
            #pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j)
                #pragma unroll
                for (int e = 0; e < 4; ++e) out[j][e] *= scale[e >> 1];
            pin(out);
            bar_wait<PASS_BLOCK>(U_READY + (c & 1));                 // and v is read
            const u64 masked = descriptor<64>(stage + P_AT), u_tile = descriptor<64>(shared + U_AT + (c & 1) * HALF_TILE);
            wgmma_fence();
            #pragma unroll
            for (int k = 0; k < CHUNK / 16; ++k) mma_ss<0, 0>(out, masked + column_step<64>(k), u_tile + column_step<64>(k), 1);
            wgmma_commit();
            wgmma_wait<0>();
            pin(out);
            // By way of v's tile, where a warp writes and reads its own rows: stores are 16 bytes and contiguous.
            u8* const staged = stage + V_AT;
            #pragma unroll
            for (int j = 0; j < COLUMNS / 8; ++j) {
                *reinterpret_cast<u32*>(staged + own + ((j ^ turn) << 4)) = pack_bf16(out[j][0], out[j][1]);
                *reinterpret_cast<u32*>(staged + own + ((j ^ turn) << 4) + 8 * LINE) = pack_bf16(out[j][2], out[j][3]);
            }
            __syncwarp();
            const int t0 = c * CHUNK, first = row & ~15;
            bf16* const outputs = o + ((i64)b * seq + t0) * s.value_width() + h * VALUE_DIM + v0;
            #pragma unroll
            for (int n = 0; n < 16; n += 4) {
                const int t = first + n + (lane >> 3), piece = lane & 7;
                if (t0 + t < seq)
                    *reinterpret_cast<uint4*>(outputs + (i64)t * s.value_width() + piece * 8) =
                        *reinterpret_cast<const uint4*>(staged + piece_at<64>(t, piece));
            }
        }
    }
}
