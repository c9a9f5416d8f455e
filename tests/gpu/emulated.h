// CUDA's dialect of C++ on a CPU, for tests: the threads of a block are fibers that take turns. One warp after another
// goes on as far as the next __syncthreads, its threads together from shuffle to shuffle: so who forgets a
// __syncthreads reads what is not there yet, or no more. All threads must come to the same places: who does not is told.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define EMULATED
#define __global__
#define __device__
#define __shared__ static  // there is one block at a time

using std::erf;
using std::exp;
using std::sqrt;

struct Place { int x, y; };
static Place threadIdx, blockIdx, blockDim, gridDim;
static int me;  // the thread's number in its block

// ---- threads --------------------------------------------------------------------------------------------------------

enum Stop { SHUFFLE, BARRIER, END };

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<Stop> stops;  // where each thread is
static std::function<void()> work;

static void run_fiber() {
    work();
    stops[me] = END;
}

static void stop(Stop where) {
    stops[me] = where;
    swapcontext(&fibers[me], &scheduler);
}

inline void __syncthreads() { stop(BARRIER); }

template <class T> T __shfl_xor_sync(unsigned, T x, int distance) {
    static T values[1024];
    values[me] = x;
    stop(SHUFFLE);
    T theirs = values[me ^ distance];
    stop(SHUFFLE);
    return theirs;
}

// In every other block the last come first.
static bool backwards = false;

static void go_on(int first, int last) {
    for (int i = 0; i < last - first; ++i) {
        me = backwards ? last - 1 - i : first + i;
        threadIdx = {me % blockDim.x, me / blockDim.x};
        swapcontext(&scheduler, &fibers[me]);
    }
}

static void check_together(int first, int last) {
    for (int i = first; i < last; ++i)
        if (stops[i] != stops[first]) {
            std::fprintf(stderr, "threads %d and %d wait for one another in different places\n", first, i);
            std::abort();
        }
}

static void run_block(int threads) {
    backwards = !backwards;
    do {
        for (int i = 0; i < threads; i += 32) {
            int first = backwards ? threads - 32 - i : i;
            do {
                go_on(first, first + 32);
                check_together(first, first + 32);
            } while (stops[first] == SHUFFLE);
        }
        check_together(0, threads);
    } while (stops[0] != END);
}

static void run(int blocks, Place block, std::function<void()> kernel) {
    int threads = block.x * block.y;
    static std::vector<std::vector<char>> stacks;
    stacks.resize(threads, std::vector<char>(64 << 10));
    fibers.resize(threads), stops.resize(threads);
    blockDim = block, gridDim.x = blocks, work = kernel;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        for (int i = 0; i < threads; ++i) {
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = stacks[i].data(), fibers[i].uc_stack.ss_size = stacks[i].size();
            fibers[i].uc_link = &scheduler;
            makecontext(&fibers[i], run_fiber, 0);
        }
        run_block(threads);
    }
}

// ---- starting a kernel, as the driver does: with pointers to its arguments ------------------------------------------

template <class... P, std::size_t... I>
void call(void (*kernel)(P...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P *>(arguments[I])...);
}

template <class... P> void start(void (*kernel)(P...), int blocks, Place block, void **arguments) {
    run(blocks, block, [=] { call(kernel, arguments, std::index_sequence_for<P...>()); });
}

template <class... P> int sizes(void (*)(P...), int *out) {
    for (int size : {sizeof(P)...}) *out++ = size;
    return sizeof...(P);
}

#define STARTS(name)                                                                       \
    extern "C" void start_##name(int blocks, int x, int y, void **arguments) {             \
        start(name, blocks, Place{x, y}, arguments);                                       \
    }                                                                                      \
    extern "C" int sizes_##name(int *out) { return sizes(name, out); }

// ---- formats of two bytes -------------------------------------------------------------------------------------------

#if defined(FLOAT16) || defined(BFLOAT16)
struct element;
inline float widen(element x);
inline element narrow(float x);
#define HALVES                                                                             \
    inline float widen(element x) { return from_bits(x.bits); }                            \
    inline element narrow(float x) { return element{to_bits(x)}; }
#endif

#if defined(FLOAT16)
inline float from_bits(unsigned short bits) {
    _Float16 x;
    std::memcpy(&x, &bits, 2);
    return x;
}
inline unsigned short to_bits(float x) {
    _Float16 y = x;
    unsigned short bits;
    std::memcpy(&bits, &y, 2);
    return bits;
}
#elif defined(BFLOAT16)
inline float from_bits(unsigned short bits) {
    unsigned wide = (unsigned)bits << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}
inline unsigned short to_bits(float x) {  // to the nearest, of two to the even one
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
#else
#define HALVES
#endif
