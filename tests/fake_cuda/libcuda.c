/* A driver without a GPU, for tests: device memory is host memory, copies and memsets happen at once, capture
   records nodes and a replay runs them. Kernels are looked up in the "cubin", which the fake NVRTC makes of the
   source text; only the executor's own reading kernels are carried out, all others do nothing.
   FAKE_CUDA_INIT is what cuInit returns, FAKE_CUDA_VERSION the version, FAKE_CUDA_FAIL a function that fails,
   FAKE_CUDA_LOAD what loading a module returns. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int R;
typedef uint64_t P;
enum { KERNEL, COPY, SET };
typedef struct { char name[96]; int count; size_t size[48]; } Function;
typedef struct { int kind; Function *f; unsigned grid[3], block[3], shared; P dst, src; size_t bytes; unsigned value, width; uint64_t arg[48]; } Node;
typedef struct { Node *node[4096]; size_t count; } Graph;
typedef struct { Graph *capturing; } Stream;
typedef struct { Graph *capturing; double ms; } Event;
static Stream *streams[64];
static int stream_count, live_graphs;

static R fail(const char *name) { const char *f = getenv("FAKE_CUDA_FAIL"); return f && !strcmp(f, name) ? 999 : 0; }
static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }

R cuInit(unsigned f) { return number("FAKE_CUDA_INIT", 0); }
R cuDriverGetVersion(int *v) { *v = number("FAKE_CUDA_VERSION", 13000); return 0; }
R cuDeviceGetCount(int *n) { *n = 1; return 0; }
R cuDeviceGet(int *d, int i) { *d = i; return i ? 101 : 0; }
R cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "Fake GPU"); return 0; }
R cuDeviceGetUuid_v2(char *u, int d) { memset(u, 0xAB, 16); return 0; }
R cuDeviceTotalMem_v2(size_t *n, int d) { *n = 1ul << 30; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 9 : a == 76 ? 0 : a == 16 ? 132 : a == 97 ? 232448 : 0; return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)8; return fail("cuDevicePrimaryCtxRetain"); }
R cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
R cuCtxSetCurrent(void *c) { return 0; }
R cuCtxSynchronize(void) { return fail("cuCtxSynchronize"); }
static size_t used;
R cuMemGetInfo_v2(size_t *f, size_t *t) { *t = 1ul << 30; *f = *t - used; return 0; }
R cuMemAlloc_v2(P *p, size_t n) {
    if (n > (1ul << 30) - used) return 2;
    size_t *m = aligned_alloc(512, 512 + (n + 511) / 512 * 512);
    m[0] = n; used += n; *p = (P)m + 512; memset((void *)*p, 0x55, n);
    return 0;
}
R cuMemFree_v2(P p) { size_t *m = (size_t *)(p - 512); used -= m[0]; free(m); return 0; }
R cuMemHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n); return 0; }
R cuMemFreeHost(void *p) { free(p); return 0; }
R cuMemcpyHtoD_v2(P d, const void *s, size_t n) { memcpy((void *)d, s, n); return 0; }
R cuMemcpyDtoH_v2(void *d, P s, size_t n) { memcpy(d, (void *)s, n); return 0; }

R cuStreamCreate(Stream **s, unsigned f) { *s = calloc(1, sizeof(Stream)); if (stream_count < 64) streams[stream_count++] = *s; return 0; }
R cuStreamDestroy_v2(Stream *s) { for (int i = 0; i < stream_count; i++) if (streams[i] == s) streams[i] = streams[--stream_count]; free(s); return 0; }
R cuStreamSynchronize(Stream *s) { return s->capturing ? 900 : fail("cuStreamSynchronize"); }
R cuEventCreate(Event **e, unsigned f) { *e = calloc(1, sizeof(Event)); return 0; }
R cuEventDestroy_v2(Event *e) { free(e); return 0; }
R cuEventRecord(Event *e, Stream *s) { e->capturing = s->capturing; e->ms = now(); return 0; }
R cuEventSynchronize(Event *e) { return e->capturing ? 907 : fail("cuEventSynchronize"); }
R cuEventElapsedTime_v2(float *ms, Event *a, Event *b) { *ms = b->ms - a->ms; return 0; }
R cuStreamWaitEvent(Stream *s, Event *e, unsigned f) {
    if (e->capturing && !s->capturing) s->capturing = e->capturing;   /* drawn into the capture */
    if (s->capturing && !e->capturing) return 905;                    /* isolation */
    return 0;
}

