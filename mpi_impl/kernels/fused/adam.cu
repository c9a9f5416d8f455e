// AdamW and the sum of squares, on flat buffers (reference/optimizer.py: adam_update).

// The optimizer's states and the gradient are numbers. The gradient is multiplied by `factor` first. `model`, if it is
// given, gets the weight in the model's format. `rate` and `root` include Adam's corrections:
// rate / (1 - beta1^step) and 1 / (1 - beta2^step).
extern "C" __global__ void adam(number *param, number *grad, number *m, number *v, element *model, Index count,
                                double factor, double rate, double root, double beta1, double rest1, double beta2,
                                double rest2, double epsilon, double decay) {
    number scale = (number)factor, step = (number)rate, r = (number)root, b1 = (number)beta1, c1 = (number)rest1,
           b2 = (number)beta2, c2 = (number)rest2, eps = (number)epsilon, keep = (number)decay;
    VECTORS EACH_ELEMENT(i, count) {
        number g = grad[i] * scale, m_ = b1 * m[i] + c1 * g, v_ = b2 * v[i] + c2 * g * g;
        number p = param[i] * keep - step * m_ / (sqrt(v_ * r) + eps);
        grad[i] = g, m[i] = m_, v[i] = v_, param[i] = p;
    }
    if (model)
        VECTORS EACH_ELEMENT(i, count) model[i] = narrow(param[i]);
}

#if !defined(CORE)  // where BLAS does it

// Each block adds up its part, in double precision; the caller adds up the blocks' sums.
extern "C" __global__ void sum_of_squares(const element *x, Index count, double *sums) {
    __shared__ double of_warps[32];
    double sum = 0;
    EACH_ELEMENT(i, count) sum += (double)widen(x[i]) * widen(x[i]);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) sum += of_warps[warp];
        sums[blockIdx.x] = sum;
    }
}

#endif
