// Vectors, loops over tasks, scratch memory.
//
// variant.cpp is compiled several times, for other instruction sets and vector lengths. All that it includes has
// internal linkage and uses no templates of the standard library: the linker would merge equally named functions of
// the variants, and an older CPU could get one with instructions that it does not have.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "api.h"
#include "runtime.h"

#ifndef INLINEVIT_VECTOR_BYTES
#error "variant.cpp needs INLINEVIT_VARIANT and INLINEVIT_VECTOR_BYTES (see build.py)"
#endif

#define INLINEVIT_INLINE inline __attribute__((always_inline))
#define INLINEVIT_UNROLL _Pragma("GCC unroll 32")

namespace {

using inlinevit::Scratch;

// Types of the compiler's vector extensions, which are lowered to whatever the target has.
template <typename T>
struct Vector {
  typedef T type __attribute__((vector_size(INLINEVIT_VECTOR_BYTES)));
  static constexpr long lanes = INLINEVIT_VECTOR_BYTES / sizeof(T);
};

template <typename T>
using Vec = typename Vector<T>::type;
template <typename T>
constexpr long LANES = Vector<T>::lanes;

// memcpy becomes one instruction; arrays need not be aligned to vectors.
template <typename T>
INLINEVIT_INLINE Vec<T> load(const T* from) {
  Vec<T> values;
  memcpy(&values, from, sizeof values);
  return values;
}

template <typename T>
INLINEVIT_INLINE void store(T* to, Vec<T> values) {
  memcpy(to, &values, sizeof values);
}

// The first `count` lanes only; the others are zero, or not stored.
template <typename T>
INLINEVIT_INLINE Vec<T> load(const T* from, long count) {
  if (count >= LANES<T>) return load(from);
  Vec<T> values{};
  memcpy(&values, from, count * sizeof(T));
  return values;
}

template <typename T>
INLINEVIT_INLINE void store(T* to, Vec<T> values, long count) {
  if (count >= LANES<T>)
    store(to, values);
  else
    memcpy(to, &values, count * sizeof(T));
}

template <typename T>
INLINEVIT_INLINE Vec<T> broadcast(T value) {
  return value - Vec<T>{};
}

// Combine all lanes by an operation of vectors and of numbers, half of them with the other half at a time.
template <typename T, long Count = LANES<T>, typename Values, typename Operation>
INLINEVIT_INLINE T reduce(Values values, Operation operation) {
  if constexpr (Count == 2) {
    return operation(values[0], values[1]);
  } else {
    typedef T Half __attribute__((vector_size(Count / 2 * sizeof(T))));
    Half halves[2];
    memcpy(halves, &values, sizeof halves);
    return reduce<T, Count / 2>(operation(halves[0], halves[1]), operation);
  }
}

template <typename T>
INLINEVIT_INLINE T sum(Vec<T> values) {
  return reduce<T>(values, [](auto a, auto b) { return a + b; });
}

template <typename T>
INLINEVIT_INLINE T maximum(Vec<T> values) {
  return reduce<T>(values, [](auto a, auto b) { return a > b ? a : b; });
}

constexpr long smaller(long a, long b) { return a < b ? a : b; }
constexpr long larger(long a, long b) { return a > b ? a : b; }
constexpr long round_up(long count, long multiple) { return (count + multiple - 1) / multiple * multiple; }

// The `part`-th of `parts` nearly equal ranges of 0…count begins here.
constexpr long part_begin(long count, long parts, long part) { return count * part / parts; }

// Hands out pieces of scratch memory. Without memory it only counts: a layout (a struct of pointers whose constructor
// takes an Arena) is made twice, to learn its size and to place it.
class Arena {
 public:
  explicit Arena(void* memory) : begin_(uintptr_t(memory)), next_(begin_) {}

  template <typename T>
  T* take(long count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += round_up(count * long(sizeof(T)), 64);
    return piece;
  }

  size_t used() const { return next_ - begin_; }

