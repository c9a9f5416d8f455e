// Products of matrices of halves on one core, summed in float32: C = A B + bias, or C += A B.
//
// A processor with AVX512-BF16 multiplies a pair of neighbours along k in each lane, and adds both products to a float.
// So A and B are packed in blocks that fit the caches, as words of one pair each, in the order in which a tile of C
// meets them (Goto and van de Geijn 2008). Other processors, and float16, get floats in place of the pairs. An element
// of C is summed along k in one order, whatever the sizes: its bits depend neither on other rows nor on the packing.
// C += A B adds the sum of each APART rows along k: fewer roundings than in one long sum, and in one order, too.
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && !defined(__AVX2__)
#error "NumPy, which widens halves for BLAS, is several times as fast"
#endif
#if defined(__AVX512F__)
constexpr int LANES = 16, HEIGHT = 14;     // numbers in a register; rows of a tile
#else
constexpr int LANES = 8, HEIGHT = 6;
#endif
constexpr int N = 2 * LANES;        // columns of a tile: with HEIGHT rows, its sums fill all registers but a few

// Vectors at any address. (As arguments of templates they would lose these attributes.)
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef Word Words __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef element Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

// Elements `row` apart from a row to the next, and `column` from a column to the next; one of the two is 1.
struct Matrix {
    const element *at;
    Index row, column;

    Matrix from(Index i, Index j) const { return {at + i * row + j * column, row, column}; }
    Matrix transposed() const { return {at, column, row}; }
};

static inline Words words_of(Halves x) { return __builtin_convertvector(x, Words); }
static inline Halves halves_of(Words x) { return __builtin_convertvector(x, Halves); }

// ---- vectors of halves and of floats --------------------------------------------------------------------------------

#if defined(BFLOAT16)

static inline Floats even_of(Words pairs) { return (Floats)(pairs << 16); }
static inline Floats odd_of(Words pairs) { return (Floats)(pairs & 0xFFFF0000u); }
#if defined(__AVX512BF16__)
static inline Halves narrowed(Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }
#else
static inline Halves narrowed(Floats x) {
    const Words bits = (Words)x, rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return halves_of(x == x ? rounded : Words{} + 0x7FC0);
}
#endif

#else  // FLOAT16

#if defined(__AVX512F__)
static inline Floats widened(Halves x) { return (Floats)_mm512_cvtph_ps((__m256i)x); }
static inline Halves narrowed(Floats x) { return (Halves)_mm512_cvtps_ph((__m512)x, 0); }
#elif defined(__F16C__)
static inline Floats widened(Halves x) { return (Floats)_mm256_cvtph_ps((__m128i)x); }
static inline Halves narrowed(Floats x) { return (Halves)_mm256_cvtps_ph((__m256)x, 0); }
#else
static inline Floats widened(Halves x) {
    Floats y;
    for (int i = 0; i < LANES; ++i) y[i] = widen(x[i]);
    return y;
}
static inline Halves narrowed(Floats x) {
    Halves y;
    for (int i = 0; i < LANES; ++i) y[i] = narrow(x[i]);
    return y;
}
#endif
static inline Floats even_of(Words pairs) { return widened(halves_of(pairs & 0xFFFFu)); }
static inline Floats odd_of(Words pairs) { return widened(halves_of(pairs >> 16)); }

#endif

static inline void put(float *to, Floats x) { *(Floats *)to = x; }
static inline void put(Word *to, Words x) { *(Words *)to = x; }
static inline void put(element *to, Floats x) { *(Halves *)to = narrowed(x); }

// ---- lanes: pairs of halves, or floats ------------------------------------------------------------------------------

#if defined(BFLOAT16) && defined(__AVX512BF16__)
typedef Word Lane;
typedef Words Lanes;
constexpr int STEPS = 1;            // rows of lanes for a pair of rows
static inline Lanes broadcast(Lane x) { return Words{} + x; }
static inline Floats dot(Floats sum, Lanes a, Lanes b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
static inline void put_pair(Lane *to, int, Words pair) { put(to, pair); }
#else
typedef float Lane;
typedef Floats Lanes;
constexpr int STEPS = 2;            // the odd row first, as AVX512-BF16 does
static inline Lanes broadcast(Lane x) { return x - Floats{}; }
static inline Floats dot(Floats sum, Lanes a, Lanes b) { return sum + a * b; }
static inline void put_pair(Lane *to, int step, Words pair) { put(to, odd_of(pair)), put(to + step, even_of(pair)); }
#endif

// ---- pairs of two neighbouring rows, which become words ------------------------------------------------------------

#if defined(__clang__)
#define SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLED(x, y, ...) __builtin_shuffle(x, y, Words{__VA_ARGS__})
#endif

// Each round riffles the registers like cards, and their words: after all rounds rows have become columns.
template <Word... I> static inline void transpose(Words x[LANES], std::integer_sequence<Word, I...>) {
    for (int round = 1; round < LANES; round *= 2) {
        Words y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; ++i) {
            y[2 * i] = SHUFFLED(x[i], x[i + LANES / 2], (I / 2 + I % 2 * LANES)...);
            y[2 * i + 1] = SHUFFLED(x[i], x[i + LANES / 2], ((I + LANES) / 2 + I % 2 * LANES)...);
        }
        std::copy(y, y + LANES, x);
    }
}

