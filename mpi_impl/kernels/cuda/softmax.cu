// Softmax, in place where it can be: of attention's scores, and of the logits in the loss. One block for each row.

// A row of `scores` [rows, keys], as numbers, becomes its probabilities, of which `dropped` gets those that dropout
// keeps. With `causal`, row i of a head sees the keys up to i, and there are `queries` rows to a head.
extern "C" __global__ void attention_probs(number *scores, element *dropped, Byte *keep, Site site, double scale,
                                           int causal, int queries, int keys) {
    Index row = blockIdx.x, at = row * keys, start = site.row_start(row);
    int seen = causal ? (int)(row % queries) + 1 : keys;
    number highest = scores[at], total = 0;
    for (int key = threadIdx.x; key < seen; key += blockDim.x) highest = Maximum::of(highest, scores[at + key]);
    highest = over_block<Maximum>(highest);
    for (int key = threadIdx.x; key < seen; key += blockDim.x)
        total += scores[at + key] = exp((scores[at + key] - highest) * (number)scale);
    total = over_block<Sum>(total);
    for (int key = threadIdx.x; key < keys; key += blockDim.x) {
        number p = key < seen ? scores[at + key] / total : 0;
        scores[at + key] = p;
        if (site.dropping) {
            bool kept = key < seen && site.keeps(start + key);
            keep[at + key] = kept;
            p = kept ? p * (number)site.scale : 0;
        }
        dropped[at + key] = narrow(p);
    }
}

// dscores = probs * (dprobs - sum of dprobs * probs) * scale, where dprobs is what dropout lets through of `ddropped`.
extern "C" __global__ void attention_probs_backward(const number *ddropped, const number *probs, const Byte *keep,
                                                    double kept_scale, double scale, element *dscores, int keys) {
    Index at = (Index)blockIdx.x * keys;
    number along = 0;
    for (int key = threadIdx.x; key < keys; key += blockDim.x) {
        number dp = keep ? (keep[at + key] ? ddropped[at + key] * (number)kept_scale : 0) : ddropped[at + key];
        along += dp * probs[at + key];
    }
    along = over_block<Sum>(along);
    for (int key = threadIdx.x; key < keys; key += blockDim.x) {
        number dp = keep ? (keep[at + key] ? ddropped[at + key] * (number)kept_scale : 0) : ddropped[at + key];
        dscores[at + key] = narrow(probs[at + key] * (dp - along) * (number)scale);
    }
}

// logits [rows, width] become exp(logits - highest); total gets the sums over rows, of the exponentials before they are
// rounded.
template <int N>
__device__ number exponentials(element *logits, number highest, int width) {
    number total = 0;
    EACH_PACK(column, width) {
        Pack<N> pack = load<N>(logits + column);
        EACH(i) {
            number e = exp(widen(pack.of[i]) - highest);
            total += e;
            pack.of[i] = narrow(e);
        }
        store<N>(logits + column, pack);
    }
    return over_block<Sum>(total);
}

extern "C" __global__ void exp_and_sum(element *logits, const element *highest, element *total, int width, int packed) {
    Index row = blockIdx.x;
    number sum = PACKED(exponentials, logits + row * width, widen(highest[row]), width);
    if (threadIdx.x == 0) total[row] = narrow(sum);
}

// (probs - one at the target) * dloss, in the place of probs. `held`: whether the target is one of these columns.
template <int N>
__device__ void scaled(element *probs, number factor, int width) {
    EACH_PACK(column, width) {
        Pack<N> pack = load<N>(probs + column);
        EACH(i) pack.of[i] = narrow(widen(pack.of[i]) * factor);
        store<N>(probs + column, pack);
    }
}

extern "C" __global__ void cross_entropy_backward(element *probs, const element *dloss, const Index *targets,
                                                  const Byte *held, int width, int packed) {
    Index row = blockIdx.x, target = targets[row];
    element *mine = probs + row * width;
    number d = widen(dloss[row]), at_target = (widen(mine[target]) - 1) * d;
    __syncthreads();  // before anyone overwrites the target's
    PACKED(scaled, mine, d, width);
    __syncthreads();
    if (threadIdx.x == 0 && held[row]) mine[target] = narrow(at_target);
}
