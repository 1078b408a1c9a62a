// InLine attention from packed q, k and v: out = v̄ + q·(s·C) + a 3×3 convolution of V (docs of ops/inline.py,
// local.py).
//
// A window is summarised by the number of its tokens, mean key, mean value and Σ (k − k̄)(v − v̄)ᵀ of each head.
// Summaries of parts of a window are merged exactly (Chan's formula), so that parts can be computed in parallel, and
// nothing large is subtracted from something large.
#pragma once
#include "simd.h"

namespace {

// Tokens that are copied out of their strided rows at once: they stay in the L1 and L2 caches.
constexpr long SUMMARY_TOKENS = 64, OUTPUT_TOKENS = 128;

// The windows of a head group. A place is a position in a window: prefix tokens first, then row by row.
struct Grid {
  InlinevitWindows windows;
  long prefix, across, padded_height, padded_width;

  Grid(const InlinevitWindows& windows, long prefix) : windows(windows), prefix(prefix) {
    const long down = (windows.map_height + windows.height - 1) / windows.height;
    across = (windows.map_width + windows.width - 1) / windows.width;
    padded_height = down * windows.height;
    padded_width = across * windows.width;
  }

  long count() const { return padded_height / windows.height * across; }
  long places() const { return prefix + windows.height * windows.width; }
  long tokens() const { return prefix + windows.map_height * windows.map_width; }

  // Rows and columns of the map are rolled by the shift, over the padded map.
  long map_row(long window, long y) const {
    const long row = window / across * windows.height + y + windows.shift_up;
    return row < padded_height ? row : row - padded_height;
  }
  long map_column(long window, long x) const {
    const long column = window % across * windows.width + x + windows.shift_left;
    return column < padded_width ? column : column - padded_width;
  }

  // Which side of the map a place of a shifted window comes from, 0 … 3: tokens of different sides share the window, but
  // are not neighbours.
  int side(long window, long y, long x) const {
    const bool from_top = window / across * windows.height + y + windows.shift_up >= padded_height;
    const bool from_left = window % across * windows.width + x + windows.shift_left >= padded_width;
    return 2 * from_top + from_left;
  }

  // The tokens at places begin … end − 1 of a window; −1 for padding.
  void find_tokens(long window, long begin, long end, int* tokens) const {
    long place = begin;
    for (; place < end && place < prefix; ++place) *tokens++ = int(place);
    while (place < end) {
      const long y = (place - prefix) / windows.width, row = map_row(window, y);
      long x = (place - prefix) % windows.width;
      for (; x < windows.width && place < end; ++x, ++place) {
        const long column = map_column(window, x);
        const bool real = row < windows.map_height && column < windows.map_width;
        *tokens++ = real ? int(prefix + row * windows.map_width + column) : -1;
      }
    }
  }

  // The number of tokens of a window that are not padding.
  long real_tokens(long window) const {
    long rows = 0, columns = 0;
    for (long y = 0; y < windows.height; ++y) rows += map_row(window, y) < windows.map_height;
    for (long x = 0; x < windows.width; ++x) columns += map_column(window, x) < windows.map_width;
    return prefix + rows * columns;
  }

  // Pointers to the rows of an array at columns begin − 1 … begin + count of row y of a window; beyond the window and
  // at padding, pointers to zeros.
  template <typename T>
  void find_row(const T* array, long stride, long window, long y, long begin, long count, const T* zeros,
                const T** pointers) const {
    const long row = y < 0 || y >= windows.height ? windows.map_height : map_row(window, y);
    for (long x = begin - 1; x <= begin + count; ++x) {
      const T* pointer = zeros;
      if (row < windows.map_height && x >= 0 && x < windows.width) {
        const long column = map_column(window, x);
        if (column < windows.map_width) pointer = array + (prefix + row * windows.map_width + column) * stride;
      }
      *pointers++ = pointer;
    }
  }

  // Call task(y, x, count, place) for the parts of rows among places begin … end − 1.
  template <typename Function>
  void for_rows(long begin, long end, Function task) const {
    for (long place = larger(begin, prefix); place < end;) {
      const long y = (place - prefix) / windows.width, x = (place - prefix) % windows.width;
      const long count = smaller(windows.width - x, end - place);
      task(y, x, count, place);
      place += count;
    }
  }
};

// Sizes of one head group. Matrices of a head are padded to whole vectors.
template <typename T>
struct Heads {
  long count, width, padded_width, channels, padded_channels;