static uint64_t mix(uint32_t bits, uint64_t i) {
    uint64_t z = bits + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
static void carry_out(Node *n) {
    if (n->kind == COPY) { memmove((void *)n->dst, (void *)n->src, n->bytes); return; }
    if (n->kind == SET) {
        for (size_t i = 0; i < n->bytes; i += n->width) memcpy((char *)n->dst + i, &n->value, n->width);
        return;
    }
    if (!strcmp(n->f->name, "gather_words"))
        for (int i = 0; i < (int)n->arg[2]; i++) ((uint32_t *)n->arg[1])[i] = *(uint32_t *)((P *)n->arg[0])[i];
    if (!strcmp(n->f->name, "digest32"))
        for (uint64_t i = 0; i < n->arg[1]; i++) *(uint64_t *)n->arg[2] += mix(((uint32_t *)n->arg[0])[i], i);
    if (!strcmp(n->f->name, "digest16"))
        for (uint64_t i = 0; i < n->arg[1]; i++) *(uint64_t *)n->arg[2] += mix(((uint16_t *)n->arg[0])[i], i);
}
static R put(Stream *s, Node n) {
    if (!s->capturing) { carry_out(&n); return 0; }
    Node *kept = malloc(sizeof n);
    *kept = n;
    s->capturing->node[s->capturing->count++] = kept;
    return 0;
}
R cuMemsetD8Async(P d, unsigned char v, size_t n, Stream *s) { return put(s, (Node){ .kind = SET, .dst = d, .bytes = n, .value = v, .width = 1 }); }
R cuMemsetD16Async(P d, unsigned short v, size_t n, Stream *s) { return put(s, (Node){ .kind = SET, .dst = d, .bytes = 2 * n, .value = v, .width = 2 }); }
R cuMemsetD32Async(P d, unsigned v, size_t n, Stream *s) { return put(s, (Node){ .kind = SET, .dst = d, .bytes = 4 * n, .value = v, .width = 4 }); }
R cuMemcpyDtoDAsync_v2(P d, P f, size_t n, Stream *s) { return put(s, (Node){ .kind = COPY, .dst = d, .src = f, .bytes = n }); }
R cuMemcpyDtoHAsync_v2(void *d, P f, size_t n, Stream *s) { return put(s, (Node){ .kind = COPY, .dst = (P)d, .src = f, .bytes = n }); }

R cuModuleLoadData(char **m, const char *image) { *m = strdup(image); return number("FAKE_CUDA_LOAD", fail("cuModuleLoadData")); }
R cuModuleUnload(char *m) { free(m); return 0; }
R cuModuleGetFunction(Function **f, char *module, const char *name) {
    char pattern[128];
    snprintf(pattern, sizeof pattern, " %s(", name);
    for (char *at = module; (at = strstr(at, pattern)); at++) {
        char *line = at;
        while (line > module && line[-1] != '\n') line--;
        char *mark = strstr(line, "__global__");
        if (!mark || mark > at) continue;
        Function *fn = calloc(1, sizeof *fn);
        snprintf(fn->name, sizeof fn->name, "%s", name);
        char *p = at + strlen(pattern), *end = strchr(p, ')');
        while (p < end) {
            char *comma = memchr(p, ',', end - p), *stop = comma ? comma : end, part[256];
            snprintf(part, sizeof part, "%.*s", (int)(stop - p), p);
            fn->size[fn->count++] = strstr(part, "TensorMap") ? 128 : strchr(part, '*') || strstr(part, "long long") ? 8 : 4;
            p = stop + 1;
        }
        *f = fn;
        return 0;
    }
    return 500;
}
R cuFuncGetParamInfo(Function *f, size_t i, size_t *o, size_t *n) { if ((int)i >= f->count) return 1; *n = f->size[i]; *o = 8 * i; return 0; }
R cuFuncGetName(const char **s, Function *f) { *s = f->name; return 0; }
R cuKernelGetName(const char **s, Function *f) { *s = f->name; return 0; }
R cuFuncLoad(Function *f) { return 0; }
R cuFuncSetAttribute(Function *f, int a, int v) { return v > 227 * 1024; }
R cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned sh, Stream *s, void **p, void **e) {
    if (fail("cuLaunchKernel")) return 719;
    Node n = { .kind = KERNEL, .f = f, .grid = { gx, gy, gz }, .block = { bx, by, bz }, .shared = sh };
    for (int i = 0; i < f->count; i++) memcpy(&n.arg[i], p[i], f->size[i] < 8 ? f->size[i] : 8);
    return put(s, n);
}

