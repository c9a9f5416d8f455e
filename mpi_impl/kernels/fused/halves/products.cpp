// Products of matrices, as kernels (products.h).

// How far apart the elements of each matrix are, from a row to the next and from a column to the next.
struct Product {
    Index a_row, a_column, b_row, b_column, c_row;
    int m, n, k, add;
};

template <class To> void multiply_its(const element *a, const element *b, const float *bias, To *c, const Product &its) {
    multiply({a, its.a_row, its.a_column}, {b, its.b_row, its.b_column}, {its.m, its.n, its.k}, bias, c, its.c_row, its.add);
}

// c [m, n] = a [m, k] b [k, n] + bias [n], if there is one.
extern "C" __global__ void product(const element *a, const element *b, const element *bias, element *c, Product its) {
    std::vector<float> wide(bias ? its.n + N : 0);
    for (int j = 0; bias && j < its.n; ++j) wide[j] = widen(bias[j]);
    multiply_its(a, b, bias ? wide.data() : nullptr, c, its);
}

// The same as floats, without a bias; or with `add`, sums += a b.
extern "C" __global__ void product_in_floats(const element *a, const element *b, float *sums, Product its) {
    multiply_its(a, b, nullptr, sums, its);
}
