// CUDA's dialect of C++ for one core of a CPU: a block has one thread, and the blocks are a loop.
#include <cmath>
#include <cstring>

#define CORE
#define __global__ static inline
#define __device__
#define __syncthreads()

struct Place { int x, y; };
static constexpr Place threadIdx{0, 0}, blockDim{1, 1};
static Place blockIdx{0, 0}, gridDim{1, 1};

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

// ---- halves: integers, since compilers vectorize no loop over structs; and rounding without branches ----------------

inline unsigned bits_of(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

#if defined(BFLOAT16)

typedef unsigned short element;
inline float widen(element x) { return float_of((unsigned)x << 16); }
inline element narrow(float x) {
    unsigned bits = bits_of(x), rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return x == x ? rounded : 0x7FC0;
}

#elif defined(FLOAT16)

// Where float16 has less than 11 bits, its numbers are 2^-24 apart, as float32's are from 1/2 to 1 (give or take a bit):
// a sum there reads or rounds them.
typedef unsigned short element;
inline float widen(element x) {
    unsigned size = (x & 0x7FFF) << 13, exponent = size & 0xF800000;
    float small = float_of(size + (113 << 23)) - float_of(113 << 23);
    unsigned large = size + ((exponent == 0xF800000 ? 224 : 112) << 23);
    return float_of((exponent ? large : bits_of(small)) | (x & 0x8000) << 16);
}
inline element narrow(float x) {
    unsigned bits = bits_of(x), size = bits & 0x7FFFFFFF;
    unsigned small = bits_of(float_of(size) + 0.5f) - (126 << 23);
    unsigned normal = (size - (112 << 23) + 0xFFF + (size >> 13 & 1)) >> 13;
    unsigned rounded = size < 113 << 23 ? small : size < 143 << 23 ? normal : size > 255 << 23 ? 0x7E00 : 0x7C00;
    return rounded | (bits >> 16 & 0x8000);
}

#endif
