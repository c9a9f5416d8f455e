// Rotary position embedding (reference/rope.py: rotate): one block for each position of each sample, whose heads all
// turn by the same angles. `direction` is 1, or -1 to turn back.

extern "C" __global__ void rotate(const element *x, const element *cosines, const element *sines, element *y,
                                  double direction, int positions, int heads, int half, int width) {
    Index row = blockIdx.x, position = row % positions;
    const element *cosine = cosines + position * half, *sine = sines + position * half;
    x += row * heads * width, y += row * heads * width;
    for (int head = 0; head < heads; ++head, x += width, y += width) {
        VECTORS EACH_COLUMN(i, half) {
            number c = widen(cosine[i]), s = widen(sine[i]) * (number)direction;
            number first = widen(x[i]), second = widen(x[half + i]);
            y[i] = narrow(first * c - second * s);
            y[half + i] = narrow(second * c + first * s);
        }
        VECTORS EACH_COLUMN(i, width - 2 * half) y[2 * half + i] = x[2 * half + i];
    }
}
