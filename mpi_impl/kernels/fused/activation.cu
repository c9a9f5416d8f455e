// The bias of a linear layer and GeLU behind it (reference/ops.py: gelu and gelu_exact), one block for each row.

constexpr number SQRT_2_PI = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr number SQRT_HALF = 0.70710678118654752440;  // sqrt(1 / 2)
constexpr number CUBIC = 0.044715;

// GeLU is x gate(x). The exact gate is Phi, the normal distribution function. The textbook's tanh form of it is
// sigmoid(2 u), u the tanh's argument: far to the left 1 / (1 + infinity) is 0.
template <bool EXACT> __device__ inline number gate_of(number x) {
    if (EXACT) return (number)0.5 * (1 + erf(x * SQRT_HALF));
    return 1 / (1 + exp(-2 * SQRT_2_PI * x * (1 + CUBIC * x * x)));
}

// The derivative of x gate(x). That of Phi is the normal density.
template <bool EXACT> __device__ inline number slope_of(number x, number gate) {
    if (EXACT) return gate + x * (number)0.5 * SQRT_2_PI * exp((number)-0.5 * x * x);
    number inner = 2 * SQRT_2_PI * x * (1 + 3 * CUBIC * x * x);  // the slope of 2 u, times x
    return gate * (1 + inner * (1 - gate));
}

template <int N> __device__ void add_bias(element *x, const element *bias, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column);
        EACH(i) xs.of[i] = narrow(widen(xs.of[i]) + widen(bias[column + i]));
        store<N>(x + column, xs);
    }
}

template <int N, bool EXACT, bool KEEP>
__device__ void forward(const element *x, element *y, element *gate, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column), ys, gates;
        EACH(i) {
            number value = widen(xs.of[i]), g = gate_of<EXACT>(value);
            ys.of[i] = narrow(value * g);
            gates.of[i] = narrow(g);
        }
        store<N>(y + column, ys);
        if (KEEP) store<N>(gate + column, gates);
    }
}

template <bool EXACT>
__device__ void forward_row(const element *x, element *y, element *gate, int width, int packed) {
    if (gate) PACKED(forward, (x, y, gate, width), EXACT, true);
    else PACKED(forward, (x, y, nullptr, width), EXACT, false);
}

// x += bias, if there is one; y = gelu(x). Keeps the gate if there is room for it.
extern "C" __global__ void gelu(element *x, const element *bias, element *y, element *gate, int exact, int width,
                                int packed) {
    Index at = (Index)blockIdx.x * width;
    if (bias) PACKED(add_bias, (x + at, bias, width));
    if (gate) gate += at;
    if (exact) forward_row<true>(x + at, y + at, gate, width, packed);
    else forward_row<false>(x + at, y + at, gate, width, packed);
}

template <int N, bool EXACT, bool KEPT>
__device__ inline Pack<N> backward_of(const Pack<N> &dys, const Pack<N> &xs, const Pack<N> &gates) {
    Pack<N> dxs;
    EACH(i) {
        number value = widen(xs.of[i]), g = KEPT ? widen(gates.of[i]) : gate_of<EXACT>(value);
        dxs.of[i] = narrow(widen(dys.of[i]) * slope_of<EXACT>(value, g));
    }
    return dxs;
}

template <int N, bool EXACT, bool KEPT>
__device__ void backward(const element *dy, const element *x, const element *gate, element *dx, int width) {
    VECTORS EACH_PACK(column, width)
        store<N>(dx + column, backward_of<N, EXACT, KEPT>(load<N>(dy + column), load<N>(x + column),
                                                          load<N>((KEPT ? gate : x) + column)));
}

template <bool EXACT>
__device__ void backward_row(const element *dy, const element *x, const element *gate, element *dx, int width,
                             int packed) {
    if (gate) PACKED(backward, (dy, x, gate, dx, width), EXACT, true);
    else PACKED(backward, (dy, x, nullptr, dx, width), EXACT, false);
}

extern "C" __global__ void gelu_backward(const element *dy, const element *x, const element *gate, element *dx,
                                         int exact, int width, int packed) {
    Index at = (Index)blockIdx.x * width;
    if (gate) gate += at;
    if (exact) backward_row<true>(dy + at, x + at, gate, dx + at, width, packed);
    else backward_row<false>(dy + at, x + at, gate, dx + at, width, packed);
}

