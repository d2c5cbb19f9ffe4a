// What the kernels of the gated delta rule for every chip with tensor cores share: tiles with padded rows, delta_prepare, the walk over chunks.
// SLICE: columns of V of a block of the pass.

constexpr int TOKEN_TILES = CHUNK / 16;
constexpr int K_TILES = KEY_DIM / 16, V_TILES = VALUE_DIM / 16;
constexpr int K_ROW = (KEY_DIM / 8 + 1) * 16, V_ROW = (VALUE_DIM / 8 + 1) * 16, F_ROW = (CHUNK / 8 + 1) * 16;
constexpr int K_TILE = CHUNK * K_ROW;            // tokens x K
constexpr int V_TILE = CHUNK * V_ROW;            // tokens x V
constexpr int F_TILE = CHUNK * F_ROW;            // tokens x tokens
constexpr int S_TILE = VALUE_DIM * K_ROW;        // a state
constexpr int SERIES_BYTES = 4 * CHUNK * 4;      // c, beta, rq, rk

// Starts the copy of a chunk's numbers a token.
template <int THREADS>
__device__ __forceinline__ void load_series(float* dst, const float* c, const float* beta, const float* rq, const float* rk) {
    for (int i = threadIdx.x; i < CHUNK; i += THREADS) {
        const int which = i / (CHUNK / 4), at = i % (CHUNK / 4) * 4;
        const float* src = which == 0 ? c : which == 1 ? beta : which == 2 ? rq : rk;
        cp_async16(dst + which * CHUNK + at, src + at);
    }
}
// The four tokens that are this lane's columns of token tile j: element e of an accumulator belongs to number
// (e & 1) + (e >> 2) * 2.
__device__ __forceinline__ void own_columns(float v[4], const float* series, int j) {
    const float* at = series + j * 16 + 2 * (threadIdx.x & 3);
    const float2 a = *reinterpret_cast<const float2*>(at), b = *reinterpret_cast<const float2*>(at + 8);
    v[0] = a.x; v[1] = a.y; v[2] = b.x; v[3] = b.y;
}
__device__ __forceinline__ constexpr int column_of(int e) { return (e & 1) + (e >> 2) * 2; }
__device__ __forceinline__ float element(const u32 a[4], int e) { return e & 1 ? bf16_hi(a[e >> 1]) : bf16_lo(a[e >> 1]); }

// What is local to a chunk: c, beta, rq, rk, T and the masked q k^T, for two value heads of one key head.
//
// T = (I + A)^-1 in blocks of 16: those on the diagonal by substitution in fp32, a thread a row; the others by products on
// tensor cores, T_ba = -T_bb A_ba T_aa for blocks of 16, then of 32. T, A and T_bb A_ba are all of the form
// beta_i k_i^T (I - beta_m k_m k_m^T) ... k_j times decays: no number is above 1, nothing cancels badly. A bf16 operand would
// still add errors above T's own rounding, so each is two of them, hi + lo, and a product three: T to 2^-15 in the worst case.
//
// A warp owns 16 rows and every other block of them while q k^T and k k^T are formed and masked. Then four warps invert and
// the other four write what is complete.
// Grid batch * chunks * key heads * pairs of value heads. Shared: k | q, in their place hi and lo of A, then of T, of either
// head; the masked q k^T of either head.
constexpr int PREPARE_THREADS = 256, SOLVERS = 4;
constexpr int TRIANGLES = 4 * F_TILE > 2 * K_TILE ? 4 * F_TILE : 2 * K_TILE;
static_assert(TOKEN_TILES == 4, "the inverse goes from blocks of 16 to 32 to 64");

