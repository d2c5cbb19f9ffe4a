// What the kernels of the gated delta rule share. Defines: CHUNK tokens of a chunk (Q), KEY_DIM (K), VALUE_DIM (V),
// SLICE columns of V of a block of the pass, NORM_EPS.
//
// Notation, per sequence and value head, inside one chunk (mod.rs): c_t the running sum of g (kept in units of ln 2, so
// that decays are exp2), c_Q the chunk's whole sum, S the state [V, K] at its start, dS the gradient of that at its end.
// q and k stay as the convolution wrote them: rq_t (with 1/sqrt(K)) and rk_t, by which they are scaled to length 1, enter
// as factors of rows and columns.
//
// c and beta lie in workspace as f32 [batch, value heads, padded], rq and rk as [batch, key heads, padded], padded =
// chunks * CHUNK. Past the sequence g and beta are 0 and every tile row is filled with zeros, so that tails need no other
// care. T and the masked q k^T: bf16 [batch, chunks, value heads, Q, Q]; 16x16 blocks above the diagonal are never read.

constexpr int TOKEN_TILES = CHUNK / 16;
constexpr int K_TILES = KEY_DIM / 16, V_TILES = VALUE_DIM / 16;
constexpr int K_ROW = (KEY_DIM / 8 + 1) * 16, V_ROW = (VALUE_DIM / 8 + 1) * 16, F_ROW = (CHUNK / 8 + 1) * 16;
constexpr int K_TILE = CHUNK * K_ROW;            // tokens x K
constexpr int V_TILE = CHUNK * V_ROW;            // tokens x V
constexpr int F_TILE = CHUNK * F_ROW;            // tokens x tokens
constexpr int S_TILE = VALUE_DIM * K_ROW;        // a state
constexpr int SERIES_BYTES = 4 * CHUNK * 4;      // c, beta, rq, rk

// Shapes, as every kernel's last parameters.
struct Shape {
    int seq, key_heads, value_heads, chunks;
    __device__ __forceinline__ int key_width() const { return key_heads * KEY_DIM; }
    __device__ __forceinline__ int value_width() const { return value_heads * VALUE_DIM; }
    __device__ __forceinline__ int width() const { return 2 * key_width() + value_width(); }   // of a row of qkv
    __device__ __forceinline__ int group() const { return value_heads / key_heads; }
    __device__ __forceinline__ i64 series(int b, int h) const { return ((i64)b * value_heads + h) * chunks * CHUNK; }
    __device__ __forceinline__ i64 key_series(int b, int kh) const { return ((i64)b * key_heads + kh) * chunks * CHUNK; }
    __device__ __forceinline__ i64 item(int b, int c, int h) const { return ((i64)b * chunks + c) * value_heads + h; }
};

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
// Inclusive prefix sum over a warp.
__device__ __forceinline__ float warp_scan(float x) {
    const int lane = threadIdx.x & 31;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const float y = __shfl_up_sync(0xffffffffu, x, o);
        if (lane >= o) x += y;
    }
    return x;
}

