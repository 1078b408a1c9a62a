// A block with InLine attention over a map that is larger than memory: two passes over its tokens, in chunks of any
// size (../stream.py).
//
//   1. norm → number of tokens, their mean, and Σ (x − x̄)(x − x̄)ᵀ. Keys and values are linear in the normed tokens x,
//      so that the key-value covariance follows from that of x. It is symmetric: computing half of it takes a quarter
//      of the time that keys and values would take.
//      (all summaries are merged; queries and covariance of keys and values become one linear layer)
//   2. norm → values of the tokens; x · F + convolution of the values → projection + skip → norm → MLP + skip.
//
// Sums over a few tiles are float32, those over more are float64.
#pragma once
#include "block.h"

namespace {

// Moments are summed up in blocks of PANEL × PANEL channels, those on and above the diagonal: block (i, j), i <= j.
constexpr long BLOCK_SIZE = PANEL * PANEL;
constexpr long block_index(long i, long j) { return j * (j + 1) / 2 + i; }

// Tiles of float32 sums before they are added to float64 sums.
constexpr long FLOAT_TILES = 8;
// Chunks are divided into this many parts, or one per thread if there are more threads; each has its own float64 sums.
constexpr long MOMENT_PARTS = 8, SMALLEST_PART = 4 * TILE_TOKENS;

// The moments of some tokens; arrays are padded to whole panels.
struct Moments {
  double *count, *mean, *kernel_sum, *blocks;

  Moments(Arena& arena, long panels)
      : count(arena.take<double>(1)),
        mean(arena.take<double>(panels * PANEL)),
        kernel_sum(arena.take<double>(panels * PANEL)),
        blocks(arena.take<double>(block_index(0, panels) * BLOCK_SIZE)) {}

  static long size(long panels) {
    Arena counting(nullptr);
    Moments(counting, panels);
    return counting.used();
  }
};

// Scratch of a whole call.
struct MomentWorkspace {
  char* parts;
  double* total_mean;
  MomentWorkspace(Arena& arena, long panels, long count)
      : parts(arena.take<char>(count * Moments::size(panels))), total_mean(arena.take<double>(panels * PANEL)) {}

