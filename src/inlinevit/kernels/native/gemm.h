// float32 products with packed weights, LayerNorm and GELU.
#pragma once
#include "simd.h"

namespace {

constexpr long PANEL = INLINEVIT_PANEL, DEPTH_BLOCK = INLINEVIT_DEPTH_BLOCK;
// A vector register may be longer than a panel, or shorter.
constexpr int PANEL_VECTORS = PANEL / LANES<float>;
constexpr int TILE_PANELS = COLUMN_VECTORS / PANEL_VECTORS;
static_assert(PANEL_VECTORS >= 1 && TILE_PANELS >= 1);

// erf(x/√2) = x·P(x²)/Q(x²) up to 4e-7: a minimax fit for |x| < 5.6, from where on erf is ±1 in float32.
INLINEVIT_INLINE Vec<float> normal_erf(Vec<float> x) {
  const Vec<float> most = broadcast(5.6f), least = broadcast(-5.6f);
  Vec<float> t = x > most ? most : x;
  t = t < least ? least : t;
  const Vec<float> u = t * t;
  Vec<float> p = u * 4.429329356e-8f + 1.271241222e-5f;
  p = p * u + 3.476423692e-4f;
  p = p * u + 9.414153793e-3f;
  p = p * u + 6.8746662e-2f;
  p = p * u + 7.978844435e-1f;
  Vec<float> q = u * 1.18022736e-6f + 7.50918361e-5f;
  q = q * u + 1.912810747e-3f;
  q = q * u + 2.893846692e-2f;
  q = q * u + 2.528268789e-1f;
  q = q * u + 1.0f;
  return t * p / q;
}

// GELU(x) = x/2 · (1 + erf(x/√2)).
INLINEVIT_INLINE Vec<float> gelu(Vec<float> x) {
  const Vec<float> half = x * 0.5f;
  return half + half * normal_erf(x);
}

// What a product does with its outputs.
struct Epilogue {
  // Added to the outputs, padded to whole panels; null: nothing.
  const float* bias;
  // Add to what is in the output array instead of overwriting it.
  bool accumulate;
  // Applied at the end.
  bool gelu;
};

void gelu_rows(float* values, long rows, long columns, long stride) {
  for (long i = 0; i < rows; ++i)
    for (long j = 0; j < columns; j += LANES<float>) {
      float* at = values + i * stride + j;
      store(at, gelu(load(at, columns - j)), columns - j);
    }
}

// Call tile(panel, panels, column, columns) for tiles of columns begin … end − 1, which begin with a whole panel.
template <typename Function>
INLINEVIT_INLINE void for_panels(long begin, long end, Function tile) {
  for (long column = begin; column < end;) {
    const long panels = column + (TILE_PANELS - 1) * PANEL < end ? TILE_PANELS : 1;
    const long columns = smaller(panels * PANEL, end - column);
    tile(column / PANEL, panels, column, columns);
    column += columns;
  }
}

// Weights that are read into the L2 cache while others are multiplied: those of the next panels. They are read once per
// tile, and would otherwise come from memory while the first rows wait. Each step of a product reads a little, so that
// no requests queue up.
struct Ahead {
  const char* at;
  // Bytes from panel to panel, and per step of the product.
  long panel, step;

