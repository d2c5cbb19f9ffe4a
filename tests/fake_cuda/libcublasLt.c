/* A cuBLASLt for tests: a product is one kernel launch that does nothing. */
#include <stdint.h>
#include <string.h>
typedef struct { uint64_t a[8]; size_t workspace; int state; float waves; int r[4]; } Result;
extern int cuModuleGetFunction(void **, char *, const char *);
extern int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
int cublasLtCreate(void **h) { *h = (void *)8; return 0; }
int cublasLtDestroy(void *h) { return 0; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **d, int c, int s) { *d = (void *)8; return 0; }
int cublasLtMatmulDescDestroy(void *d) { return 0; }
int cublasLtMatmulDescSetAttribute(void *d, int a, const void *v, size_t n) { return n == 4 ? 0 : 7; }
int cublasLtMatmulPreferenceCreate(void **p) { *p = (void *)8; return 0; }
int cublasLtMatmulPreferenceDestroy(void *p) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *p, int a, const void *v, size_t n) { return n == (a == 1 ? 8 : 4) ? 0 : 7; }
int cublasLtMatrixLayoutCreate(void **l, int t, uint64_t r, uint64_t c, int64_t ld) { *l = (void *)8; return r && c && ld >= (int64_t)r ? 0 : 7; }
int cublasLtMatrixLayoutDestroy(void *l) { return 0; }
int cublasLtMatrixLayoutSetAttribute(void *l, int a, const void *v, size_t n) { return n == (a == 5 ? 4 : 8) ? 0 : 7; }
int cublasLtMatmulAlgoCheck(void *h, void *o, void *a, void *b, void *c, void *d, const uint64_t *x, Result *r) { memset(r, 0, sizeof *r); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, Result *r, int *found) {
    memset(r, 0, 2 * sizeof *r); r[1].a[0] = 1; *found = 2; return 0;
}
int cublasLtMatmul(void *h, void *o, const float *alpha, const void *A, void *a, const void *B, void *b, const float *beta, const void *C, void *c, void *D, void *d, const uint64_t *algo, void *w, size_t wn, void *stream) {
    static void *kernel;
    if (!kernel) cuModuleGetFunction(&kernel, "extern __global__ void fake_gemm(int a)", "fake_gemm");
    int x = 0;
    void *p[1] = { &x };
    return *alpha == 1.0f && (*beta == 0.0f || *beta == 1.0f) ? cuLaunchKernel(kernel, 1 + (unsigned)algo[0], 1, 1, 128, 1, 1, 0, stream, p, 0) : 7;
}