  Heads(long count, long width)
      : count(count),
        width(width),
        padded_width(round_up(width, LANES<T>)),
        channels(count * width),
        padded_channels(round_up(channels, LANES<T>) + LANES<T>) {}

  long matrix() const { return padded_width * padded_width; }
  // Σ (k − k̄)(v − v̄)ᵀ, k̄, v̄
  long summary() const { return matrix() + 2 * padded_width; }
};

// Copy columns of rows into a dense matrix (rows, padded width), minus `offset` (padded width) or its own mean, which
// is written to `mean`. Either may be null.
template <typename T>
void gather(const T* const* rows, long count, long column, const Heads<T>& heads, const T* offset, T* mean, T* dense) {
  for (long j = 0; j < heads.padded_width; j += LANES<T>) {
    const long lanes = heads.width - j;
    Vec<T> centre{};
    if (mean) {
      for (long i = 0; i < count; ++i) centre += load(rows[i] + column + j, lanes);
      centre *= broadcast(T(1) / T(count));
      store(mean + j, centre);
    } else if (offset) {
      centre = load(offset + j);
    }
    for (long i = 0; i < count; ++i)
      store(dense + i * heads.padded_width + j, load(rows[i] + column + j, lanes) - centre);
  }
}

// matrix (width, width) += aᵀ·b for dense a and b (count, width), both padded.
template <typename T>
void add_outer(const T* a, const T* b, long count, long width, T* matrix) {
  auto columns = [&]<int N>(long j) {
    constexpr long R = COVARIANCE_ROWS;
    for (long i = 0; i < width; i += R) {
      Vec<T> sums[R][N];
      INLINEVIT_UNROLL for (long r = 0; r < R; ++r) {
        INLINEVIT_UNROLL for (int n = 0; n < N; ++n)
          sums[r][n] = i + r < width ? load(matrix + (i + r) * width + j + n * LANES<T>) : Vec<T>{};
      }
      for (long token = 0; token < count; ++token) {
        const T *left = a + token * width + i, *right = b + token * width + j;
        Vec<T> values[N];
        INLINEVIT_UNROLL for (int n = 0; n < N; ++n) values[n] = load(right + n * LANES<T>);
        INLINEVIT_UNROLL for (long r = 0; r < R; ++r) {
          INLINEVIT_UNROLL for (int n = 0; n < N; ++n) sums[r][n] += broadcast(left[r]) * values[n];
        }
      }
      for (long r = 0; r < R && i + r < width; ++r)
        for (int n = 0; n < N; ++n) store(matrix + (i + r) * width + j + n * LANES<T>, sums[r][n]);
    }
  };
  long j = 0;
  for (; j + 2 * LANES<T> <= width; j += 2 * LANES<T>) columns.template operator()<2>(j);
  if (j < width) columns.template operator()<1>(j);
}

// Merge the means of `added` tokens into a summary of `count`, whose matrix already has the added tokens' own sum.
template <typename T>
void merge_means(T* summary, double count, const T* key_mean, const T* value_mean, double added,
                 const Heads<T>& heads) {
  const long width = heads.padded_width;
  T *keys = summary + heads.matrix(), *values = keys + width;
  const T weight = T(count * added / (count + added)), fraction = T(added / (count + added));
  for (long i = 0; i < width; ++i) {
    const Vec<T> key = broadcast((key_mean[i] - keys[i]) * weight);
    for (long j = 0; j < width; j += LANES<T>)
      store(summary + i * width + j, load(summary + i * width + j) + key * (load(value_mean + j) - load(values + j)));
  }
  for (long j = 0; j < width; j += LANES<T>) {
    store(keys + j, load(keys + j) + broadcast(fraction) * (load(key_mean + j) - load(keys + j)));
    store(values + j, load(values + j) + broadcast(fraction) * (load(value_mean + j) - load(values + j)));
  }
}

template <typename T>
struct SummaryBuffers {
  T *keys, *values, *key_mean, *value_mean;
  SummaryBuffers(Arena& arena, const Heads<T>& heads)
      : keys(arena.take<T>(SUMMARY_TOKENS * heads.padded_width)),
        values(arena.take<T>(SUMMARY_TOKENS * heads.padded_width)),
        key_mean(arena.take<T>(heads.padded_width)),
        value_mean(arena.take<T>(heads.padded_width)) {}
};

// Add tokens to the summaries of all heads, which have `count` tokens before. rows: packed q, k and v of each token,
// of which keys and values of the head group begin at these columns.
template <typename T>
void summarize(const T* const* rows, long added, long key_column, long value_column, const Heads<T>& heads,
               const SummaryBuffers<T>& buffers, T* summaries, long count) {
  for (long begin = 0; begin < added; begin += SUMMARY_TOKENS) {
    const long n = smaller(SUMMARY_TOKENS, added - begin);
    for (long head = 0; head < heads.count; ++head) {
      T* summary = summaries + head * heads.summary();
      if (count + begin == 0) memset(summary, 0, heads.summary() * sizeof(T));
      const long column = head * heads.width;
      gather<T>(rows + begin, n, key_column + column, heads, nullptr, buffers.key_mean, buffers.keys);
      gather<T>(rows + begin, n, value_column + column, heads, nullptr, buffers.value_mean, buffers.values);
      add_outer(buffers.keys, buffers.values, n, heads.padded_width, summary);
      merge_means(summary, double(count + begin), buffers.key_mean, buffers.value_mean, double(n), heads);
    }
  }
}

// Merge the summaries of several parts, `stride` apart, into the first, and make s·C of its matrix.
template <typename T>
void finish_summary(T* summary, long stride, const long* counts, long parts, double scale, const Heads<T>& heads) {
  const long matrix = heads.matrix();
  long count = counts[0];
  for (long part = 1; part < parts; ++part) {
    const T* other = summary + part * stride;
    if (counts[part] == 0) continue;
    for (long i = 0; i < matrix; i += LANES<T>) store(summary + i, load(summary + i) + load(other + i));
    merge_means(summary, double(count), other + matrix, other + matrix + heads.padded_width, double(counts[part]),
                heads);
    count += counts[part];
  }
  const Vec<T> factor = broadcast(T(scale / double(larger(count, 1))));
  for (long i = 0; i < matrix; i += LANES<T>) store(summary + i, load(summary + i) * factor);
}

// out (count, padded width) = constant + rows · matrix for one head. Whole vectors are written: what lies beyond the
// head's width is overwritten by the next head, or is padding.
template <typename T>
void apply_matrix(const T* const* rows, long count, long column, const T* matrix, const T* constant,
                  const Heads<T>& heads, T* out, long stride) {
  multiply_rows<T, smaller(ROWS, 6)>(
      count, heads.padded_width / LANES<T>, [=](long i) { return rows[i] + column; }, matrix, heads.padded_width,
      LANES<T>, heads.width, [=](long, long j) { return constant ? load(constant + j * LANES<T>) : Vec<T>{}; },
      [=](long i, long j, Vec<T> sums) { store(out + i * stride + j * LANES<T>, sums); });
}

// Three rows of a map around a part of its middle row, with one more column on each side (Grid::find_row).
template <typename T>
struct Neighbours {
  const T** rows[3];
  Neighbours(Arena& arena, long width) {
    for (auto& row : rows) row = arena.take<const T*>(width + 2);
  }
  void find(const Grid& grid, const T* array, long stride, long window, long y, long x, long count,
            const T* zeros) const {
    for (int i = 0; i < 3; ++i) grid.find_row(array, stride, window, y + i - 1, x, count, zeros, rows[i]);
  }
};

// out (count, channels) += bias + 3×3 convolution. taps: (9, padded channels); bias: (padded channels) or null.
template <typename T>
void convolve_row(const Neighbours<T>& neighbours, long count, const T* taps, const T* bias, const Heads<T>& heads,
                  T* out, long stride) {
  const T *const *up = neighbours.rows[0], *const *middle = neighbours.rows[1], *const *down = neighbours.rows[2];
  for (long c = 0; c < heads.channels; c += LANES<T>) {
    const long lanes = heads.channels - c;
    Vec<T> w[9];
    INLINEVIT_UNROLL for (int tap = 0; tap < 9; ++tap) w[tap] = load(taps + tap * heads.padded_channels + c);
    const Vec<T> constant = bias ? load(bias + c) : Vec<T>{};
    // Each column is loaded once. It completes the sum of the token on its left, and begins that of the one on its
    // right.
    Vec<T> left{}, middle_sum{};
    for (long i = 0; i < count + 2; ++i) {
      const Vec<T> a = load(up[i] + c, lanes), b = load(middle[i] + c, lanes), d = load(down[i] + c, lanes);
      const Vec<T> complete = left + w[2] * a + w[5] * b + w[8] * d;
      left = middle_sum + w[1] * a + w[4] * b + w[7] * d;
      middle_sum = constant + w[0] * a + w[3] * b + w[6] * d;
      if (i >= 2) {
        T* to = out + (i - 2) * stride + c;
        store(to, load(to, lanes) + complete, lanes);
      }
    }
  }
}

// taps (10, padded channels) += the gradients of the kernels and of the bias, for gradients of the output at one part
// of a row.
template <typename T>
void correlate_row(const Neighbours<T>& neighbours, const T* const* gradients, long count, const Heads<T>& heads,
                   T* taps) {
  const T *const *up = neighbours.rows[0], *const *middle = neighbours.rows[1], *const *down = neighbours.rows[2];
  for (long c = 0; c < heads.channels; c += LANES<T>) {
    const long lanes = heads.channels - c;
    Vec<T> sums[9];
    INLINEVIT_UNROLL for (int tap = 0; tap < 9; ++tap) sums[tap] = load(taps + tap * heads.padded_channels + c);
    Vec<T> here{}, left{}, far_left{};
    for (long i = 0; i < count + 2; ++i) {
      far_left = left;
      left = here;
      here = i < count ? load(gradients[i] + c, lanes) : Vec<T>{};
      const Vec<T> a = load(up[i] + c, lanes), b = load(middle[i] + c, lanes), d = load(down[i] + c, lanes);
      sums[0] += here * a, sums[1] += left * a, sums[2] += far_left * a;
      sums[3] += here * b, sums[4] += left * b, sums[5] += far_left * b;
      sums[6] += here * d, sums[7] += left * d, sums[8] += far_left * d;
    }
    INLINEVIT_UNROLL for (int tap = 0; tap < 9; ++tap) store(taps + tap * heads.padded_channels + c, sums[tap]);
    Vec<T> total = load(taps + 9 * heads.padded_channels + c);
    for (long i = 0; i < count; ++i) total += load(gradients[i] + c, lanes);
    store(taps + 9 * heads.padded_channels + c, total);
  }
}

// One head group of a batch: where its arrays are, and how the work is divided. A unit is a window of an image; it is
// divided into parts where there are few units.
template <typename T>
struct Attention {
  Grid grid;
  Heads<T> heads;
  long batch, threads, parts;
  double scale;
  // Of a token's packed q, k and v.
  long stride, query_column, key_column, value_column;