// ---- panels: WIDTH columns of x, with STEPS rows of lanes for each pair ---------------------------------------------

template <int WIDTH> constexpr int STRIDE = (WIDTH + LANES - 1) / LANES * LANES;    // lanes in a row of a panel
template <int WIDTH> constexpr int lanes_of(int depth) { return depth / 2 * STEPS * STRIDE<WIDTH>; }

constexpr int DEEP = 2 * LANES;     // rows of x that are packed at a time

#if defined(__AVX512BW__) && defined(__AVX512VL__)
static inline void read_part(const element *x, int there, Halves &y) {
    y = (Halves)_mm256_maskz_loadu_epi16((1u << there) - 1, x);
}
static inline void read_part(const element *x, int there, Words &y) {
    y = (Words)_mm512_maskz_loadu_epi16((1u << there) - 1, x);
}
#else
template <class Vector> static inline void read_part(const element *x, int there, Vector &y) {
    std::memcpy(&y, x, there * sizeof(element));
}
#endif

// As many elements as a vector has, of which only some may be there (not WHOLE): 0 for the others.
template <class Vector, bool WHOLE> static inline Vector read(const element *x, int there) {
    constexpr int COUNT = sizeof(Vector) / sizeof(element);
    Vector y = {};
    if (WHOLE || there >= COUNT) std::memcpy(&y, x, sizeof(Vector));
    else if (there > 0) read_part(x, there, y);
    return y;
}

// Packs PAIRS pairs of rows of x, which has k rows and `count` columns.
template <int WIDTH, int PAIRS, bool WHOLE> static inline void pack_rows(Matrix x, int k, int count, Lane *to) {
#pragma GCC unroll 16
    for (int i = 0; i < PAIRS; ++i, x.at += 2 * x.row)
        for (int l = 0; l < STRIDE<WIDTH>; l += LANES) {
            const Words even = words_of(read<Halves, WHOLE>(x.at + l, 2 * i < k ? count - l : 0));
            const Words odd = words_of(read<Halves, WHOLE>(x.at + x.row + l, 2 * i + 1 < k ? count - l : 0));
            put_pair(to + lanes_of<WIDTH>(2 * i) + l, STRIDE<WIDTH>, even | odd << 16);
        }
}

// The same where the elements of a column are neighbours.
template <int WIDTH, bool WHOLE> static inline void pack_columns(Matrix x, int k, int count, Lane *to) {
    for (int l = 0; l < STRIDE<WIDTH>; l += LANES) {
        Words pairs[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) pairs[i] = read<Words, WHOLE>(x.at + (l + i) * x.column, l + i < count ? k : 0);
        transpose(pairs, std::make_integer_sequence<Word, LANES>());
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) put_pair(to + lanes_of<WIDTH>(2 * i) + l, STRIDE<WIDTH>, pairs[i]);
    }
}

template <int WIDTH, bool WHOLE> static void pack_block(Matrix x, int k, int count, Lane *to) {
    if (x.column == 1) pack_rows<WIDTH, LANES, WHOLE>(x, k, count, to);
    else pack_columns<WIDTH, WHOLE>(x, k, count, to);
}

// Packs the first k rows and `count` columns of x, which has `there` columns, in panels for `depth` rows.
template <int WIDTH> static void pack(Matrix x, int k, int count, int there, int depth, Lane *to) {
    for (int j = 0; j < count; j += WIDTH, to += lanes_of<WIDTH>(depth))
        for (int p = 0; p < k; p += DEEP) {
            const Matrix block = x.from(p, j);
            const int rows = k - p, columns = there - j;
            Lane *at = to + lanes_of<WIDTH>(p);
            if (rows >= DEEP && columns >= STRIDE<WIDTH>) pack_block<WIDTH, true>(block, rows, columns, at);
            else pack_block<WIDTH, false>(block, rows, columns, at);
        }
}