#if !defined(CORE)  // where a product adds the rows up

// The same, and sums of dx over rows: the gradient of the bias. A block takes every groups-th row, and of it blockDim.x
// packs of columns, which a thread adds up in registers. Each group has a row of `partial`.
template <int N, bool EXACT, bool KEPT>
__device__ void backward_and_sum(const element *dy, const element *x, const element *gate, element *dx, number *partial,
                                 int groups, int rows, int width) {
    int group = blockIdx.x % groups, column = (blockIdx.x / groups * blockDim.x + threadIdx.x) * N;
    number sums[N] = {};
    if (column >= width) return;
#pragma unroll 2  // more words on their way at a time
    for (int row = group; row < rows; row += groups) {
        Index at = (Index)row * width + column;
        Pack<N> dxs = backward_of<N, EXACT, KEPT>(load<N>(dy + at), load<N>(x + at), load<N>((KEPT ? gate : x) + at));
        store<N>(dx + at, dxs);
        EACH(i) sums[i] += widen(dxs.of[i]);
    }
    EACH(i) partial[(Index)group * width + column + i] = sums[i];
}

#define BACKWARD_AND_SUM(exact, kept) \
    PACKED(backward_and_sum, (dy, x, gate, dx, partial, groups, rows, width), exact, kept)

extern "C" __global__ void gelu_backward_and_sum(const element *dy, const element *x, const element *gate, element *dx,
                                                 number *partial, int groups, int exact, int rows, int width,
                                                 int packed) {
    if (gate) exact ? BACKWARD_AND_SUM(true, true) : BACKWARD_AND_SUM(false, true);
    else exact ? BACKWARD_AND_SUM(true, false) : BACKWARD_AND_SUM(false, false);
}

#endif

// ---- the gate of the MLP (reference/ops.py: swiglu) ------------------------------------------------------------------

// A row of x is gate and up, `width` columns each; silu(gate) is gate sigmoid(gate).
__device__ inline number sigmoid_of(number gate) { return 1 / (1 + exp(-gate)); }

template <int N, bool KEEP> __device__ void gated(const element *x, element *y, element *sigmoid, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> gates = load<N>(x + column), ups = load<N>(x + width + column), ys, sigmoids;
        EACH(i) {
            number gate = widen(gates.of[i]), s = sigmoid_of(gate);
            ys.of[i] = narrow(gate * s * widen(ups.of[i]));
            sigmoids.of[i] = narrow(s);
        }
        store<N>(y + column, ys);
        if (KEEP) store<N>(sigmoid + column, sigmoids);
    }
}

// Keeps the sigmoid if there is room for it.
extern "C" __global__ void swiglu(const element *x, element *y, element *sigmoid, int width, int packed) {
    Index at = (Index)blockIdx.x * width;
    if (sigmoid) PACKED(gated, (x + 2 * at, y + at, sigmoid + at, width), true);
    else PACKED(gated, (x + 2 * at, y + at, nullptr, width), false);
}

template <int N, bool KEPT>
__device__ void gated_backward(const element *dy, const element *x, const element *sigmoid, element *dx, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> dys = load<N>(dy + column), gates = load<N>(x + column), ups = load<N>(x + width + column),
                sigmoids = load<N>((KEPT ? sigmoid : x) + column), dgates, dups;
        EACH(i) {
            number d = widen(dys.of[i]), gate = widen(gates.of[i]);
            number s = KEPT ? widen(sigmoids.of[i]) : sigmoid_of(gate);
            dgates.of[i] = narrow(d * widen(ups.of[i]) * s * (1 + gate * (1 - s)));
            dups.of[i] = narrow(d * gate * s);
        }
        store<N>(dx + column, dgates);
        store<N>(dx + width + column, dups);
    }
}

extern "C" __global__ void swiglu_backward(const element *dy, const element *x, const element *sigmoid, element *dx,
                                           int width, int packed) {
    Index at = (Index)blockIdx.x * width;
    if (sigmoid) PACKED(gated_backward, (dy + at, x + 2 * at, sigmoid + at, dx + 2 * at, width), true);
    else PACKED(gated_backward, (dy + at, x + 2 * at, nullptr, dx + 2 * at, width), false);
}
