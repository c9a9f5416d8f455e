// Attention on a core. A block is one sample's head of keys and values, with all heads of queries that share it. It
// takes a few queries at a time, so that all that happens to their scores happens in the cache.

using namespace heads_;

// context = dropout(softmax(scale q k^T)) v; `probs` [b, heads, s, s] before dropout, and `keep`, what it lets through.
extern "C" __global__ void attention(const number *q, const number *k, const number *v, number *context, number *probs,
                                     Byte *keep, Site site, const Index *lengths, Heads all, double scale, int causal) {
    const Index s = all.s;
    const Right values{head_of(v, all.v, all), all.v.position};
    const std::vector<number> keys = transposed({head_of(k, all.k, all), all.k.position}, all.s, all.d);
    std::vector<number> dropped(keep ? QUERIES * s : 0);
    for_queries(all, lengths, causal, [&](Queries its) {
        number *p = probs + its.row * s;
        multiply({its.in(q, all.q), all.q.position, 1}, {keys.data(), s}, {p, s}, its.count, its.keys, all.d);
        Site here = site;
        here.first = site.row_start(its.row), here.second = 1, here.third = its.count;
        for_rows(its.count, [&] {
            softmax_::attention_probs(p, keep ? dropped.data() : nullptr, keep ? keep + its.row * s : nullptr, here,
                                      lengths ? lengths + its.sample : nullptr, its.rows(s, all.s), 1, scale, causal);
        });
        multiply(keep ? Left{dropped.data(), (Index)its.keys, 1} : Left{p, s, 1}, values,
                 {its.in(context, all.context), all.context.position}, its.count, all.d, its.keys);
    });
}

// Gradients of q, k and v, of which the last two are added to what is there.
extern "C" __global__ void attention_backward(const number *dcontext, const number *q, const number *k,
                                              const number *v, const number *probs, const Byte *keep,
                                              double kept_scale, const Index *lengths, number *dq, number *dk,
                                              number *dv, Heads all, Heads gradients, double scale, int causal) {
    const Index s = all.s;
    const Right keys{head_of(k, all.k, all), all.k.position};
    const Product dkeys{head_of(dk, gradients.k, all), gradients.k.position};
    const Product dvalues{head_of(dv, gradients.v, all), gradients.v.position};
    const std::vector<number> values = transposed({head_of(v, all.v, all), all.v.position}, all.s, all.d);
    std::vector<number> dscores(QUERIES * s), dropped(keep ? QUERIES * s : 0);
    for_queries(all, lengths, causal, [&](Queries its) {
        const Index n = its.keys;
        const number *p = probs + its.row * s;
        const Byte *kept = keep ? keep + its.row * s : nullptr;
        const Right dy{its.in(dcontext, all.context), all.context.position};
        for (int i = 0; keep && i < its.count; ++i)
            for (int j = 0; j < its.keys; ++j)
                dropped[i * n + j] = kept[i * s + j] ? p[i * s + j] * (number)kept_scale : 0;
        // forward: context = dropped @ v
        multiply(keep ? Left{dropped.data(), 1, n} : Left{p, 1, s}, dy, dvalues, its.keys, all.d, its.count, true);
        multiply({dy.at, dy.row, 1}, {values.data(), s}, {dscores.data(), n}, its.count, its.keys, all.d);
        // forward: dropped = dropout(softmax(scale * scores))
        for_rows(its.count, [&] {
            softmax_::attention_probs_backward(dscores.data(), p, kept, its.rows(s, all.s), kept_scale, scale,
                                               dscores.data());
        });
        // forward: scores = q @ k^T
        multiply({dscores.data(), n, 1}, keys, {its.in(dq, gradients.q), gradients.q.position}, its.count, all.d, its.keys);
        multiply({dscores.data(), 1, n}, {its.in(q, all.q), all.q.position}, dkeys, its.keys, all.d, its.count, true);
    });
}
