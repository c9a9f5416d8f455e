// Sums of the ranks' arrays, which begin `step` elements after one another: in float32 and in the order of the ranks.
extern "C" __global__ void sum_in_rank_order(const element *x, Index step, int ranks, element *y, Index size) {
    constexpr Index TILE = 1024;
    number total[TILE];
    for (Index first = 0; first < size; first += TILE) {
        const int count = (int)std::min(TILE, size - first);
        const element *part = x + first;
        VECTORS for (int i = 0; i < count; ++i) total[i] = widen(part[i]) + widen(part[step + i]);
        for (int rank = 2; rank < ranks; ++rank)
            VECTORS for (int i = 0; i < count; ++i) total[i] += widen(part[rank * step + i]);
        VECTORS for (int i = 0; i < count; ++i) y[first + i] = narrow(total[i]);
    }
}
