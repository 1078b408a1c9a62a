// GELU and its derivative, for training and for the kernels of the local residual.
#pragma once
#include "gemm.h"
#include "softmax.h"

namespace {

void gelu_row(float* values, long count) { gelu_rows(values, 1, count, count); }

void gelu_row(double* values, long count) {
  for (long i = 0; i < count; ++i) values[i] *= 0.5 + 0.5 * erf(values[i] * 0.70710678118654752440);
}

// The derivative of GELU: Φ(x) + x·φ(x), with the distribution function and the density of the normal distribution.
INLINEVIT_INLINE Vec<float> gelu_slope(Vec<float> x) {
  // From |x| = 14 on, x·φ(x) is 0 in float32; an infinite x would make it NaN.
  const Vec<float> most = broadcast(14.0f), least = broadcast(-14.0f);
  Vec<float> t = x > most ? most : x;
  t = t < least ? least : t;
  const Vec<float> density = exp2(t * t * float(-0.5 * LOG2_E)) * 0.39894228040143267794f;
  return 0.5f + 0.5f * normal_erf(x) + t * density;
}

// out = gradients · the derivative of GELU at values; out may be gradients.
void multiply_gelu_slope(const float* values, const float* gradients, long count, float* out) {
  for (long i = 0; i < count; i += LANES<float>) {
    const long lanes = count - i;
    store(out + i, load(gradients + i, lanes) * gelu_slope(load(values + i, lanes)), lanes);
  }
}

void multiply_gelu_slope(const double* values, const double* gradients, long count, double* out) {
  for (long i = 0; i < count; ++i) {
    const double x = values[i], density = 0.39894228040143267794 * exp(-0.5 * x * x);
    out[i] = gradients[i] * (0.5 + 0.5 * erf(x * 0.70710678118654752440) + (density > 0 ? x * density : 0));
  }
}

// Numbers that a thread takes at once: fewer are not worth a thread.
constexpr long GELU_PIECE = 16384;

template <typename Function>
void for_pieces(long count, long threads, Function task) {
  const long pieces = (count + GELU_PIECE - 1) / GELU_PIECE;
  parallel(pieces, threads, [&](long piece) {
    const long begin = piece * GELU_PIECE;
    task(begin, smaller(GELU_PIECE, count - begin));
  });
}

void gelu_forward(int64_t count, int64_t threads, const float* x, float* out) {
  for_pieces(count, threads, [=](long begin, long piece) {
    for (long i = begin; i < begin + piece; i += LANES<float>) {
      const long lanes = begin + piece - i;
      store(out + i, gelu(load(x + i, lanes)), lanes);
    }
  });
}

void gelu_backward(int64_t count, int64_t threads, const float* grad, const float* x, float* out) {
  for_pieces(count, threads,
             [=](long begin, long piece) { multiply_gelu_slope(x + begin, grad + begin, piece, out + begin); });
}

}  // namespace
