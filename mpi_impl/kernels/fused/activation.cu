// The bias of a linear layer and GeLU behind it (reference/ops.py: gelu), one block for each row.

constexpr number SQRT_2_PI = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr number CUBIC = 0.044715;

// x Phi(x) as x sigmoid(2 u), u the argument of the textbook's tanh. Far to the left 1 / (1 + infinity) is 0.
__device__ inline number sigmoid_of(number x) {
    return 1 / (1 + exp(-2 * SQRT_2_PI * x * (1 + CUBIC * x * x)));
}

template <int N> __device__ void add_bias(element *x, const element *bias, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column);
        EACH(i) xs.of[i] = narrow(widen(xs.of[i]) + widen(bias[column + i]));
        store<N>(x + column, xs);
    }
}

template <int N, bool KEEP> __device__ void forward(const element *x, element *y, element *sigmoid, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column), ys, sigmoids;
        EACH(i) {
            number value = widen(xs.of[i]), s = sigmoid_of(value);
            ys.of[i] = narrow(value * s);
            sigmoids.of[i] = narrow(s);
        }
        store<N>(y + column, ys);
        if (KEEP) store<N>(sigmoid + column, sigmoids);
    }
}

// x += bias, if there is one; y = gelu(x). Keeps the sigmoid if there is room for it.
extern "C" __global__ void gelu(element *x, const element *bias, element *y, element *sigmoid, int width, int packed) {
    Index at = (Index)blockIdx.x * width;
    if (bias) PACKED(add_bias, (x + at, bias, width));
    if (sigmoid) PACKED(forward, (x + at, y + at, sigmoid + at, width), true);
    else PACKED(forward, (x + at, y + at, nullptr, width), false);
}

template <int N, bool KEPT>
__device__ void backward(const element *dy, const element *x, const element *sigmoid, element *dx, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> dys = load<N>(dy + column), xs = load<N>(x + column), sigmoids = load<N>((KEPT ? sigmoid : x) + column),
                dxs;
        EACH(i) {
            number value = widen(xs.of[i]), s = KEPT ? widen(sigmoids.of[i]) : sigmoid_of(value);
            number slope = 2 * SQRT_2_PI * value * (1 + 3 * CUBIC * value * value);  // of 2 u, times x
            dxs.of[i] = narrow(widen(dys.of[i]) * s * (1 + slope * (1 - s)));
        }
        store<N>(dx + column, dxs);
    }
}

extern "C" __global__ void gelu_backward(const element *dy, const element *x, const element *sigmoid, element *dx,
                                         int width, int packed) {
    Index at = (Index)blockIdx.x * width;
    if (sigmoid) PACKED(backward, (dy + at, x + at, sigmoid + at, dx + at, width), true);
    else PACKED(backward, (dy + at, x + at, nullptr, dx + at, width), false);
}
