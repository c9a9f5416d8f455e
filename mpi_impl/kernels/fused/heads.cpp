// Attention on a core, head by head. A block is one sample's head of keys and values, with all heads of queries that share
// it. It takes a few queries at a time, so that all that happens to their scores happens in the cache.

// How far apart samples, positions and heads are in an array [b, s, heads, d]. The d of a head are next to one another.
struct Strides {
    Index sample, position, head;
};

struct Heads {
    Strides q, k, v, context;
    int s, keys, heads, groups, d;      // queries, which are the last of the positions of the keys
};

constexpr int QUERIES = 4 * HEIGHT;     // at a time; causal attention skips the keys after the last of them

// Some queries of a head, which may see the first `keys` of all keys, or fewer.
struct Queries {
    Index sample, head, row;    // `row`: the first one's among the rows of all probabilities
    int first, position, count, keys;

    template <class T> T *in(T *x, Strides of) const {
        return x + sample * of.sample + first * of.position + head * of.head;
    }

    softmax_::Rows rows(Index step, int width) const { return {0, 0, step, position, count, keys, width}; }
};

// The keys' head of a block, in k, v or their gradients.
template <class T> T *head_of(T *x, Strides of, const Heads &all) {
    return x + blockIdx.x / all.groups * of.sample + blockIdx.x % all.groups * of.head;
}

template <class Function>
void for_queries(const Heads &all, const Index *lengths, int causal, Function function) {
    Index block = blockIdx.x, sample = block / all.groups, share = all.heads / all.groups;
    int real = lengths ? (int)lengths[sample] : all.keys, before = all.keys - all.s;
    for (Index head = block % all.groups * share, i = 0; i < share; ++i, ++head)
        for (int first = 0; first < all.s; first += QUERIES) {
            int count = all.s - first < QUERIES ? all.s - first : QUERIES;
            int seen = causal ? before + first + count : all.keys;
            function(Queries{sample, head, (sample * all.heads + head) * all.s + first, first, before + first, count,
                             seen < real ? seen : real});
        }
    blockIdx.x = block;
}

// Calls a kernel of softmax.cu, of which each row is a block.
template <class Kernel> void for_rows(int count, Kernel kernel) {
    for (blockIdx.x = 0; blockIdx.x < count; ++blockIdx.x) kernel();
}
