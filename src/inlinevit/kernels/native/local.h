// The kernels of the local residual, W₂·GELU(W₁·x̄) for each window, head by head (docs of layers/inline_attention.py).
//
// The weights are those of the layers, (outputs, inputs), and may change between calls: nothing is packed.
#pragma once
#include "attention.h"
#include "gemm.h"

namespace {

void gelu_row(float* values, long count) { gelu_rows(values, 1, count, count); }

void gelu_row(double* values, long count) {
  for (long i = 0; i < count; ++i) values[i] *= 0.5 + 0.5 * erf(values[i] * 0.70710678118654752440);
}

// total (columns) += the sum of rows. Few rows at a time, so that rounding errors do not grow with their number.
template <typename T>
void add_rows(const T* const* rows, long count, long columns, T* total) {
  auto add = [&]<int N>(long c) {
    const long lanes = columns - c;
    Vec<T> sums[N] = {};
    for (long i = 0; i < count; ++i) {
      INLINEVIT_UNROLL for (int n = 0; n < N; ++n)
        sums[n] += N == 1 ? load(rows[i] + c, lanes) : load(rows[i] + c + n * LANES<T>);
    }
    for (int n = 0; n < N; ++n) store(total + c + n * LANES<T>, load(total + c + n * LANES<T>) + sums[n]);
  };
  long c = 0;
  for (; c + 4 * LANES<T> <= columns; c += 4 * LANES<T>) add.template operator()<4>(c);
  for (; c < columns; c += LANES<T>) add.template operator()<1>(c);
}

// Call finish(i, output, Σ_k row(i)[k] · weight[output · depth + k]) for all rows i and outputs begin … end − 1.
template <typename T, typename Rows, typename Finish>
void multiply_transposed(long rows, Rows row, const T* weight, long begin, long end, long depth, Finish finish) {
  for_row_blocks<4>(rows, [&](long i, long count) {
    with_rows<4>(count, [&]<int M>() __attribute__((always_inline)) {
      for (long output = begin; output < end; ++output) {
        Vec<T> sums[M] = {};
        for (long k = 0; k < depth; k += LANES<T>) {
          const Vec<T> right = load(weight + output * depth + k, depth - k);
          INLINEVIT_UNROLL for (int m = 0; m < M; ++m) sums[m] += load(row(i + m) + k, depth - k) * right;
        }
        INLINEVIT_UNROLL for (int m = 0; m < M; ++m) finish(i + m, output, sum<T>(sums[m]));
      }
    });
  });
}

// Scratch of a whole call: for each part of a unit the sum of its tokens, for each unit the hidden channels.
template <typename T>
struct LocalScratch {
  T *sums, *hidden;
  LocalScratch(Arena& arena, const Attention<T>& attention)
      : sums(arena.take<T>(attention.units() * attention.parts * attention.heads.padded_channels)),
        hidden(arena.take<T>(attention.units() * attention.heads.padded_channels)) {}
};

// Scratch of a task.
template <typename T>
struct LocalBuffers {
  int* tokens;
  const T** rows;
  LocalBuffers(Arena& arena)
      : tokens(arena.take<int>(OUTPUT_TOKENS)), rows(arena.take<const T*>(OUTPUT_TOKENS)) {}
};

template <typename T>
void local_kernels(const InlinevitAttention* shape, const T* x, const T* weight1, const T* bias1, const T* weight2,
                   const T* bias2, const T* added, T* out) {
  const Attention<T> attention(*shape);
  const Heads<T>& heads = attention.heads;
  const long units = attention.units(), parts = attention.parts, threads = attention.threads;
  const long width = heads.width, padded = heads.padded_channels, row_size = shape->num_heads * width;
  const auto scratch = take_scratch<LocalScratch<T>>(Scratch::caller, attention);

  auto sum_part = [&](long index) {
    const long unit = index / parts, last = attention.begin(index % parts + 1);
    const T* image = x + attention.image(unit) * attention.grid.tokens() * row_size + attention.query_column;
    const auto buffers = take_scratch<LocalBuffers<T>>(Scratch::task);
    T* sums = scratch.sums + index * padded;
    memset(sums, 0, padded * sizeof(T));
    for (long begin = attention.begin(index % parts); begin < last; begin += OUTPUT_TOKENS) {
      const long found = attention.find_rows(image, row_size, attention.window(unit), begin,
                                             smaller(last, begin + OUTPUT_TOKENS), buffers.tokens, nullptr, buffers.rows);
      add_rows(buffers.rows, found, heads.channels, sums);
    }
  };
  auto make_hidden = [&](long unit) {
    T *mean = scratch.sums + unit * parts * padded, *hidden = scratch.hidden + unit * padded;
    const T count = T(larger(1, attention.grid.real_tokens(attention.window(unit))));
    for (long c = 0; c < heads.channels; c += LANES<T>) {
      Vec<T> total{};
      for (long part = 0; part < parts; ++part) total += load(mean + part * padded + c);
      store(mean + c, total / broadcast(count));
    }
    for (long column = 0; column < heads.channels; column += width)
      multiply_transposed<T>(
          1, [=](long) { return mean + column; }, weight1, column, column + width, width,
          [=](long, long output, T value) { hidden[output] = value + bias1[output]; });
    gelu_row(hidden, heads.channels);
  };
  // The outputs of each head are divided over the threads: there are few heads.
  auto make_outputs = [&](long index) {
    const long head = index / threads, outputs = 9 * width;
    const long begin = head * outputs + part_begin(outputs, threads, index % threads);
    const long end = head * outputs + part_begin(outputs, threads, index % threads + 1);
    const T* hidden = scratch.hidden + head * width;
    multiply_transposed<T>(
        units, [=](long unit) { return hidden + unit * padded; }, weight2, begin, end, width,
        [=](long unit, long output, T value) {
          out[unit * 9 * heads.channels + output] = value + bias2[output] + (added ? added[output] : T(0));
        });
  };

  if (parts == 1) {
    parallel(units, threads, [&](long unit) {
      sum_part(unit);
      make_hidden(unit);
    });
  } else {
    parallel(units * parts, threads, sum_part);
    parallel(units, threads, make_hidden);
  }
  parallel(heads.count * threads, threads, make_outputs);
}

}  // namespace
