// Rotary position embedding (reference/rope.py: rotate): a block for each position of each sample, whose heads all turn by
// the same angles. Each head has blockDim.x of its threads. `direction` is 1, or -1 to turn back.

template <int N>
__device__ void turn(const element *x, const element *cosine, const element *sine, element *y, number direction,
                     int heads, int half, int width) {
    x += threadIdx.y * width, y += threadIdx.y * width;
    for (int head = threadIdx.y; head < heads; head += blockDim.y, x += blockDim.y * width, y += blockDim.y * width) {
        VECTORS EACH_PACK(column, half) {
            Pack<N> firsts = load<N>(x + column), seconds = load<N>(x + half + column), lefts, rights;
            Pack<N> cosines = load<N>(cosine + column), sines = load<N>(sine + column);
            EACH(i) {
                number c = widen(cosines.of[i]), s = widen(sines.of[i]) * direction;
                number first = widen(firsts.of[i]), second = widen(seconds.of[i]);
                lefts.of[i] = narrow(first * c - second * s);
                rights.of[i] = narrow(second * c + first * s);
            }
            store<N>(y + column, lefts);
            store<N>(y + half + column, rights);
        }
        VECTORS EACH_COLUMN(column, width - 2 * half) y[2 * half + column] = x[2 * half + column];
    }
}

extern "C" __global__ void rotate(const element *x, const element *cosines, const element *sines, element *y,
                                  double direction, int positions, int heads, int half, int width, int packed) {
    Index row = blockIdx.x, at = row * heads * width, angles = row % positions * half;
    PACKED(turn, (x + at, cosines + angles, sines + angles, y + at, (number)direction, heads, half, width));
}