  Moments part(long index, long panels) const {
    Arena arena(parts + index * Moments::size(panels));
    return Moments(arena, panels);
  }
};

// Scratch of a task.
struct MomentBuffers {
  // Centred tokens (panels, tokens + 1, 16), and float32 sums of their products.
  float *normed, *centred, *blocks, *kernel_sum;
  MomentBuffers(Arena& arena, long channels, long panels)
      : normed(arena.take<float>(TILE_TOKENS * channels)),
        centred(arena.take<float>(panels * PANEL * (TILE_TOKENS + 1))),
        blocks(arena.take<float>(block_index(0, panels) * BLOCK_SIZE)),
        kernel_sum(arena.take<float>(panels * PANEL)) {}
};

// Add aᵀ·b to a block for each of N panels b, `stride` apart. a and b: (count, 16).
template <int N>
INLINEVIT_INLINE void add_panel_products(const float* a, const float* b, long stride, long count,
                                         float* const (&blocks)[N]) {
  for_row_blocks<ROWS>(PANEL, [&](long row, long rows) {
    with_rows<ROWS>(rows, [&]<int M>() __attribute__((always_inline)) {
      constexpr int VECTORS = N * PANEL_VECTORS;
      auto at = [&](int m, int j) {
        return blocks[j / PANEL_VECTORS] + (row + m) * PANEL + j % PANEL_VECTORS * LANES<float>;
      };
      Vec<float> sums[M][VECTORS];
      INLINEVIT_UNROLL for (int m = 0; m < M; ++m) {
        INLINEVIT_UNROLL for (int j = 0; j < VECTORS; ++j) sums[m][j] = load(at(m, j));
      }
      for (long token = 0; token < count; ++token) {
        Vec<float> right[VECTORS];
        INLINEVIT_UNROLL for (int j = 0; j < VECTORS; ++j)
          right[j] = load(b + j / PANEL_VECTORS * stride + token * PANEL + j % PANEL_VECTORS * LANES<float>);
        INLINEVIT_UNROLL for (int m = 0; m < M; ++m) {
          const Vec<float> left = broadcast(a[token * PANEL + row + m]);
          INLINEVIT_UNROLL for (int j = 0; j < VECTORS; ++j) sums[m][j] += left * right[j];
        }
      }
      INLINEVIT_UNROLL for (int m = 0; m < M; ++m) {
        INLINEVIT_UNROLL for (int j = 0; j < VECTORS; ++j) store(at(m, j), sums[m][j]);
      }
    });
  });
}

// blocks += xᵀ·x, for x in panels (panels, count, 16), `stride` apart.
void add_moments(const float* x, long stride, long panels, long count, float* blocks) {
  for (long j = 0; j < panels; j += TILE_PANELS) {
    const long columns = smaller(TILE_PANELS, panels - j);
    for (long i = 0; i < j + columns; ++i) {
      float* block[TILE_PANELS];
      for (long n = 0; n < columns; ++n) block[n] = blocks + block_index(i, j + n) * BLOCK_SIZE;
      if (columns == TILE_PANELS && i <= j) {
        add_panel_products<TILE_PANELS>(x + i * stride, x + j * stride, stride, count, block);
      } else {
        for (long n = larger(0, i - j); n < columns; ++n)
          add_panel_products<1>(x + i * stride, x + (j + n) * stride, stride, count, {block[n]});
      }
    }
  }
}

// Move float32 sums to float64 ones.
void flush_moments(long panels, float* blocks, double* totals) {
  const long size = block_index(0, panels) * BLOCK_SIZE;
  for (long i = 0; i < size; ++i) totals[i] += double(blocks[i]);
  memset(blocks, 0, size * sizeof(float));
}

// Add a tile of normed tokens (count, channels) to the moments of a part.
void add_tile(const MomentBuffers& buffers, long count, long channels, const Moments& moments) {
  const long panels = round_up(channels, PANEL) / PANEL, stride = (TILE_TOKENS + 1) * PANEL;
  const double before = *moments.count, after = before + double(count);
  // Merging is Chan's formula: the difference of the means, weighted, is one more centred token.
  const double weight = sqrt(before * double(count) / after), fraction = double(count) / after;
  for (long c = 0; c < panels * PANEL; c += LANES<float>) {
    const long lanes = larger(0, channels - c);
    const float* from = buffers.normed + smaller(c, channels);
    float* to = buffers.centred + c / PANEL * stride + c % PANEL;
    Vec<float> centre{}, rest{};
    for (long i = 0; i < count; ++i) centre += load(from + i * channels, lanes);
    centre *= broadcast(1.0f / float(count));
    for (long i = 0; i < count; ++i) {
      const Vec<float> centred = load(from + i * channels, lanes) - centre;
      rest += centred;
      store(to + i * PANEL, centred);
    }
    for (long lane = 0; lane < LANES<float>; ++lane) {
      // What rounding the mean has left.
      const double mean = double(centre[lane]) + double(rest[lane]) / double(count);
      const double difference = mean - moments.mean[c + lane];
      to[count * PANEL + lane] = float(weight * difference);
      moments.mean[c + lane] += fraction * difference;
    }
  }
  add_moments(buffers.centred, stride, panels, count + 1, buffers.blocks);
  *moments.count = after;
}

// Compute the moments of those tokens (count, channels) that the mask, if there is one, does not hide.
void collect_moments(const InlinevitBlock& block, const float* x, const uint8_t* mask, long count,
                     const Moments& moments) {
  const long channels = block.num_heads * block.head_dim, panels = round_up(channels, PANEL) / PANEL;
  const long size = block_index(0, panels) * BLOCK_SIZE;
  const auto buffers = take_scratch<MomentBuffers>(Scratch::task, channels, panels);
  *moments.count = 0;
  memset(moments.mean, 0, panels * PANEL * sizeof(double));
  memset(moments.kernel_sum, 0, panels * PANEL * sizeof(double));
  memset(moments.blocks, 0, size * sizeof(double));
  memset(buffers.blocks, 0, size * sizeof(float));
  memset(buffers.kernel_sum, 0, panels * PANEL * sizeof(float));
  long found = 0, tiles = 0;
  for (long i = 0; i < count; ++i) {
    if (!mask || mask[i]) {
      layer_norm(x + i * channels, block.norm1_weight, block.norm1_bias, channels, block.norm1_eps,
                 buffers.normed + found * channels);
      if (block.kernels_before_norm) add_row(buffers.kernel_sum, x + i * channels, channels);
      ++found;
    }
    const bool last = i == count - 1;
    if (found == TILE_TOKENS || (last && found > 0)) {
      add_tile(buffers, found, channels, moments);
      found = 0;
      ++tiles;
    }
    if (last || tiles == FLOAT_TILES) {
      flush_moments(panels, buffers.blocks, moments.blocks);
      for (long c = 0; c < channels; ++c) moments.kernel_sum[c] += double(buffers.kernel_sum[c]);
      memset(buffers.kernel_sum, 0, panels * PANEL * sizeof(float));
      tiles = 0;
    }
  }
}

// See api.h.
void summarize_tokens(const InlinevitBlock* block, int64_t tokens, const float* x, const uint8_t* mask, double* count,
                      double* mean, double* kernel_mean, double* covariance) {
  const long channels = block->num_heads * block->head_dim, panels = round_up(channels, PANEL) / PANEL;
  const long parts = larger(1, smaller(round_up(MOMENT_PARTS, block->threads), tokens / SMALLEST_PART));
  const auto workspace = take_scratch<MomentWorkspace>(Scratch::caller, panels, parts);
  parallel(parts, block->threads, [&](long part) {
    const long begin = part_begin(tokens, parts, part), end = part_begin(tokens, parts, part + 1);
    collect_moments(*block, x + begin * channels, mask ? mask + begin : nullptr, end - begin,
                    workspace.part(part, panels));
  });
  *count = 0;
  for (long part = 0; part < parts; ++part) *count += *workspace.part(part, panels).count;
  for (long c = 0; c < channels; ++c) {
    double total = 0, kernel_total = 0;
    for (long part = 0; part < parts; ++part) {
      const Moments moments = workspace.part(part, panels);
      total += *moments.count * moments.mean[c];
      kernel_total += moments.kernel_sum[c];
    }
    mean[c] = *count > 0 ? total / *count : 0;
    kernel_mean[c] = !block->kernels_before_norm ? mean[c] : *count > 0 ? kernel_total / *count : 0;
  }
  parallel(panels, block->threads, [&](long panel) {
    for (long j = panel * PANEL; j < smaller(channels, (panel + 1) * PANEL); ++j)
      for (long i = 0; i <= j; ++i) {
        const long at = block_index(i / PANEL, panel) * BLOCK_SIZE + i % PANEL * PANEL + j % PANEL;
        double total = 0;
        for (long part = 0; part < parts; ++part) {
          const Moments moments = workspace.part(part, panels);
          total += moments.blocks[at] + *moments.count * (moments.mean[i] - mean[i]) * (moments.mean[j] - mean[j]);
        }
        covariance[i * channels + j] = covariance[j * channels + i] = total;
      }
  });
}

// Bytes of values that are computed ahead of their convolution: they stay in the L3 cache until then.
constexpr long AHEAD_BYTES = 4 << 20;

// A chunk of rows. Its tokens and those of the rows above and below are numbered from the first one of the row above.
struct Chunk {
  const InlinevitRows& rows;
  const float* x;
  // first … last − 1 exist; the chunk itself is begin … end − 1.
  long channels, begin, end, first, last;
  // Tokens whose outputs are computed at a time, and whose values are kept.
  long round, kept;

