/* A cuBLAS that multiplies nothing, and writes what it was asked for to the file $CUBLAS_LOG. */
#include <stdio.h>
#include <stdlib.h>

static void *workspace;

int cublasCreate_v2(void **handle) {
    *handle = (void *)16;
    return getenv("CUBLAS_FAILS") ? 3 : 0;
}
int cublasDestroy_v2(void *handle) { return handle ? 0 : 1; }
int cublasSetStream_v2(void *handle, void *stream) { return handle && stream ? 0 : 7; }
int cublasSetWorkspace_v2(void *handle, void *place, size_t bytes) {
    workspace = place;
    return handle && bytes >= (1 << 20) ? 0 : 7;
}
int cublasGemmStridedBatchedEx(void *handle, int op_a, int op_b, int m, int n, int k, const float *alpha, const void *a,
                               int type_a, int lda, long long stride_a, const void *b, int type_b, int ldb,
                               long long stride_b, const float *beta, void *c, int type_c, int ldc, long long stride_c,
                               int batch, int compute, int algorithm) {
    if (!handle || !workspace || !a || !b || !c || *beta != 0 || algorithm != -1) return 7;
    const char *path = getenv("CUBLAS_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%d %d: %d %d %d x %d, alpha %g, types %d %d %d, ld %d %d %d, strides %lld %lld %lld, compute %d\n",
                op_a, op_b, m, n, k, batch, *alpha, type_a, type_b, type_c, lda, ldb, ldc, stride_a, stride_b, stride_c,
                compute);
        fclose(log);
    }
    return 0;
}
