// Causal depthwise convolution over tokens, width 4, with SiLU and, where BIAS is 1, a bias. A thread owns four channels (8 bytes) of
// ROWS tokens and reads all rows that it needs before it computes: one row after the other would leave the memory idle.
constexpr int TAPS = 4;
constexpr int CHANNELS = 4;   // of a thread
constexpr int HALO = TAPS - 1;

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ void unpack(uint2 p, float v[CHANNELS]) {
    v[0] = bf16_lo(p.x); v[1] = bf16_hi(p.x); v[2] = bf16_lo(p.y); v[3] = bf16_hi(p.y);
}
__device__ __forceinline__ uint2 pack(const float v[CHANNELS]) { return make_uint2(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3])); }
// Row t of a column of `stride` elements a row; zeros before the sequence and after it.
__device__ __forceinline__ uint2 row_or_zero(const bf16* column, int t, int seq, int stride) {
    if (t < 0 || t >= seq) return make_uint2(0, 0);
    return *reinterpret_cast<const uint2*>(column + (i64)t * stride);
}

// Weights [channel][tap] and biases.
struct Filter {
    float w[CHANNELS][TAPS], bias[CHANNELS];
    __device__ __forceinline__ Filter(const bf16* weight, const bf16* bias_, int c) {
        load8(weight + (i64)c * TAPS, &w[0][0]);
        load8(weight + (i64)c * TAPS + 8, &w[2][0]);
        #pragma unroll
        for (int e = 0; e < CHANNELS; ++e) bias[e] = 0.f;
        if (BIAS) unpack(*reinterpret_cast<const uint2*>(bias_ + c), bias);
    }
    // The value before SiLU; `x`: a ring of rows, the oldest at `oldest`.
    __device__ __forceinline__ float before(const float x[TAPS][CHANNELS], int oldest, int e) const {
        float v = bias[e];
        #pragma unroll
        for (int k = 0; k < TAPS; ++k) v += w[e][k] * x[(oldest + k) % TAPS][e];
        return v;
    }
};

// out[t, c] = silu(bias[c] + sum_k w[c, k] in[t - 3 + k, c]); in = columns first.. of rows of `width`.
// Grid (channels / 4 / threads, tiles of ROWS tokens, batch).
extern "C" __global__ void __launch_bounds__(128) mamba_conv_fwd(const bf16* in, const bf16* weight, const bf16* bias, bf16* out,
    int width, int first, int channels, int seq) {
    const int c = (blockIdx.x * blockDim.x + threadIdx.x) * CHANNELS;
    if (c >= channels) return;
    const i64 row0 = (i64)blockIdx.z * seq;
    const int t0 = blockIdx.y * ROWS;
    const bf16* src = in + row0 * width + first + c;
    uint2 rows[ROWS + HALO];
    #pragma unroll
    for (int k = 0; k < ROWS + HALO; ++k) rows[k] = row_or_zero(src, t0 - HALO + k, seq, width);
    const Filter f(weight, bias, c);
    float x[TAPS][CHANNELS];
    #pragma unroll
    for (int k = 0; k < HALO; ++k) unpack(rows[k], x[k]);
    #pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        unpack(rows[r + HALO], x[(r + HALO) % TAPS]);
        float o[CHANNELS];
        #pragma unroll
        for (int e = 0; e < CHANNELS; ++e) {
            const float v = f.before(x, r, e);
            o[e] = v * sigmoid(v);
        }
        if (t0 + r < seq) *reinterpret_cast<uint2*>(out + (row0 + t0 + r) * channels + c) = pack(o);
    }
}

// Sums of a thread over its tokens.
struct Sums {
    float dw[CHANNELS][TAPS], db[CHANNELS];
};

// With p the value before SiLU and g = dout silu'(p): din[t] = sum_k w[k] g[t + 3 - k], and the sums of g and of g times the inputs over
// tokens t0 .. t0 + ROWS. Computes g of the three tokens after them too (their sums belong to the next thread's).
__device__ __forceinline__ void convolve_back(const Filter& f, const bf16* src, const bf16* grad, bf16* to, int width, int channels, int t0,
    int seq, Sums& sums) {
    uint2 in_rows[ROWS + 2 * HALO], grad_rows[ROWS + HALO];
    #pragma unroll
    for (int k = 0; k < ROWS + 2 * HALO; ++k) in_rows[k] = row_or_zero(src, t0 - HALO + k, seq, width);
    #pragma unroll
    for (int k = 0; k < ROWS + HALO; ++k) grad_rows[k] = row_or_zero(grad, t0 + k, seq, channels);
    float x[TAPS][CHANNELS], g[TAPS][CHANNELS];
    #pragma unroll
    for (int k = 0; k < HALO; ++k) unpack(in_rows[k], x[k]);
    #pragma unroll
    for (int k = 0; k < ROWS + HALO; ++k) {
        float d[CHANNELS], o[CHANNELS];
        unpack(in_rows[k + HALO], x[(k + HALO) % TAPS]);
        unpack(grad_rows[k], d);
        #pragma unroll
        for (int e = 0; e < CHANNELS; ++e) {
            const float p = f.before(x, k, e), s = sigmoid(p), gp = d[e] * s * (1.f + p * (1.f - s));
            g[k % TAPS][e] = gp;
            if (k < ROWS) {
                sums.db[e] += gp;
                #pragma unroll
                for (int j = 0; j < TAPS; ++j) sums.dw[e][j] += gp * x[(k + j) % TAPS][e];
            }
            if (k >= HALO) {
                o[e] = 0.f;
                #pragma unroll
                for (int j = 0; j < TAPS; ++j) o[e] += f.w[e][j] * g[(k - j) % TAPS][e];
            }
        }
        const int t = t0 + k - HALO;
        if (k >= HALO && t < seq) *reinterpret_cast<uint2*>(to + (i64)t * width) = pack(o);
    }
}

