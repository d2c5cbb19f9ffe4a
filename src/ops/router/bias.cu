// The expert bias: counts of a step, and the move that they ask for.

// total [E] += counts [E]
extern "C" __global__ void __launch_bounds__(256) count_add(const int* counts, int* total, int experts) {
    const int e = blockIdx.x * 256 + threadIdx.x;
    if (e < experts) total[e] += counts[e];
}

// bias [L,E] moves by `rate` towards the mean of total [L,E], which becomes zero. One block a layer.
extern "C" __global__ void __launch_bounds__(256) expert_bias_update(int* total, float* bias, int experts, float rate) {
    __shared__ u64 sum;
    total += (i64)blockIdx.x * experts;
    bias += (i64)blockIdx.x * experts;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    u64 mine = 0;
    for (int e = threadIdx.x; e < experts; e += 256) mine += (u64)total[e];
    atomicAdd(&sum, mine);  // integers: any order gives the same sum
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += 256) {
        const u64 scaled = (u64)total[e] * experts;  // against the sum: no division
        if (scaled != sum) bias[e] += scaled < sum ? rate : -rate;
        total[e] = 0;
    }
}