R cuStreamBeginCapture_v2(Stream *s, int mode) { if (mode != 1 || s->capturing) return 900; s->capturing = calloc(1, sizeof(Graph)); live_graphs++; return fail("cuStreamBeginCapture_v2"); }
R cuStreamEndCapture(Stream *s, Graph **g) {
    if (!s->capturing) return 901;
    *g = s->capturing;
    for (int i = 0; i < stream_count; i++) if (streams[i]->capturing == *g) streams[i]->capturing = 0;
    return fail("cuStreamEndCapture");
}
R cuGraphDestroy(Graph *g) { live_graphs--; return 0; }          /* the instance keeps the nodes */
R cuGraphInstantiateWithFlags(Graph **x, Graph *g, unsigned long long f) { *x = g; if (getenv("FAKE_CUDA_GRAPH_OOM")) return 2; used += 4096; return fail("cuGraphInstantiateWithFlags"); }
R cuGraphExecDestroy(Graph *g) { used -= 4096; return 0; }
R cuGraphUpload(Graph *g, Stream *s) { return fail("cuGraphUpload"); }
R cuGraphLaunch(Graph *g, Stream *s) { for (size_t i = 0; i < g->count; i++) carry_out(g->node[i]); return fail("cuGraphLaunch"); }
R cuGraphGetNodes(Graph *g, Node **n, size_t *c) { if (n) memcpy(n, g->node, *c * sizeof *n); else *c = g->count; return 0; }
R cuGraphGetEdges_v2(Graph *g, Node **a, Node **b, void *d, size_t *c) {
    if (!a) { *c = g->count ? g->count - 1 : 0; return 0; }
    for (size_t i = 0; i + 1 < g->count; i++) { a[i] = g->node[i]; b[i] = g->node[i + 1]; }
    return 0;
}
R cuGraphNodeGetType(Node *n, unsigned *t) { *t = n->kind; return 0; }
R cuGraphKernelNodeGetParams_v2(Node *n, struct { Function *f; unsigned g[3], b[3], sh; void **p, **e, *k, *c; } *out) {
    out->f = n->f; memcpy(out->g, n->grid, 12); memcpy(out->b, n->block, 12); out->sh = n->shared; return 0;
}
/* No attribute is set, and no library here is launched by hand. */
R cuGraphKernelNodeGetAttribute(Node *n, unsigned id, void *value) { memset(value, 0, 64); return 0; }
R cuLaunchKernelEx(void *config, Function *f, void **p, void **e) { return 1; }
R cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return 0; }
R cuGraphMemcpyNodeGetParams(Node *n, size_t *out) { memset(out, 0, 200); out[22] = n->bytes; out[23] = out[24] = 1; return 0; }
R cuGraphMemsetNodeGetParams(Node *n, struct { P d; size_t pitch; unsigned v, e; size_t w, h; } *out) { out->e = n->width; out->w = n->bytes / n->width; out->h = 1; return 0; }