// Two numbers as two pairs of bf16 whose sum they are, to 2^-17.
__device__ __forceinline__ void split(u32& hi, u32& lo, float x, float y) {
    hi = pack_bf16(x, y);
    lo = pack_bf16(x - bf16_lo(hi), y - bf16_hi(hi));
}
// A square of tokens x tokens as hi + lo, F_TILE bytes apart.
struct Triangle {
    u8* hi;
    __device__ __forceinline__ explicit Triangle(int head) : hi(shared + head * 2 * F_TILE) {}
    __device__ __forceinline__ u8* lo() const { return hi + F_TILE; }
    // Block (i, j) as operand A.
    __device__ __forceinline__ void left(u32 (&h)[4], u32 (&l)[4], int i, int j) const {
        const u32 at = smem_addr(hi) + by_rows<F_ROW>(i * 16, j * 16);
        ldsm_x4(h, at);
        ldsm_x4(l, at + F_TILE);
    }
    // Block (i, j) as operand B.
    __device__ __forceinline__ void right(u32 (&h)[4], u32 (&l)[4], int i, int j) const {
        const u32 at = smem_addr(hi) + by_rows<F_ROW>(i * 16, j * 16);
        ldsm_x4_t(h, at);
        ldsm_x4_t(l, at + F_TILE);
    }
    // acc += (h + l) * block (i, j)
    __device__ __forceinline__ void multiply(float (&acc)[8], const u32 (&h)[4], const u32 (&l)[4], int i, int j) const {
        u32 bh[4], bl[4];
        right(bh, bl, i, j);
        mma_pair(acc, h, bh);
        mma_pair(acc, h, bl);
        mma_pair(acc, l, bh);
    }
};
__device__ __forceinline__ void split_operand(u32 (&h)[4], u32 (&l)[4], const float (&acc)[8]) {
    #pragma unroll
    for (int e = 0; e < 8; e += 2) split(h[e >> 1], l[e >> 1], acc[e], acc[e + 1]);
}
// Of 16 rows: BLOCKS blocks of k k^T and q k^T, from block `half` in steps of two, and where the diagonal is among them the
// rows' q q^T.
template <int BLOCKS>
__device__ __forceinline__ void key_products(float (&kk)[2][8], float (&qk)[2][8], float (&qq)[8], u32 ka, u32 qa, int r, int half) {
    const bool diagonal = half == (r & 1);
    #pragma unroll 2
    for (int k = 0; k < K_TILES; ++k) {
        u32 a[4], aq[4], fb[BLOCKS][4];
        ldsm_x4(a, ka + by_rows<K_ROW>(r * 16, k * 16));
        ldsm_x4(aq, qa + by_rows<K_ROW>(r * 16, k * 16));
        #pragma unroll
        for (int i = 0; i < BLOCKS; ++i) ldsm_x4(fb[i], ka + by_cols<K_ROW>((half + 2 * i) * 16, k * 16));
        #pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            mma_pair(kk[i], a, fb[i]);
            mma_pair(qk[i], aq, fb[i]);
        }
        if (diagonal) {                          // operand A holds what B of its own rows holds
            mma_16816(qq, aq, aq[0], aq[2]);
            mma_16816(qq + 4, aq, aq[1], aq[3]);
        }
    }
}
// Masks a block of q k^T and k k^T with decays c_t - c_s: q k^T to `masked`, A to the triangle. `at`: the lane's byte there.
template <bool DIAGONAL>
__device__ __forceinline__ void mask_block(const float (&kk)[8], const float (&qk)[8], const float (&to)[2], const float (&from)[4],
    const float (&weight)[2], u8* masked, const Triangle& triangle, int at) {
    const int lane = threadIdx.x & 31, past = (lane >> 2) - 2 * (lane & 3);
    float l[8];
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const float decay = exp2_fast(to[(e >> 1) & 1] - from[column_of(e)]);
        l[e] = !DIAGONAL || past >= col_of(e) - row_of(e) ? decay : 0.f;
    }
    #pragma unroll
    for (int e = 0; e < 8; e += 2) {
        const int x = (e >> 1) & 1, rows = row_of(e) * F_ROW, place = at + rows + col_of(e) * 2;
        *reinterpret_cast<u32*>(masked + place) = pack_bf16(qk[e] * l[e], qk[e + 1] * l[e + 1]);
        const float a0 = weight[x] * kk[e] * l[e], a1 = weight[x] * kk[e + 1] * l[e + 1];
        if (DIAGONAL) {                          // as invert_block takes it, which reads below the diagonal alone
            *reinterpret_cast<float2*>(triangle.hi + at + (lane & 3) * 4 + rows + (e >> 2) * F_TILE) = make_float2(a0, a1);
        } else {
            u32 hi, lo;
            split(hi, lo, a0, a1);
            *reinterpret_cast<u32*>(triangle.hi + place) = hi;
            *reinterpret_cast<u32*>(triangle.lo() + place) = lo;
        }
    }
}
// Inverts a 16x16 block of the diagonal, a thread a row i: x (I + A) = e_i, from the last column to the first. The block is
// there in fp32, the left eight columns in the place of its hi, the right eight in that of its lo; hi and lo overwrite it.
__device__ __forceinline__ void invert_block(const Triangle& a, int t) {
    const int corner = (t & ~15) * F_ROW + (t >> 4) * 32;
    float x[16];
    #pragma unroll
    for (int j = 0; j < 16; ++j) x[j] = j == (t & 15) ? 1.f : 0.f;
    #pragma unroll
    for (int m = 15; m > 0; --m)
        #pragma unroll
        for (int j = 0; j < m; j += 4) {
            const float4 v = *reinterpret_cast<const float4*>(a.hi + corner + m * F_ROW + (j & 7) * 4 + (j >> 3) * F_TILE);
            x[j] -= x[m] * v.x;
            if (j + 1 < m) x[j + 1] -= x[m] * v.y;
            if (j + 2 < m) x[j + 2] -= x[m] * v.z;
            if (j + 3 < m) x[j + 3] -= x[m] * v.w;
        }
    __syncwarp();                                // every row is read
    uint4* out = reinterpret_cast<uint4*>(a.hi + corner + (t & 15) * F_ROW);
    #pragma unroll
    for (int j = 0; j < 16; j += 8) {
        uint4 h, l;
        split(h.x, l.x, x[j], x[j + 1]);
        split(h.y, l.y, x[j + 2], x[j + 3]);
        split(h.z, l.z, x[j + 4], x[j + 5]);
        split(h.w, l.w, x[j + 6], x[j + 7]);
        out[j >> 3] = h;
        out[F_TILE / 16 + (j >> 3)] = l;
    }
    __syncwarp();
}
// Writes 16 rows of token tile i, a row eight threads of 128, zero above the diagonal; of columns from `first` on.
__device__ __forceinline__ void write_rows(bf16* square, const u8* tile, int i, int first) {
    const int t = i * 16 + (threadIdx.x & 127) / 8, piece = threadIdx.x & 7;
    if (piece < first * 2) return;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (piece / 2 <= i) v = *reinterpret_cast<const uint4*>(tile + t * F_ROW + piece * 16);
    *reinterpret_cast<uint4*>(square + t * CHUNK + piece * 8) = v;
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS, 4) delta_prepare(const bf16* qkv, const bf16* proj, const bf16* a_log,
    const bf16* dt_bias, float* cum, float* betas, float* rqs, float* rks, bf16* tri, bf16* att, int proj_width, int seq, int key_heads,
    int value_heads, int chunks) {
    __shared__ __align__(16) float scale[2][CHUNK], series[2][2][CHUNK];
    const Shape s = {seq, key_heads, value_heads, chunks};
    const int pairs = (s.group() + 1) / 2, pair = blockIdx.x % pairs, item = blockIdx.x / pairs;
    const int kh = item % key_heads, bc = item / key_heads, b = bc / chunks, c = bc % chunks;
    const int head0 = kh * s.group() + pair * 2, heads = min(2, s.group() - pair * 2);
    const int t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3;
    u8 *kt = shared, *qt = shared + K_TILE;
    const bf16* rows = qkv + ((i64)b * seq + t0) * s.width() + kh * KEY_DIM;
    load_tile<CHUNK, KEY_DIM, PREPARE_THREADS>(kt, rows + s.key_width(), s.width(), valid);
    load_tile<CHUNK, KEY_DIM, PREPARE_THREADS>(qt, rows, s.width(), valid);
    cp_async_commit();
    // While they come: c and beta, a warp a head, a thread two tokens.
    if (warp >= SOLVERS && warp - SOLVERS < heads) {
        const int p = warp - SOLVERS, h = head0 + p;
        const bf16 rate = a_log[h], bias = dt_bias[h];
        bf16 raw[2][2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {            // all loads at once, of legal addresses past the sequence too
            const bf16* from = proj + ((i64)b * seq + t0 + min(i * 32 + lane, valid - 1) + 1) * proj_width - 2 * value_heads + h;
            raw[i][0] = from[0];
            raw[i][1] = from[value_heads];
        }
        const float pace = -expf(to_f32(rate)) * LOG2E;
        float g[2], beta[2];
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool inside = i * 32 + lane < valid;
            g[i] = inside ? pace * softplus(to_f32(raw[i][1]) + to_f32(bias)) : 0.f;
            beta[i] = inside ? 1.f / (1.f + expf(-to_f32(raw[i][0]))) : 0.f;
            g[i] = warp_scan(g[i]);
        }
        g[1] += __shfl_sync(0xffffffffu, g[0], 31);
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int token = i * 32 + lane;
            series[p][0][token] = g[i];
            series[p][1][token] = beta[i];
            cum[s.series(b, h) + t0 + token] = g[i];
            betas[s.series(b, h) + t0 + token] = beta[i];
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    {
        // The warp's rows, and its blocks of them: half, half + 2.
        const int r = warp >> 1, half = warp & 1, row = r * 16 + (lane >> 2);
        const u32 ka = smem_addr(kt), qa = smem_addr(qt);
        float kk[2][8], qk[2][8], qq[1][8];
        clear(kk);
        clear(qk);
        clear(qq);
        if (half + 2 <= r) key_products<2>(kk, qk, qq[0], ka, qa, r, half);
        else if (half <= r) key_products<1>(kk, qk, qq[0], ka, qa, r, half);
        // Square sums are diagonals of k k^T and q q^T.
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (half + 2 * i != r) continue;
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (row_of(e) != (col_of(e) & 8) || (lane >> 2) != 2 * quad + (e & 1)) continue;
                const int t = row + row_of(e);
                const float rq = rsqrtf((qq[0][e] + NORM_EPS) * KEY_DIM), rk = rsqrtf(kk[i][e] + NORM_EPS);
                scale[0][t] = rq;
                scale[1][t] = rk;
                if (pair == 0) {
                    rqs[s.key_series(b, kh) + t0 + t] = rq;
                    rks[s.key_series(b, kh) + t0 + t] = rk;
                }
            }
        }
        __syncthreads();                         // the tiles are read; the scales are there
        const float rq[2] = {scale[0][row], scale[0][row + 8]}, rk[2] = {scale[1][row], scale[1][row + 8]};
        #pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (half + 2 * i > r) continue;
            float from[4];
            own_columns(from, scale[1], half + 2 * i);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                kk[i][e] *= from[column_of(e)];
                qk[i][e] *= from[column_of(e)] * rq[(e >> 1) & 1];
            }
        }
        #pragma unroll 1
        for (int p = 0; p < heads; ++p) {
            const float *cs = series[p][0], *bs = series[p][1];
            const float ct[2] = {cs[row], cs[row + 8]}, weight[2] = {bs[row] * rk[0], bs[row + 8] * rk[1]};
            const Triangle triangle(p);
            u8* masked = shared + TRIANGLES + p * F_TILE;
            #pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int j = half + 2 * i, at = row * F_ROW + (j * 16 + 2 * quad) * 2;
                if (j > r) continue;
                float from[4];
                own_columns(from, cs, j);
                if (j == r) mask_block<true>(kk[i], qk[i], ct, from, weight, masked, triangle, at);
                else mask_block<false>(kk[i], qk[i], ct, from, weight, masked, triangle, at);
            }
        }
    }
    __syncthreads();
    // Of a solver: its head, and which half of the rows is its own.
    const int p = warp >> 1, half = warp & 1;
    const Triangle triangle(p);
    const auto square = [&](bf16* all, int head) { return all + s.item(b, c, head0 + head) * CHUNK * CHUNK; };
    if (warp >= SOLVERS) {
        #pragma unroll 1
        for (int head = 0; head < heads; ++head)
            #pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i) write_rows(square(att, head), shared + TRIANGLES + head * F_TILE, i, 0);
    } else if (p < heads) {
        invert_block(triangle, half * 32 + lane);
        const int i = 2 * half + 1, j = 2 * half;
        u32 h[4], l[4];
        float product[1][8], out[1][8];
        clear(product);
        clear(out);
        triangle.left(h, l, i, i);
        triangle.multiply(product[0], h, l, i, j);
        split_operand(h, l, product[0]);
        triangle.multiply(out[0], h, l, j, j);
        __syncwarp();                            // A_ij is read
        #pragma unroll
        for (int e = 0; e < 8; e += 2) {
            const int at = (i * 16 + (lane >> 2) + row_of(e)) * F_ROW + (j * 16 + 2 * quad + col_of(e)) * 2;
            split(h[0], l[0], -out[0][e], -out[0][e + 1]);
            *reinterpret_cast<u32*>(triangle.hi + at) = h[0];
            *reinterpret_cast<u32*>(triangle.lo() + at) = l[0];
        }
    }
    __syncthreads();
    if (warp >= SOLVERS) {
        #pragma unroll 1
        for (int head = 0; head < heads; ++head)
            #pragma unroll
            for (int i = 0; i < TOKEN_TILES; ++i) write_rows(square(tri, head), Triangle(head).hi, i, i < 2 ? 0 : 2);
    } else if (p < heads) {
        // Rows of one of the two lower token tiles, the left half.
        const int i = 2 + half;
        float product[2][8], out[2][8];
        clear(product);
        clear(out);
        #pragma unroll
        for (int m = 2; m < TOKEN_TILES; ++m) {
            if (m > i) continue;
            u32 h[4], l[4], bh[2][4], bl[2][4];
            triangle.left(h, l, i, m);
            #pragma unroll
            for (int n = 0; n < 2; ++n) triangle.right(bh[n], bl[n], m, n);
            // In this order a product waits for none of the last three.
            #pragma unroll
            for (int n = 0; n < 2; ++n) mma_pair(product[n], h, bh[n]);
            #pragma unroll
            for (int n = 0; n < 2; ++n) mma_pair(product[n], h, bl[n]);
            #pragma unroll
            for (int n = 0; n < 2; ++n) mma_pair(product[n], l, bh[n]);
        }
        u32 h[4], l[4];
        split_operand(h, l, product[1]);
        triangle.multiply(out[1], h, l, 1, 1);
        triangle.multiply(out[0], h, l, 1, 0);
        split_operand(h, l, product[0]);
        triangle.multiply(out[0], h, l, 0, 0);
        u8* staged = shared + TRIANGLES + p * F_TILE;    // the masked q k^T is written
        #pragma unroll
        for (int n = 0; n < 2; ++n)
            #pragma unroll
            for (int e = 0; e < 8; e += 2)
                *reinterpret_cast<u32*>(staged + (i * 16 + (lane >> 2) + row_of(e)) * F_ROW + (n * 16 + 2 * quad + col_of(e)) * 2) =
                    pack_bf16(-out[n][e], -out[n][e + 1]);
        __syncwarp();
        #pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int t = i * 16 + n * 8 + (lane >> 2);
            *reinterpret_cast<uint4*>(square(tri, p) + t * CHUNK + quad * 8) = *reinterpret_cast<const uint4*>(staged + t * F_ROW + quad * 16);
        }
    }
}

