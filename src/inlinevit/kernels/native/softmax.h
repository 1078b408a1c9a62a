// Softmax attention within windows: out = softmax(s·q·kᵀ + bias)·v.
//
// The keys and values of a window are packed once. Queries are processed in tiles and keys in blocks, whose maxima and
// sums are merged as they come (online softmax): scores stay in the L2 cache, however large the window is.
#pragma once
#include "attention.h"

namespace {

constexpr long SCORE_ROWS = 48, KEY_BLOCK = 512;
constexpr double LOG2_E = 1.4426950408889634;

// 2^x up to a relative error of 3e-7, for x <= 0; exactly 0 for x < −127.
INLINEVIT_INLINE Vec<float> exp2(Vec<float> x) {
  const Vec<float> least = broadcast(-127.0f);
  x = x < least ? least : x;
  // Adding 1.5·2²³ rounds to an integer, which is in the low bits of the sum.
  const Vec<float> shifted = x + 12582912.0f;
  const Vec<float> fraction = x - (shifted - 12582912.0f);
  // A minimax fit for |fraction| <= 1/2.
  Vec<float> power = fraction * 1.3276471960e-3f + 9.6755415026e-3f;
  power = power * fraction + 5.5507132751e-2f;
  power = power * fraction + 2.4022119721e-1f;
  power = power * fraction + 6.9314696706e-1f;
  power = power * fraction + 1.0000000717f;
  return power * Vec<float>((Vec<int32_t>(shifted) - (0x4B400000 - 127)) << 23);
}

// What is added to the scores of a block: biases of relative positions, or a null table. They are those of a window of
// `side` tokens; a smaller one uses the middle of the table.
struct RelativeBias {
  // (heads, (2 · side − 1)²), in units of log 2; from the last position to the first, so that the biases of
  // consecutive keys are consecutive.
  const float* table;
  long side;

  long length() const { return 2 * side - 1; }
  // The biases of the query at (y, x): that of the key at (0, 0) is the first.
  const float* find(long head, long y, long x) const {
    return table + head * length() * length() + (side - 1 - y) * length() + side - 1 - x;
  }
};

// The keys and values of the heads of a window. Keys: for each head and vector of keys (width, LANES). Values: for each
// head (places, padded width).
struct SoftmaxKeys {
  long padded_places, key_size, value_size;
  float *keys, *values;

  SoftmaxKeys(Arena& arena, const Heads<float>& heads, long places, long windows)
      : padded_places(round_up(places, LANES<float>)),
        key_size(padded_places * heads.width),
        value_size(places * heads.padded_width),
        keys(arena.take<float>(windows * heads.count * key_size)),
        values(arena.take<float>(windows * heads.count * value_size)) {}

  // Those of the `index`-th window.
  SoftmaxKeys at(long index, const Heads<float>& heads) const {
    SoftmaxKeys found = *this;
    found.keys += index * heads.count * key_size;
    found.values += index * heads.count * value_size;
    return found;
  }
};

// A part of a row of keys, `offset` after the first key of its block; its biases are `table` after those of (0, 0).
struct KeyRow {
  long offset, count, table;
};

// Scratch of a task.
struct SoftmaxBuffers {
  float *penalties, *queries, *scores, *out, *maxima, *sums, *corrections;
  const float** initial;
  KeyRow* rows;
  long scores_stride;

