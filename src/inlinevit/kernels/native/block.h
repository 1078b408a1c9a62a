// The transformer block for inference: norm → attention → add, norm → MLP → add.
//
// Tokens are processed in tiles, so that everything between two reads of the tokens stays in the L2 cache. If a
// window covers the map there are two passes:
//   1. norm → q, k, v → summaries of the tile's keys and values, sum of its tokens;
//      (all summaries are merged, and the kernels of the local residual are made from the mean token)
//   2. v̄ + q·(s·C) + convolution → projection + skip → norm → MLP + skip.
// With smaller windows, attention is a pass of its own between the two. With softmax, keys and values are packed
// instead of summarised. Where there are few tokens, the threads divide the channels (forward_channels).
#pragma once
#include "int8.h"
#include "softmax.h"

namespace {

constexpr long TILE_TOKENS = OUTPUT_TOKENS, TYPICAL_TILE = 104, SMALLEST_TILE = 16;
// Rows that a thread computes at once where the threads divide the channels.
constexpr long MOST_ROWS = 256;
// Bytes of packed q, k and v up to which images are processed together: they stay in the L3 cache until the second
// pass.
constexpr long ROUND_BYTES = 16 << 20;

// Into how many tiles each image is divided: enough for all threads, none larger than TILE_TOKENS.
long count_tiles(long images, long tokens, long threads) {
  long tiles = larger((tokens + TYPICAL_TILE / 2) / TYPICAL_TILE, (tokens + TILE_TOKENS - 1) / TILE_TOKENS);
  while (images * tiles % threads != 0 && (tiles + 1) * SMALLEST_TILE <= tokens) ++tiles;
  return tiles;
}

// Rows of inputs, and room for them quantised.
struct Products {
  QuantizedRows quantized;
  Products(Arena& arena, long rows, long depth) : quantized(arena, rows, depth) {}

  // Make rows ready to be multiplied with a layer's weights.
  void prepare(const InlinevitLinear& layer, const float* rows, long row_stride, long count, long depth) {
    inputs = rows;
    stride = row_stride;
    if (layer.scales) current = quantize(rows, row_stride, count, depth, quantized);
  }
  // See multiply_packed.
  void multiply(const InlinevitLinear& layer, long rows, long begin, long end, long first, long depth,
                const Epilogue& epilogue, float* out, long out_stride) const {
    if (layer.scales)
      multiply_int8(layer, current, rows, begin, end, first, depth, epilogue, out, out_stride);
    else
      multiply_packed(layer, inputs, stride, rows, begin, end, first, depth, epilogue, out, out_stride);
  }

 private:
  QuantizedRows current = quantized;
  const float* inputs = nullptr;
  long stride = 0;
};

struct LinearBuffers : Products {
  LinearBuffers(Arena& arena, const InlinevitLinear& layer)
      : Products(arena, layer.scales ? TILE_TOKENS : 0, layer.inputs) {}
};

void linear_forward(const InlinevitLinear* layer, int64_t rows, int64_t threads, int64_t gelu, const float* x,
                    float* out) {
  const long tiles = count_tiles(1, larger(rows, 1), threads);
  parallel(tiles, threads, [&](long tile) {
    const long begin = part_begin(rows, tiles, tile), count = part_begin(rows, tiles, tile + 1) - begin;
    auto buffers = take_scratch<LinearBuffers>(Scratch::task, *layer);
    buffers.prepare(*layer, x + begin * layer->inputs, layer->inputs, count, layer->inputs);
    buffers.multiply(*layer, count, 0, layer->outputs, 0, layer->inputs, {layer->bias, false, gelu != 0},
                     out + begin * layer->outputs, layer->outputs);
  });
}

// The shapes of a block, and one Attention for each head group.
struct BlockPlan {
  const InlinevitBlock& block;
  long channels, tokens, images, tiles;
  Attention<float> groups[2];

  BlockPlan(const InlinevitBlock& block, long images)
      : block(block),
        channels(block.num_heads * block.head_dim),
        images(images),
        groups{make_group(block, images, 0), make_group(block, images, block.num_head_groups - 1)} {
    tokens = groups[0].grid.tokens();
    tiles = count_tiles(images, tokens, block.threads);
  }