  Attention(const InlinevitAttention& shape)
      : grid(shape.windows, shape.prefix),
        heads(shape.num_heads / shape.windows.num_head_groups, shape.head_dim),
        batch(shape.batch),
        threads(shape.threads),
        scale(shape.scale) {
    const long all = shape.num_heads * shape.head_dim;
    stride = 3 * all;
    query_column = shape.windows.head_group * heads.channels;
    key_column = query_column + all;
    value_column = key_column + all;
    // Small windows, and batches that occupy all threads, are not divided.
    const bool divide = threads > 1 && units() < 4 * threads;
    parts = divide ? larger(1, smaller(grid.places() / 96, 4 * threads)) : 1;
  }

  long units() const { return batch * grid.count(); }
  long image(long unit) const { return unit / grid.count(); }
  long window(long unit) const { return unit % grid.count(); }
  long begin(long part) const { return part_begin(grid.places(), parts, part); }

  // Pointers to the rows of an array (tokens, stride) at these places. Padding: left out if zeros is null, else
  // zeros.
  long find_rows(const T* array, long row_stride, long window, long begin, long end, int* tokens, const T* zeros,
                 const T** rows) const {
    grid.find_tokens(window, begin, end, tokens);
    long found = 0;
    for (long i = 0; i < end - begin; ++i) {
      if (tokens[i] >= 0)
        rows[found++] = array + tokens[i] * row_stride;
      else if (zeros)
        rows[found++] = zeros;
    }
    return found;
  }
};

// kernels (channels, 9) of a unit, to taps (9, padded channels); backwards: as the transposed convolution needs them.
template <typename T>
void transpose_taps(const T* kernels, const Heads<T>& heads, bool backwards, T* taps) {
  memset(taps, 0, 9 * heads.padded_channels * sizeof(T));
  for (long c = 0; c < heads.channels; ++c)
    for (int tap = 0; tap < 9; ++tap)
      taps[(backwards ? 8 - tap : tap) * heads.padded_channels + c] = kernels[9 * c + tap];
}

// Scratch of a task that summarises tokens or computes outputs.
template <typename T>
struct AttentionBuffers {
  SummaryBuffers<T> summary;
  Neighbours<T> neighbours;
  int* tokens;
  const T** rows;
  T *zeros, *taps, *bias, *out;