  Chunk(const InlinevitBlock& block, const InlinevitRows& rows, const float* x)
      : rows(rows), x(x), channels(block.num_heads * block.head_dim), begin(rows.width) {
    end = begin + rows.height * rows.width;
    first = rows.above ? 0 : begin;
    last = rows.below ? end + rows.width : end;
    round = larger(AHEAD_BYTES / (channels * long(sizeof(float))), 8 * TYPICAL_TILE * block.threads);
    round = smaller(round, end - begin);
    // Those of two rounds, and of a row and a token before and after.
    kept = smaller(last - first, 2 * round + 2 * (rows.width + 1));
  }

  const float* token(long index) const {
    if (index < begin) return rows.above + index * channels;
    return index < end ? x + (index - begin) * channels : rows.below + (index - end) * channels;
  }
  bool hidden(long index) const {
    const uint8_t* mask = index < begin ? rows.mask_above : index < end ? rows.mask : rows.mask_below;
    return mask && !mask[index < begin ? index : index < end ? index - begin : index - end];
  }
  // One more than the last token whose value is needed for the outputs before `index`.
  long values_end(long index) const { return smaller(last, index + rows.width + 1); }
};

// Scratch of a whole call.
struct ChunkWorkspace {
  float *values, *taps;
  ChunkWorkspace(Arena& arena, const Chunk& chunk, const Heads<float>& heads)
      : values(arena.take<float>(chunk.rows.taps ? chunk.kept * chunk.channels : 0)),
        taps(arena.take<float>(9 * heads.padded_channels)) {}

