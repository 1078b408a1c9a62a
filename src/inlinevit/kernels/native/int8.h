// int8 products: weights are integers with a scale for each output. Inputs are quantised to 0 … INPUT_RANGE + 1, with a
// scale and a zero point for each row and block of DEPTH_BLOCK inputs. Sums of integers are exact, so all variants without
// VNNI give the same ones.
//
// Packed weights have 4 inputs of an output side by side: a group, multiplied with the same 4 bytes of a row. VNNI sums
// up its products in 32 bits. AVX2 and AVX-512 without it sum up two of them, and those of the next group, in 16 bits:
// the weights are so small (../packing.py) that these sums cannot overflow; VNNI has larger ones, and more steps of the
// inputs. Others multiply 16-bit numbers, which are
// pairs of inputs 0 and 2, then 1 and 3: the low and the high bytes of the group's 16-bit words.
#pragma once
#include "gemm.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace {

#if INLINEVIT_VECTOR_BYTES >= 32
using Quantized = uint8_t;
#else
using Quantized = int16_t;
#endif
// How many vectors of products are summed up in 16 bits, and how many rows are computed at once: so many that all sums
// and weights stay in registers.
#if defined(INLINEVIT_VNNI) || INLINEVIT_VECTOR_BYTES < 32
constexpr int TOGETHER = 1, INT8_ROWS = ROWS;
#else
constexpr int TOGETHER = 2, INT8_ROWS = INLINEVIT_VECTOR_BYTES == 32 ? 4 : 12;
#endif
// Whether a tile reads weights in the order in which they are packed.
constexpr bool IN_ORDER = sizeof(Quantized) == 1 && TILE_PANELS == 1;
// Rounding may make it one more, which has to fit into 8 bits, or its products into 16.
#if defined(INLINEVIT_VNNI)
constexpr int INPUT_RANGE = 254;
#else
constexpr int INPUT_RANGE = 203;
#endif
// Inputs of a row are padded to a multiple of this.
constexpr long INPUT_STEP = 8;

using Ints = Vec<int32_t>;

INLINEVIT_INLINE Ints load_ints(const void* from) {
  Ints values;
  memcpy(&values, from, sizeof values);
  return values;
}

// sum + products of the integers in each 32-bit lane: 4 inputs and weights of 8 bits, or 2 of 16 bits.
INLINEVIT_INLINE Ints add_products(Ints sum, const Ints (&inputs)[TOGETHER], const Ints (&weights)[TOGETHER]) {
#if defined(INLINEVIT_VNNI) && defined(__AVX512VNNI__)
  return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(inputs[0]), __m512i(weights[0])));
#elif defined(__AVX512BW__) && INLINEVIT_VECTOR_BYTES == 64
  const __m512i words = _mm512_add_epi16(_mm512_maddubs_epi16(__m512i(inputs[0]), __m512i(weights[0])),
                                         _mm512_maddubs_epi16(__m512i(inputs[1]), __m512i(weights[1])));
  return sum + Ints(_mm512_madd_epi16(words, _mm512_set1_epi16(1)));
#elif defined(__AVX2__) && INLINEVIT_VECTOR_BYTES == 32
  const __m256i words = _mm256_add_epi16(_mm256_maddubs_epi16(__m256i(inputs[0]), __m256i(weights[0])),
                                         _mm256_maddubs_epi16(__m256i(inputs[1]), __m256i(weights[1])));
  return sum + Ints(_mm256_madd_epi16(words, _mm256_set1_epi16(1)));
#elif INLINEVIT_VECTOR_BYTES >= 32
  for (int i = 0; i < TOGETHER; ++i)
    for (int bit = 0; bit < 32; bit += 8) sum += (inputs[i] >> bit & 255) * (weights[i] << (24 - bit) >> 24);
  return sum;
#elif defined(__SSE2__)
  return sum + Ints(_mm_madd_epi16(__m128i(inputs[0]), __m128i(weights[0])));
#else
  return sum + (inputs[0] << 16 >> 16) * (weights[0] << 16 >> 16) + (inputs[0] >> 16) * (weights[0] >> 16);
