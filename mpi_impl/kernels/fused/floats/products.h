// Products of small matrices on a core: those of attention's heads, for which a call of BLAS each would take too long.
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 64 / sizeof(number), HEIGHT = 8;      // numbers in a vector register; rows of a tile
#elif defined(__AVX__)
constexpr int LANES = 32 / sizeof(number), HEIGHT = 4;
#else
constexpr int LANES = 16 / sizeof(number), HEIGHT = 4;
#endif

// W numbers, anywhere in memory.
template <int W> struct Vector {
    typedef number type __attribute__((vector_size(W * sizeof(number)), aligned(sizeof(number)), may_alias));
};
template <> struct Vector<1> { typedef number type; };

// A left factor, whose elements lie anywhere: `row` is the distance between rows, `column` that between columns.
struct Left { const number *at; Index row, column; };
// A right factor, and a product: the elements of a row are next to one another.
struct Right { const number *at; Index row; };
struct Product { number *at; Index row; };

// M rows of a product, and N * W columns: all its sums stay in registers.
template <int M, int N, int W> inline void tile(Left a, Right b, Product c, int k, bool add) {
    typedef typename Vector<W>::type Numbers;
    Numbers sums[M][N] = {};
    for (int i = 0; i < k; ++i) {
        Numbers right[N];
        for (int n = 0; n < N; ++n) right[n] = *(const Numbers *)(b.at + i * b.row + n * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) sums[m][n] += a.at[m * a.row + i * a.column] * right[n];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            Numbers &to = *(Numbers *)(c.at + m * c.row + n * W);
            to = add ? to + sums[m][n] : sums[m][n];
        }
}

template <int N, int W> inline void tiles(Left a, Right b, Product c, int m, int k, bool add) {
    for (; m >= HEIGHT; m -= HEIGHT, a.at += HEIGHT * a.row, c.at += HEIGHT * c.row) tile<HEIGHT, N, W>(a, b, c, k, add);
    for (; m > 0; --m, a.at += a.row, c.at += c.row) tile<1, N, W>(a, b, c, k, add);
}

// c [m, n] = a [m, k] @ b [k, n]; or with `add`, c += that.
inline void multiply(Left a, Right b, Product c, int m, int n, int k, bool add = false) {
    for (int done; n > 0; n -= done, b.at += done, c.at += done) {
        if (n >= 2 * LANES) done = 2 * LANES, tiles<2, LANES>(a, b, c, m, k, add);
        else if (n >= LANES) done = LANES, tiles<1, LANES>(a, b, c, m, k, add);
        else if (n >= LANES / 2) done = LANES / 2, tiles<1, LANES / 2>(a, b, c, m, k, add);
        else done = 1, tiles<1, 1>(a, b, c, m, k, add);
    }
}

// x [s, d], whose rows are `row` elements apart, as [d, s].
inline std::vector<number> transposed(Right x, int s, int d) {
    std::vector<number> y((Index)s * d);
    for (int i = 0; i < s; ++i)
        for (int j = 0; j < d; ++j) y[(Index)j * s + i] = x.at[i * x.row + j];
    return y;
}