  static Attention<float> make_group(const InlinevitBlock& block, long images, long group) {
    return Attention<float>({images, block.prefix, block.num_heads, block.head_dim, block.threads, block.scale,
                             block.windows[group]});
  }

  RelativeBias relative_bias() const { return {block.relative_bias, block.relative_window}; }
  // The places of the larger windows.
  long places() const { return larger(groups[0].grid.places(), groups[1].grid.places()); }
  bool one_window() const { return block.num_head_groups == 1 && groups[0].grid.count() == 1; }
  long begin(long tile) const { return part_begin(tokens, tiles, tile % tiles); }
  long end(long tile) const { return part_begin(tokens, tiles, tile % tiles + 1); }
};

// Whether the threads divide the channels instead of the tokens. Where there are fewer tokens than channels, most of what
// they read is weights, and then each reads only its part of them.
bool divides_channels(const BlockPlan& plan) {
  const InlinevitBlock& block = plan.block;
  return block.threads > 1 && plan.images == 1 && plan.one_window() && plan.tokens <= MOST_ROWS &&
         3 * plan.tokens < 2 * plan.channels && block.num_heads % block.threads == 0 && block.head_dim % PANEL == 0 &&
         !block.softmax && !block.prefix_only;
}

// Scratch of a whole call.
struct BlockWorkspace {
  float *qkv, *attended, *summaries, *sums, *taps;
  long* counts;
  SoftmaxKeys keys;
  BlockWorkspace(Arena& arena, const BlockPlan& plan)
      : keys(arena, plan.groups[0].heads, plan.places(), plan.one_window() && plan.block.softmax ? plan.images : 0) {
    const Heads<float>& heads = plan.groups[0].heads;
    const bool whole = plan.one_window();
    const long all_tiles = plan.images * plan.tiles;
    qkv = arena.take<float>(plan.images * plan.tokens * 3 * plan.channels);
    attended = arena.take<float>(whole ? 0 : plan.images * plan.tokens * plan.channels);
    summaries = arena.take<float>(whole ? all_tiles * heads.count * heads.summary() : 0);
    sums = arena.take<float>(whole ? all_tiles * plan.channels : 0);
    taps = arena.take<float>(whole ? plan.images * 9 * heads.padded_channels : 0);
    counts = arena.take<long>(whole ? all_tiles : 0);
  }
};

// Scratch of a task.
struct BlockBuffers {
  // For one head group; the other is the same size.
  AttentionBuffers<float> attention;
  SoftmaxBuffers softmax;
  SoftmaxKeys keys;
  Products products, hidden_products;
  float *normed, *tokens, *hidden, *summaries, *mean, *local, *zeros;

  BlockBuffers(Arena& arena, const BlockPlan& plan)
      : attention(arena, wider(plan)),
        softmax(arena, plan.groups[0].heads, plan.block.softmax ? plan.places() : 0),
        keys(arena, plan.groups[0].heads, plan.places(), plan.block.softmax && !plan.one_window() ? 1 : 0),
        products(arena, plan.block.qkv.scales ? rows(plan) : 0, plan.channels),
        hidden_products(arena, plan.block.fc2.scales ? rows(plan) : 0, DEPTH_BLOCK),
        normed(arena.take<float>(rows(plan) * plan.channels)),
        tokens(arena.take<float>(TILE_TOKENS * plan.channels)),
        hidden(arena.take<float>(rows(plan) * DEPTH_BLOCK)),
        summaries(arena.take<float>(plan.groups[0].heads.count * plan.groups[0].heads.summary())),
        mean(arena.take<float>(plan.channels)),
        local(arena.take<float>(plan.groups[0].heads.padded_width)),
        zeros(attention.zeros) {}

  static long rows(const BlockPlan& plan) { return divides_channels(plan) ? larger(plan.tokens, TILE_TOKENS) : TILE_TOKENS; }

  static const Attention<float>& wider(const BlockPlan& plan) {
    return plan.groups[plan.groups[0].grid.windows.width < plan.groups[1].grid.windows.width];
  }

