// CUDA's dialect of C++ for one core of a CPU: a block has one thread, and the blocks are a loop.
#include <cmath>
#include <cstring>

#define CORE
#define __global__ static inline
#define __device__
#define __syncthreads()

struct Place { int x; };
static constexpr Place threadIdx{0}, blockDim{1};
static Place blockIdx{0}, gridDim{1};

using std::sqrt;

// exp of doubles is the library's. exp of floats is ours, within 2 units in the last place, and a compiler can
// vectorize it: 2^n e^r, where |r| is at most half of log(2), by a polynomial (S. Moshier, Cephes: expf). It is 0 below
// -88 and infinity above 88.4.
inline float exp(float x) {
    x = x < -88.f ? -88.f : x > 89.f ? 89.f : x;
    float n = std::floor(x * 1.44269504f + 0.5f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.f;
    int bits = ((int)n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return y * power;
}

// erf of floats is ours, too, within 3 units in the last place: by a polynomial in x^2 where |x| < 1, and elsewhere as
// 1 - e^(-x^2) times a polynomial in t = 1 / (1 + |x| / 2). The coefficients minimize the largest relative error.
inline float erf(float x) {
    float size = std::fabs(x), square = x * x, t = 1.f / (1.f + 0.5f * size);
    float near = 7.853861389e-5f;
    near = near * square - 8.010193744e-4f;
    near = near * square + 5.188327715e-3f;
    near = near * square - 2.685381196e-2f;
    near = near * square + 1.128358515e-1f;
    near = near * square - 3.761262582e-1f;
    near = near * square + 1.128379166f;
    float far = 9.030647140e-2f;
    far = far * t - 3.719236647e-1f;
    far = far * t + 4.193124590e-1f;
    far = far * t + 1.114910343e-2f;
    far = far * t + 2.934921151e-1f;
    far = far * t + 2.749443279e-1f;
    far = far * t + 2.825570718e-1f;
    return size < 1.f ? x * near : std::copysign(1.f - exp(-square) * t * far, x);
}
