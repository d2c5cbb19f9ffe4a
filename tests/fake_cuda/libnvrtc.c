/* An NVRTC for tests whose "cubin" is the source text. */
#include <stdlib.h>
#include <string.h>
int nvrtcVersion(int *a, int *b) { *a = 13; *b = 0; return 0; }
int nvrtcCreateProgram(char **p, const char *s, const char *n, int c, const char **h, const char **i) { *p = strdup(s); return 0; }
int nvrtcCompileProgram(char *p, int n, const char **o) { return 0; }
int nvrtcDestroyProgram(char **p) { free(*p); return 0; }
int nvrtcGetProgramLogSize(char *p, size_t *n) { *n = 1; return 0; }
int nvrtcGetProgramLog(char *p, char *l) { *l = 0; return 0; }
int nvrtcGetCUBINSize(char *p, size_t *n) { *n = strlen(p) + 1; return 0; }
int nvrtcGetCUBIN(char *p, char *c) { strcpy(c, p); return 0; }