  float* value(const Chunk& chunk, long index) const { return values + index % chunk.kept * chunk.channels; }
};

// norm → one of the layers rows.attention and rows.values, for tokens begin … begin + count − 1.
void project_chunk(const BlockPlan& plan, const Chunk& chunk, const InlinevitLinear& layer, long begin, long count,
                   BlockBuffers& buffers, float* out, long stride) {
  const InlinevitBlock& block = plan.block;
  const long channels = chunk.channels;
  for (long i = 0; i < count; ++i)
    layer_norm(chunk.token(begin + i), block.norm1_weight, block.norm1_bias, channels, block.norm1_eps,
               buffers.normed + i * channels);
  buffers.products.prepare(layer, buffers.normed, channels, count, channels);
  buffers.products.multiply(layer, count, 0, channels, 0, channels, {layer.bias, false, false}, out, stride);
}

// The values of tokens begin … end − 1; those of hidden tokens are zero.
void compute_values(const BlockPlan& plan, const Chunk& chunk, long begin, long end, const ChunkWorkspace& workspace) {
  auto buffers = BlockBuffers::take(plan);
  project_chunk(plan, chunk, chunk.rows.values, begin, end - begin, buffers, buffers.tokens, chunk.channels);
  for (long i = begin; i < end; ++i) {
    float* to = workspace.value(chunk, i);
    if (chunk.hidden(i))
      memset(to, 0, chunk.channels * sizeof(float));
    else
      memcpy(to, buffers.tokens + (i - begin) * chunk.channels, chunk.channels * sizeof(float));
  }
}

// The outputs of tokens begin … end − 1, from their values and those of their neighbours.
void compute_outputs(const BlockPlan& plan, const Chunk& chunk, long begin, long end, const ChunkWorkspace& workspace,
                     float* out) {
  const Heads<float>& heads = plan.groups[0].heads;
  const long stride = heads.padded_channels, width = chunk.rows.width, channels = chunk.channels;
  auto buffers = BlockBuffers::take(plan);
  float* attended = buffers.attention.out;
  project_chunk(plan, chunk, chunk.rows.attention, begin, end - begin, buffers, attended, stride);
  for (long i = begin; chunk.rows.taps && i < end;) {
    const long column = i % width, count = smaller(width - column, end - i);
    for (int row = 0; row < 3; ++row)
      for (long k = -1; k <= count; ++k) {
        const long neighbour = i + k + (row - 1) * width;
        const bool exists = column + k >= 0 && column + k < width && neighbour >= chunk.first && neighbour < chunk.last;
        buffers.attention.neighbours.rows[row][k + 1] = exists ? workspace.value(chunk, neighbour) : buffers.zeros;
      }
    convolve_row(buffers.attention.neighbours, count, workspace.taps, plan.block.lepe_bias, heads,
                 attended + (i - begin) * stride, stride);
    i += count;
  }
  finish_tokens(
      plan, attended, stride, end - begin, [&](long i) { return chunk.token(begin + i); },
      [&](long i) { return out + (begin - chunk.begin + i) * channels; }, buffers);
}

// See api.h. In each round the values for the next one are computed as well. Outputs may overwrite the tokens, because
// only values that have been computed already are needed of those.
void apply_rows(const InlinevitBlock* block, const InlinevitRows* rows, const float* x, float* out) {
  const BlockPlan plan(*block, 1);
  const Heads<float>& heads = plan.groups[0].heads;
  const Chunk chunk(*block, *rows, x);
  const auto workspace = take_scratch<ChunkWorkspace>(Scratch::caller, chunk, heads);
  if (rows->taps) {
    memset(workspace.taps, 0, 9 * heads.padded_channels * sizeof(float));
    for (int tap = 0; tap < 9; ++tap)
      memcpy(workspace.taps + tap * heads.padded_channels, rows->taps + tap * chunk.channels,
             chunk.channels * sizeof(float));
  }
  long begin = chunk.begin, end = begin, ahead = chunk.first;
  while (begin < chunk.end) {
    // At first there are values to compute only.
    const long next = smaller(chunk.end, end + chunk.round);
    const long values_end = rows->taps ? chunk.values_end(next) : ahead;
    auto tiles_of = [&](long tokens) { return tokens > 0 ? count_tiles(1, tokens, block->threads) : 0; };
    const long tiles = tiles_of(end - begin), value_tiles = tiles_of(values_end - ahead);
    parallel(tiles + value_tiles, block->threads, [&](long tile) {
      if (tile < tiles) {
        compute_outputs(plan, chunk, begin + part_begin(end - begin, tiles, tile),
                        begin + part_begin(end - begin, tiles, tile + 1), workspace, out);
      } else {
        compute_values(plan, chunk, ahead + part_begin(values_end - ahead, value_tiles, tile - tiles),
                       ahead + part_begin(values_end - ahead, value_tiles, tile - tiles + 1), workspace);
      }
    });
    begin = end, end = next, ahead = values_end;
  }
}

}  // namespace
