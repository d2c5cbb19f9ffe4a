// Received chunks, ordered by (rank, local expert), to sorted chunks, ordered by (local expert, rank).
// Constants: EXPERTS (1..512) = RANKS * LOCAL, LOCAL. Blocks of 512 threads map 2048 rows.

#define THREADS 512
#define ROWS_PER_THREAD 4
#define RANKS (EXPERTS / LOCAL)

// offsets [EXPERTS+1] -> local_offsets [LOCAL+1], src [rows], dest [rows]
extern "C" __global__ void __launch_bounds__(THREADS) chunk_map(
    const int* offsets, int* local_offsets, int* src, int* dest, int rows) {
    __shared__ int start[EXPERTS + 1];  // first received row of chunk e
    __shared__ int sorted[EXPERTS];     // first sorted row of chunk e
    __shared__ int warp_sums[THREADS / 32];
    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    for (int e = tid; e <= EXPERTS; e += THREADS) start[e] = min(max(offsets[e], 0), rows);
    __syncthreads();

    // Thread i stands for the i-th chunk in sorted order: i = l * RANKS + rank.
    const int e = (tid % RANKS) * LOCAL + tid / RANKS;
    const int len = tid < EXPERTS ? max(start[e + 1] - start[e], 0) : 0;
    int x = len;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
        const int y = __shfl_up_sync(0xffffffffu, x, o);
        if (lane >= o) x += y;
    }
    if (lane == 31) warp_sums[warp] = x;
    __syncthreads();
    int before = x - len;
    for (int w = 0; w < warp; ++w) before += warp_sums[w];
    if (tid < EXPERTS) sorted[e] = before;
    if (blockIdx.x == 0 && tid < EXPERTS) {
        if (tid % RANKS == 0) local_offsets[tid / RANKS] = before;
        if (tid == EXPERTS - 1) local_offsets[LOCAL] = before + len;
    }
    __syncthreads();

    const int used = start[EXPERTS];  // received and sorted rows alike
    #pragma unroll
    for (int i = 0; i < ROWS_PER_THREAD; ++i) {
        const int row = (blockIdx.x * ROWS_PER_THREAD + i) * THREADS + tid;
        if (row >= rows) break;
        if (row >= used) {
            src[row] = -1;
            dest[row] = -1;
            continue;
        }
        // Last chunk that starts at or before the row: it is not empty.
        int low = 0, high = EXPERTS;
        while (high - low > 1) {
            const int mid = (low + high) / 2;
            if (start[mid] <= row) low = mid;
            else high = mid;
        }
        const int to = sorted[low] + row - start[low];
        dest[row] = to;
        src[to] = row;
    }
}