// ---- a tile: its sums stay in registers -----------------------------------------------------------------------------

// Where sums begin, with 0 if nowhere, and where they go. With `add`, they are made apart and then added.
template <class To> struct Sums {
    const float *from;
    Index from_row;
    To *to;
    Index to_row;
    bool add;

    Sums at(int row, int column) const {
        return {from ? from + row * from_row + column : from, from_row, to + row * to_row + column, to_row, add};
    }
};

// R rows and V vectors of a tile, of which `width` columns are there.
template <int R, int V, class To> static void tile(const Lane *a, const Lane *b, int depth, Sums<To> c, int width) {
    constexpr int COUNT = V * LANES;
    Floats sums[R][V];
    float edge[R][COUNT] = {};
    if (c.from && width < COUNT) {
        for (int i = 0; i < R; ++i) std::copy(c.from + i * c.from_row, c.from + i * c.from_row + width, edge[i]);
        c.from = edge[0], c.from_row = COUNT;
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
        for (int j = 0; j < V; ++j)
            sums[i][j] = c.from && !c.add ? *(const Floats *)(c.from + i * c.from_row + j * LANES) : Floats{};
    for (int step = 0; step < depth; ++step, a += STRIDE<HEIGHT>, b += N) {
        Lanes right[V];
        for (int j = 0; j < V; ++j) right[j] = *(const Lanes *)(b + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            const Lanes x = broadcast(a[i]);
            for (int j = 0; j < V; ++j) sums[i][j] = dot(sums[i][j], x, right[j]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
        To rounded[COUNT], *to = width == COUNT ? c.to + i * c.to_row : rounded;
        for (int j = 0; j < V; ++j)
            put(to + j * LANES, c.add ? *(const Floats *)(c.from + i * c.from_row + j * LANES) + sums[i][j] : sums[i][j]);
        if (width < COUNT) std::copy(rounded, rounded + width, c.to + i * c.to_row);
    }
}

template <int V, class To> static void tiles(int rows, const Lane *a, const Lane *b, int depth, Sums<To> c, int width) {
    auto take = [&](auto R) {
        for (; rows >= R; rows -= R, a += R, c = c.at(R, 0)) tile<R, V>(a, b, depth, c, width);
    };
    take(std::integral_constant<int, HEIGHT>()), take(std::integral_constant<int, 8>());
    take(std::integral_constant<int, 4>()), take(std::integral_constant<int, 2>()), take(std::integral_constant<int, 1>());
}

// ---- the product ----------------------------------------------------------------------------------------------------

struct Sizes {
    int m, n, k;
};

constexpr int DEPTH = 1024 / STEPS, ROWS = 12 * HEIGHT, COLUMNS = 512;   // of the blocks that are packed at a time
constexpr int APART = 512;          // rows along k that C += A B sums apart before it adds them to C, on every processor
static_assert(DEPTH % APART == 0, "or the order of sums would depend on the blocks");

struct Room {
    alignas(64) Lane left[lanes_of<HEIGHT>(DEPTH) * (ROWS / HEIGHT)], right[lanes_of<N>(DEPTH) * (COLUMNS / N)];
};

// Multiplies a block of A with a block of B, once both are packed.
template <class To> static void multiply_packed(const Room &room, int rows, int columns, int steps, Sums<To> c) {
    const int apart = c.add ? APART / 2 * STEPS : DEPTH * STEPS;
    for (int j = 0; j < columns; j += N)
        for (int i = 0; i < rows; i += HEIGHT)
            for (int step = 0; step == 0 || step < steps; step += apart) {
                const Lane *x = room.left + i / HEIGHT * lanes_of<HEIGHT>(DEPTH) + step * STRIDE<HEIGHT>;
                const Lane *y = room.right + j / N * lanes_of<N>(DEPTH) + step * N;
                const int height = std::min(HEIGHT, rows - i), width = std::min(N, columns - j);
                const int depth = std::min(apart, steps - step);
                if (width > LANES) tiles<2>(height, x, y, depth, c.at(i, j), width);
                else tiles<1>(height, x, y, depth, c.at(i, j), width);
            }
}

// What `multiply` computes, block by block. Sums of a part of k are floats: in C itself, if it has floats.
template <class To>
static void multiply_blocks(Matrix a, Matrix b, Sizes size, const float *bias, To *c, Index c_row, bool add) {
    static const std::unique_ptr<Room> room(new Room);
    const bool apart = sizeof(To) == 2 && size.k > DEPTH;
    const std::unique_ptr<float[]> parts(apart ? new float[(Index)size.m * COLUMNS] : nullptr);
    for (int j = 0; j < size.n; j += COLUMNS)
        for (int p = 0; p == 0 || p < size.k; p += DEPTH) {     // once, even if there is nothing to add
            const int columns = std::min(COLUMNS, size.n - j), k = std::min(DEPTH, size.k - p);
            const int steps = (k + 1) / 2 * STEPS;
            const bool first = p == 0 && !add, last = p + k == size.k;
            pack<N>(b.from(p, j), k, columns, size.n - j, DEPTH, room->right);
            for (int i = 0; i < size.m; i += ROWS) {
                const int rows = std::min(ROWS, size.m - i);
                pack<HEIGHT>(a.from(i, p).transposed(), k, rows, size.m - i, DEPTH, room->left);
                To *to = c + i * c_row + j;
                float *part = apart ? parts.get() + (Index)i * COLUMNS : (float *)to;
                const Index part_row = apart ? COLUMNS : c_row, from_row = first ? 0 : part_row;
                const float *from = first ? bias ? bias + j : nullptr : part;
                if (last) multiply_packed(*room, rows, columns, steps, Sums<To>{from, from_row, to, c_row, add});
                else multiply_packed(*room, rows, columns, steps, Sums<float>{from, from_row, part, part_row, add});
            }
        }
}

// ---- a few rows of A: B is read once, and in its own order ----------------------------------------------------------

constexpr int FEW = 16;

// sums [rows, WIDTH] += a [rows, 2 PAIRS] b, for a block of B that has been packed.
template <int WIDTH, int PAIRS>
static inline void add_block(const Lane *a, const Lane *b, float *sums, Index step, int rows) {
    for (int i = 0; i < rows; ++i, sums += step)
        for (int l = 0; l < WIDTH; l += LANES) {
            Floats sum = *(const Floats *)(sums + l);
#pragma GCC unroll 32
            for (int j = 0; j < STEPS * PAIRS; ++j)
                sum = dot(sum, broadcast(a[j * STRIDE<FEW> + i]), *(const Lanes *)(b + j * WIDTH + l));
            put(sums + l, sum);
        }
}

// Asks for the lines of the cache that LANES rows or columns begin with: the memory is what takes the time here.
static inline void prefetch(const element *x, Index step) {
    for (int i = 0; i < LANES; ++i) __builtin_prefetch(x + i * step);
}

// What `multiply` computes, to the bit, for at most FEW rows, where B has no edges.
template <class To>
static void multiply_few_rows(Matrix a, Matrix b, Sizes size, const float *bias, To *c, Index c_row) {
    std::vector<float> sums((Index)size.m * size.n);
    std::vector<Lane> left(lanes_of<FEW>(size.k));
    alignas(64) Lane right[lanes_of<LANES>(DEEP)];
    pack<FEW>(a.transposed(), size.k, size.m, size.m, size.k, left.data());
    for (int i = 0; bias && i < size.m; ++i) std::copy(bias, bias + size.n, sums.data() + (Index)i * size.n);
    if (b.column == 1)      // whole lines of the cache, of fewer rows
        for (int p = 0; p < size.k; p += LANES)
            for (int j = 0; j < size.n; j += N) {
                prefetch(b.from(p + LANES, j).at, b.row);
                pack_rows<N, LANES / 2, true>(b.from(p, j), LANES, N, right);
                add_block<N, LANES / 2>(left.data() + lanes_of<FEW>(p), right, sums.data() + j, size.n, size.m);
            }
    else
        for (int j = 0; j < size.n; j += LANES)
            for (int p = 0; p < size.k; p += DEEP) {
                prefetch(b.from(p, j + LANES).at, b.column);
                pack_columns<LANES, true>(b.from(p, j), DEEP, LANES, right);
                add_block<LANES, LANES>(left.data() + lanes_of<FEW>(p), right, sums.data() + j, size.n, size.m);
            }
    for (int i = 0; i < size.m; ++i)
        for (int j = 0; j < size.n; j += LANES) put(c + i * c_row + j, *(const Floats *)&sums[(Index)i * size.n + j]);
}

// C [m, n] = A [m, k] B [k, n] + bias [n], if there is one; or, of floats with `add`, C += A B.
template <class To>
static void multiply(Matrix a, Matrix b, Sizes size, const float *bias, To *c, Index c_row, bool add = false) {
    const bool whole = size.k % DEEP == 0 && size.n % N == 0;
    if (size.m <= FEW && whole && !add) multiply_few_rows(a, b, size, bias, c, c_row);
    else multiply_blocks(a, b, size, bias, c, c_row, add);
}