  AttentionBuffers(Arena& arena, const Attention<T>& attention)
      : summary(arena, attention.heads),
        neighbours(arena, smaller(attention.grid.windows.width, OUTPUT_TOKENS)),
        tokens(arena.take<int>(OUTPUT_TOKENS)),
        rows(arena.take<const T*>(OUTPUT_TOKENS)),
        zeros(arena.take<T>(attention.stride)),
        taps(arena.take<T>(9 * attention.heads.padded_channels)),
        bias(arena.take<T>(attention.heads.padded_channels)),
        out(arena.take<T>(OUTPUT_TOKENS * attention.heads.padded_channels)) {}
};

// Buffers of a task, with zeros for what lies outside of its window.
template <typename Buffers, typename T>
Buffers take_buffers(const Attention<T>& attention) {
  const auto buffers = take_scratch<Buffers>(Scratch::task, attention);
  memset(buffers.zeros, 0, attention.stride * sizeof(T));
  return buffers;
}

// Summarise places begin … end − 1 of a window; returns the number of real tokens. qkv: of the window's image.
template <typename T>
long summarize_places(const Attention<T>& attention, const T* qkv, long window, long begin, long end,
                      const AttentionBuffers<T>& buffers, T* summaries) {
  long count = 0;
  for (long first = begin; first < end; first += OUTPUT_TOKENS) {
    const long last = smaller(end, first + OUTPUT_TOKENS);
    const long found =
        attention.find_rows(qkv, attention.stride, window, first, last, buffers.tokens, nullptr, buffers.rows);
    summarize(buffers.rows, found, attention.key_column, attention.value_column, attention.heads, buffers.summary,
              summaries, count);
    count += found;
  }
  if (count == 0) memset(summaries, 0, attention.heads.count * attention.heads.summary() * sizeof(T));
  return count;
}

// out (places, padded channels) += bias + 3×3 convolution of the values, at up to OUTPUT_TOKENS places.
template <typename T>
void convolve_places(const Attention<T>& attention, const T* qkv, long window, long begin, long end, const T* taps,
                     const T* bias, const AttentionBuffers<T>& buffers, T* out) {
  const long stride = attention.heads.padded_channels;
  attention.grid.for_rows(begin, end, [&](long y, long x, long count, long place) {
    buffers.neighbours.find(attention.grid, qkv + attention.value_column, attention.stride, window, y, x, count,
                            buffers.zeros);
    convolve_row(buffers.neighbours, count, taps, bias, attention.heads, out + (place - begin) * stride, stride);
  });
}

// Attention at up to OUTPUT_TOKENS places, into out (places, padded channels). buffers.tokens are the tokens of the
// places then.
template <typename T>
void attend_places(const Attention<T>& attention, const T* qkv, long window, long begin, long end, const T* summaries,
                   const AttentionBuffers<T>& buffers, T* out) {
  const Heads<T>& heads = attention.heads;
  attention.find_rows(qkv, attention.stride, window, begin, end, buffers.tokens, buffers.zeros, buffers.rows);
  for (long head = 0; head < heads.count; ++head) {
    const T* summary = summaries + head * heads.summary();
    const long column = head * heads.width;
    apply_matrix(buffers.rows, end - begin, attention.query_column + column, summary,
                 summary + heads.matrix() + heads.padded_width, heads, out + column, heads.padded_channels);
  }
}

// Scratch of a whole call: the summaries of all parts.
template <typename T>
struct Summaries {
  T* all;
  long* counts;
  Summaries(Arena& arena, const Attention<T>& attention)
      : all(arena.take<T>(attention.units() * attention.parts * attention.heads.count * attention.heads.summary())),
        counts(arena.take<long>(attention.units() * attention.parts)) {}
};

template <typename T>
void attention_forward(const InlinevitAttention* shape, const T* qkv, const T* kernels, const T* bias, T* out,
                       T* state) {
  const Attention<T> attention(*shape);
  const Heads<T>& heads = attention.heads;
  const Grid& grid = attention.grid;
  const long parts = attention.parts, width = heads.width, summary_size = heads.count * heads.summary();
  const auto summaries = take_scratch<Summaries<T>>(Scratch::caller, attention);
  auto tokens_of = [&](long unit) { return qkv + attention.image(unit) * grid.tokens() * attention.stride; };

  auto summarize_part = [&](long index) {
    const long unit = index / parts, part = index % parts;
    const auto buffers = take_buffers<AttentionBuffers<T>>(attention);
    summaries.counts[index] =
        summarize_places(attention, tokens_of(unit), attention.window(unit), attention.begin(part),
                         attention.begin(part + 1), buffers, summaries.all + index * summary_size);
  };
  auto finish_head = [&](long index) {
    const long unit = index / heads.count, head = index % heads.count;
    T* summary = summaries.all + unit * parts * summary_size + head * heads.summary();
    finish_summary(summary, summary_size, summaries.counts + unit * parts, parts, attention.scale, heads);
    if (!state) return;
    for (long i = 0; i < width + 2; ++i) {
      const T* from = summary + (i < width ? i : heads.padded_width + i - width) * heads.padded_width;
      memcpy(state + (index * (width + 2) + i) * width, from, width * sizeof(T));
    }
  };
  auto attend_part = [&](long index) {
    const long unit = index / parts, part = index % parts;
    const auto buffers = take_buffers<AttentionBuffers<T>>(attention);
    if (kernels) transpose_taps(kernels + unit * heads.channels * 9, heads, false, buffers.taps);
    if (bias) {
      memset(buffers.bias, 0, heads.padded_channels * sizeof(T));
      memcpy(buffers.bias, bias, heads.channels * sizeof(T));
    }
    T* image = out + attention.image(unit) * grid.tokens() * heads.channels;
    for (long begin = attention.begin(part); begin < attention.begin(part + 1); begin += OUTPUT_TOKENS) {
      const long end = smaller(attention.begin(part + 1), begin + OUTPUT_TOKENS);
      attend_places(attention, tokens_of(unit), attention.window(unit), begin, end,
                    summaries.all + unit * parts * summary_size, buffers, buffers.out);
      if (kernels)
        convolve_places<T>(attention, tokens_of(unit), attention.window(unit), begin, end, buffers.taps,
                           bias ? buffers.bias : nullptr, buffers, buffers.out);
      for (long i = 0; i < end - begin; ++i)
        if (buffers.tokens[i] >= 0)
          memcpy(image + buffers.tokens[i] * heads.channels, buffers.out + i * heads.padded_channels,
                 heads.channels * sizeof(T));
    }
  };

  if (parts == 1) {
    // A unit at a time, while its tokens are in the cache.
    parallel(attention.units(), attention.threads, [&](long unit) {
      summarize_part(unit);
      for (long head = 0; head < heads.count; ++head) finish_head(unit * heads.count + head);
      attend_part(unit);
    });
  } else {
    parallel(attention.units() * parts, attention.threads, summarize_part);
    parallel(attention.units() * heads.count, attention.threads, finish_head);
    parallel(attention.units() * parts, attention.threads, attend_part);
  }
}

// What the backward pass needs of all tokens. Of each part, sums: for each head Σ qᵀ·g and Σ g; for each channel the
// gradients of the 9 taps and of the bias. Of each unit and head: the matrices that g, v − v̄ and k − k̄ are
// multiplied by.
template <typename T>
struct GradientSums {
  long head_size, size, matrices_size;
  T *all, *matrices;
  GradientSums(Arena& arena, const Attention<T>& attention)
      : head_size(attention.heads.matrix() + attention.heads.padded_width),
        size(attention.heads.count * head_size + 10 * attention.heads.padded_channels),
        matrices_size(3 * attention.heads.matrix() + 3 * attention.heads.padded_width),
        all(arena.take<T>(attention.units() * attention.parts * size)),
        matrices(arena.take<T>(attention.units() * attention.heads.count * matrices_size)) {}
};

template <typename T>
struct BackwardBuffers : AttentionBuffers<T> {
  // Pointers to the gradients of the output at some places, and to those of a row with one more column on each side.
  const T **gradients, **gradient_row, **dense_rows;
  T *dense, *dense_gradients;
  BackwardBuffers(Arena& arena, const Attention<T>& attention)
      : AttentionBuffers<T>(arena, attention),
        gradients(arena.take<const T*>(OUTPUT_TOKENS)),
        gradient_row(arena.take<const T*>(OUTPUT_TOKENS + 2)),
        dense_rows(arena.take<const T*>(OUTPUT_TOKENS)),
        dense(arena.take<T>(OUTPUT_TOKENS * attention.heads.padded_width)),
        dense_gradients(arena.take<T>(OUTPUT_TOKENS * attention.heads.padded_width)) {}
};

// With g the gradient of the output and D = s·Σ q_iᵀ·g_i:
//   q: s·g·Cᵀ      k: (v − v̄)·Dᵀ / N      v: (k − k̄)·D / N + Σ g / N + transposed convolution of g
template <typename T>
void attention_backward(const InlinevitAttention* shape, const T* grad, const T* qkv, const T* kernels, const T* state,
                        T* grad_qkv, T* grad_kernels, T* grad_bias) {
  const Attention<T> attention(*shape);
  const Heads<T>& heads = attention.heads;
  const Grid& grid = attention.grid;
  const long parts = attention.parts, width = heads.width, padded = heads.padded_width;
  const auto sums = take_scratch<GradientSums<T>>(Scratch::caller, attention);
  auto tokens_of = [&](long unit) { return qkv + attention.image(unit) * grid.tokens() * attention.stride; };
  auto gradients_of = [&](long unit) { return grad + attention.image(unit) * grid.tokens() * heads.channels; };

  auto sum_part = [&](long index) {
    const long unit = index / parts, part = index % parts, window = attention.window(unit);
    const auto buffers = take_buffers<BackwardBuffers<T>>(attention);
    T *sum = sums.all + index * sums.size, *taps = sum + heads.count * sums.head_size;
    memset(sum, 0, sums.size * sizeof(T));
    for (long begin = attention.begin(part); begin < attention.begin(part + 1); begin += OUTPUT_TOKENS) {
      const long end = smaller(attention.begin(part + 1), begin + OUTPUT_TOKENS);
      const long count = attention.find_rows(tokens_of(unit), attention.stride, window, begin, end, buffers.tokens,
                                             nullptr, buffers.rows);
      attention.find_rows(gradients_of(unit), heads.channels, window, begin, end, buffers.tokens, nullptr,
                          buffers.gradients);
      for (long head = 0; head < heads.count; ++head) {
        T *matrix = sum + head * sums.head_size, *total = matrix + heads.matrix();
        const long column = head * width;
        gather<T>(buffers.rows, count, attention.query_column + column, heads, nullptr, nullptr, buffers.dense);
        gather<T>(buffers.gradients, count, column, heads, nullptr, nullptr, buffers.dense_gradients);
        add_outer(buffers.dense, buffers.dense_gradients, count, padded, matrix);
        for (long j = 0; j < padded; j += LANES<T>) {
          Vec<T> added{};
          for (long i = 0; i < count; ++i) added += load(buffers.dense_gradients + i * padded + j);
          store(total + j, load(total + j) + added);
        }
      }
      if (!grad_kernels && !grad_bias) continue;
      grid.for_rows(begin, end, [&](long y, long x, long n, long) {
        buffers.neighbours.find(grid, tokens_of(unit) + attention.value_column, attention.stride, window, y, x, n,
                                buffers.zeros);
        grid.find_row(gradients_of(unit), heads.channels, window, y, x, n, buffers.zeros, buffers.gradient_row);
        correlate_row(buffers.neighbours, buffers.gradient_row + 1, n, heads, taps);
      });
    }
  };

  auto merge_unit = [&](long unit) {
    T* sum = sums.all + unit * parts * sums.size;
    for (long part = 1; part < parts; ++part)
      for (long i = 0; i < sums.size; i += LANES<T>)
        store(sum + i, load(sum + i) + load(sum + part * sums.size + i));
    const T* taps = sum + heads.count * sums.head_size;
    for (long c = 0; c < heads.channels; ++c) {
      if (grad_kernels)
        for (int tap = 0; tap < 9; ++tap)
          grad_kernels[(unit * heads.channels + c) * 9 + tap] = taps[tap * heads.padded_channels + c];
      if (grad_bias) grad_bias[unit * heads.channels + c] = taps[9 * heads.padded_channels + c];
    }
    const T inverse = T(1) / T(larger(1, grid.real_tokens(attention.window(unit)))), scale = T(attention.scale);
    for (long head = 0; head < heads.count; ++head) {
      const T *covariance = state + (unit * heads.count + head) * (width + 2) * width;
      const T *means = covariance + width * width, *outer = sum + head * sums.head_size;
      T* matrices = sums.matrices + (unit * heads.count + head) * sums.matrices_size;
      memset(matrices, 0, sums.matrices_size * sizeof(T));
      T *to_queries = matrices, *to_keys = to_queries + heads.matrix(), *to_values = to_keys + heads.matrix();
      T *key_mean = to_values + heads.matrix(), *value_mean = key_mean + padded, *constant = value_mean + padded;
      for (long i = 0; i < width; ++i) {
        for (long j = 0; j < width; ++j) {
          to_queries[i * padded + j] = covariance[j * width + i];
          to_keys[i * padded + j] = outer[j * padded + i] * scale * inverse;
          to_values[i * padded + j] = outer[i * padded + j] * scale * inverse;
        }
        key_mean[i] = means[i];
        value_mean[i] = means[width + i];
        constant[i] = outer[heads.matrix() + i] * inverse;
      }
    }
  };

  auto write_part = [&](long index) {
    const long unit = index / parts, part = index % parts, window = attention.window(unit);
    const auto buffers = take_buffers<BackwardBuffers<T>>(attention);
    if (kernels) transpose_taps(kernels + unit * heads.channels * 9, heads, true, buffers.taps);
    T* image = grad_qkv + attention.image(unit) * grid.tokens() * attention.stride;
    for (long begin = attention.begin(part); begin < attention.begin(part + 1); begin += OUTPUT_TOKENS) {
      const long end = smaller(attention.begin(part + 1), begin + OUTPUT_TOKENS), n = end - begin;
      attention.find_rows(tokens_of(unit), attention.stride, window, begin, end, buffers.tokens, buffers.zeros,
                          buffers.rows);
      attention.find_rows(gradients_of(unit), heads.channels, window, begin, end, buffers.tokens, buffers.zeros,
                          buffers.gradients);
      for (long i = 0; i < n; ++i) buffers.dense_rows[i] = buffers.dense + i * padded;
      // Compute one of the three outputs of all heads, and write it; finish is called in between.
      auto output = [&](long to_column, auto multiply, auto finish) {
        for (long head = 0; head < heads.count; ++head)
          multiply(head * width, sums.matrices + (unit * heads.count + head) * sums.matrices_size,
                   buffers.out + head * width);
        finish();
        for (long i = 0; i < n; ++i)
          if (buffers.tokens[i] >= 0)
            memcpy(image + buffers.tokens[i] * attention.stride + to_column, buffers.out + i * heads.padded_channels,
                   heads.channels * sizeof(T));
      };
      const long matrix = heads.matrix(), out_stride = heads.padded_channels;
      auto nothing = [] {};
      output(
          attention.query_column,
          [&](long column, const T* matrices, T* out) {
            apply_matrix<T>(buffers.gradients, n, column, matrices, nullptr, heads, out, out_stride);
          },
          nothing);
      output(
          attention.key_column,
          [&](long column, const T* matrices, T* out) {
            const T* value_mean = matrices + 3 * matrix + padded;
            gather<T>(buffers.rows, n, attention.value_column + column, heads, value_mean, nullptr, buffers.dense);
            apply_matrix<T>(buffers.dense_rows, n, 0, matrices + matrix, nullptr, heads, out, out_stride);
          },
          nothing);
      output(
          attention.value_column,
          [&](long column, const T* matrices, T* out) {
            const T *key_mean = matrices + 3 * matrix, *constant = key_mean + 2 * padded;
            gather<T>(buffers.rows, n, attention.key_column + column, heads, key_mean, nullptr, buffers.dense);
            apply_matrix<T>(buffers.dense_rows, n, 0, matrices + 2 * matrix, constant, heads, out, out_stride);
          },
          [&] {
            if (!kernels) return;
            grid.for_rows(begin, end, [&](long y, long x, long count, long place) {
              buffers.neighbours.find(grid, gradients_of(unit), heads.channels, window, y, x, count, buffers.zeros);
              convolve_row<T>(buffers.neighbours, count, buffers.taps, nullptr, heads,
                              buffers.out + (place - begin) * out_stride, out_stride);
            });
          });
    }
  };

  if (parts == 1) {
    parallel(attention.units(), attention.threads, [&](long unit) {
      sum_part(unit);
      merge_unit(unit);
      write_part(unit);
    });
  } else {
    parallel(attention.units() * parts, attention.threads, sum_part);
    parallel(attention.units(), attention.threads, merge_unit);
    parallel(attention.units() * parts, attention.threads, write_part);
  }
}

}  // namespace
