// What the kernels of the scan share. Defines: CHUNK tokens of a chunk (Q), HEAD_DIM (P), STATE (N), SLICE columns
// of a state block.
//
// Notation, per sequence, head h and group g of it, inside one chunk: dt_t after softplus, c_t the running sum of
// dt A (kept in units of ln 2, so that decays are exp2), L_ts = 2^(c_t - c_s) for s <= t, c_Q the chunk's whole sum.
// H is the state [P, N] at the chunk's start, dH the gradient of the state at its end.
//
// dt and c lie in workspace as f32 [batch, heads, padded], padded = chunks * CHUNK; dt is 0 past the sequence, where
// every tile row is filled with zeros too, so that tails need no other care.

constexpr int WARPS = CHUNK / 16;                // of kernels whose warps own 16 tokens each
constexpr int TOKEN_TILES = CHUNK / 16;
constexpr int P_PIECES = HEAD_DIM / 8, N_PIECES = STATE / 8;
// One 16-byte piece of padding: the eight rows of an ldmatrix phase lie in eight different bank groups.
constexpr int P_ROW = (P_PIECES + 1) * 16, N_ROW = (N_PIECES + 1) * 16, T_ROW = (CHUNK / 8 + 1) * 16;
constexpr int X_TILE = CHUNK * P_ROW;            // tokens x head
constexpr int M_TILE = CHUNK * N_ROW;            // tokens x state (B or C)
constexpr int S_TILE = HEAD_DIM * N_ROW;         // head x state
constexpr int F_TILE = CHUNK * T_ROW;            // tokens x tokens

// Shapes, as every kernel's last parameters.
struct Shape {
    int seq, heads, groups, chunks;
    __device__ __forceinline__ int inner() const { return heads * HEAD_DIM; }
    __device__ __forceinline__ int width() const { return inner() + 2 * groups * STATE; }   // of a row of xbc
    __device__ __forceinline__ i64 series(int b, int h) const { return ((i64)b * heads + h) * chunks * CHUNK; }
    __device__ __forceinline__ i64 state(int b, int c, int h) const {
        return (((i64)b * chunks + c) * heads + h) * HEAD_DIM * STATE;
    }
};

// Starts the copy of a chunk's dt and c.
template <int THREADS>
__device__ __forceinline__ void load_series(float* dst, const float* dt, const float* cum) {
    for (int i = threadIdx.x; i < CHUNK / 2; i += THREADS) {
        const float* src = i < CHUNK / 4 ? dt + i * 4 : cum + (i - CHUNK / 4) * 4;
        cp_async16(dst + i * 4, src);
    }
}

// Inclusive prefix sum over a block of CHUNK threads. `scratch` holds CHUNK / 32 floats of its own.
__device__ __forceinline__ float block_scan(float x, float* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const float y = __shfl_up_sync(0xffffffffu, x, o);
        if (lane >= o) x += y;
    }
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    // A bound known to the compiler: it loads ahead of `w < warp`, and must not reach into the next scratch (racecheck).
    #pragma unroll
    for (int w = 0; w < CHUNK / 32 - 1; ++w)
        if (w < warp) x += scratch[w];
    return x;
}

// dt = softplus(raw + bias), 0 past the sequence; cum = running sum of -exp(a_log) dt within the chunk, over ln 2.
// Grid (batch * chunks, heads / 8), CHUNK threads: a thread a token, eight heads.
extern "C" __global__ void __launch_bounds__(CHUNK) ssd_dt(const bf16* zxbcdt, const bf16* a_log, const bf16* dt_bias,
    float* dt, float* cum, int width, int dt_col, int seq, int heads, int groups, int chunks) {
    __shared__ float scratch[8][CHUNK / 32];
    const Shape s = {seq, heads, groups, chunks};
    const int b = blockIdx.x / chunks, c = blockIdx.x % chunks, h0 = blockIdx.y * 8, t = threadIdx.x;
    const int at = c * CHUNK + t;
    float raw[8];
    if (at < seq) load8(zxbcdt + ((i64)b * seq + at) * width + dt_col + h0, raw);
    #pragma unroll
    for (int e = 0; e < 8; ++e) {
        const int h = h0 + e;
        const float v = at < seq ? softplus(raw[e] + to_f32(dt_bias[h])) : 0.f;
        const float sum = block_scan(-expf(to_f32(a_log[h])) * v * LOG2E, scratch[e]);
        dt[s.series(b, h) + at] = v;
        cum[s.series(b, h) + at] = sum;
    }
}

