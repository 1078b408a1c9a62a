// int8 products: weights are integers with a scale for each output, inputs are quantised to −127…127 with a scale for
// each row and block of DEPTH_BLOCK inputs. Sums of integers are exact, so all variants give the same ones.
//
// Packed weights have 4 inputs of an output side by side, in the order 0, 2, 1, 3. Taken as 16-bit numbers, their low
// bytes are inputs 0 and 1, their high bytes 2 and 3: pairs for a multiply-add of 16-bit numbers, which cannot
// overflow. (The one of 8-bit numbers saturates.) VNNI multiplies all 4 at once; there the inputs are unsigned,
// offset by 128.
#pragma once
#include "gemm.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace {

#ifdef INLINEVIT_VNNI
using Quantized = uint8_t;
constexpr int OFFSET = 128, TERMS = 1;
#else
using Quantized = int16_t;
constexpr int OFFSET = 0, TERMS = 2;
#endif

using Ints = Vec<int32_t>;

INLINEVIT_INLINE Ints load_ints(const void* from) {
  Ints values;
  memcpy(&values, from, sizeof values);
  return values;
}

// sum + products of the integers in each 32-bit lane: 4 inputs and weights of 8 bits, or 2 of 16 bits.
INLINEVIT_INLINE Ints add_products(Ints sum, Ints inputs, Ints weights) {
#ifdef INLINEVIT_VNNI
#if defined(__AVX512VNNI__) && INLINEVIT_VECTOR_BYTES == 64
  return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(inputs), __m512i(weights)));
#else
  for (int bit = 0; bit < 32; bit += 8) sum += (inputs >> bit & 255) * (weights << (24 - bit) >> 24);
  return sum;
#endif
#elif defined(__AVX512BW__) && INLINEVIT_VECTOR_BYTES == 64
  return sum + Ints(_mm512_madd_epi16(__m512i(inputs), __m512i(weights)));
#elif defined(__AVX2__) && INLINEVIT_VECTOR_BYTES == 32
  return sum + Ints(_mm256_madd_epi16(__m256i(inputs), __m256i(weights)));
#elif defined(__SSE2__) && INLINEVIT_VECTOR_BYTES == 16
  return sum + Ints(_mm_madd_epi16(__m128i(inputs), __m128i(weights)));
#else
  return sum + (inputs << 16 >> 16) * (weights << 16 >> 16) + (inputs >> 16) * (weights >> 16);
#endif
}

// Copy the weights of a tile's panels, `panel_size` apart, in the order in which it reads them: for each group of 4
// inputs one vector per column vector, or two of 16-bit numbers. It is used for all rows.
void expand_weights(const int8_t* panels, long panel_size, long groups, long vectors, Ints* weights) {
  for (long group = 0; group < groups; ++group) {
    for (long j = 0; j < vectors; ++j) {
      const int8_t* from = panels + j / PANEL_VECTORS * panel_size + group * 4 * PANEL +
                           j % PANEL_VECTORS * INLINEVIT_VECTOR_BYTES;
      const Ints bytes = load_ints(from);
#ifdef INLINEVIT_VNNI
      weights[group * vectors + j] = bytes;
#else
      const Vec<int16_t> words = Vec<int16_t>(bytes);
      weights[2 * group * vectors + j] = Ints(words << 8 >> 8);
      weights[(2 * group + 1) * vectors + j] = Ints(words >> 8);
#endif
    }
  }
}

// Hides from the compiler where a value comes from. It would load weights again for each row, and add products to
// each other before it adds them to their sum, for which there are not enough registers.
INLINEVIT_INLINE void hide(Ints& value) {
#if defined(__AVX512F__) && INLINEVIT_VECTOR_BYTES == 64
  asm("" : "+v"(value));
#elif defined(__AVX2__) && INLINEVIT_VECTOR_BYTES == 32
  asm("" : "+x"(value));
#else
  (void)value;
#endif
}

// Rows of inputs: integers (rows, depth rounded up to 4) and scales (rows, blocks).
struct QuantizedRows {
  Quantized* values;
  float* scales;
  long stride, blocks;

  QuantizedRows(Arena& arena, long rows, long depth)
      : stride(round_up(depth, LANES<float> > 4 ? LANES<float> : 4)), blocks((depth + DEPTH_BLOCK - 1) / DEPTH_BLOCK) {
    values = arena.take<Quantized>(rows * stride);
    scales = arena.take<float>(rows * blocks);
  }
};