// What is local to a chunk: c, beta, rq, rk, T and the masked q k^T of all value heads of one key head, two at a time. Each
// warp owns 16 rows of k k^T and q k^T; two warps invert a head's triangle, a thread a column.
// Grid batch * chunks * key heads, 128 threads. Shared: k | q, later the two heads' A in fp32.
constexpr int A_ROW = CHUNK + 4;                 // rows that float4 can read
extern "C" __global__ void __launch_bounds__(128, 2) delta_prepare(const bf16* qkv, const bf16* proj, const bf16* a_log, const bf16* dt_bias,
    float* cum, float* betas, float* rqs, float* rks, bf16* tri, bf16* att, int proj_width, int seq, int key_heads, int value_heads, int chunks) {
    __shared__ float scale[2][CHUNK], series[2][2][CHUNK], carry[2];
    const Shape s = {seq, key_heads, value_heads, chunks};
    const int kh = blockIdx.x % key_heads, bc = blockIdx.x / key_heads, b = bc / chunks, c = bc % chunks;
    const int t0 = c * CHUNK, valid = min(CHUNK, seq - t0);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, row = warp * 16 + (lane >> 2);
    const int pair = threadIdx.x >> 6, token = threadIdx.x & 63;
    u8 *kt = shared, *qt = shared + K_TILE;
    const bf16* rows = qkv + ((i64)b * seq + t0) * s.width() + kh * KEY_DIM;
    load_tile<CHUNK, KEY_DIM, 128>(qt, rows, s.width(), valid);
    load_tile<CHUNK, KEY_DIM, 128>(kt, rows + s.key_width(), s.width(), valid);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    {
        const u8* tile = (pair ? kt : qt) + token * K_ROW;
        float sum = NORM_EPS;
        #pragma unroll 4
        for (int i = 0; i < KEY_DIM / 8; ++i) {
            float v[8];
            load8(reinterpret_cast<const bf16*>(tile + i * 16), v);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum += v[e] * v[e];
        }
        const float r = rsqrtf(pair ? sum : sum * KEY_DIM);
        scale[pair][token] = r;
        (pair ? rks : rqs)[s.key_series(b, kh) + t0 + token] = r;
    }
    const u32 ka = smem_addr(kt), qa = smem_addr(qt);
    float kk[TOKEN_TILES][8], qk[TOKEN_TILES][8];
    clear(kk);
    clear(qk);
    #pragma unroll 2
    for (int k = 0; k < K_TILES; ++k) {
        u32 a[4], aq[4];
        ldsm_x4(a, ka + by_rows<K_ROW>(warp * 16, k * 16));
        ldsm_x4(aq, qa + by_rows<K_ROW>(warp * 16, k * 16));
        #pragma unroll
        for (int j = 0; j < TOKEN_TILES; ++j) {
            if (j > warp) continue;
            u32 fb[4];
            ldsm_x4(fb, ka + by_cols<K_ROW>(j * 16, k * 16));
            mma_pair(kk[j], a, fb);
            mma_pair(qk[j], aq, fb);
        }
    }
    __syncthreads();                             // the scales are there
    #pragma unroll
    for (int j = 0; j < TOKEN_TILES; ++j)
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float from = scale[1][j * 16 + 2 * quad + col_of(e)];
            kk[j][e] *= scale[1][row + row_of(e)] * from;
            qk[j][e] *= scale[0][row + row_of(e)] * from;
        }
    float* triangles = reinterpret_cast<float*>(shared);
    #pragma unroll 1
    for (int first = 0; first < s.group(); first += 2) {
        const int mine = first + pair, h = kh * s.group() + mine;
        const bool active = mine < s.group();
        float g = 0.f, beta = 0.f;
        if (active && token < valid) {
            const bf16* raw = proj + ((i64)b * seq + t0 + token + 1) * proj_width - 2 * value_heads + h;
            g = -expf(to_f32(a_log[h])) * softplus(to_f32(raw[value_heads]) + to_f32(dt_bias[h])) * LOG2E;
            beta = 1.f / (1.f + expf(-to_f32(raw[0])));
        }
        float sum = warp_scan(g);
        if (lane == 31 && !(warp & 1)) carry[pair] = sum;
        __syncthreads();                         // also: the tiles, or the last triangles, are read
        if (warp & 1) sum += carry[pair];
        series[pair][0][token] = sum;
        series[pair][1][token] = beta;
        if (active) {
            cum[s.series(b, h) + t0 + token] = sum;
            betas[s.series(b, h) + t0 + token] = beta;
        }
        __syncthreads();
        #pragma unroll
        for (int p = 0; p < 2; ++p) {
            if (first + p >= s.group()) continue;
            const float *cs = series[p][0], *bs = series[p][1];
            bf16* out = att + s.item(b, c, kh * s.group() + first + p) * CHUNK * CHUNK;
            #pragma unroll
            for (int j = 0; j < TOKEN_TILES; ++j) {
                if (j > warp) continue;
                #pragma unroll
                for (int e = 0; e < 8; e += 2) {
                    const int t = row + row_of(e), from = j * 16 + 2 * quad + col_of(e);
                    const float l0 = from <= t ? exp2_fast(cs[t] - cs[from]) : 0.f;
                    const float l1 = from + 1 <= t ? exp2_fast(cs[t] - cs[from + 1]) : 0.f;
                    *reinterpret_cast<u32*>(out + t * CHUNK + from) = pack_bf16(qk[j][e] * l0, qk[j][e + 1] * l1);
                    float* a = triangles + (p * CHUNK + t) * A_ROW + from;
                    a[0] = from < t ? bs[t] * kk[j][e] * l0 : 0.f;
                    a[1] = from + 1 < t ? bs[t] * kk[j][e + 1] * l1 : 0.f;
                }
            }
        }
        __syncthreads();
        if (!active) continue;
        // Column `token` of T: x_i = [i = token] - sum_{m < i} A_im x_m. Above the diagonal x stays 0.
        float x[CHUNK];
        const float* a = triangles + pair * CHUNK * A_ROW;
        bf16* out = tri + s.item(b, c, h) * CHUNK * CHUNK + token;
        #pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            float part[4] = {i == token ? 1.f : 0.f, 0.f, 0.f, 0.f};
            #pragma unroll
            for (int m = 0; m < i; m += 4) {
                const float4 v = *reinterpret_cast<const float4*>(a + i * A_ROW + m);
                part[0] -= v.x * x[m];
                if (m + 1 < i) part[1] -= v.y * x[m + 1];
                if (m + 2 < i) part[2] -= v.z * x[m + 2];
                if (m + 3 < i) part[3] -= v.w * x[m + 3];
            }
            x[i] = (part[0] + part[1]) + (part[2] + part[3]);
            out[i * CHUNK] = to_bf16(x[i]);
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