  static BlockBuffers take(const BlockPlan& plan) {
    const auto buffers = take_scratch<BlockBuffers>(Scratch::task, plan);
    memset(buffers.zeros, 0, plan.groups[0].stride * sizeof(float));
    return buffers;
  }
};

// sums (channels) += values (channels)
void add_row(float* sums, const float* values, long channels) {
  for (long c = 0; c < channels; c += LANES<float>)
    store(sums + c, load(sums + c, channels - c) + load(values + c, channels - c), channels - c);
}

// out (columns) = bias + row · weight (depth, columns, `stride` apart): a product with a single row.
void multiply_row(const float* row, const float* weight, long stride, long depth, const float* bias, long columns,
                  float* out) {
  for (long j = 0; j < columns; j += LANES<float>) {
    Vec<float> total = load(bias + j, columns - j);
    for (long k = 0; k < depth; ++k) total += broadcast(row[k]) * load(weight + k * stride + j, columns - j);
    store(out + j, total, columns - j);
  }
}

// Make the 3×3 kernels of one head from the mean token (width) of its channels: W₂·GELU(W₁·x̄), plus LePE.
// head: among all heads; taps: (9, tap_stride) at the head's first channel; hidden: room for width numbers.
void make_taps(const InlinevitBlock& block, long head, const float* mean, float* hidden, float* taps, long tap_stride) {
  const long width = block.head_dim, channels = block.num_heads * width, column = head * width;
  if (block.local1_weight) {
    multiply_row(mean, block.local1_weight + column * width, width, width, block.local1_bias + column, width, hidden);
    gelu_rows(hidden, 1, width, width);
  }
  for (int tap = 0; tap < 9; ++tap) {
    float* to = taps + tap * tap_stride;
    if (block.local2_weight)
      multiply_row(hidden, block.local2_weight + (column * 9 + tap) * width, 9 * width, width,
                   block.local2_bias + tap * channels + column, width, to);
    else
      memset(to, 0, width * sizeof(float));
    if (block.lepe_weight) add_row(to, block.lepe_weight + tap * channels + column, width);
  }
}

// norm → q, k, v of tokens (count, channels); sums: null, or the sum of what the local residual's mean is taken of.
void project_tokens(const BlockPlan& plan, const float* x, long count, long prefix, BlockBuffers& buffers, float* qkv,
                    float* sums) {
  const InlinevitBlock& block = plan.block;
  const long channels = plan.channels;
  if (sums) memset(sums, 0, channels * sizeof(float));
  for (long i = 0; i < count; ++i) {
    const float* token = x + i * channels;
    float* normed = buffers.normed + i * channels;
    layer_norm(token, block.norm1_weight, block.norm1_bias, channels, block.norm1_eps, normed);
    if (sums) add_row(sums, block.kernels_before_norm ? token : normed, channels);
  }
  buffers.products.prepare(block.qkv, buffers.normed, channels, count, channels);
  auto project = [&](long rows, long begin, long end) {
    buffers.products.multiply(block.qkv, rows, begin, end, 0, channels, {block.qkv.bias, false, false}, qkv + begin,
                              3 * channels);
  };
  if (!block.prefix_only) {
    project(count, 0, 3 * channels);
  } else {
    // Queries of the prefix tokens only. A panel may hold the last queries and the first keys.
    const long keys = channels / PANEL * PANEL;
    if (prefix > 0) project(prefix, 0, keys);
    project(count, keys, 3 * channels);
  }
}

// projection + skip → norm → MLP + skip. attended: (count, `stride` apart); x and out: a row for each token.
template <typename Source, typename Target>
void finish_tokens(const BlockPlan& plan, const float* attended, long stride, long count, Source x, Target out,
                   BlockBuffers& buffers) {
  const InlinevitBlock& block = plan.block;
  const long channels = plan.channels;
  float* tokens = buffers.tokens;
  for (long i = 0; i < count; ++i) memcpy(tokens + i * channels, x(i), channels * sizeof(float));
  buffers.products.prepare(block.proj, attended, stride, count, channels);
  buffers.products.multiply(block.proj, count, 0, channels, 0, channels, {block.proj.bias, true, false}, tokens,
                            channels);
  for (long i = 0; i < count; ++i)
    layer_norm(tokens + i * channels, block.norm2_weight, block.norm2_bias, channels, block.norm2_eps,
               buffers.normed + i * channels);
  // A part of the hidden channels at a time: all of them would not fit into the cache.
  buffers.products.prepare(block.fc1, buffers.normed, channels, count, channels);
  for (long begin = 0; begin < block.fc1.outputs; begin += DEPTH_BLOCK) {
    const long end = smaller(block.fc1.outputs, begin + DEPTH_BLOCK);
    buffers.products.multiply(block.fc1, count, begin, end, 0, channels, {block.fc1.bias, false, true}, buffers.hidden,
                              DEPTH_BLOCK);
    buffers.hidden_products.prepare(block.fc2, buffers.hidden, DEPTH_BLOCK, count, end - begin);
    buffers.hidden_products.multiply(block.fc2, count, 0, channels, begin, end - begin,
                                     {begin ? nullptr : block.fc2.bias, true, false}, tokens, channels);
  }
  for (long i = 0; i < count; ++i) memcpy(out(i), tokens + i * channels, channels * sizeof(float));
}

// All images at once, one window.
void forward_whole_map(const BlockPlan& plan, const float* x, float* out) {
  const InlinevitBlock& block = plan.block;
  const Attention<float>& attention = plan.groups[0];
  const Heads<float>& heads = attention.heads;
  const long channels = plan.channels, tiles = plan.tiles, summary_size = heads.count * heads.summary();
  const auto workspace = take_scratch<BlockWorkspace>(Scratch::caller, plan);
  const bool convolves = (block.local1_weight || block.lepe_weight) && !block.prefix_only;

  parallel(plan.images * tiles, block.threads, [&](long tile) {
    const long begin = plan.begin(tile), count = plan.end(tile) - begin, first = tile / tiles * plan.tokens + begin;
    auto buffers = BlockBuffers::take(plan);
    float* qkv = workspace.qkv + first * 3 * channels;
    project_tokens(plan, x + first * channels, count, larger(0, smaller(count, block.prefix - begin)), buffers, qkv,
                   block.softmax ? nullptr : workspace.sums + tile * channels);
    if (block.softmax) return;
    for (long i = 0; i < count; ++i) buffers.attention.rows[i] = qkv + i * 3 * channels;
    summarize(buffers.attention.rows, count, attention.key_column, attention.value_column, heads,
              buffers.attention.summary, workspace.summaries + tile * summary_size, 0);
    workspace.counts[tile] = count;
  });

  parallel(plan.images * heads.count, block.threads, [&](long index) {
    const long image = index / heads.count, head = index % heads.count, width = heads.width;
    auto buffers = BlockBuffers::take(plan);
    if (block.softmax)
      pack_keys(attention, workspace.qkv + image * plan.tokens * 3 * channels, 0, head,
                workspace.keys.at(image, heads), buffers.attention);
    else
      finish_summary(workspace.summaries + image * tiles * summary_size + head * heads.summary(), summary_size,
                     workspace.counts + image * tiles, tiles, attention.scale, heads);
    if (!convolves) return;
    if (block.local1_weight) {
      memset(buffers.mean, 0, width * sizeof(float));
      for (long tile = 0; tile < tiles; ++tile)
        add_row(buffers.mean, workspace.sums + (image * tiles + tile) * channels + head * width, width);
      for (long c = 0; c < width; ++c) buffers.mean[c] /= float(plan.tokens);
    }
    make_taps(block, head, buffers.mean, buffers.local,
              workspace.taps + image * 9 * heads.padded_channels + head * width, heads.padded_channels);
  });

  auto attend = [&](long image, long begin, long end, const BlockBuffers& buffers, float* attended) {
    const float* qkv = workspace.qkv + image * plan.tokens * 3 * channels;
    if (block.softmax) {
      make_penalties(attention.grid, 0, buffers.softmax.penalties);
      attend_softmax(attention, qkv, 0, begin, end, plan.relative_bias(), workspace.keys.at(image, heads),
                     buffers.softmax, buffers.attention, attended);
    } else {
      attend_places(attention, qkv, 0, begin, end, workspace.summaries + image * tiles * summary_size,
                    buffers.attention, attended);
    }
    if (convolves)
      convolve_places(attention, qkv, 0, begin, end, workspace.taps + image * 9 * heads.padded_channels,
                      block.lepe_bias, buffers.attention, attended);
  };
  if (block.prefix_only) {
    // As many images at a time as a tile holds.
    const long images_of_thread = (plan.images + block.threads - 1) / block.threads;
    const long together = larger(1, smaller(TILE_TOKENS / block.prefix, images_of_thread));
    parallel((plan.images + together - 1) / together, block.threads, [&](long task) {
      const long image = task * together, images = smaller(together, plan.images - image), prefix = block.prefix;
      auto buffers = BlockBuffers::take(plan);
      for (long i = 0; i < images; ++i)
        attend(image + i, 0, prefix, buffers, buffers.attention.out + i * prefix * heads.padded_channels);
      finish_tokens(
          plan, buffers.attention.out, heads.padded_channels, images * prefix,
          [&](long i) { return x + ((image + i / prefix) * plan.tokens + i % prefix) * channels; },
          [&](long i) { return out + (image * prefix + i) * channels; }, buffers);
    });
    return;
  }
  parallel(plan.images * tiles, block.threads, [&](long tile) {
    const long image = tile / tiles, begin = plan.begin(tile), end = plan.end(tile);
    const long first = (image * plan.tokens + begin) * channels;
    auto buffers = BlockBuffers::take(plan);
    attend(image, begin, end, buffers, buffers.attention.out);
    finish_tokens(
        plan, buffers.attention.out, heads.padded_channels, end - begin,
        [&](long i) { return x + first + i * channels; }, [&](long i) { return out + first + i * channels; }, buffers);
  });
}

// Attention of one window of one head group, to the group's channels of attended (tokens, channels).
void attend_window(const BlockPlan& plan, const Attention<float>& attention, long window, const float* x,
                   const float* qkv, float* attended) {
  const InlinevitBlock& block = plan.block;
  const Heads<float>& heads = attention.heads;
  const Grid& grid = attention.grid;
  const long channels = plan.channels, column = attention.query_column;
  auto buffers = BlockBuffers::take(plan);
  const auto& scratch = buffers.attention;
  long count = 0;
  if (block.softmax) {
    for (long head = 0; head < heads.count; ++head) pack_keys(attention, qkv, window, head, buffers.keys, scratch);
    make_penalties(grid, window, buffers.softmax.penalties);
  } else {
    count = summarize_places(attention, qkv, window, 0, grid.places(), scratch, buffers.summaries);
    for (long head = 0; head < heads.count; ++head)
      finish_summary(buffers.summaries + head * heads.summary(), 0, &count, 1, attention.scale, heads);
  }
  if (block.local1_weight) {
    // The norm is computed again: it is cheap, and in the first pass windows are not known.
    memset(buffers.mean, 0, channels * sizeof(float));
    for (long begin = 0; begin < grid.places(); begin += OUTPUT_TOKENS) {
      const long end = smaller(grid.places(), begin + OUTPUT_TOKENS);
      const long found = attention.find_rows(x, channels, window, begin, end, scratch.tokens, nullptr, scratch.rows);
      for (long i = 0; i < found; ++i) {
        const float* token = scratch.rows[i];
        if (!block.kernels_before_norm) {
          layer_norm(token, block.norm1_weight, block.norm1_bias, channels, block.norm1_eps, buffers.normed);
          token = buffers.normed;
        }
        add_row(buffers.mean, token, channels);
      }
    }
    for (long c = 0; c < channels; ++c) buffers.mean[c] /= float(count);
  }
  const bool convolves = block.local1_weight || block.lepe_weight;
  if (convolves)
    for (long head = 0; head < heads.count; ++head)
      make_taps(block, column / heads.width + head, buffers.mean + column + head * heads.width, buffers.local,
                scratch.taps + head * heads.width, heads.padded_channels);
  for (long begin = 0; begin < grid.places(); begin += OUTPUT_TOKENS) {
    const long end = smaller(grid.places(), begin + OUTPUT_TOKENS);
    if (block.softmax)
      attend_softmax(attention, qkv, window, begin, end, plan.relative_bias(), buffers.keys, buffers.softmax, scratch,
                     scratch.out);
    else
      attend_places(attention, qkv, window, begin, end, buffers.summaries, scratch, scratch.out);
    if (convolves)
      convolve_places(attention, qkv, window, begin, end, scratch.taps,
                      block.lepe_bias ? block.lepe_bias + column : nullptr, scratch, scratch.out);
    for (long i = 0; i < end - begin; ++i)
      if (scratch.tokens[i] >= 0)
        memcpy(attended + scratch.tokens[i] * channels + column, scratch.out + i * heads.padded_channels,
               heads.channels * sizeof(float));
  }
}

// Several windows or head groups: attention is a pass between two passes over all tokens, in any tiles.
void forward_windows(const BlockPlan& plan, const float* x, float* out) {
  const InlinevitBlock& block = plan.block;
  const long channels = plan.channels, tokens = plan.images * plan.tokens;
  const auto workspace = take_scratch<BlockWorkspace>(Scratch::caller, plan);
  const long tiles = count_tiles(1, tokens, block.threads);
  parallel(tiles, block.threads, [&](long tile) {
    const long begin = part_begin(tokens, tiles, tile), count = part_begin(tokens, tiles, tile + 1) - begin;
    auto buffers = BlockBuffers::take(plan);
    project_tokens(plan, x + begin * channels, count, 0, buffers, workspace.qkv + begin * 3 * channels, nullptr);
  });
  const long first_units = plan.groups[0].units();
  const long units = block.num_head_groups == 1 ? first_units : first_units + plan.groups[1].units();
  parallel(units, block.threads, [&](long index) {
    const Attention<float>& attention = plan.groups[index >= first_units];
    const long unit = index < first_units ? index : index - first_units, image = attention.image(unit);
    attend_window(plan, attention, attention.window(unit), x + image * plan.tokens * channels,
                  workspace.qkv + image * plan.tokens * 3 * channels,
                  workspace.attended + image * plan.tokens * channels);
  });
  parallel(tiles, block.threads, [&](long tile) {
    const long begin = part_begin(tokens, tiles, tile) * channels;
    const long count = part_begin(tokens, tiles, tile + 1) - part_begin(tokens, tiles, tile);
    auto buffers = BlockBuffers::take(plan);
    finish_tokens(
        plan, workspace.attended + begin, channels, count, [&](long i) { return x + begin + i * channels; },
        [&](long i) { return out + begin + i * channels; }, buffers);
  });
}

// Scratch of a call that divides the channels.
struct ChannelWorkspace {
  // sums: what each thread adds to the tokens.
  float *qkv, *attended, *tokens, *sums;
  ChannelWorkspace(Arena& arena, const BlockPlan& plan) {
    const long size = plan.tokens * plan.channels;
    qkv = arena.take<float>(3 * size);
    attended = arena.take<float>(size);
    tokens = arena.take<float>(size);
    sums = arena.take<float>(plan.block.threads * size);
  }
};

// One window of few tokens. Each thread has some heads up to attention, then some channels of the projection, then some
// hidden channels of the MLP.
void forward_channels(const BlockPlan& plan, const float* x, float* out) {
  const InlinevitBlock& block = plan.block;
  const Attention<float>& attention = plan.groups[0];
  const long channels = plan.channels, tokens = plan.tokens, threads = block.threads, width = block.head_dim;
  const auto workspace = take_scratch<ChannelWorkspace>(Scratch::caller, plan);
  auto begin_of = [=](long count, long unit, long part) {
    return smaller(part_begin((count + unit - 1) / unit, threads, part) * unit, count);
  };
  auto norm = [&](const float* from, const float* weight, const float* bias, double eps, float* to) {
    for (long i = 0; i < tokens; ++i)
      layer_norm(from + i * channels, weight, bias, channels, eps, to + i * channels);
  };

  parallel(threads, threads, [&](long part) {
    const long first = begin_of(channels, width, part), end = begin_of(channels, width, part + 1);
    Attention<float> own = attention;
    own.heads = Heads<float>((end - first) / width, width);
    own.query_column += first, own.key_column += first, own.value_column += first;
    auto buffers = BlockBuffers::take(plan);
    norm(x, block.norm1_weight, block.norm1_bias, block.norm1_eps, buffers.normed);
    buffers.products.prepare(block.qkv, buffers.normed, channels, tokens, channels);
    const long columns[] = {own.query_column, own.key_column, own.value_column};
    for (long column : columns)
      buffers.products.multiply(block.qkv, tokens, column, column + own.heads.channels, 0, channels,
                                {block.qkv.bias, false, false}, workspace.qkv + column, 3 * channels);
    attend_window(plan, own, 0, x, workspace.qkv, workspace.attended);
  });
  parallel(threads, threads, [&](long part) {
    const long begin = begin_of(channels, PANEL, part), end = begin_of(channels, PANEL, part + 1);
    auto buffers = BlockBuffers::take(plan);
    for (long i = 0; i < tokens; ++i)
      memcpy(workspace.tokens + i * channels + begin, x + i * channels + begin, (end - begin) * sizeof(float));
    buffers.products.prepare(block.proj, workspace.attended, channels, tokens, channels);
    buffers.products.multiply(block.proj, tokens, begin, end, 0, channels, {block.proj.bias, true, false},
                              workspace.tokens + begin, channels);
  });
  parallel(threads, threads, [&](long part) {
    // Hidden channels are quantised in whole blocks.
    const long hidden = block.fc1.outputs, unit = block.fc2.scales ? DEPTH_BLOCK : PANEL;
    const long first = begin_of(hidden, unit, part), last = begin_of(hidden, unit, part + 1);
    auto buffers = BlockBuffers::take(plan);
    float* sums = workspace.sums + part * tokens * channels;
    if (first == last) memset(sums, 0, tokens * channels * sizeof(float));
    norm(workspace.tokens, block.norm2_weight, block.norm2_bias, block.norm2_eps, buffers.normed);
    buffers.products.prepare(block.fc1, buffers.normed, channels, tokens, channels);
    for (long begin = first; begin < last; begin += DEPTH_BLOCK) {
      const long end = smaller(last, begin + DEPTH_BLOCK);
      buffers.products.multiply(block.fc1, tokens, begin, end, 0, channels, {block.fc1.bias, false, true},
                                buffers.hidden, DEPTH_BLOCK);
      buffers.hidden_products.prepare(block.fc2, buffers.hidden, DEPTH_BLOCK, tokens, end - begin);
      buffers.hidden_products.multiply(block.fc2, tokens, 0, channels, begin, end - begin,
                                       {begin ? nullptr : block.fc2.bias, begin > first, false}, sums, channels);
    }
  });
  parallel(threads, threads, [&](long part) {
    for (long i = part_begin(tokens, threads, part); i < part_begin(tokens, threads, part + 1); ++i) {
      for (long other = 0; other < threads; ++other)
        add_row(workspace.tokens + i * channels, workspace.sums + (other * tokens + i) * channels, channels);
      memcpy(out + i * channels, workspace.tokens + i * channels, channels * sizeof(float));
    }
  });
}

// out may be x, but not with prefix_only.
void block_forward(const InlinevitBlock* block, const float* x, float* out) {
  const BlockPlan single(*block, 1);
  const long image_bytes = single.tokens * 3 * single.channels * long(sizeof(float));
  const long together = larger(1, ROUND_BYTES / larger(1, image_bytes));
  const long outputs = block->prefix_only ? block->prefix : single.tokens;
  for (long image = 0; image < block->batch; image += together) {
    const BlockPlan plan(*block, smaller(together, block->batch - image));
    const float* from = x + image * plan.tokens * plan.channels;
    float* to = out + image * outputs * plan.channels;
    if (divides_channels(plan))
      forward_channels(plan, from, to);
    else if (plan.one_window())
      forward_whole_map(plan, from, to);
    else
      forward_windows(plan, from, to);
  }
}

// Consecutive blocks of the same tokens. All but the first compute in place.
void blocks_forward(const InlinevitBlock* blocks, int64_t count, const float* x, float* out) {
  for (long i = 0; i < count; ++i) block_forward(blocks + i, i == 0 ? x : out, out);
}

}  // namespace
