/* libetkv_blas: computes the matrix products of MLX's CPU build with OpenBLAS.
 *
 * MLX's wheel for Linux links the reference BLAS, which uses one thread and no
 * vector unit. This library defines the same symbols for the products that MLX
 * calls, and a program links it before libmlx, so that its symbols are found
 * first. It passes the calls on to the OpenBLAS that pip installs
 * (scipy-openblas32, whose symbols have a prefix). If there is none, it passes
 * them on to the BLAS that libmlx is linked to.
 *
 * With ETKV_BLAS=mlx in the environment MLX's own BLAS is used. ETKV_BLAS=FILE
 * is the path of another libscipy_openblas.so. OPENBLAS_NUM_THREADS limits the
 * threads.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef void (*sgemm_t)(
    int, int, int, int, int, int, float, const float*, int, const float*, int,
    float, float*, int);
typedef void (*dgemm_t)(
    int, int, int, int, int, int, double, const double*, int, const double*,
    int, double, double*, int);
typedef void (*cgemm_t)(
    int, int, int, int, int, int, const void*, const void*, int, const void*,
    int, const void*, void*, int);

static pthread_once_t once = PTHREAD_ONCE_INIT;
static sgemm_t sgemm;
static dgemm_t dgemm;
static cgemm_t cgemm;
static char name[160] = "MLX's own";

static int use(void* library, const char* prefix) {
  const char* const names[] = {"sgemm", "dgemm", "cgemm"};
  void* found[3];
  for (int i = 0; i < 3; ++i) {
    char symbol[32];
    snprintf(symbol, sizeof(symbol), "%scblas_%s", prefix, names[i]);
    if (!(found[i] = dlsym(library, symbol))) {
      return 0;
    }
  }
  sgemm = (sgemm_t)found[0];
  dgemm = (dgemm_t)found[1];
  cgemm = (cgemm_t)found[2];
  return 1;
}

/* Loads MLX's BLAS into a separate namespace. It calls its own functions by names
 * such as sgemm_. ExecuTorch's kernels define functions of the same names, which
 * would be called instead in a program that links these kernels. */
static void* apart(void* mlx) {
  Dl_info found;
  void* symbol = mlx ? dlsym(mlx, "cblas_sgemm") : NULL;
  if (!symbol || !dladdr(symbol, &found)) {
    return NULL;
  }
  return dlmopen(LM_ID_NEWLM, found.dli_fname, RTLD_NOW | RTLD_LOCAL);
}

static void choose(void) {
  const char* asked = getenv("ETKV_BLAS");
  if (!asked || strcmp(asked, "mlx") != 0) {
    /* A name without a folder is looked up in this library's run path. */
    const char* file = asked && *asked ? asked : "libscipy_openblas.so";
    void* openblas = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (openblas && use(openblas, "scipy_")) {
      const char* (*config)(void) =
          (const char* (*)(void))dlsym(openblas, "scipy_openblas_get_config");
      snprintf(name, sizeof(name), "%s", config ? config() : "OpenBLAS");
      return;
    }
    if (asked && *asked) {
      fprintf(
          stderr,
          "etkv: ETKV_BLAS is %s, which is not an OpenBLAS of the package scipy-openblas32 (%s); "
          "MLX's own BLAS is used\n",
          asked,
          openblas ? "its products are missing" : dlerror());
    }
  }
  /* Finds symbols in libmlx and its own dependencies, which exclude this library. */
  void* mlx = dlopen("libmlx.so", RTLD_NOW | RTLD_NOLOAD);
  void* own = apart(mlx);
  if (own && use(own, "")) {
    return;
  }
  if (!mlx || !use(mlx, "")) {
    snprintf(name, sizeof(name), "none");
  }
}

/* Called before each product. An MLX without a BLAS calls no product. */
static void need(void) {
  pthread_once(&once, choose);
  if (!sgemm) {
    fprintf(stderr, "etkv: neither OpenBLAS nor libmlx has cblas_sgemm, cblas_dgemm and cblas_cgemm\n");
    abort();
  }
}

/* Does nothing. Calling it makes the linker keep this library, without loading a BLAS. */
API void etkv_blas_keep(void) {
}

API const char* etkv_blas_name(void) {
  pthread_once(&once, choose);
  return name;
}

API void cblas_sgemm(
    int order, int transa, int transb, int m, int n, int k, float alpha,
    const float* a, int lda, const float* b, int ldb, float beta, float* c,
    int ldc) {
  need();
  sgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

API void cblas_dgemm(
    int order, int transa, int transb, int m, int n, int k, double alpha,
    const double* a, int lda, const double* b, int ldb, double beta, double* c,
    int ldc) {
  need();
  dgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

API void cblas_cgemm(
    int order, int transa, int transb, int m, int n, int k, const void* alpha,
    const void* a, int lda, const void* b, int ldb, const void* beta, void* c,
    int ldc) {
  need();
  cgemm(order, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
