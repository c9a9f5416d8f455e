// AdamW and the sum of squares, on flat buffers (reference/optimizer.py: adam_update), one thread for each number.

// The optimizer's states are numbers, and so is the gradient, which is multiplied by `factor` first. `model` gets the
// weight in the model's format, if it has one of its own.
extern "C" __global__ void adam(number *param, number *grad, number *m, number *v, element *model, Index count,
                                double factor, double rate, double beta1, double beta2, double epsilon,
                                double correction1, double correction2, double decay) {
    Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    number g = grad[i] *= (number)factor;
    number m_ = m[i] = (number)beta1 * m[i] + (number)(1 - beta1) * g;
    number v_ = v[i] = (number)beta2 * v[i] + (number)(1 - beta2) * g * g;
    number p = param[i] * (number)decay;
    p -= (number)rate * (m_ / (number)correction1) / (sqrt(v_ / (number)correction2) + (number)epsilon);
    param[i] = p;
    if (model) model[i] = narrow(p);
}

// Each block adds up its part, in double precision; who calls adds up the blocks' sums.
extern "C" __global__ void sum_of_squares(const element *x, Index count, double *sums) {
    __shared__ double of_warps[32];
    double sum = 0;
    for (Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (Index)gridDim.x * blockDim.x)
        sum += (double)widen(x[i]) * widen(x[i]);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) sum += of_warps[warp];
        sums[blockIdx.x] = sum;
    }
}
