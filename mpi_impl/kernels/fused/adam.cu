// AdamW and the sum of squares, on flat buffers (reference/optimizers/adam.py: adam_update).

// Runs of elements, of which every other one has weight decay: run i ends where run i + 1 begins. Small tensors would cost
// more if each were launched by itself.
struct Runs {
    Index ends[33];  // the start of the first, and each one's end
    int count, first_decays;

    __device__ bool decays(int run) const { return (run % 2 == 0) == first_decays; }
};

// The optimizer's states and the gradient are numbers. The gradient is multiplied by `factor` first, if that is not 1.
// `model`, if it is given, gets the weight in the model's format. `rate` and `root` include Adam's corrections:
// rate / (1 - beta1^step) and 1 / (1 - beta2^step). Where there is weight decay, weights are multiplied by `decay`.
template <bool SCALED, bool MODEL>
__device__ void move(number *param, number *grad, number *m, number *v, element *model, const Runs &runs, number factor,
                     number rate, number root, number beta1, number rest1, number beta2, number rest2, number epsilon,
                     number decay) {
    for (int run = 0; run < runs.count; ++run) {
        Index start = runs.ends[run], size = runs.ends[run + 1] - start;
        number keep = runs.decays(run) ? decay : 1;
        number *__restrict__ p = param + start, *__restrict__ g = grad + start, *__restrict__ m_ = m + start,
               *__restrict__ v_ = v + start;
        element *__restrict__ copy = model + start;
#if !defined(CORE)  // more words on their way at a time
#pragma unroll 4
#endif
        VECTORS EACH_ELEMENT(i, size) {
            number gradient = SCALED ? g[i] * factor : g[i];
            number mean = beta1 * m_[i] + rest1 * gradient, square = beta2 * v_[i] + rest2 * gradient * gradient;
            number moved = p[i] * keep - rate * mean / (sqrt(square * root) + epsilon);
            m_[i] = mean, v_[i] = square, p[i] = moved;
            if (SCALED) g[i] = gradient;
            if (MODEL) copy[i] = narrow(moved);
        }
    }
}

#define MOVE(scaled, has_model)                                                                                     \
    move<scaled, has_model>(param, grad, m, v, model, runs, (number)factor, (number)rate, (number)root, (number)beta1, \
                            (number)rest1, (number)beta2, (number)rest2, (number)epsilon, (number)decay)

extern "C" __global__ void adam(number *param, number *grad, number *m, number *v, element *model, Runs runs,
                                double factor, double rate, double root, double beta1, double rest1, double beta2,
                                double rest2, double epsilon, double decay) {
    if (factor == 1) model ? MOVE(false, true) : MOVE(false, false);
    else model ? MOVE(true, true) : MOVE(true, false);
}

#if !defined(CORE)  // where BLAS does it

template <int N> __device__ double squares_of(const element *x, Index packs) {
    double sum = 0;
#pragma unroll 4  // more words on their way at a time
    EACH_ELEMENT(pack, packs) {
        Pack<N> xs = load<N>(x + pack * N);
        EACH(i) sum += (double)widen(xs.of[i]) * widen(xs.of[i]);
    }
    return sum;
}

// Each block adds up its part, in double precision; the caller adds up the blocks' sums.
extern "C" __global__ void sum_of_squares(const element *x, Index count, double *sums, int packed) {
    __shared__ double of_warps[32];
    double sum = PACKED(squares_of, (x, packed ? count / PACK : count));
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) sum += of_warps[warp];
        sums[blockIdx.x] = sum;
    }
}

#endif