// Whole rows of the gradient of the in-projection's output: dz as it is, the convolution's own part, ddt as it is. Per tile, partial
// [tile][(4 + BIAS) * channels] holds dw [channel][tap], then dbias. A tile is SLICES warps of ROWS tokens; a warp has 128 columns.
// Grid (width / 128, tiles of a sequence, batch).
extern "C" __global__ void __launch_bounds__(32 * SLICES) mamba_conv_bwd(const bf16* in, const bf16* weight, const bf16* bias,
    const bf16* dout, const bf16* dz, const bf16* ddt, bf16* din, float* partial, int width, int first, int channels, int tail, int seq) {
    constexpr int VALUES = (TAPS + BIAS) * CHANNELS;   // sums of a thread
    // One float more a line, so that neither lanes nor values meet in a bank.
    __shared__ float all[SLICES][VALUES][33];
    const int lane = threadIdx.x & 31, slice = threadIdx.x >> 5, column = (blockIdx.x * 32 + lane) * CHANNELS, c = column - first;
    const i64 row0 = (i64)blockIdx.z * seq;
    const int t0 = (blockIdx.y * SLICES + slice) * ROWS;
    Sums sums;
    #pragma unroll
    for (int e = 0; e < CHANNELS; ++e) {
        sums.db[e] = 0.f;
        #pragma unroll
        for (int k = 0; k < TAPS; ++k) sums.dw[e][k] = 0.f;
    }
    bf16* to = din + row0 * width + column;
    if (c >= 0 && c < channels) {
        const Filter f(weight, bias, c);
        convolve_back(f, in + row0 * width + column, dout + row0 * channels + c, to, width, channels, t0, seq, sums);
    } else if (column < width) {
        const bf16* from = c < 0 ? dz + row0 * first + column : ddt + row0 * tail + (c - channels);
        const int stride = c < 0 ? first : tail;
        uint2 rows[ROWS];
        #pragma unroll
        for (int r = 0; r < ROWS; ++r) rows[r] = row_or_zero(from, t0 + r, seq, stride);
        #pragma unroll
        for (int r = 0; r < ROWS; ++r)
            if (t0 + r < seq) *reinterpret_cast<uint2*>(to + (i64)(t0 + r) * width) = rows[r];
    }
    const int c0 = blockIdx.x * 32 * CHANNELS - first;   // channel of the first lane
    if (c0 + 32 * CHANNELS <= 0 || c0 >= channels) return;   // the whole block
    #pragma unroll
    for (int e = 0; e < CHANNELS; ++e) {
        #pragma unroll
        for (int k = 0; k < TAPS; ++k) all[slice][e * TAPS + k][lane] = sums.dw[e][k];
        if (BIAS) all[slice][CHANNELS * TAPS + e][lane] = sums.db[e];
    }
    __syncthreads();
    float* part = partial + ((i64)blockIdx.z * gridDim.y + blockIdx.y) * (TAPS + BIAS) * channels;
    // In the order of the results: of a channel its taps, then the biases.
    for (int i = threadIdx.x; i < 32 * VALUES; i += 32 * SLICES) {
        const bool of_bias = i >= 32 * CHANNELS * TAPS;
        const int n = of_bias ? i - 32 * CHANNELS * TAPS : i, a_lane = of_bias ? CHANNELS : CHANNELS * TAPS;
        const int channel = c0 + (of_bias ? n : n / TAPS);
        const int value = n % a_lane + (of_bias ? CHANNELS * TAPS : 0);
        float sum = 0.f;
        #pragma unroll
        for (int s = 0; s < SLICES; ++s) sum += all[s][value][n / a_lane];
        if (channel >= 0 && channel < channels) part[of_bias ? (i64)TAPS * channels + channel : (i64)c0 * TAPS + n] = sum;
    }
}