#endif
}

// Copy the weights of a tile's panels, `panel_size` apart, in the order in which it reads them: for each group one
// vector per column vector, or two of 16-bit numbers. They are used for all rows.
void expand_weights(const int8_t* panels, long panel_size, long groups, long vectors, Ints* weights) {
  for (long group = 0; group < groups; ++group) {
    for (long j = 0; j < vectors; ++j) {
      const Ints bytes = load_ints(panels + j / PANEL_VECTORS * panel_size + group * 4 * PANEL +
                                   j % PANEL_VECTORS * INLINEVIT_VECTOR_BYTES);
      if constexpr (sizeof(Quantized) == 1) {
        weights[group * vectors + j] = bytes;
      } else {
        const Vec<int16_t> words = Vec<int16_t>(bytes);
        weights[2 * group * vectors + j] = Ints(words << 8 >> 8);
        weights[(2 * group + 1) * vectors + j] = Ints(words >> 8);
      }
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

// Rows of inputs: integers (rows, padded depth), scales and zero points (rows, blocks).
struct QuantizedRows {
  Quantized* values;
  float* scales;
  int32_t* zeros;
  long stride, blocks;

  QuantizedRows(Arena& arena, long rows, long depth) {
    set_depth(depth);
    values = arena.take<Quantized>(rows * stride);
    scales = arena.take<float>(rows * blocks);
    zeros = arena.take<int32_t>(rows * blocks);
  }

  void set_depth(long depth) {
    stride = round_up(depth, larger(LANES<float>, INPUT_STEP));
    blocks = (depth + DEPTH_BLOCK - 1) / DEPTH_BLOCK;
  }
};

// Store integers of 0 … 255 in the order in which they are multiplied.
INLINEVIT_INLINE void store_quantized(Quantized* to, Ints values) {
#if defined(__AVX2__) && INLINEVIT_VECTOR_BYTES == 32
  // The lowest byte of each integer, to the front of its half; then both halves.
  const __m256i low = _mm256_set1_epi32(0x0c080400), front = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(__m256i(values), low), front);
  memcpy(to, &bytes, LANES<float>);
#else
#if INLINEVIT_VECTOR_BYTES == 16
  values = __builtin_shufflevector(values, values, 0, 2, 1, 3);
#endif
  typedef Quantized Narrow __attribute__((vector_size(LANES<float> * sizeof(Quantized))));
  const Narrow narrow = __builtin_convertvector(values, Narrow);
  memcpy(to, &narrow, sizeof narrow);
#endif
}

// Quantise rows; `to` may have been made for longer ones.
QuantizedRows quantize(const float* rows, long row_stride, long count, long depth, QuantizedRows to) {
  to.set_depth(depth);
  // Adding 1.5·2²³ rounds to an integer, which is in the low bits of the sum.
  auto round = [](Vec<float> x) { return Ints(x + 12582912.0f) - 0x4B400000; };
  for (long i = 0; i < count; ++i) {
    for (long block = 0; block < to.blocks; ++block) {
      const float* from = rows + i * row_stride + block * DEPTH_BLOCK;
      Quantized* target = to.values + i * to.stride + block * DEPTH_BLOCK;
      const long length = smaller(DEPTH_BLOCK, depth - block * DEPTH_BLOCK);
      // The range includes 0.
      Vec<float> most{}, least{}, invalid{};
      for (long k = 0; k < length; k += LANES<float>) {
        const Vec<float> x = load(from + k, length - k);
        most = x > most ? x : most;
        least = x < least ? x : least;
        invalid += x * 0.0f;
      }
      const float low = -maximum<float>(-least), span = maximum<float>(most) - low;
      const float factor = span > 1e-30f && span < 1e38f ? INPUT_RANGE / span : 0.0f;
      const Ints zero = round(broadcast(-low * factor));
      // NaN and infinity must not become ordinary numbers: they make the scale NaN.
      to.scales[i * to.blocks + block] = span / INPUT_RANGE + sum<float>(invalid);
      to.zeros[i * to.blocks + block] = zero[0];
      for (long k = 0; k < round_up(length, INPUT_STEP); k += LANES<float>)
        store_quantized(target + k, round(load(from + k, larger(0, length - k)) * factor) + zero);
    }
  }
  return to;
}

// As multiply_packed, for quantised rows.
void multiply_int8(const InlinevitLinear& layer, const QuantizedRows& a, long rows, long begin, long end, long first,
                   long depth, const Epilogue& epilogue, float* out, long out_stride) {
  constexpr long GROUP = 4 * PANEL;
  const int8_t* weight = static_cast<const int8_t*>(layer.weight);
  const long panel_size = round_up(layer.inputs, INPUT_STEP) / 4 * GROUP, padded_outputs = round_up(layer.outputs, PANEL);
  Ints expanded[IN_ORDER ? 1 : DEPTH_BLOCK / 4 * sizeof(Quantized) * COLUMN_VECTORS];
  for (long block = 0; block < a.blocks; ++block) {
    const long groups = round_up(smaller(DEPTH_BLOCK, depth - block * DEPTH_BLOCK), INPUT_STEP) / 4;
    const bool add = block > 0 || epilogue.accumulate, last = block == a.blocks - 1;
    const float *bias = block == 0 ? epilogue.bias : nullptr, *scales = layer.scales;
    const int32_t* sums = layer.sums + (first / DEPTH_BLOCK + block) * padded_outputs;
    auto panel_at = [=](long panel) { return weight + panel * panel_size + (first + block * DEPTH_BLOCK) / 4 * GROUP; };
    auto compute = [=, &expanded]<int M, int N>(OutputTile tile) __attribute__((always_inline)) {
      const int8_t* panel = panel_at(tile.panel);
      if constexpr (!IN_ORDER) {
        if (tile.row == 0) expand_weights(panel, panel_size, groups, N, expanded);
      }
      const Ints* weights = IN_ORDER ? reinterpret_cast<const Ints*>(panel) : expanded;
      Ints totals[M][N];
      INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
        INLINEVIT_UNROLL for (int j = 0; j < N; ++j) totals[i][j] = Ints{};
      }
      const Quantized* left = a.values + tile.row * a.stride + block * DEPTH_BLOCK;
      // 4 bytes of each row at a time.
      for (long k = 0; k < groups * long(sizeof(Quantized)); k += TOGETHER) {
        tile.ahead.read(k / TOGETHER);
        Ints right[N][TOGETHER];
        INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
          INLINEVIT_UNROLL for (int t = 0; t < TOGETHER; ++t) {
            right[j][t] = load_ints(weights + (k + t) * N + j);
            hide(right[j][t]);
          }
        }
        INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
          Ints inputs[TOGETHER];
          INLINEVIT_UNROLL for (int t = 0; t < TOGETHER; ++t) {
            int32_t bytes;
            memcpy(&bytes, left + i * a.stride + (k + t) * 4 / long(sizeof(Quantized)), sizeof bytes);
            inputs[t] = bytes - Ints{};
          }
          INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
            totals[i][j] = add_products(totals[i][j], inputs, right[j]);
            hide(totals[i][j]);
          }
        }
      }
      INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
        const Vec<float> row_scale = broadcast(a.scales[(tile.row + i) * a.blocks + block]);
        const Ints zero = a.zeros[(tile.row + i) * a.blocks + block] - Ints{};
        INLINEVIT_UNROLL for (int j = 0; j < N; ++j) {
          const long at = tile.column + j * LANES<float>;
          const Ints total = totals[i][j] - load_ints(sums + at) * zero;
          float* to = tile.out + i * tile.stride + j * LANES<float>;
          Vec<float> value = __builtin_convertvector(total, Vec<float>) * (load(scales + at) * row_scale);
          if (bias) value += load(bias + at);
          if (add) value += load(to);
          store(to, value);
        }
      }
    };
    multiply_panels<INT8_ROWS>(rows, begin, end, add, last && epilogue.gelu, out, out_stride, groups * GROUP,
                               groups * long(sizeof(Quantized)) / TOGETHER, panel_at, compute);
  }
}

}  // namespace
