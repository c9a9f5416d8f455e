// Shared by all kernels: the format of the arrays, sums over a block, and the bits of reference/random/counter_rng.py.
//
// Compiled once for each format that arrays may have: they hold `element`s, and we compute in `number`s.
// Nothing is included, so that it compiles wherever there is a compiler. On a GPU, CuPy always compiles with -ftz=true:
// there, float32 below 2^-126 is 0, and so is bfloat16, once it is widened. On a core and in the tests it is not.

typedef unsigned char Byte;
typedef unsigned int Word;
typedef unsigned long long Index;

#if defined(FLOAT64)

typedef double element;
typedef double number;
__device__ inline number widen(element x) { return x; }
__device__ inline element narrow(number x) { return x; }

#elif defined(FLOAT32)

typedef float element;
typedef float number;
__device__ inline number widen(element x) { return x; }
__device__ inline element narrow(number x) { return x; }

#else  // a format of two bytes: read, computed in float32, rounded once to the nearest

typedef float number;
#if !defined(CORE)  // core.h has its own
struct element { unsigned short bits; };
#endif
#if defined(CORE) || defined(EMULATED)  // the tests' header has the rest: a CPU's compiler knows no PTX
#elif defined(FLOAT16)
__device__ inline number widen(element x) {
    number y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ inline element narrow(number x) {
    element y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
#elif defined(BFLOAT16)
__device__ inline number widen(element x) { return __uint_as_float((Word)x.bits << 16); }
__device__ inline element narrow(number x) {
    element y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    Word bits = __float_as_uint(x);
    y.bits = x == x ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0;
#endif
    return y;
}
#endif

#endif

// ---- a thread's columns of a row ------------------------------------------------------------------------------------

// Memory is fastest in words of 16 bytes. Where rows and arrays allow it (`packed`), a thread takes that many elements
// at a time, else one: PACKED(function, (arguments), further template arguments) calls one or the other. No loop
// tests a condition that is the same for all of its columns: that is a template argument, too.
constexpr int PACK = 16 / sizeof(element);

template <int N> struct alignas(N * sizeof(element)) Pack { element of[N]; };

#if !defined(CORE)
template <int N> __device__ inline Pack<N> load(const element *x) { return *(const Pack<N> *)x; }
template <int N> __device__ inline void store(element *x, const Pack<N> &pack) { *(Pack<N> *)x = pack; }
#define VECTORS
#define SUMMING(...)
#define SEEKING(x)
#define IN_VECTORS(some, all) some
#define HOLDS(width) ((width) <= (int)blockDim.x * (packed ? PACK : 1))  // at most one pack for each thread
#define PACKED(function, arguments, ...) \
    (packed ? function<PACK, ##__VA_ARGS__> arguments : function<1, ##__VA_ARGS__> arguments)
#else  // one thread, and a CPU's vectors: loops say what they add up, which may be done in any order
template <int N> inline Pack<N> load(const element *x) { return Pack<N>{*x}; }
template <int N> inline void store(element *x, const Pack<N> &pack) { *x = pack.of[0]; }
#define PRAGMA(...) _Pragma(#__VA_ARGS__)
#define VECTORS PRAGMA(omp simd)
#define SUMMING(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define SEEKING(x) PRAGMA(omp simd reduction(max : x))
#define IN_VECTORS(some, all) ((some) + 15 < (all) ? ((some) + 15) & ~15 : (all))  // what is left of a vector takes long
#define HOLDS(width) false  // sums of columns stay in the cache
#define PACKED(function, arguments, ...) function<1, ##__VA_ARGS__> arguments
#endif

#define EACH_PACK(column, width) for (int column = threadIdx.x * N; column < width; column += blockDim.x * N)
#define EACH_COLUMN(column, width) for (int column = threadIdx.x; column < width; column += blockDim.x)
#define EACH(i) for (int i = 0; i < N; ++i)
// Loops over a flat array, shared by all blocks.
#define EACH_ELEMENT(i, count) \
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (Index)gridDim.x * blockDim.x)

// Short rows share a block: blockDim.x threads, 32 at most, have a row each.
#define ROW_OF_BLOCK ((Index)blockIdx.x * blockDim.y + threadIdx.y)

// ---- over the threads of a row --------------------------------------------------------------------------------------

struct Sum {
    static __device__ inline number of(number a, number b) { return a + b; }
};
struct Maximum {
    static __device__ inline number of(number a, number b) { return a > b ? a : b; }
};

// All threads of a block take part, and those of a row get the same result, in an order that does not change from run to
// run.
template <class Operation> __device__ inline number over_row(number x) {
#if !defined(CORE)
    __shared__ number of_warps[32];
    for (int distance = blockDim.x < 32 ? blockDim.x / 2 : 16; distance > 0; distance /= 2)
        x = Operation::of(x, __shfl_xor_sync(0xFFFFFFFFu, x, distance));
    if (blockDim.x <= 32) return x;
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warps[0];
    for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) x = Operation::of(x, of_warps[warp]);
    __syncthreads();  // all have read: the next call may write
#endif
    return x;
}

// Two sums in the time of one.
__device__ inline void sum_both(number &x, number &y) {
#if !defined(CORE)
    __shared__ number of_warps[64];
    for (int distance = blockDim.x < 32 ? blockDim.x / 2 : 16; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
        y += __shfl_xor_sync(0xFFFFFFFFu, y, distance);
    }
    if (blockDim.x <= 32) return;
    int warps = (int)blockDim.x / 32, mine = threadIdx.x / 32;
    if (threadIdx.x % 32 == 0) of_warps[mine] = x, of_warps[warps + mine] = y;
    __syncthreads();
    x = of_warps[0], y = of_warps[warps];
    for (int warp = 1; warp < warps; ++warp) x += of_warps[warp], y += of_warps[warps + warp];
    __syncthreads();  // all have read: the next call may write
#endif
}

// ---- dropout's mask -------------------------------------------------------------------------------------------------

// Where dropout draws for an array [n, second, third, width] (reference/random/dropout.py's Site): the element at (i, j, k, l)
// has the number first + i * along[0] + j * along[1] + k * along[2] + l in the whole array.
struct Site {
    Index first, along[3];
    Word key[2], threshold, second, third, dropping;
    double scale;

    __device__ Index row_start(Index row) const {
        return first + row / third / second * along[0] + row / third % second * along[1] + row % third * along[2];
    }

    __device__ bool keeps(Index i) const { return bits(i) >= threshold; }

    __device__ Word bits(Index i) const {
        Word x = scramble((Word)i ^ key[0]);
        x = scramble((x + (Word)(i >> 32)) ^ key[1]);
        return scramble(x + key[0]);
    }

    static __device__ Word scramble(Word x) {
        x = (x ^ (x >> 16)) * 0x7FEB352Du;
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        return x ^ (x >> 16);
    }
};
