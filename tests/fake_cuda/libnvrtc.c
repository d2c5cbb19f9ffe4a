/* An NVRTC for tests whose "cubin" and "PTX" are the source text. Version 13.0, or MAJOR.8 where it is built with one;
   FAKE_NVRTC_ARCHS is what it compiles for, e.g. "75 80". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifdef MAJOR
int nvrtcVersion(int *a, int *b) { *a = MAJOR; *b = 8; return 0; }
#else
int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return 0; }
#endif
static int archs(int *out) {
    const char *text = getenv("FAKE_NVRTC_ARCHS");
    int count = 0, used = 0, arch;
    for (text = text ? text : "75 80 90"; sscanf(text, "%d%n", &arch, &used) == 1; text += used, count++) if (out) out[count] = arch;
    return count;
}
int nvrtcGetNumSupportedArchs(int *n) { *n = archs(0); return 0; }
int nvrtcGetSupportedArchs(int *out) { archs(out); return 0; }
int nvrtcCreateProgram(char **p, const char *s, const char *n, int c, const char **h, const char **i) { *p = strdup(s); return 0; }
int nvrtcCompileProgram(char *p, int n, const char **o) { return 0; }
int nvrtcDestroyProgram(char **p) { free(*p); return 0; }
int nvrtcGetProgramLogSize(char *p, size_t *n) { *n = 1; return 0; }
int nvrtcGetProgramLog(char *p, char *l) { *l = 0; return 0; }
int nvrtcGetCUBINSize(char *p, size_t *n) { *n = strlen(p) + 1; return 0; }
int nvrtcGetCUBIN(char *p, char *c) { strcpy(c, p); return 0; }
int nvrtcGetPTXSize(char *p, size_t *n) { *n = strlen(p) + 1; return 0; }
int nvrtcGetPTX(char *p, char *c) { strcpy(c, p); return 0; }
