// Patch embedding and downsampling: patches of an image or a map are rows of a linear layer, with norms around it.
#pragma once
#include "block.h"

namespace {

struct PatchBuffers {
  LinearBuffers products;
  float* rows;
  PatchBuffers(Arena& arena, const InlinevitLinear& layer)
      : products(arena, layer), rows(arena.take<float>(TILE_TOKENS * layer.inputs)) {}
};

void embed_patches(const InlinevitPatches* patches, const float* x, float* out) {
  const InlinevitLinear& layer = patches->layer;
  const long of_image = patches->height * patches->width, all = patches->batch * of_image;
  const long tiles = count_tiles(1, larger(all, 1), patches->threads);
  parallel(tiles, patches->threads, [&](long tile) {
    const long begin = part_begin(all, tiles, tile), count = part_begin(all, tiles, tile + 1) - begin;
    auto buffers = take_scratch<PatchBuffers>(Scratch::task, layer);
    for (long i = 0; i < count; ++i) {
      const long place = (begin + i) % of_image;
      const float* from = x + (begin + i) / of_image * patches->batch_stride +
                          place / patches->width * patches->row_stride + place % patches->width * patches->column_stride;
      float *row = buffers.rows + i * layer.inputs, *to = row;
      for (long outer = 0; outer < patches->outer; ++outer)
        for (long inner = 0; inner < patches->inner; ++inner, to += patches->length)
          memcpy(to, from + outer * patches->outer_stride + inner * patches->inner_stride,
                 patches->length * sizeof(float));
      if (patches->norm_in_weight)
        layer_norm(row, patches->norm_in_weight, patches->norm_in_bias, layer.inputs, patches->norm_in_eps, row);
    }
    float* tokens = out + begin * layer.outputs;
    buffers.products.prepare(layer, buffers.rows, layer.inputs, count, layer.inputs);
    buffers.products.multiply(layer, count, 0, layer.outputs, 0, layer.inputs, {layer.bias, false, false}, tokens,
                              layer.outputs);
    if (!patches->norm_out_weight) return;
    for (long i = 0; i < count; ++i, tokens += layer.outputs)
      layer_norm(tokens, patches->norm_out_weight, patches->norm_out_bias, layer.outputs, patches->norm_out_eps, tokens);
  });
}

}  // namespace
