// A clock around BLAS's products of float32: loaded before NumPy (LD_PRELOAD), its functions are found instead of
// BLAS's. They call those, and add up the thread's CPU time by the product's shape.
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

const int MOST = 100;                                       // shapes; the last place takes all that find no room
struct Product { int64_t m, n, k, calls; double seconds; }; // [m, k] @ [k, n], as in cpu_times.py
extern "C" {
Product products[MOST];
double product_seconds = 0;
int running = 0;                                            // set by Python for the steps that are profiled
}

static double now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void count(int64_t m, int64_t n, int64_t k, double began) {
    double seconds = now() - began;
    Product* p = products;
    while (p < products + MOST - 1 && p->calls && (p->m != m || p->n != n || p->k != k)) ++p;
    *p = {m, n, k, p->calls + 1, p->seconds + seconds};
    product_seconds += seconds;
}

// BLAS is found through NumPy's own extension module, as NumPy's calls would have found it.
static void* function(const char* name) { return dlsym(dlopen(getenv("NUMPY_MODULE"), RTLD_LAZY), name); }

#define CLOCKED(NAME, PARAMETERS, ARGUMENTS, M, N, K)                                   \
    extern "C" void NAME PARAMETERS {                                                   \
        static auto blas = reinterpret_cast<void (*) PARAMETERS>(function(#NAME));      \
        double began = running ? now() : 0;                                             \
        blas ARGUMENTS;                                                                 \
        if (running) count(M, N, K, began);                                             \
    }

#define PRODUCTS(PREFIX, INT, SUFFIX)                                                                              \
    CLOCKED(PREFIX##sgemm##SUFFIX,                                                                                 \
            (int order, int ta, int tb, INT m, INT n, INT k, float alpha, const float* a, INT lda, const float* b, \
             INT ldb, float beta, float* c, INT ldc),                                                              \
            (order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc), m, n, k)                                \
    CLOCKED(PREFIX##sgemv##SUFFIX,                                                                                 \
            (int order, int ta, INT m, INT n, float alpha, const float* a, INT lda, const float* x, INT incx,      \
             float beta, float* y, INT incy),                                                                      \
            (order, ta, m, n, alpha, a, lda, x, incx, beta, y, incy), m, 1, n)

PRODUCTS(scipy_cblas_, int64_t, 64_)    // the BLAS of NumPy's wheels
PRODUCTS(cblas_, int, )                 // any other
