// The C interface of the library: what Python calls through ctypes (../_library.py mirrors these structs).
//
// All arrays are row-major and contiguous. Functions that compute return 0, or 1 when memory ran out.
#pragma once
#include <stdint.h>

#define INLINEVIT_API_VERSION 8

// Outputs of a linear layer per panel of packed weights, and inputs per block (see gemm.h, int8.h, ../packing.py).
#define INLINEVIT_PANEL 16
#define INLINEVIT_DEPTH_BLOCK 512

extern "C" {

// How one map is split into windows for one of the equally large head groups: Windows of layers/layouts.py.
typedef struct {
  int64_t map_height, map_width, height, width, shift_up, shift_left, head_group, num_head_groups;
} InlinevitWindows;

typedef struct {
  int64_t batch, prefix, num_heads, head_dim, threads;
  double scale;
  InlinevitWindows windows;
} InlinevitAttention;

// A packed linear layer. Outputs are padded to whole panels, in weight, bias, scales and sums.
typedef struct {
  int64_t inputs, outputs;
  // float32: (panels, inputs, 16). int8: (panels, inputs / 4, 16, 4), inputs padded to a multiple of 8.
  const void* weight;
  const float* bias;
  // int8 only, else null: the scale of each output, and the sum of its integers over each block of inputs.
  const float* scales;
  const int32_t* sums;
} InlinevitLinear;

typedef struct {
  int64_t batch, prefix, num_heads, head_dim, threads;
  // Compute only the outputs of the prefix tokens.
  int64_t prefix_only;
  // The mean token of the local residual is that of the block's input, not of its norm.
  int64_t kernels_before_norm;
  // Softmax attention, which has no local residual, instead of InLine attention.
  int64_t softmax;
  // The side of the largest window that relative_bias has positions for; 0 without it.
  int64_t relative_window;
  double scale, norm1_eps, norm2_eps;
  int64_t num_head_groups;
  InlinevitWindows windows[2];
  const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
  InlinevitLinear qkv, proj, fc1, fc2;
  // The local residual, or null: (heads, width in, width out), (channels), (heads, width in, 9, width out) and
  // (9, channels).
  const float *local1_weight, *local1_bias, *local2_weight, *local2_bias;
  // LePE, or null: (9, channels) and (channels).
  const float *lepe_weight, *lepe_bias;
  // Biases of relative positions, or null: (heads, (2 · relative_window − 1)²), from the last position to the first,
  // in units of log 2, and 16 more numbers.
  const float* relative_bias;
} InlinevitBlock;

// Patches of images or maps (patches.h). height and width are those of the map of patches; strides are the distances
// between them in numbers. A patch is read as outer · inner pieces of `length` consecutive numbers.
typedef struct {
  int64_t batch, height, width, threads;
  int64_t batch_stride, row_stride, column_stride;
  int64_t outer, outer_stride, inner, inner_stride, length;
  double norm_in_eps, norm_out_eps;
  // LayerNorm of each patch, and of each token; null if there is none.
  const float *norm_in_weight, *norm_in_bias, *norm_out_weight, *norm_out_bias;
  InlinevitLinear layer;
} InlinevitPatches;

// A chunk of rows of a map that does not fit into memory (stream.h).
typedef struct {
  int64_t height, width;
  // Linear layers of the normed tokens: to v̄ + q·(s·C), and to the values. channels inputs and outputs.
  InlinevitLinear attention, values;
  // Kernels of the convolution (9, channels), or null without one.
  const float* taps;
  // The rows next to the chunk (width, channels), or null at the border of the map.
  const float *above, *below;
  // 0 for tokens whose values count as zero in the convolution; null if there are none.
  const uint8_t *mask, *mask_above, *mask_below;
} InlinevitRows;

typedef struct {
  // Tokens (batch, prefix + H·W, 3 · channels of all heads) to (batch, prefix + H·W, channels of the head group).
  // kernels: (batch · windows, channels of the group, 9) or null; bias: (channels of the group) or null. state, for
  // the backward pass, or null: (batch · windows, heads of the group, width + 2, width): the covariance times the
  // scale, the mean key, the mean value.
  void (*attention_f32)(const InlinevitAttention*, const float* qkv, const float* kernels, const float* bias,
                        float* out, float* state);
  void (*attention_f64)(const InlinevitAttention*, const double* qkv, const double* kernels, const double* bias,
                        double* out, double* state);
  // grad_kernels (as kernels) and grad_bias (batch · windows, channels of the group) may be null. Of grad_qkv, only
  // the channels of the head group are written.
  void (*attention_backward_f32)(const InlinevitAttention*, const float* grad, const float* qkv, const float* kernels,
                                 const float* state, float* grad_qkv, float* grad_kernels, float* grad_bias);
  void (*attention_backward_f64)(const InlinevitAttention*, const double* grad, const double* qkv,
                                 const double* kernels, const double* state, double* grad_qkv, double* grad_kernels,
                                 double* grad_bias);
  // Tokens (batch, prefix + H·W, channels of all heads) to the kernels of the local residual (batch · windows, channels
  // of the head group, 9). Of the head group: weight1 (channels, width), bias1 (channels), weight2 (channels · 9, width),
  // bias2 and added (channels, 9); added, to all kernels, may be null. state, for the backward pass, or null: (2,
  // batch · windows, channels): x̄, and the hidden channels before GELU.
  void (*local_kernels_f32)(const InlinevitAttention*, const float* x, const float* weight1, const float* bias1,
                            const float* weight2, const float* bias2, const float* added, float* out, float* state);
  void (*local_kernels_f64)(const InlinevitAttention*, const double* x, const double* weight1, const double* bias1,
                            const double* weight2, const double* bias2, const double* added, double* out, double* state);
  // grad: as the kernels. grad_mean (batch · windows, channels), of each token of a window, and grad_x, as x, of which
  // only the channels of the head group are written, may be null; grad_x needs grad_mean.
  void (*local_kernels_backward_f32)(const InlinevitAttention*, const float* grad, const float* state,
                                     const float* weight1, const float* weight2, float* grad_mean, float* grad_x,
                                     float* grad_weight1, float* grad_bias1, float* grad_weight2, float* grad_bias2);
  void (*local_kernels_backward_f64)(const InlinevitAttention*, const double* grad, const double* state,
                                     const double* weight1, const double* weight2, double* grad_mean, double* grad_x,
                                     double* grad_weight1, double* grad_bias1, double* grad_weight2,
                                     double* grad_bias2);
  // GELU of x (count), and grad times its derivative at x.
  void (*gelu)(int64_t count, int64_t threads, const float* x, float* out);
  void (*gelu_backward)(int64_t count, int64_t threads, const float* grad, const float* x, float* out);
  // Tokens (batch, prefix + H·W, channels) to the same shape, by `count` consecutive blocks; or to (batch, prefix,
  // channels) by a single one with prefix_only.
  void (*blocks)(const InlinevitBlock*, int64_t count, const float* x, float* out);
  // (rows, inputs) to (rows, outputs), float32 or int8 as it was packed; gelu: applied to the outputs.
  void (*linear)(const InlinevitLinear*, int64_t rows, int64_t threads, int64_t gelu, const float* x, float* out);
  // Images or maps, with borders of zeros where patches need them, to (batch, height, width, outputs).
  void (*patches)(const InlinevitPatches*, const float* x, float* out);
  // Of the tokens (tokens, channels) that are not 0 in mask (tokens) or null: their number, their mean after the first
  // norm (channels), the mean that kernels are made of (channels), and Σ (x − x̄)(x − x̄)ᵀ (channels, channels) after
  // the norm.
  void (*summarize)(const InlinevitBlock*, int64_t tokens, const float* x, const uint8_t* mask, double* count,
                    double* mean, double* kernel_mean, double* covariance);
  // Tokens (height · width, channels) to the same shape; out may be x. The block's window is the chunk, without prefix.
  void (*apply)(const InlinevitBlock*, const InlinevitRows*, const float* x, float* out);
} InlinevitFunctions;

int inlinevit_api_version(void);
// The variants that were compiled and that this CPU supports, best first, separated by commas.
const char* inlinevit_variants(void);
// Use one of them from now on; returns 0, or 1 if there is no such variant.
int inlinevit_select(const char* variant);
// Use the threads of the OpenMP runtime with this function GOMP_parallel, or with null those of this library.
void inlinevit_use_openmp(void* parallel);

int inlinevit_attention_f32(const InlinevitAttention*, const float*, const float*, const float*, float*, float*);
int inlinevit_attention_f64(const InlinevitAttention*, const double*, const double*, const double*, double*, double*);
int inlinevit_attention_backward_f32(const InlinevitAttention*, const float*, const float*, const float*, const float*,
                                     float*, float*, float*);
int inlinevit_attention_backward_f64(const InlinevitAttention*, const double*, const double*, const double*,
                                     const double*, double*, double*, double*);
int inlinevit_local_kernels_f32(const InlinevitAttention*, const float*, const float*, const float*, const float*,
                                const float*, const float*, float*, float*);
int inlinevit_local_kernels_f64(const InlinevitAttention*, const double*, const double*, const double*, const double*,
                                const double*, const double*, double*, double*);
int inlinevit_local_kernels_backward_f32(const InlinevitAttention*, const float*, const float*, const float*,
                                         const float*, float*, float*, float*, float*, float*, float*);
int inlinevit_local_kernels_backward_f64(const InlinevitAttention*, const double*, const double*, const double*,
                                         const double*, double*, double*, double*, double*, double*, double*);
int inlinevit_gelu(int64_t, int64_t, const float*, float*);
int inlinevit_gelu_backward(int64_t, int64_t, const float*, const float*, float*);
int inlinevit_blocks(const InlinevitBlock*, int64_t, const float*, float*);
int inlinevit_linear(const InlinevitLinear*, int64_t, int64_t, int64_t, const float*, float*);
int inlinevit_patches(const InlinevitPatches*, const float*, float*);
int inlinevit_summarize(const InlinevitBlock*, int64_t, const float*, const uint8_t*, double*, double*, double*,
                        double*);
int inlinevit_apply(const InlinevitBlock*, const InlinevitRows*, const float*, float*);
}
