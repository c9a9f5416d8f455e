// Softmax, in place where it can be: of attention's scores, and of the logits in the loss. One block for each row.

// Where attention's rows are; each block takes one. A head has `queries` rows, `row_step` elements apart, and heads are
// `head_step` apart. The first row is at `offset`, and belongs to query `first_query`. (A GPU takes a whole sample;
// a core takes what fits its cache, a few heads' rows at a time.)
struct Rows {
    Index offset, head_step, row_step;
    int first_query, queries, keys, width;

    __device__ Index start(Index row) const { return offset + row / queries * head_step + row % queries * row_step; }

    // With `causal`, a query sees the keys up to its own; and with `lengths`, those of its sample that are not padding.
    __device__ int seen(Index row, int causal, const Index *lengths, int heads) const {
        int before = first_query + (int)(row % queries) + 1, seen = causal && before < keys ? before : keys;
        int real = lengths ? (int)lengths[row / queries / heads] : keys;
        return real < seen ? real : seen;
    }
};

// A row of `scores`, as numbers, becomes its probabilities, and 0 from `keys` up to `width`. What dropout lets through
// of them goes to `dropped` [rows, keys], if it is given.
extern "C" __global__ void attention_probs(number *scores, element *dropped, Byte *keep, Site site,
                                           const Index *lengths, Rows rows, int heads, double scale, int causal) {
    Index row = blockIdx.x, at = rows.start(row), drawn = site.row_start(row), mine = row * rows.keys;
    int seen = rows.seen(row, causal, lengths, heads);
    int near = IN_VECTORS(seen, rows.keys);
    number *p = scores + at, highest = p[0], total = 0;
    SEEKING(highest) EACH_COLUMN(key, near) highest = Maximum::of(highest, key < seen ? p[key] : highest);
    highest = over_row<Maximum>(highest);
    SUMMING(total) EACH_COLUMN(key, near) {
        number e = key < seen ? exp((p[key] - highest) * (number)scale) : 0;
        p[key] = e;
        total += e;
    }
    number inverse = 1 / over_row<Sum>(total);
    VECTORS EACH_COLUMN(key, rows.width) p[key] = key < seen ? p[key] * inverse : 0;
    if (site.dropping) {
        VECTORS EACH_COLUMN(key, rows.keys) {
            bool kept = key < seen && site.keeps(drawn + key);
            keep[at + key] = kept;
            dropped[mine + key] = narrow(kept ? p[key] * (number)site.scale : 0);
        }
    } else if (dropped) {
        VECTORS EACH_COLUMN(key, rows.keys) dropped[mine + key] = narrow(p[key]);
    }
}

// dscores = probs * (dprobs - sum of dprobs * probs) * scale, where dprobs is what dropout lets through of `ddropped`.
// Both are [rows, keys], and may be one array.
template <bool MASKED>
__device__ void backward(const number *ddropped, const number *probs, const Byte *keep, number kept_scale,
                         number scale, element *dscores, int keys) {
    number along = 0;
    SUMMING(along) EACH_COLUMN(key, keys) {
        number dp = MASKED ? (keep[key] ? ddropped[key] * kept_scale : 0) : ddropped[key];
        along += dp * probs[key];
    }
    along = over_row<Sum>(along);
    VECTORS EACH_COLUMN(key, keys) {
        number dp = MASKED ? (keep[key] ? ddropped[key] * kept_scale : 0) : ddropped[key];
        dscores[key] = narrow(probs[key] * (dp - along) * scale);
    }
}

extern "C" __global__ void attention_probs_backward(const number *ddropped, const number *probs, const Byte *keep,
                                                    Rows rows, double kept_scale, double scale, element *dscores) {
    Index row = blockIdx.x, at = rows.start(row), mine = row * rows.keys;
    ddropped += mine, dscores += mine, probs += at;
    if (keep) backward<true>(ddropped, probs, keep + at, kept_scale, scale, dscores, rows.keys);
    else backward<false>(ddropped, probs, nullptr, kept_scale, scale, dscores, rows.keys);
}

template <int N> __device__ number largest_of(const element *x, int width) {
    number found = widen(x[0]);
    SEEKING(found) EACH_PACK(column, width) {
        Pack<N> xs = load<N>(x + column);
        EACH(i) found = Maximum::of(found, widen(xs.of[i]));
    }
    return over_row<Maximum>(found);
}

extern "C" __global__ void largest(const element *x, element *highest, int width, int packed) {
    Index row = blockIdx.x;
    number found = PACKED(largest_of, (x + row * width, width));
    if (threadIdx.x == 0) highest[row] = narrow(found);
}

// total gets the sum of exp(logits - highest) over each row of logits [rows, width]. With KEEP, logits become the
// exponentials; halves stay, since these would lose more than logits have lost.
template <int N, bool KEEP>
__device__ number exponentials(element *logits, number highest, int width) {
    number total = 0;
    SUMMING(total) EACH_PACK(column, width) {
        Pack<N> pack = load<N>(logits + column);
        EACH(i) {
            number e = exp(widen(pack.of[i]) - highest);
            total += e;
            pack.of[i] = narrow(e);
        }
        if (KEEP) store<N>(logits + column, pack);
    }
    return over_row<Sum>(total);
}

extern "C" __global__ void exp_and_sum(element *logits, const number *highest, number *total, int halves, int width,
                                       int packed) {
    Index row = blockIdx.x;
    number sum = halves ? PACKED(exponentials, (logits + row * width, highest[row], width), false)
                        : PACKED(exponentials, (logits + row * width, highest[row], width), true);
    if (threadIdx.x == 0) total[row] = sum;
}

// (probability - one at the target) * dloss, in place of what was kept, exponentials or (AGAIN) the logits.
template <bool AGAIN> __device__ number exponential(element kept, number highest) {
    return AGAIN ? exp(widen(kept) - highest) : widen(kept);
}

template <int N, bool AGAIN>
__device__ void scaled(element *kept, number highest, number factor, int width) {
    VECTORS EACH_PACK(column, width) {
        Pack<N> pack = load<N>(kept + column);
        EACH(i) pack.of[i] = narrow(exponential<AGAIN>(pack.of[i], highest) * factor);
        store<N>(kept + column, pack);
    }
}

template <bool AGAIN>
__device__ void gradient(element *kept, number highest, number total, number dloss, Index target, bool held, int width,
                         int packed) {
    number at_target = exponential<AGAIN>(kept[target], highest) / total * dloss - dloss;
    __syncthreads();  // before any thread overwrites the target's
    PACKED(scaled, (kept, highest, dloss / total, width), AGAIN);
    __syncthreads();
    if (threadIdx.x == 0 && held) kept[target] = narrow(at_target);
}

// `held`: whether the target is one of these columns.
extern "C" __global__ void cross_entropy_backward(element *kept, const number *highest, const number *total,
                                                  const number *dloss, const Index *targets, const Byte *held,
                                                  int halves, int width, int packed) {
    Index row = blockIdx.x, target = targets[row];
    element *mine = kept + row * width;
    if (halves) gradient<true>(mine, highest[row], total[row], dloss[row], target, held[row], width, packed);
    else gradient<false>(mine, highest[row], total[row], dloss[row], target, held[row], width, packed);
}