 private:
  uintptr_t begin_, next_;
};

template <typename Layout, typename... Arguments>
Layout take_scratch(Scratch kind, const Arguments&... arguments) {
  Arena counting(nullptr);
  Layout(counting, arguments...);
  Arena arena(inlinevit::scratch(kind, counting.used()));
  return Layout(arena, arguments...);
}

// Call task(index) for all 0 <= index < count.
template <typename Function>
void parallel(long count, long threads, Function task) {
  auto call = [](void* context, long index) { (*static_cast<Function*>(context))(index); };
  inlinevit::run_tasks(count, threads, call, &task);
}

// Registers: 16 vectors on x86 before AVX-512, 32 on others. A product keeps ROWS × COLUMN_VECTORS sums in them.
#if INLINEVIT_VECTOR_BYTES == 64
constexpr int ROWS = 14, COLUMN_VECTORS = 2, COVARIANCE_ROWS = 8;
#elif INLINEVIT_VECTOR_BYTES == 32
constexpr int ROWS = 6, COLUMN_VECTORS = 2, COVARIANCE_ROWS = 4;
#elif defined(__aarch64__)
constexpr int ROWS = 6, COLUMN_VECTORS = 4, COVARIANCE_ROWS = 4;
#else
constexpr int ROWS = 3, COLUMN_VECTORS = 4, COVARIANCE_ROWS = 4;
#endif

// Call function.template operator()<M>() with M = rows, 1 <= rows <= Most.
template <int Most, typename Function>
INLINEVIT_INLINE void with_rows(long rows, Function function) {
  if constexpr (Most > 1) {
    if (rows < Most) return with_rows<Most - 1>(rows, function);
  }
  function.template operator()<Most>();
}

// sums[i][j] += Σ_k row(i)[k] · b[k · stride + j · column], a vector of columns at a time. The heart of all products.
// step(k) is called for each k.
template <typename T, int M, int N, typename Rows, typename Step>
INLINEVIT_INLINE void multiply_add(Vec<T> (&sums)[M][N], Rows row, const T* b, long stride, const long (&column)[N],
                                   long depth, Step step) {
  _Pragma("GCC unroll 2") for (long k = 0; k < depth; ++k) {
    step(k);
    Vec<T> right[N];
    INLINEVIT_UNROLL for (int j = 0; j < N; ++j) right[j] = load(b + k * stride + column[j]);
    INLINEVIT_UNROLL for (int i = 0; i < M; ++i) {
      const Vec<T> left = broadcast(row(i)[k]);
      INLINEVIT_UNROLL for (int j = 0; j < N; ++j) sums[i][j] += left * right[j];
    }
  }
}

// Call tile(row, rows) for blocks of nearly equal numbers of rows, at most `Most`: 98 rows are 17 blocks of 6 or 5.
template <int Most = ROWS, typename Function>
INLINEVIT_INLINE void for_row_blocks(long rows, Function tile) {
  const long blocks = (rows + Most - 1) / Most;
  for (long block = 0; block < blocks; ++block) {
    const long begin = part_begin(rows, blocks, block);
    tile(begin, part_begin(rows, blocks, block + 1) - begin);
  }
}

// Call finish(i, j, initial(i, j) + Σ_k row(i)[k] · b[k · stride + j · step]) for all rows i and vectors of columns j.
template <typename T, int Most = ROWS, typename Rows, typename Initial, typename Finish>
INLINEVIT_INLINE void multiply_rows(long rows, long vectors, Rows row, const T* b, long stride, long step, long depth,
                                    Initial initial, Finish finish) {
  auto columns = [&]<int N>(long j) {
    long offsets[N];
    INLINEVIT_UNROLL for (int n = 0; n < N; ++n) offsets[n] = (j + n) * step;
    for_row_blocks<Most>(rows, [&](long i, long count) {
      with_rows<Most>(count, [&]<int M>() __attribute__((always_inline)) {
        Vec<T> sums[M][N];
        INLINEVIT_UNROLL for (int m = 0; m < M; ++m) {
          INLINEVIT_UNROLL for (int n = 0; n < N; ++n) sums[m][n] = initial(i + m, j + n);
        }
        multiply_add<T>(sums, [=](int m) { return row(i + m); }, b, stride, offsets, depth, [](long) {});
        INLINEVIT_UNROLL for (int m = 0; m < M; ++m) {
          INLINEVIT_UNROLL for (int n = 0; n < N; ++n) finish(i + m, j + n, sums[m][n]);
        }
      });
    });
  };
  long j = 0;
  for (; j + COLUMN_VECTORS <= vectors; j += COLUMN_VECTORS) columns.template operator()<COLUMN_VECTORS>(j);
  for (; j < vectors; ++j) columns.template operator()<1>(j);
}

}  // namespace
