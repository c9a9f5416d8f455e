// Products of a few rows with a large matrix, y [b, m] = x [b, n] @ w [n, m], for cores alone.
//
// A BLAS copies blocks of w into another order before it multiplies. With many rows that pays; with a few, as when some
// texts get their next tokens, the copies take longer than the product. Here w is read once, in its own order.

constexpr int WIDTH = 64 / sizeof(element);
typedef element Vector __attribute__((vector_size(64), aligned(sizeof(element)), may_alias));  // at any address

static inline Vector &vector_at(element *x) { return *(Vector *)x; }
static inline Vector vector_at(const element *x) { return *(const Vector *)x; }

// ---- w [n, m], row after row ----

// y += x @ w for N rows of w: those of a column stay in registers while all rows of x meet them.
template <int N> static void add_product(const element *x, const element *w, element *y, int b, int n, int m) {
    int column = 0;
    for (; column + WIDTH <= m; column += WIDTH) {
        Vector ws[N];
        EACH(k) ws[k] = vector_at(w + (Index)k * m + column);
        for (int row = 0; row < b; ++row) {
            Vector &out = vector_at(y + (Index)row * m + column), sum = out;
            EACH(k) sum += x[(Index)row * n + k] * ws[k];
            out = sum;
        }
    }
    for (; column < m; ++column)
        for (int row = 0; row < b; ++row)
            EACH(k) y[(Index)row * m + column] += x[(Index)row * n + k] * w[(Index)k * m + column];
}

extern "C" __global__ void few_rows(const element *x, const element *w, element *y, int b, int n, int m) {
    constexpr int N = 16;
    int k = 0;
    for (; k + N <= n; k += N) add_product<N>(x + k, w + (Index)k * m, y, b, n, m);
    for (; k < n; ++k) add_product<1>(x + k, w + (Index)k * m, y, b, n, m);
}

// ---- w, column after column: it is the transpose of an array [m, n] ----

// The inner products of R rows of x and N columns of w.
template <int R, int N> static void inner_products(const element *x, const element *w, element *y, int n, int m) {
    Vector sums[R][N] = {};
    int k = 0;
    for (; k + WIDTH <= n; k += WIDTH) {
        EACH(i) __builtin_prefetch(w + (Index)(N + i) * n + k);  // of the columns that come next
        for (int row = 0; row < R; ++row)
            EACH(i) sums[row][i] += vector_at(x + (Index)row * n + k) * vector_at(w + (Index)i * n + k);
    }
    for (int row = 0; row < R; ++row) EACH(i) {
        element lanes[WIDTH], total = 0;
        vector_at(lanes) = sums[row][i];
        SUMMING(total) for (int lane = 0; lane < WIDTH; ++lane) total += lanes[lane];
        for (int rest = k; rest < n; ++rest) total += x[(Index)row * n + rest] * w[(Index)i * n + rest];
        y[(Index)row * m + i] = total;
    }
}

constexpr int R = 4;

template <int N> static void all_rows(const element *x, const element *w, element *y, int b, int n, int m) {
    int row = 0;
    for (; row + R <= b; row += R) inner_products<R, N>(x + (Index)row * n, w, y + (Index)row * m, n, m);
    for (; row < b; ++row) inner_products<1, N>(x + (Index)row * n, w, y + (Index)row * m, n, m);
}

// With fewer than R rows the memory is what takes time, and it is read fastest column by column.
extern "C" __global__ void few_rows_transposed(const element *x, const element *w, element *y, int b, int n, int m) {
    constexpr int N = 4;
    int column = 0;
    if (b >= R) for (; column + N <= m; column += N) all_rows<N>(x, w + (Index)column * n, y + column, b, n, m);
    for (; column < m; ++column) all_rows<1>(x, w + (Index)column * n, y + column, b, n, m);
}
