// y = rmsnorm by group (x * silu(z)) * weight. A warp a group of a row; ITEMS vectors of eight values a lane.

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

__device__ __forceinline__ void unpack8(uint4 q, float v[8]) {
    v[0] = bf16_lo(q.x); v[1] = bf16_hi(q.x); v[2] = bf16_lo(q.y); v[3] = bf16_hi(q.y);
    v[4] = bf16_lo(q.z); v[5] = bf16_hi(q.z); v[6] = bf16_lo(q.w); v[7] = bf16_hi(q.w);
}
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

// Narrow groups: what the first loop read stays in registers, packed, with the sigmoid, for the second. Wide ones read again,
// from the cache: values of both loops at once would not fit the registers.
#define KEEP (ITEMS <= 2)

// With u = x silu(z), n = u rstd, dn = dy weight: du = rstd (dn - n mean(dn n)); dx = du silu(z), dz = du x silu'(z). A warp
// walks rows blockIdx.x + k gridDim.x of one group (blockIdx.y) and sums dy n of its columns: partial [gridDim.x][width].
extern "C" __global__ void __launch_bounds__(32, ITEMS == 1 ? 32 : ITEMS <= 4 ? 20 : 12) gated_norm_bwd(const bf16* x, const bf16* z, const bf16* weight, const float* rstd,
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
        const i64 at = row * width + column, z_at = row * z_stride + column;
        uint4 kept_x[ITEMS], kept_z[ITEMS], kept_dy[ITEMS];
        float n[ITEMS][8], sig[KEEP ? ITEMS : 1][8], dot = 0.f;
        if (KEEP) {   // all loads before the first use
            FOR_VECTORS(i, c) {
                kept_x[i] = *reinterpret_cast<const uint4*>(x + at + c);
                kept_z[i] = *reinterpret_cast<const uint4*>(z + z_at + c);
                kept_dy[i] = *reinterpret_cast<const uint4*>(dy + at + c);
            }
        }
        FOR_VECTORS(i, c) {
            float v[8], w[8], d[8];
            if (KEEP) {
                unpack8(kept_x[i], n[i]);
                unpack8(kept_z[i], v);
                unpack8(kept_dy[i], d);
            } else {
                load8(x + at + c, n[i]);
                load8(z + z_at + c, v);
                load8(dy + at + c, d);
            }
            load8(weight + column + c, w);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float s = sigmoid(v[e]);
                if (KEEP) sig[i][e] = s;
                n[i][e] *= v[e] * s * r;
                dot += d[e] * w[e] * n[i][e];
                dw[i][e] += d[e] * n[i][e];
            }
        }
        const float mean = warp_sum(dot) / group;
        FOR_VECTORS(i, c) {
            float a[8], v[8], w[8], d[8];
            if (KEEP) {
                unpack8(kept_x[i], a);
                unpack8(kept_z[i], v);
                unpack8(kept_dy[i], d);
            } else {
                load8(x + at + c, a);
                load8(z + z_at + c, v);
                load8(dy + at + c, d);
            }
            load8(weight + column + c, w);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float s = KEEP ? sig[i][e] : sigmoid(v[e]), du = r * (d[e] * w[e] - n[i][e] * mean);
                d[e] = du * v[e] * s;
                a[e] = du * a[e] * s * (1.f + v[e] * (1.f - s));
            }
            store8(dx + at + c, d);
            store8(dz + at + c, a);
        }
    }
    FOR_VECTORS(i, c) store8(partial + blockIdx.x * width + column + c, dw[i]);
}
