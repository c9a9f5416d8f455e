// Attention of halves on a core: products of halves, and scores and probabilities in float32. No probability is kept, as
// in FlashAttention (Dao et al. 2022): the backward makes them again.
using namespace heads_;

// The arrays of some queries' scores, made once for all.
struct Scores {
    std::vector<number> probs, ddropped;
    std::vector<element> dropped, dscores;
    std::vector<Byte> keep;

    Scores(const Heads &all, bool dropping, bool backward)
        : probs(QUERIES * all.keys), ddropped(backward ? probs.size() : 0), dropped(probs.size()),
          dscores(ddropped.size()), keep(dropping ? probs.size() : 0) {}
};

static Matrix rows_of(const element *x, const Strides &of) { return {x, of.position, 1}; }

// probs = softmax(scale q k^T) of some queries, and what dropout lets through of it; rows are as long as there are keys.
static void attend(Queries its, Matrix q, Matrix keys, Site site, const Index *lengths, const Heads &all, double scale,
                   int causal, Scores &to) {
    multiply(q, keys.transposed(), {its.count, its.keys, all.d}, nullptr, to.probs.data(), its.keys);
    site.first = site.row_start(its.row), site.second = 1, site.third = its.count;
    for_rows(its.count, [&] {
        softmax_::attention_probs(to.probs.data(), to.dropped.data(), to.keep.data(), site,
                                  lengths ? lengths + its.sample : nullptr, its.rows(its.keys, its.keys), 1, scale, causal);
    });
}

// context = dropout(softmax(scale q k^T)) v
extern "C" __global__ void attention(const element *q, const element *k, const element *v, element *context, Site site,
                                     const Index *lengths, Heads all, double scale, int causal) {
    const Matrix keys = rows_of(head_of(k, all.k, all), all.k), values = rows_of(head_of(v, all.v, all), all.v);
    Scores scores(all, site.dropping, false);
    for_queries(all, lengths, causal, [&](Queries its) {
        attend(its, rows_of(its.in(q, all.q), all.q), keys, site, lengths, all, scale, causal, scores);
        multiply({scores.dropped.data(), (Index)its.keys, 1}, values, {its.count, all.d, its.keys}, nullptr,
                 its.in(context, all.context), all.context.position);
    });
}

// Gradients of q, k and v. Those of k and v are summed over all queries in float32, and rounded once.
extern "C" __global__ void attention_backward(const element *dcontext, const element *q, const element *k,
                                              const element *v, Site site, const Index *lengths, element *dq,
                                              element *dk, element *dv, Heads all, Heads gradients, double scale,
                                              int causal) {
    const Matrix keys = rows_of(head_of(k, all.k, all), all.k), values = rows_of(head_of(v, all.v, all), all.v);
    const int d = all.d;
    Scores scores(all, site.dropping, true);
    std::vector<number> dkeys(all.keys * d), dvalues(all.keys * d);
    for_queries(all, lengths, causal, [&](Queries its) {
        const Matrix dy = rows_of(its.in(dcontext, all.context), all.context), mine = rows_of(its.in(q, all.q), all.q);
        const Matrix dropped{scores.dropped.data(), (Index)its.keys, 1}, dscores{scores.dscores.data(), (Index)its.keys, 1};
        attend(its, mine, keys, site, lengths, all, scale, causal, scores);
        // forward: context = dropped @ v
        multiply(dropped.transposed(), dy, {its.keys, d, its.count}, nullptr, dvalues.data(), d, true);
        multiply(dy, values.transposed(), {its.count, its.keys, d}, nullptr, scores.ddropped.data(), its.keys);
        // forward: dropped = dropout(softmax(scale * scores))
        for_rows(its.count, [&] {
            softmax_::attention_probs_backward(scores.ddropped.data(), scores.probs.data(),
                                               site.dropping ? scores.keep.data() : nullptr, its.rows(its.keys, its.keys),
                                               site.scale, scale, scores.dscores.data());
        });
        // forward: scores = q @ k^T
        multiply(dscores, keys, {its.count, d, its.keys}, nullptr, its.in(dq, gradients.q), gradients.q.position);
        multiply(dscores.transposed(), mine, {its.keys, d, its.count}, nullptr, dkeys.data(), d, true);
    });
    for (int i = 0; i < all.keys; ++i)
        for (int j = 0; j < d; ++j) {
            head_of(dk, gradients.k, all)[i * gradients.k.position + j] = narrow(dkeys[i * d + j]);
            head_of(dv, gradients.v, all)[i * gradients.v.position + j] = narrow(dvalues[i * d + j]);
        }
}
