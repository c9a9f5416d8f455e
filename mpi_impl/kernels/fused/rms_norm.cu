// RMS norm (reference/ops.py: rms_norm). A row may be one head of one position: a block takes several of these. A row
// beyond the last one has no columns.

template <int N>
__device__ void normalise(const element *x, const element *weight, element *y, element *normed, number *inverse_rms,
                          number epsilon, int width) {
    number squares = 0;
    SUMMING(squares) EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column);
        EACH(i) {
            number value = widen(xs.of[i]);
            squares += value * value;
        }
    }
    number inverse = 1 / sqrt(over_row<Sum>(squares) / width + epsilon);
    if (threadIdx.x == 0 && width) *inverse_rms = inverse;
    VECTORS EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column), ys, normeds;
        EACH(i) {
            number value = widen(xs.of[i]) * inverse;
            normeds.of[i] = narrow(value);
            ys.of[i] = narrow(value * widen(weight[column + i]));
        }
        store<N>(normed + column, normeds);
        store<N>(y + column, ys);
    }
}

extern "C" __global__ void rms_norm(const element *x, const element *weight, element *y, element *normed,
                                    number *inverse_rms, double epsilon, int rows, int width, int packed) {
    Index row = ROW_OF_BLOCK, at = row * width;
    if (row >= rows) width = 0;
    PACKED(normalise, (x + at, weight, y + at, normed + at, inverse_rms + row, (number)epsilon, width));
}

// dx = (dn - normed * mean of dn * normed) / rms, dn = dy * weight. Blocks, HELD and ADD as in layer_norm.cu.
template <int N, bool HELD, bool ADD>
__device__ void backward(const element *dy, const element *weight, const element *normed, number inverse_rms,
                         const element *around, element *dx, number *dweight, int width) {
    number along = 0;
    SUMMING(along) EACH_PACK(column, width) {
        Pack<N> dys = load<N>(dy + column), normeds = load<N>(normed + column);
        EACH(i) {
            number d = widen(dys.of[i]), n = widen(normeds.of[i]);
            along += d * widen(weight[column + i]) * n;
            dweight[HELD ? i : column + i] += d * n;
        }
    }
    along = over_row<Sum>(along) / width;
    VECTORS EACH_PACK(column, width) {
        Pack<N> dys = load<N>(dy + column), normeds = load<N>(normed + column), dxs;
        Pack<N> arounds = load<N>(around + column);
        EACH(i) {
            number dn = widen(dys.of[i]) * widen(weight[column + i]);
            number value = (dn - widen(normeds.of[i]) * along) * inverse_rms;
            dxs.of[i] = narrow(ADD ? value + widen(arounds.of[i]) : value);
        }
        store<N>(dx + column, dxs);
    }
}

template <int N, bool HELD, bool ADD>
__device__ void backward_rows(const element *dy, const element *weight, const element *normed,
                              const number *inverse_rms, const element *around, element *dx, number *partial, int rows,
                              int width) {
    number *dweight = partial + ROW_OF_BLOCK * width, held[N] = {};
    if (!HELD) EACH_PACK(column, width) EACH(i) dweight[column + i] = 0;
    for (int first = 0; first < rows; first += gridDim.x * blockDim.y) {
        int row = first + (int)ROW_OF_BLOCK, there = row < rows;
        Index at = (Index)row * width;
        backward<N, HELD, ADD>(dy + at, weight, normed + at, there ? inverse_rms[row] : 0, (ADD ? around : dy) + at,
                               dx + at, HELD ? held : dweight, there ? width : 0);
    }
    if (HELD) EACH_PACK(column, width) EACH(i) dweight[column + i] = held[i];
}

#define BACKWARD(held, add) \
    PACKED(backward_rows, (dy, weight, normed, inverse_rms, around, dx, partial, rows, width), held, add)

extern "C" __global__ void rms_norm_backward(const element *dy, const element *weight, const element *normed,
                                             const number *inverse_rms, const element *around, element *dx,
                                             number *partial, int rows, int width, int packed) {
    if (HOLDS(width)) around ? BACKWARD(true, true) : BACKWARD(true, false);
    else around ? BACKWARD(false, true) : BACKWARD(false, false);
}