  SoftmaxBuffers(Arena& arena, const Heads<float>& heads, long places) {
    const long keys = round_up(smaller(KEY_BLOCK, places), LANES<float>);
    scores_stride = keys + LANES<float>;
    penalties = arena.take<float>(4 * round_up(places, LANES<float>));
    queries = arena.take<float>(SCORE_ROWS * heads.width);
    scores = arena.take<float>(SCORE_ROWS * scores_stride);
    out = arena.take<float>(SCORE_ROWS * heads.padded_width);
    maxima = arena.take<float>(SCORE_ROWS);
    sums = arena.take<float>(SCORE_ROWS);
    corrections = arena.take<float>(SCORE_ROWS);
    initial = arena.take<const float*>(SCORE_ROWS);
    rows = arena.take<KeyRow>(keys);
  }
};

// Pack the keys and values of one head of a window. qkv: of the window's image.
void pack_keys(const Attention<float>& attention, const float* qkv, long window, long head, const SoftmaxKeys& packed,
               const AttentionBuffers<float>& buffers) {
  const Heads<float>& heads = attention.heads;
  const long column = head * heads.width, places = attention.grid.places();
  for (long begin = 0; begin < places; begin += OUTPUT_TOKENS) {
    const long end = smaller(places, begin + OUTPUT_TOKENS);
    attention.find_rows(qkv, attention.stride, window, begin, end, buffers.tokens, buffers.zeros, buffers.rows);
    gather<float>(buffers.rows, end - begin, attention.value_column + column, heads, nullptr, nullptr,
                  packed.values + head * packed.value_size + begin * heads.padded_width);
    for (long key = begin; key < end; key += LANES<float>) {
      const float* rows[LANES<float>];
      for (long lane = 0; lane < LANES<float>; ++lane)
        rows[lane] = (key + lane < end ? buffers.rows[key + lane - begin] : buffers.zeros) + attention.key_column + column;
      float* to = packed.keys + head * packed.key_size + key * heads.width;
      for (long c = 0; c < heads.width; ++c)
        for (long lane = 0; lane < LANES<float>; ++lane) to[c * LANES<float> + lane] = rows[lane][c];
    }
  }
}

// Make penalties (4, padded places): 0 for the keys that the queries of a side see, else −∞.
void make_penalties(const Grid& grid, long window, float* penalties) {
  const long places = grid.places(), padded = round_up(places, LANES<float>);
  const bool shifted = grid.windows.shift_up > 0 || grid.windows.shift_left > 0;
  for (int side = 0; side < (shifted ? 4 : 1); ++side) {
    float* to = penalties + side * padded;
    for (long place = 0; place < padded; ++place) to[place] = place < grid.prefix ? 0.0f : -INFINITY;
    grid.for_rows(0, places, [&](long y, long x, long count, long place) {
      if (grid.map_row(window, y) >= grid.windows.map_height) return;
      for (long i = 0; i < count; ++i)
        if (grid.map_column(window, x + i) < grid.windows.map_width && grid.side(window, y, x + i) == side)
          to[place + i] = 0.0f;
    });
  }
}

// The weights of the scores of a row, to base 2, in place, and their sum. They are relative to `most`.
INLINEVIT_INLINE float exponentiate(float* scores, long count, float most) {
  Vec<float> total{};
  for (long key = 0; key < count; key += LANES<float>) {
    const Vec<float> weights = exp2(load(scores + key) - broadcast(most));
    store(scores + key, weights);
    total += weights;
  }
  return sum<float>(total);
}

// Attention of one head at places begin … end − 1, at most SCORE_ROWS, to out (places, `stride` apart), of which whole
// vectors are written. rows: packed q, k and v of these places. Queries at padding give anything.
void attend_head(const Attention<float>& attention, long window, long head, long begin, long end,
                    const float* const* rows, const RelativeBias& bias, const SoftmaxKeys& packed,
                    const SoftmaxBuffers& buffers, float* out, long stride) {
  const Heads<float>& heads = attention.heads;
  const Grid& grid = attention.grid;
  const long places = grid.places(), count = end - begin, width = heads.width, padded = packed.padded_places;
  const long query_column = attention.query_column + head * width, bias_head = attention.query_column / width + head;
  const float scale = float(attention.scale * LOG2_E);
  for (long i = 0; i < count; ++i) {
    for (long c = 0; c < width; ++c) buffers.queries[i * width + c] = rows[i][query_column + c] * scale;
    buffers.maxima[i] = -3e38f;
    buffers.sums[i] = 0.0f;
  }
  for (long first = 0; first < places; first += KEY_BLOCK) {
    const long keys = smaller(KEY_BLOCK, places - first), vectors = (keys + LANES<float> - 1) / LANES<float>;
    const bool last = first + keys == places;
    long key_rows = 0;
    if (bias.table)
      grid.for_rows(first, first + keys, [&](long y, long x, long length, long place) {
        buffers.rows[key_rows++] = {place - first, length, y * bias.length() + x};
      });
    for (long i = 0; i < count; ++i) {
      const long y = (begin + i - grid.prefix) / grid.windows.width, x = (begin + i - grid.prefix) % grid.windows.width;
      const float* penalties = buffers.penalties + first;
      if (begin + i >= grid.prefix) penalties += grid.side(window, y, x) * padded;
      buffers.initial[i] = penalties;
      if (!bias.table) continue;
      float* scores = buffers.scores + i * buffers.scores_stride;
      const float* biases = bias.find(bias_head, y, x);
      // Whole vectors are copied: the next row overwrites what is too much.
      store(scores + (vectors - 1) * LANES<float>, Vec<float>{});
      for (long r = 0; r < key_rows; ++r)
        for (long j = 0; j < buffers.rows[r].count; j += LANES<float>)
          store(scores + buffers.rows[r].offset + j, load(biases + buffers.rows[r].table + j));
      for (long j = 0; j < vectors * LANES<float>; j += LANES<float>)
        store(scores + j, load(scores + j) + load(penalties + j));
      buffers.initial[i] = scores;
    }
    multiply_rows<float>(
        count, vectors, [&](long i) { return buffers.queries + i * width; },
        packed.keys + head * packed.key_size + first * width, LANES<float>, width * LANES<float>, width,
        [&](long i, long j) { return load(buffers.initial[i] + j * LANES<float>); },
        [&](long i, long j, Vec<float> scores) {
          store(buffers.scores + i * buffers.scores_stride + j * LANES<float>, scores);
        });
    for (long i = 0; i < count; ++i) {
      float* scores = buffers.scores + i * buffers.scores_stride;
      Vec<float> most = broadcast(buffers.maxima[i]);
      for (long j = 0; j < vectors; ++j) {
        const Vec<float> values = load(scores + j * LANES<float>);
        most = values > most ? values : most;
      }
      const float before = buffers.maxima[i], now = maximum<float>(most);
      buffers.maxima[i] = now;
      buffers.corrections[i] = first == 0 ? 0.0f : exp2(broadcast(before - now))[0];
      buffers.sums[i] = buffers.sums[i] * buffers.corrections[i] + exponentiate(scores, vectors * LANES<float>, now);
    }
    multiply_rows<float>(
        count, heads.padded_width / LANES<float>,
        [&](long i) { return buffers.scores + i * buffers.scores_stride; },
        packed.values + head * packed.value_size + first * heads.padded_width, heads.padded_width, LANES<float>, keys,
        [&](long i, long j) {
          if (first == 0) return Vec<float>{};
          return load(buffers.out + i * heads.padded_width + j * LANES<float>) * buffers.corrections[i];
        },
        [&](long i, long j, Vec<float> values) {
          if (last)
            store(out + i * stride + j * LANES<float>, values / broadcast(buffers.sums[i]));
          else
            store(buffers.out + i * heads.padded_width + j * LANES<float>, values);
        });
  }
}

// Attention of all heads at up to OUTPUT_TOKENS places, to out (places, padded channels). buffers.tokens are the tokens
// of the places then. The penalties must have been made for the window.
void attend_softmax(const Attention<float>& attention, const float* qkv, long window, long begin, long end,
                    const RelativeBias& bias, const SoftmaxKeys& packed, const SoftmaxBuffers& softmax,
                    const AttentionBuffers<float>& buffers, float* out) {
  const Heads<float>& heads = attention.heads;
  const long count = end - begin, tiles = (count + SCORE_ROWS - 1) / SCORE_ROWS, stride = heads.padded_channels;
  attention.find_rows(qkv, attention.stride, window, begin, end, buffers.tokens, buffers.zeros, buffers.rows);
  for (long head = 0; head < heads.count; ++head) {
    for (long tile = 0; tile < tiles; ++tile) {
      const long from = part_begin(count, tiles, tile), to = part_begin(count, tiles, tile + 1);
      attend_head(attention, window, head, begin + from, begin + to, buffers.rows + from, bias, packed, softmax,
                     out + from * stride + head * heads.width, stride);
    }
  }
}

}  // namespace
