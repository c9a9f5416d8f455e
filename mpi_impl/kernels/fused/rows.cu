// Rows added and copied, one block for each, 16 bytes at a time: CuPy's own loops take two bytes of halves at a time.

// y += x, where x has y's rows or is a single one, as a bias is.
template <int N> __device__ void add(element *y, const element *x, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> ys = load<N>(y + column), xs = load<N>(x + column);
        EACH(i) ys.of[i] = narrow(widen(ys.of[i]) + widen(xs.of[i]));
        store<N>(y + column, ys);
    }
}

extern "C" __global__ void add_to(element *y, const element *x, int single, int width, int packed) {
    Index at = (Index)blockIdx.x * width;
    PACKED(add, (y + at, single ? x : x + at, width));
}

// Row `place` of every `places` rows of y becomes a row of x.
template <int N> __device__ void copy(const element *x, element *y, int width) {
    VECTORS EACH_PACK(column, width) store<N>(y + column, load<N>(x + column));
}

extern "C" __global__ void stack(const element *x, element *y, int place, int places, int width, int packed) {
    Index row = blockIdx.x;
    PACKED(copy, (x + row * width, y + (row * places + place) * width, width));
}