// The passes between chunks: a block walks the chunks of one value head and SLICE columns of V. A warp owns 16 columns of V
// and everything transposed, so that an accumulator is the next product's operand and warps exchange nothing: of the state
// 16 x K in fp32, of tokens 16 x Q.
constexpr int PASS_THREADS = SLICE * 2;
constexpr int SLICE_ROW = (SLICE / 8 + 1) * 16;
constexpr int PASS_STAGE = 2 * K_TILE + 2 * F_TILE + CHUNK * SLICE_ROW + SERIES_BYTES;
struct Pass {
    int b, h, kh, v0;                            // v0: the warp's first column of V
    __device__ __forceinline__ Pass(const Shape& s) {
        constexpr int SLICES = VALUE_DIM / SLICE;
        const int bh = blockIdx.x / SLICES;
        b = bh / s.value_heads;
        h = bh % s.value_heads;
        kh = h / s.group();
        v0 = blockIdx.x % SLICES * SLICE + (threadIdx.x >> 5) * 16;
    }
};
// A stage of shared memory: k | q | T | masked q k^T | v or dO | series.
struct Stage {
    u8* at;
    __device__ __forceinline__ Stage(int i) : at(shared + (i & 1) * PASS_STAGE) {}
    __device__ __forceinline__ u32 k() const { return smem_addr(at); }
    __device__ __forceinline__ u32 q() const { return smem_addr(at + K_TILE); }
    __device__ __forceinline__ u32 tri() const { return smem_addr(at + 2 * K_TILE); }
    __device__ __forceinline__ u32 att() const { return smem_addr(at + 2 * K_TILE + F_TILE); }
    __device__ __forceinline__ u8* rows() const { return at + 2 * K_TILE + 2 * F_TILE; }
    __device__ __forceinline__ float* series() const { return reinterpret_cast<float*>(rows() + CHUNK * SLICE_ROW); }
    // Starts the copy of chunk c. `src`: v or dO at the sequence's first row and the block's first column.
    __device__ __forceinline__ void load(const Shape& s, const Pass& p, int c, const bf16* qkv, const bf16* src, int stride,
        const float* cum, const float* betas, const float* rqs, const float* rks, const bf16* tris, const bf16* atts) const {
        const int t0 = c * CHUNK, valid = min(CHUNK, s.seq - t0);
        const bf16* keys = qkv + ((i64)p.b * s.seq + t0) * s.width() + p.kh * KEY_DIM;
        load_tile<CHUNK, KEY_DIM, PASS_THREADS>(at, keys + s.key_width(), s.width(), valid);
        load_tile<CHUNK, KEY_DIM, PASS_THREADS>(at + K_TILE, keys, s.width(), valid);
        const i64 square = s.item(p.b, c, p.h) * CHUNK * CHUNK;
        load_tile<CHUNK, CHUNK, PASS_THREADS>(at + 2 * K_TILE, tris + square, CHUNK, CHUNK);
        load_tile<CHUNK, CHUNK, PASS_THREADS>(at + 2 * K_TILE + F_TILE, atts + square, CHUNK, CHUNK);
        load_tile<CHUNK, SLICE, PASS_THREADS>(rows(), src + (i64)t0 * stride, stride, valid);
        const i64 own = s.series(p.b, p.h) + t0, keyed = s.key_series(p.b, p.kh) + t0;
        load_series<PASS_THREADS>(series(), cum + own, betas + own, rqs + keyed, rks + keyed);
    }
    // Puts a transposed 16 (V) x 16 (tokens) accumulator over the warp's own columns of the rows of token tile j.
    __device__ __forceinline__ void put(int j, const float (&acc)[8]) const {
        const int lane = threadIdx.x & 31, column = (threadIdx.x >> 5) * 16 + (lane >> 2);
        #pragma unroll
        for (int e = 0; e < 8; ++e)
            *reinterpret_cast<bf16*>(rows() + (j * 16 + 2 * (lane & 3) + col_of(e)) * SLICE_ROW + (column + row_of(e)) * 2) = to_bf16(acc[e]);
    }
    // Copies the warp's own columns of all `valid` rows out.
    __device__ __forceinline__ void write(bf16* to, i64 stride, int valid) const {
        const int lane = threadIdx.x & 31, piece = (threadIdx.x >> 5) * 2 + (lane & 1);
        #pragma unroll
        for (int i = 0; i < CHUNK; i += 16) {
            const int t = i + (lane >> 1);
            if (t < valid)
                *reinterpret_cast<uint4*>(to + t * stride + (lane & 1) * 8) = *reinterpret_cast<const uint4*>(rows() + t * SLICE_ROW + piece * 16);
        }
    }
};
// Rounds the state (or its gradient) to the next products' operand and writes it.
__device__ __forceinline__ void hold(u32 (&held)[K_TILES][4], const float (&acc)[K_TILES][8], bf16* to, int v0) {
    const int lane = threadIdx.x & 31;
    bf16* own = to + (i64)(v0 + (lane >> 2)) * KEY_DIM + 2 * (lane & 3);
    #pragma unroll
    for (int n = 0; n < K_TILES; ++n) {
        as_operand(held[n], acc[n]);
        #pragma unroll
        for (int e = 0; e < 8; e += 2)
            *reinterpret_cast<u32*>(own + row_of(e) * KEY_DIM + n * 16 + col_of(e)) = held[n][e >> 1];
    }
}