// Quantise rows; `to` may have been made for longer ones.
QuantizedRows quantize(const float* rows, long row_stride, long count, long depth, QuantizedRows to) {
  to.stride = round_up(depth, LANES<float> > 4 ? LANES<float> : 4);
  to.blocks = (depth + DEPTH_BLOCK - 1) / DEPTH_BLOCK;
  for (long i = 0; i < count; ++i) {
    for (long block = 0; block < to.blocks; ++block) {
      const float* from = rows + i * row_stride + block * DEPTH_BLOCK;
      Quantized* target = to.values + i * to.stride + block * DEPTH_BLOCK;
      const long length = smaller(DEPTH_BLOCK, depth - block * DEPTH_BLOCK);
      Vec<float> most{}, invalid{};
      for (long k = 0; k < length; k += LANES<float>) {
        const Vec<float> x = load(from + k, length - k), size = x < 0 ? -x : x;
        most = size > most ? size : most;
        invalid += x * 0.0f;
      }
      const float largest = maximum<float>(most);
      // NaN and infinity must not become ordinary numbers: they make the scale NaN.
      to.scales[i * to.blocks + block] = largest / 127 + sum<float>(invalid);
      const Vec<float> factor = broadcast(largest > 0 ? 127 / largest : 0.0f);
      for (long k = 0; k < length; k += LANES<float>) {
        // Adding 1.5·2²³ rounds to an integer, which is in the low bits of the sum.
        const Vec<float> shifted = load(from + k, length - k) * factor + 12582912.0f;
        Ints integers = Ints(shifted) - (0x4B400000 - OFFSET);
        typedef Quantized Narrow __attribute__((vector_size(LANES<float> * sizeof(Quantized))));
        Narrow narrow = __builtin_convertvector(integers, Narrow);
#ifdef INLINEVIT_VNNI
        typedef uint32_t Words __attribute__((vector_size(LANES<float>)));
        const Words words = Words(narrow);
        narrow = Narrow((words & 0xff0000ffu) | (words & 0xff00u) << 8 | (words >> 8 & 0xff00u));
#endif
        memcpy(target + k, &narrow, sizeof narrow);
      }
    }
  }
  return to;
}

// As multiply_packed, for quantised rows.
void multiply_int8(const InlinevitLinear& layer, const QuantizedRows& a, long rows, long begin, long end, long first,
                   long depth, const Epilogue& epilogue, float* out, long out_stride) {
  constexpr long GROUP = 4 * PANEL;
  const int8_t* weight = static_cast<const int8_t*>(layer.weight);
  const long panel_size = (layer.inputs + 3) / 4 * GROUP, padded_outputs = round_up(layer.outputs, PANEL);
  alignas(64) float edge[ROWS * TILE_PANELS * PANEL];
  Ints weights[DEPTH_BLOCK / 4 * TERMS * COLUMN_VECTORS];
  for (long block = 0; block < a.blocks; ++block) {
    const long groups = (smaller(DEPTH_BLOCK, depth - block * DEPTH_BLOCK) + 3) / 4;
    const bool add = block > 0 || epilogue.accumulate, last = block == a.blocks - 1;
    const float* bias = block == 0 ? epilogue.bias : nullptr;
    const int32_t* sums = layer.sums + (first / DEPTH_BLOCK + block) * padded_outputs;
    for_panels(begin, end, [&](long panel, long panels, long column, long columns) {
      expand_weights(weight + panel * panel_size + (first + block * DEPTH_BLOCK) / 4 * GROUP, panel_size, groups,
                     panels * PANEL_VECTORS, weights);
      const bool whole = columns == panels * PANEL;
      for_row_blocks(rows, [&](long row, long count) {
        float* target = out + row * out_stride + column - begin;
        float* c = whole ? target : edge;
        const long c_stride = whole ? out_stride : panels * PANEL;
        if (!whole && add)
          for (long i = 0; i < count; ++i) memcpy(c + i * c_stride, target + i * out_stride, columns * sizeof(float));
        auto compute = [&]<int N>() {
          with_rows<ROWS>(count, [&]<int M>() __attribute__((always_inline)) {
            Ints totals[M][N];
            INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
              INLINEVIT_UNROLL for (int j = 0; j < N; ++j) totals[i][j] = Ints{};
            }
            const Quantized* left = a.values + row * a.stride + block * DEPTH_BLOCK;
            for (long group = 0; group < groups; ++group) {
              INLINEVIT_UNROLL for (int term = 0; term < TERMS; ++term) {
                Ints right[N];
                INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
                  right[j] = weights[(group * TERMS + term) * N + j];
                  hide(right[j]);
                }
                INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
                  int32_t inputs;
                  memcpy(&inputs, left + i * a.stride + 4 * group + 2 * term, sizeof inputs);
                  INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
                    totals[i][j] = add_products(totals[i][j], inputs - Ints{}, right[j]);
                    hide(totals[i][j]);
                  }
                }
              }
            }
            INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
              const Vec<float> row_scale = broadcast(a.scales[(row + i) * a.blocks + block]);
              INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
                const long at = column + j * LANES<float>;
                Ints total = totals[i][j];
                if (OFFSET) total -= load_ints(sums + at) * OFFSET;
                float* to = c + i * c_stride + j * LANES<float>;
                Vec<float> value = __builtin_convertvector(total, Vec<float>) * (load(layer.scales + at) * row_scale);
                if (bias) value += load(bias + at);
                if (add) value += load(to);
                store(to, value);
              }
            }
          });
        };
        if (panels == TILE_PANELS)
          compute.template operator()<COLUMN_VECTORS>();
        else
          compute.template operator()<PANEL_VECTORS>();
        if (last && epilogue.gelu) gelu_rows(c, count, panels * PANEL, c_stride);
        if (!whole)
          for (long i = 0; i < count; ++i) memcpy(target + i * out_stride, c + i * c_stride, columns * sizeof(float));
      });
    });
  }
}

}  // namespace