  INLINEVIT_INLINE void read(long k) const {
    INLINEVIT_UNROLL for (int i = 0; i < TILE_PANELS; ++i) __builtin_prefetch(at + i * panel + k * step, 0, 2);
  }
};

// What multiply_panels knows of a tile of outputs: rows `row` … row + count − 1, and columns of whole panels.
struct OutputTile {
  long row, count, panel, panels, column;
  // The outputs, `stride` apart.
  float* out;
  long stride;
  Ahead ahead;
};

// Call compute.template operator()<M, N>(tile) for all tiles of `rows` rows and columns begin … end − 1, with M rows and
// N vectors of columns. Panels first, so that one is read from the cache for all rows; meanwhile compute, in each of its
// `steps`, reads some of the next one: panel_bytes at panel_at(panel). A panel that is only partly real is computed next
// to the output.
// add: compute adds to the outputs; gelu: it is applied to them at the end.
template <int Most, typename PanelAt, typename Compute>
INLINEVIT_INLINE void multiply_panels(long rows, long begin, long end, bool add, bool gelu, float* out, long out_stride,
                                      long panel_bytes, long steps, PanelAt panel_at, Compute compute) {
  alignas(64) float edge[Most * TILE_PANELS * PANEL];
  for_panels(begin, end, [&](long panel, long panels, long column, long columns) {
    const bool whole = columns == panels * PANEL;
    const bool more = column + columns < end;
    const char *here = reinterpret_cast<const char*>(panel_at(panel)),
               *next = reinterpret_cast<const char*>(panel_at(panel + panels));
    const long blocks = (rows + Most - 1) / Most, panel_stride = (next - here) / panels;
    for_row_blocks<Most>(rows, [&](long row, long count) {
      Ahead ahead{more ? next + row * panel_bytes / rows : here, panel_stride,
                  more ? (panel_bytes + blocks * steps - 1) / larger(1, blocks * steps) : 0};
      float* target = out + row * out_stride + column - begin;
      OutputTile tile{row, count, panel, panels, column, whole ? target : edge, whole ? out_stride : panels * PANEL,
                      ahead};
      if (!whole && add)
        for (long i = 0; i < count; ++i)
          memcpy(tile.out + i * tile.stride, target + i * out_stride, columns * sizeof(float));
      with_rows<Most>(count, [&]<int M>() __attribute__((always_inline)) {
        if (panels == TILE_PANELS)
          compute.template operator()<M, COLUMN_VECTORS>(tile);
        else
          compute.template operator()<M, PANEL_VECTORS>(tile);
      });
      if (gelu) gelu_rows(tile.out, count, panels * PANEL, tile.stride);
      if (!whole)
        for (long i = 0; i < count; ++i)
          memcpy(target + i * out_stride, tile.out + i * tile.stride, columns * sizeof(float));
    });
  });
}

// out (rows, columns) = a (rows, inputs) · weightᵀ, for columns begin … end − 1 of the layer's outputs and inputs
// first … first + depth − 1, of which a has only these. out begins with column `begin`.
void multiply_packed(const InlinevitLinear& layer, const float* a, long a_stride, long rows, long begin, long end,
                     long first, long depth, const Epilogue& epilogue, float* out, long out_stride) {
  const float* weight = static_cast<const float*>(layer.weight);
  const long panel_size = layer.inputs * PANEL;
  // Long rows in blocks, so that a panel stays in the cache.
  for (long k = 0; k < depth || k == 0; k += DEPTH_BLOCK) {
    const long block = smaller(DEPTH_BLOCK, depth - k);
    const bool add = k > 0 || epilogue.accumulate, last = k + block >= depth;
    const float* bias = k == 0 ? epilogue.bias : nullptr;
    auto panel_at = [=](long panel) { return weight + panel * panel_size + (first + k) * PANEL; };
    auto compute = [=]<int M, int N>(OutputTile tile) __attribute__((always_inline)) {
      long offsets[N];
      Vec<float> sums[M][N];
      INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
        offsets[j] = j / PANEL_VECTORS * panel_size + j % PANEL_VECTORS * LANES<float>;
        const Vec<float> initial = bias ? load(bias + tile.column + j * LANES<float>) : Vec<float>{};
        INLINEVIT_UNROLL for (int i = 0; i < M; ++i) sums[i][j] = initial;
      }
      const float* left = a + tile.row * a_stride + k;
      multiply_add<float>(sums, [=](int i) { return left + i * a_stride; }, panel_at(tile.panel), PANEL, offsets, block,
                          [=](long k) { tile.ahead.read(k); });
      INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
        INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
          float* at = tile.out + i * tile.stride + j * LANES<float>;
          // What is added to comes last: every product would be rounded as coarsely as tokens that are large.
          store(at, add ? sums[i][j] + load(at) : sums[i][j]);
        }
      }
    };
    multiply_panels<ROWS>(rows, begin, end, add, last && epilogue.gelu, out, out_stride,
                          block * PANEL * long(sizeof(float)), block, panel_at, compute);
  }
}

// out = (x − mean) / √(variance + eps) · weight + bias, for one token.
void layer_norm(const float* x, const float* weight, const float* bias, long channels, double eps, float* out) {
  Vec<float> total{}, squares{};
  for (long c = 0; c < channels; c += LANES<float>) total += load(x + c, channels - c);
  const Vec<float> mean = broadcast(sum<float>(total) / float(channels));
  for (long c = 0; c < channels; c += LANES<float>) {
    Vec<float> centred = load(x + c, channels - c) - mean;
    if (channels - c < LANES<float>)
      for (long lane = channels - c; lane < LANES<float>; ++lane) centred[lane] = 0;
    squares += centred * centred;
  }
  const float variance = sum<float>(squares) / float(channels);
  const Vec<float> factor = broadcast(float(1.0 / sqrt(double(variance) + eps)));
  for (long c = 0; c < channels; c += LANES<float>) {
    const long lanes = channels - c;
    store(out + c, (load(x + c, lanes) - mean) * factor * load(weight + c, lanes) + load(bias + c, lanes), lanes);
  }
}

}  // namespace