// The pass between chunks: a block walks the chunks of one head and SLICE columns of the state, which stay in
// registers in fp32. Each warp owns 16 rows of the state.
//   forward: out[c] = H; H = 2^c_Q H + sum_t dt_t 2^(c_Q - c_t) x_t B_t^T
//   REVERSE: out[c] = dH; dH = 2^c_Q dH + sum_t 2^(c_t) dy_t C_t^T; and dots[c] = 2^c_Q <H[c], dH> of the slice
// `rows` (x or dy) and `mats` (B or C) begin at the head's and the group's first column.
constexpr int STATE_THREADS = HEAD_DIM * 2;
constexpr int SLICE_ROW = (SLICE / 8 + 1) * 16;
constexpr int STATE_STAGE = X_TILE + CHUNK * SLICE_ROW + CHUNK * 8;
template <bool REVERSE>
__device__ __forceinline__ void pass_states(const bf16* rows, int row_stride, const bf16* mats, int mat_stride, const float* dt,
    const float* cum, const bf16* states, bf16* out, float* dots, const Shape s) {
    __shared__ float scratch[32];
    constexpr int slices = STATE / SLICE;
    const int slice = blockIdx.x % slices, bh = blockIdx.x / slices, b = bh / s.heads, h = bh % s.heads;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane & 3, n0 = slice * SLICE;
    rows += (i64)b * s.seq * row_stride + h * HEAD_DIM;
    mats += (i64)b * s.seq * mat_stride + (h / (s.heads / s.groups)) * STATE + n0;
    dt += s.series(b, h);
    cum += s.series(b, h);
    const auto chunk_of = [&](int i) { return REVERSE ? s.chunks - 1 - i : i; };
    const auto prefetch = [&](int i) {
        if (i < s.chunks) {
            const int t0 = chunk_of(i) * CHUNK, valid = min(CHUNK, s.seq - t0);
            u8* stage = shared + (i & 1) * STATE_STAGE;
            load_tile<CHUNK, HEAD_DIM, STATE_THREADS>(stage, rows + (i64)t0 * row_stride, row_stride, valid);
            load_tile<CHUNK, SLICE, STATE_THREADS>(stage + X_TILE, mats + (i64)t0 * mat_stride, mat_stride, valid);
            load_series<STATE_THREADS>(reinterpret_cast<float*>(stage + X_TILE + CHUNK * SLICE_ROW), dt + t0, cum + t0);
        }
        cp_async_commit();
    };
    float acc[SLICE / 16][8];
    clear(acc);
    prefetch(0);
    #pragma unroll 1
    for (int i = 0; i < s.chunks; ++i) {
        prefetch(i + 1);
        cp_async_wait<1>();
        __syncthreads();
        const int c = chunk_of(i);
        const u8* stage = shared + (i & 1) * STATE_STAGE;
        const float* dts = reinterpret_cast<const float*>(stage + X_TILE + CHUNK * SLICE_ROW);
        const float *cs = dts + CHUNK, last = cs[CHUNK - 1], decay = exp2_fast(last);
        const i64 at = s.state(b, c, h) + (i64)(warp * 16 + (lane >> 2)) * STATE + n0 + 2 * quad;
        float dot = 0.f;
        #pragma unroll
        for (int n = 0; n < SLICE / 16; ++n)
            #pragma unroll
            for (int e = 0; e < 8; e += 2) {
                const i64 place = at + row_of(e) * STATE + n * 16 + col_of(e);
                if (REVERSE) {
                    const u32 old = *reinterpret_cast<const u32*>(states + place);
                    dot += acc[n][e] * bf16_lo(old) + acc[n][e + 1] * bf16_hi(old);
                }
                *reinterpret_cast<u32*>(out + place) = pack_bf16(acc[n][e], acc[n][e + 1]);
                acc[n][e] *= decay;
                acc[n][e + 1] *= decay;
            }
        if (REVERSE) {
            dot = block_sum(dot, scratch);
            if (threadIdx.x == 0) dots[(((i64)b * s.chunks + c) * s.heads + h) * slices + slice] = dot * decay;
        }
        const u32 x = smem_addr(stage), m = smem_addr(stage + X_TILE);
        #pragma unroll 4
        for (int k = 0; k < TOKEN_TILES; ++k) {
            u32 a[4];
            ldsm_x4_t(a, x + by_cols<P_ROW>(k * 16, warp * 16));
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = k * 16 + half * 8 + 2 * quad;
                const float2 ct = *reinterpret_cast<const float2*>(cs + t);
                float w0, w1;
                if (REVERSE) {
                    w0 = exp2_fast(ct.x);
                    w1 = exp2_fast(ct.y);
                } else {
                    const float2 d = *reinterpret_cast<const float2*>(dts + t);
                    w0 = d.x * exp2_fast(last - ct.x);
                    w1 = d.y * exp2_fast(last - ct.y);
                }
                #pragma unroll
                for (int r = 0; r < 2; ++r) {
                    u32& v = a[half * 2 + r];
                    v = pack_bf16(bf16_lo(v) * w0, bf16_hi(v) * w1);
                }
            }
            #pragma unroll
            for (int n = 0; n < SLICE / 16; ++n) {
                u32 fb[4];
                ldsm_x4_t(fb, m + by_rows<SLICE_ROW>(k * 16, n * 16));
                mma_pair(acc[n], a, fb);
            }
        }
        __syncthreads();
    }
}
