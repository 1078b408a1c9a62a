// The kernels of the local residual, W₂·GELU(W₁·x̄) for each window, head by head (docs of layers/inline_attention.py).
//
// The weights are those of the layers, (outputs, inputs), and may change between calls: nothing is packed. The backward
// pass divides outputs over the threads, never a sum, so that results do not depend on the number of threads.
#pragma once
#include "attention.h"
#include "gelu.h"

namespace {

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
                   const T* bias2, const T* added, T* out, T* state) {
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
    if (state) {
      memcpy(state + unit * heads.channels, mean, heads.channels * sizeof(T));
      memcpy(state + (units + unit) * heads.channels, hidden, heads.channels * sizeof(T));
    }
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

// out (rows begin … end − 1, columns) = aᵀ·b for a (count, a_stride) and b (count, b_stride), of which whole vectors can
// be read; sums (rows) = the sums of the columns of a.
template <typename T>
void multiply_outer(const T* a, long a_stride, const T* b, long b_stride, long count, long begin, long end, long columns,
                    T* out, T* sums) {
  auto tile = [&]<int M, int N>(long row, long column) __attribute__((always_inline)) {
    Vec<T> products[M][N] = {};
    T totals[M] = {};
    for (long i = 0; i < count; ++i) {
      const T *left = a + i * a_stride + row, *right = b + i * b_stride + column;
      Vec<T> values[N];
      INLINEVIT_UNROLL for (int n = 0; n < N; ++n) values[n] = load(right + n * LANES<T>);
      INLINEVIT_UNROLL for (int m = 0; m < M; ++m) {
        INLINEVIT_UNROLL for (int n = 0; n < N; ++n) products[m][n] += broadcast(left[m]) * values[n];
        totals[m] += left[m];
      }
    }
    INLINEVIT_UNROLL for (int m = 0; m < M; ++m) {
      INLINEVIT_UNROLL for (int n = 0; n < N; ++n) {
        const long at = column + n * LANES<T>;
        store(out + (row + m) * columns + at, products[m][n], columns - at);
      }
      if (column == 0) sums[row + m] = totals[m];
    }
  };
  for_row_blocks<4>(end - begin, [&](long row, long rows) {
    with_rows<4>(rows, [&]<int M>() __attribute__((always_inline)) {
      long column = 0;
      for (; column + LANES<T> < columns; column += 2 * LANES<T>) tile.template operator()<M, 2>(begin + row, column);
      if (column < columns) tile.template operator()<M, 1>(begin + row, column);
    });
  });
}

// Scratch of the backward pass. Of each unit, padded: the hidden channels, the gradient before GELU, and x̄. If the width
// of a head is not that of whole vectors, weights with padded rows.
template <typename T>
struct LocalGradients {
  T *hidden, *before, *mean, *weight1, *weight2;
  LocalGradients(Arena& arena, const Attention<T>& attention) {
    const Heads<T>& heads = attention.heads;
    const long size = attention.units() * heads.count * heads.padded_width;
    const bool pad = heads.width < heads.padded_width;
    hidden = arena.take<T>(size);
    before = arena.take<T>(size);
    mean = arena.take<T>(size);
    weight1 = arena.take<T>(pad ? heads.channels * heads.padded_width : 0);
    weight2 = arena.take<T>(pad ? 9 * heads.channels * heads.padded_width : 0);
  }
};

// Rows of `width` numbers to rows of `padded` numbers.
template <typename T>
void pad_rows(const T* from, long rows, long width, long padded, T* to) {
  for (long i = 0; i < rows; ++i) {
    memcpy(to + i * padded, from + i * width, width * sizeof(T));
    memset(to + i * padded + width, 0, (padded - width) * sizeof(T));
  }
}

// With h = GELU(u), u = W₁·x̄ + b₁ and the gradient g of the kernels:
//   W₂: g·hᵀ      b₂: g      u: GELU'(u) · (W₂ᵀ·g)      W₁: ∂u·x̄ᵀ      b₁: ∂u      x̄: W₁ᵀ·∂u, a share for each token
template <typename T>
void local_kernels_backward(const InlinevitAttention* shape, const T* grad, const T* state, const T* weight1,
                            const T* weight2, T* grad_mean, T* grad_x, T* grad_weight1, T* grad_bias1,
                            T* grad_weight2, T* grad_bias2) {
  const Attention<T> attention(*shape);
  const Heads<T>& heads = attention.heads;
  const Grid& grid = attention.grid;
  const long units = attention.units(), threads = attention.threads, channels = heads.channels;
  const long width = heads.width, padded = heads.padded_width, unit_size = heads.count * padded;
  const long outputs = 9 * width, row_size = shape->num_heads * width;
  const auto scratch = take_scratch<LocalGradients<T>>(Scratch::caller, attention);
  const T *rows1 = weight1, *rows2 = weight2;
  if (width < padded) {
    pad_rows(weight1, channels, width, padded, scratch.weight1);
    pad_rows(weight2, 9 * channels, width, padded, scratch.weight2);
    rows1 = scratch.weight1, rows2 = scratch.weight2;
  }
  pad_rows(state, units * heads.count, width, padded, scratch.mean);

  // finish(unit, vector of columns, rows (units, stride) · weight (depth, padded)), for some units.
  auto multiply = [=](const T* rows, long stride, const T* weight, long depth, long first, long count, auto finish) {
    multiply_rows<T, smaller(ROWS, 6)>(
        count, padded / LANES<T>, [=](long i) { return rows + (first + i) * stride; }, weight, padded, LANES<T>, depth,
        [](long, long) { return Vec<T>{}; }, [=](long i, long j, Vec<T> sums) { finish(first + i, j * LANES<T>, sums); });
  };
  // Units of one head: all that has to be known of them for the weights, and the gradient of x̄.
  auto differentiate = [&](long index) {
    const long head = index / threads, first = part_begin(units, threads, index % threads);
    const long count = part_begin(units, threads, index % threads + 1) - first, column = head * padded;
    if (count == 0) return;
    multiply(grad + head * outputs, 9 * channels, rows2 + head * outputs * padded, outputs, first, count,
             [=](long unit, long j, Vec<T> sums) { store(scratch.before + unit * unit_size + column + j, sums); });
    for (long unit = first; unit < first + count; ++unit) {
      const T* sums = state + (units + unit) * channels + head * width;
      T *hidden = scratch.hidden + unit * unit_size + column, *before = scratch.before + unit * unit_size + column;
      multiply_gelu_slope(sums, before, width, before);
      pad_rows(sums, 1, width, padded, hidden);
      gelu_row(hidden, width);
    }
    if (!grad_mean) return;
    multiply(scratch.before + column, unit_size, rows1 + head * width * padded, width, first, count,
             [=, &attention, &grid](long unit, long j, Vec<T> sums) {
               const T share = T(1) / T(larger(1, grid.real_tokens(attention.window(unit))));
               store(grad_mean + unit * channels + head * width + j, sums * broadcast(share), width - j);
             });
  };
  // The gradients of some outputs of a head.
  auto sum_weights = [&](long index) {
    const long head = index / threads, part = index % threads;
    multiply_outer(grad + head * outputs, 9 * channels, scratch.hidden + head * padded, unit_size, units,
                   part_begin(outputs, threads, part), part_begin(outputs, threads, part + 1), width,
                   grad_weight2 + head * outputs * width, grad_bias2 + head * outputs);
    multiply_outer(scratch.before + head * padded, unit_size, scratch.mean + head * padded, unit_size, units,
                   part_begin(width, threads, part), part_begin(width, threads, part + 1), width,
                   grad_weight1 + head * width * width, grad_bias1 + head * width);
  };
  auto spread = [&](long unit) {
    const auto buffers = take_scratch<LocalBuffers<T>>(Scratch::task);
    T* image = grad_x + attention.image(unit) * grid.tokens() * row_size + attention.query_column;
    for (long begin = 0; begin < grid.places(); begin += OUTPUT_TOKENS) {
      const long end = smaller(grid.places(), begin + OUTPUT_TOKENS);
      grid.find_tokens(attention.window(unit), begin, end, buffers.tokens);
      for (long i = 0; i < end - begin; ++i)
        if (buffers.tokens[i] >= 0)
          memcpy(image + buffers.tokens[i] * row_size, grad_mean + unit * channels, channels * sizeof(T));
    }
  };

  parallel(heads.count * threads, threads, differentiate);
  parallel(heads.count * threads, threads, sum_weights);
  if (grad_x) parallel(units, threads, spread);
}

}  // namespace
