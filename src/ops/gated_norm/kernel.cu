// y = rmsnorm by group (x * silu(z)) * weight. A warp a group of a row; ITEMS vectors of eight values a lane.

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Calls `f(i, column)` for the lane's vectors inside the group.
#define FOR_VECTORS(i, c) \
    _Pragma("unroll") for (int i = 0; i < ITEMS; ++i) \
        if (const int c = (i * 32 + lane) * 8; c < group)

// Rows of z are z_stride apart. Grid: rows * groups warps.
extern "C" __global__ void __launch_bounds__(256) gated_norm_fwd(const bf16* x, const bf16* z, const bf16* weight, bf16* y, float* rstd,
    int z_stride, int group, int groups, int rows, float eps) {
    const int lane = threadIdx.x & 31;
    const i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    const i64 row = id / groups;
    const int g = (int)(id % groups);
    if (row >= rows) return;
    const i64 at = (row * groups + g) * group, z_at = row * z_stride + (i64)g * group;
    float u[ITEMS][8], sum = 0.f;
    FOR_VECTORS(i, c) {
        float v[8];
        load8(x + at + c, u[i]);
        load8(z + z_at + c, v);
        #pragma unroll
        for (int e = 0; e < 8; ++e) {
            u[i][e] *= v[e] * sigmoid(v[e]);
            sum += u[i][e] * u[i][e];
        }
    }
    const float r = rsqrtf(warp_sum(sum) / group + eps);
    if (lane == 0) rstd[id] = r;
    FOR_VECTORS(i, c) {
        float w[8];
        load8(weight + (i64)g * group + c, w);
        #pragma unroll
        for (int e = 0; e < 8; ++e) u[i][e] *= r * w[e];
        store8(y + at + c, u[i]);
    }
}

// With u = x silu(z), n = u rstd, dn = dy weight: du = rstd (dn - n mean(dn n)); dx = du silu(z), dz = du x silu'(z). A warp
// walks rows blockIdx.x + k gridDim.x of one group (blockIdx.y) and sums dy n of its columns: partial [gridDim.x][width].
extern "C" __global__ void __launch_bounds__(32) gated_norm_bwd(const bf16* x, const bf16* z, const bf16* weight, const float* rstd,
    const bf16* dy, bf16* dx, bf16* dz, float* partial, int z_stride, int group, int groups, int rows) {
    const int lane = threadIdx.x & 31, g = blockIdx.y;
    const i64 width = (i64)groups * group, column = (i64)g * group;
    float dw[ITEMS][8];
    FOR_VECTORS(i, c) {
        #pragma unroll
        for (int e = 0; e < 8; ++e) dw[i][e] = 0.f;
    }
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const float r = rstd[row * groups + g];
        float n[ITEMS][8], dot = 0.f;
        FOR_VECTORS(i, c) {
            float v[8], w[8], d[8];
            load8(x + row * width + column + c, n[i]);
            load8(z + row * z_stride + column + c, v);
            load8(weight + column + c, w);
            load8(dy + row * width + column + c, d);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                n[i][e] *= v[e] * sigmoid(v[e]) * r;
                dot += d[e] * w[e] * n[i][e];
                dw[i][e] += d[e] * n[i][e];
            }
        }
        const float mean = warp_sum(dot) / group;
        // Read again, from the cache: values of both loops at once would not fit the registers of wide groups.
        FOR_VECTORS(i, c) {
            float a[8], v[8], w[8], d[8];
            load8(x + row * width + column + c, a);
            load8(z + row * z_stride + column + c, v);
            load8(weight + column + c, w);
            load8(dy + row * width + column + c, d);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float s = sigmoid(v[e]), du = r * (d[e] * w[e] - n[i][e] * mean);
                d[e] = du * v[e] * s;
                a[e] = du * a[e] * s * (1.f + v[e] * (1.f - s));
            }
            store8(dx + row * width + column + c, d);
            store8(dz + row * width + column + c, a);
        }
    }
    FOR_VECTORS(i, c) store8(partial + blockIdx.x * width + column + c, dw[i]);
}
