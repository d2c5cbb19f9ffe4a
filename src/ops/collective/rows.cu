// The plan of a dropless all-to-all from every rank's offsets. Constants: RANKS, OWN, LOCAL. One block.

#define THREADS 512
#define EXPERTS (RANKS * LOCAL)
#define N (EXPERTS + 1)
// Whole 16-byte vectors: the compiler reads the sum over bins in vectors, beyond the last one too.
#define BINS ((EXPERTS + 3) / 4 * 4)

// all [RANKS*N] -> plan [2*N]: own offsets, offsets of what is received by (rank, local expert); or zeros and fault = 1
// when a rank would receive more than `rows`.
extern "C" __global__ void __launch_bounds__(THREADS) row_plan(const int* all, int* plan, int* fault, int rows) {
    __shared__ int received[BINS];
    __shared__ int over;
    const int tid = threadIdx.x;
    if (tid == 0) over = 0;
    __syncthreads();
    // What rank `to` receives is one difference a sender: its experts lie side by side.
    for (int to = tid; to < RANKS; to += THREADS) {
        i64 sum = 0;
        for (int from = 0; from < RANKS; ++from) sum += all[from * N + (to + 1) * LOCAL] - all[from * N + to * LOCAL];
        if (sum > rows) over = 1;
    }
    for (int b = tid; b < BINS; b += THREADS) {
        const int at = (b / LOCAL) * N + OWN * LOCAL + b % LOCAL;
        received[b] = b < EXPERTS ? all[at + 1] - all[at] : 0;
    }
    __syncthreads();
    if (over) {
        for (int i = tid; i < 2 * N; i += THREADS) plan[i] = 0;
        if (tid == 0) fault[0] = 1;
        return;
    }
    for (int i = tid; i < N; i += THREADS) plan[i] = all[OWN * N + i];
    // At most a few hundred bins: each end is summed from the start.
    for (int b = tid; b < EXPERTS; b += THREADS) {
        int end = 0;
        for (int i = 0; i <= b; ++i) end += received[i];
        plan[N + b + 1] = end;
    }
    if (tid == 0) plan[N] = 0;
}
