// Rotary position embedding (reference/layers/rope.py: rotate): a block for each position of each sample, whose heads all turn by
// the same angles. Each head has blockDim.x of its threads. `direction` is 1, or -1 to turn back.

__device__ inline void turn_pair(number first, number second, number cosine, number sine, element &left,
                                 element &right) {
    left = narrow(first * cosine - second * sine);
    right = narrow(second * cosine + first * sine);
}

template <int N>
__device__ void turn(const element *x, const element *cosine, const element *sine, element *y, number direction,
                     int heads, int half, int width) {
    x += threadIdx.y * width, y += threadIdx.y * width;
    for (int head = threadIdx.y; head < heads; head += blockDim.y, x += blockDim.y * width, y += blockDim.y * width) {
        if (N == 1) {  // without packs a compiler for cores has vectors for the rest of half a head, too
            VECTORS EACH_COLUMN(i, half)
                turn_pair(widen(x[i]), widen(x[half + i]), widen(cosine[i]), widen(sine[i]) * direction, y[i],
                          y[half + i]);
        } else {
            EACH_PACK(column, half) {
                Pack<N> firsts = load<N>(x + column), seconds = load<N>(x + half + column), lefts, rights;
                Pack<N> cosines = load<N>(cosine + column), sines = load<N>(sine + column);
                EACH(i) turn_pair(widen(firsts.of[i]), widen(seconds.of[i]), widen(cosines.of[i]),
                                  widen(sines.of[i]) * direction, lefts.of[i], rights.of[i]);
                store<N>(y + column, lefts);
                store<N>(y + half + column, rights);
            }
        }
        VECTORS EACH_COLUMN(i, width - 2 * half) y[2 * half + i] = x[2 * half + i];
    }
}

extern "C" __global__ void rotate(const element *x, const element *cosines, const element *sines, element *y,
                                  double direction, int positions, int heads, int half, int width, int packed) {
    Index row = blockIdx.x, at = row * heads * width, angles = row % positions * half;
    PACKED(turn, (x + at, cosines + angles, sines + angles, y + at, (number)direction, heads, half, width));
}
