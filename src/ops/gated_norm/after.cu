// y = rmsnorm by group (x) * weight * silu(z), one weight of a group's width for all groups. LANES lanes share a group, each
// with ITEMS vectors of eight values; ZERO_CENTERED 1: the weight is stored less one.

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
// Sum over the lanes of a group; every lane of the warp must take part.
__device__ __forceinline__ float group_sum(float x) {
    #pragma unroll
    for (int o = LANES / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}
__device__ __forceinline__ void load_weight(const bf16* weight, float w[8]) {
    load8(weight, w);
    #pragma unroll
    for (int e = 0; e < 8; ++e) w[e] += ZERO_CENTERED;
}

// Where a group's lanes find its values. `id`: row * groups + group.
struct Place {
    i64 x, z;
    bool active;
    __device__ __forceinline__ Place(i64 id, i64 all, int z_stride, int group, int groups) {
        active = id < all;
        x = id * group;
        z = id / groups * z_stride + id % groups * group;
    }
};

// Rows of z are z_stride apart. Grid: rows * groups, LANES threads each.
extern "C" __global__ void __launch_bounds__(256) norm_gate_fwd(const bf16* x, const bf16* z, const bf16* weight, bf16* y, float* rstd,
    int z_stride, int group, int groups, int rows, float eps) {
    const int lane = threadIdx.x % LANES;
    const i64 id = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const Place p(id, (i64)rows * groups, z_stride, group, groups);
    float u[ITEMS][8], v[ITEMS][8], sum = 0.f;
    #pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int c = (i * LANES + lane) * 8;
        if (!p.active || c >= group) continue;
        load8(x + p.x + c, u[i]);
        load8(z + p.z + c, v[i]);
        #pragma unroll
        for (int e = 0; e < 8; ++e) sum += u[i][e] * u[i][e];
    }
    const float r = rsqrtf(group_sum(sum) / group + eps);
    if (p.active && lane == 0) rstd[id] = r;
    #pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int c = (i * LANES + lane) * 8;
        if (!p.active || c >= group) continue;
        float w[8];
        load_weight(weight + c, w);
        #pragma unroll
        for (int e = 0; e < 8; ++e) u[i][e] *= r * w[e] * v[i][e] * sigmoid(v[i][e]);
        store8(y + p.x + c, u[i]);
    }
}

// With n = x rstd and dn = dy weight silu(z): dx = rstd (dn - n mean(dn n)), dz = dy n weight silu'(z); a block takes groups
// blockIdx.x + k gridDim.x of eight warps' worth and sums dy n silu(z), over its warps in order: partial [gridDim.x][group].
extern "C" __global__ void __launch_bounds__(256) norm_gate_bwd(const bf16* x, const bf16* z, const bf16* weight, const float* rstd,
    const bf16* dy, bf16* dx, bf16* dz, float* partial, int z_stride, int group, int groups, int rows) {
    constexpr int WIDTH = LANES * ITEMS * 8, OWNERS = 256 / LANES;
    __shared__ float sums[OWNERS][WIDTH];
    const int lane = threadIdx.x % LANES, owner = threadIdx.x / LANES;
    const i64 all = (i64)rows * groups;
    float dw[ITEMS][8];
    #pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        #pragma unroll
        for (int e = 0; e < 8; ++e) dw[i][e] = 0.f;
    for (i64 first = (i64)blockIdx.x * OWNERS; first < all; first += (i64)gridDim.x * OWNERS) {
        const i64 id = first + owner;
        const Place p(id, all, z_stride, group, groups);
        const float r = p.active ? rstd[id] : 0.f;
        float n[ITEMS][8], v[ITEMS][8], d[ITEMS][8], dot = 0.f;
        #pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int c = (i * LANES + lane) * 8;
            if (!p.active || c >= group) continue;
            float w[8];
            load8(x + p.x + c, n[i]);
            load8(z + p.z + c, v[i]);
            load8(dy + p.x + c, d[i]);
            load_weight(weight + c, w);
            #pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float s = sigmoid(v[i][e]), gate = v[i][e] * s;
                n[i][e] *= r;
                const float dyn = d[i][e] * n[i][e];
                dw[i][e] += dyn * gate;
                v[i][e] = dyn * w[e] * s * (1.f + v[i][e] * (1.f - s));
                d[i][e] *= w[e] * gate;
                dot += d[i][e] * n[i][e];
            }
        }
        const float mean = group_sum(dot) / group;
        #pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int c = (i * LANES + lane) * 8;
            if (!p.active || c >= group) continue;
            #pragma unroll
            for (int e = 0; e < 8; ++e) d[i][e] = r * (d[i][e] - n[i][e] * mean);
            store8(dx + p.x + c, d[i]);
            store8(dz + p.x + c, v[i]);
        }
    }
    #pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        #pragma unroll
        for (int e = 0; e < 8; ++e) sums[owner][(i * LANES + lane) * 8 + e] = dw[i][e];
    __syncthreads();
    for (int c = threadIdx.x; c < group; c += 256) {
        float sum = 0.f;
        for (int o = 0; o < OWNERS; ++o) sum += sums[o][c];
        partial[(i64)blockIdx.x * group + c] = sum;
    }
}
