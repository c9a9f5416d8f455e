// Dropout, the residual sum and layer norm behind it, in one (reference/layers/block.py: add_branch; reference/ops.py:
// layer_norm). A row may be one head of one position: a block takes several of these. A row beyond the last one has no
// columns. A thread reads only the columns that it wrote itself: none needs to wait.

struct Norm {
    const element *weight, *bias;
    element *y, *normed;
    number *inverse_std, epsilon;
};

// sum = x * mask * scale + residual, without the terms that are not given -> its total over this thread's columns.
template <int N, bool DROP, bool ADD>
__device__ number add(const element *x, const element *residual, element *sum, Byte *keep, const Site &site,
                      Index start, int width) {
    number total = 0, scale = (number)site.scale;
    SUMMING(total) EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column), residuals = load<N>((ADD ? residual : x) + column), sums;
        EACH(i) {
            number value = widen(xs.of[i]);
            if (DROP) {
                bool kept = site.keeps(start + column + i);
                keep[column + i] = kept;
                value = kept ? value * scale : 0;
            }
            if (ADD) value += widen(residuals.of[i]);
            sums.of[i] = narrow(value);
            total += widen(sums.of[i]);
        }
        if (DROP || ADD) store<N>(sum + column, sums);
    }
    return total;
}

template <int N>
__device__ void normalise(const element *x, number total, Norm norm, int width) {
    number mean = over_row<Sum>(total) / width, squares = 0;
    SUMMING(squares) EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column);
        EACH(i) {
            number centred = widen(xs.of[i]) - mean;
            squares += centred * centred;
        }
    }
    number inverse_std = 1 / sqrt(over_row<Sum>(squares) / width + norm.epsilon);
    if (threadIdx.x == 0 && width) *norm.inverse_std = inverse_std;
    VECTORS EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column), ys, normeds;
        EACH(i) {
            number normed = (widen(xs.of[i]) - mean) * inverse_std;
            normeds.of[i] = narrow(normed);
            ys.of[i] = narrow(normed * widen(norm.weight[column + i]) + widen(norm.bias[column + i]));
        }
        store<N>(norm.normed + column, normeds);
        store<N>(norm.y + column, ys);
    }
}

// Without a site and a residual there is no `sum`, and x is what is normed.
extern "C" __global__ void add_and_norm(const element *x, const element *residual, element *sum, Byte *keep, Site site,
                                        const element *weight, const element *bias, element *y, element *normed,
                                        number *inverse_std, double epsilon, int rows, int width, int packed) {
    Index row = ROW_OF_BLOCK, at = row * width, start = site.row_start(row);
    if (row >= rows) width = 0;
    number total;
    if (site.dropping && residual)
        total = PACKED(add, (x + at, residual + at, sum + at, keep + at, site, start, width), true, true);
    else if (site.dropping)
        total = PACKED(add, (x + at, nullptr, sum + at, keep + at, site, start, width), true, false);
    else if (residual)
        total = PACKED(add, (x + at, residual + at, sum + at, nullptr, site, start, width), false, true);
    else
        total = PACKED(add, (x + at, nullptr, nullptr, nullptr, site, start, width), false, false);
    if (weight) {
        Norm norm = {weight, bias, y + at, normed + at, inverse_std + row, (number)epsilon};
        PACKED(normalise, (sum ? sum + at : x + at, total, norm, width));
    }
}

extern "C" __global__ void dropout_backward(const element *dy, const Byte *keep, double scale, element *dx,
                                            int width) {
    Index at = (Index)blockIdx.x * width;
    VECTORS EACH_COLUMN(column, width)
        dx[at + column] = narrow(keep[at + column] ? widen(dy[at + column]) * (number)scale : 0);
}

// dx = (dn - mean of dn - normed * mean of dn * normed) / std, dn = dy * weight, and to ADD is what came around the branch.
// Adds d to dbias and d * normed to dweight in the same columns, or, if these are HELD for this thread alone, in its own.
template <int N, bool HELD, bool ADD>
__device__ void backward(const element *dy, const element *weight, const element *normed, number inverse_std,
                         const element *around, element *dx, number *dweight, number *dbias, int width) {
    number sum = 0, along = 0;
    SUMMING(sum, along) EACH_PACK(column, width) {
        Pack<N> dys = load<N>(dy + column), normeds = load<N>(normed + column);
        EACH(i) {
            number d = widen(dys.of[i]), n = widen(normeds.of[i]), dn = d * widen(weight[column + i]);
            sum += dn;
            along += dn * n;
            dweight[HELD ? i : column + i] += d * n;
            dbias[HELD ? i : column + i] += d;
        }
    }
    sum_both(sum, along);
    sum /= width, along /= width;
    VECTORS EACH_PACK(column, width) {
        Pack<N> dys = load<N>(dy + column), normeds = load<N>(normed + column), dxs;
        Pack<N> arounds = load<N>(around + column);
        EACH(i) {
            number dn = widen(dys.of[i]) * widen(weight[column + i]);
            number value = (dn - sum - widen(normeds.of[i]) * along) * inverse_std;
            dxs.of[i] = narrow(ADD ? value + widen(arounds.of[i]) : value);
        }
        store<N>(dx + column, dxs);
    }
}

// A block takes every gridDim.x-th row. What they give to dweight and dbias goes to rows of its own, [2, width].
// A thread that has one pack of columns at most (HELD) adds up in registers.
template <int N, bool HELD, bool ADD>
__device__ void backward_rows(const element *dy, const element *weight, const element *normed,
                              const number *inverse_std, const element *around, element *dx, number *partial, int rows,
                              int width) {
    number *dweight = partial + ROW_OF_BLOCK * 2 * width, *dbias = dweight + width, held[2][N] = {};
    if (!HELD) EACH_PACK(column, width) EACH(i) dweight[column + i] = dbias[column + i] = 0;
    for (int first = 0; first < rows; first += gridDim.x * blockDim.y) {
        int row = first + (int)ROW_OF_BLOCK, there = row < rows;
        Index at = (Index)row * width;
        backward<N, HELD, ADD>(dy + at, weight, normed + at, there ? inverse_std[row] : 0, (ADD ? around : dy) + at,
                               dx + at, HELD ? held[0] : dweight, HELD ? held[1] : dbias, there ? width : 0);
    }
    if (HELD) EACH_PACK(column, width) EACH(i) dweight[column + i] = held[0][i], dbias[column + i] = held[1][i];
}

#define BACKWARD(held, add) \
    PACKED(backward_rows, (dy, weight, normed, inverse_std, around, dx, partial, rows, width), held, add)

extern "C" __global__ void layer_norm_backward(const element *dy, const element *weight, const element *normed,
                                               const number *inverse_std, const element *around, element *dx,
                                               number *partial, int rows, int width, int packed) {
    if (HOLDS(width)) around ? BACKWARD(true, true) : BACKWARD(true, false);
    else around ? BACKWARD(false, true) : BACKWARD(false, false);
}
