// The exported functions: they call the variant that fits this CPU.
#include <atomic>
#include <cstring>
#include <new>
#include <string>

#include "api.h"
#include "runtime.h"

namespace inlinevit {

#define INLINEVIT_DECLARE(name) \
  namespace name {              \
  extern const InlinevitFunctions functions; \
  }
INLINEVIT_DECLARE(generic)
#ifdef INLINEVIT_X86
INLINEVIT_DECLARE(avx2)
INLINEVIT_DECLARE(avx512)
INLINEVIT_DECLARE(avx512_vnni)
#endif

namespace {

struct Variant {
  const char* name;
  const InlinevitFunctions* functions;
  bool (*supported)();
};

#ifdef INLINEVIT_X86
// A library whose variants were all compiled for one instruction set, for tests, has the feature checks switched off.
#ifdef INLINEVIT_ASSUME_SUPPORT
#define INLINEVIT_CPU_HAS(feature) true
#else
#define INLINEVIT_CPU_HAS(feature) __builtin_cpu_supports(feature)
#endif
bool has_avx2() { return INLINEVIT_CPU_HAS("avx2") && INLINEVIT_CPU_HAS("fma"); }
bool has_avx512() {
  return has_avx2() && INLINEVIT_CPU_HAS("avx512f") && INLINEVIT_CPU_HAS("avx512bw") &&
         INLINEVIT_CPU_HAS("avx512dq") && INLINEVIT_CPU_HAS("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && INLINEVIT_CPU_HAS("avx512vnni"); }
#endif

// Best first.
const Variant VARIANTS[] = {
#ifdef INLINEVIT_X86
    {"avx512_vnni", &avx512_vnni::functions, has_avx512_vnni},
    {"avx512", &avx512::functions, has_avx512},
    {"avx2", &avx2::functions, has_avx2},
#endif
    {"generic", &generic::functions, [] { return true; }},
};

std::atomic<const InlinevitFunctions*> selected{nullptr};

const InlinevitFunctions& functions() {
  if (!selected) {
    for (const Variant& variant : VARIANTS) {
      if (variant.supported()) {
        selected = variant.functions;
        break;
      }
    }
  }
  return *selected;
}

// Call a function of the variant; no exception may leave the library.
template <typename Function, typename... Arguments>
int call(Function function, Arguments... arguments) {
  int code = 0;
  try {
    function(arguments...);
  } catch (const std::bad_alloc&) {
    code = 1;
  }
  trim_scratch();
  return code;
}

}  // namespace
}  // namespace inlinevit

using inlinevit::call;
using inlinevit::functions;

#define INLINEVIT_EXPORT extern "C" __attribute__((visibility("default")))

INLINEVIT_EXPORT int inlinevit_api_version() { return INLINEVIT_API_VERSION; }

INLINEVIT_EXPORT const char* inlinevit_variants() {
  static const std::string names = [] {
    std::string joined;
    for (const auto& variant : inlinevit::VARIANTS) {
      if (!variant.supported()) continue;
      if (!joined.empty()) joined += ',';
      joined += variant.name;
    }
    return joined;
  }();
  return names.c_str();
}

INLINEVIT_EXPORT int inlinevit_select(const char* name) {
  for (const auto& variant : inlinevit::VARIANTS) {
    if (std::strcmp(variant.name, name) == 0 && variant.supported()) {
      inlinevit::selected = variant.functions;
      return 0;
    }
  }
  return 1;
}

INLINEVIT_EXPORT void inlinevit_use_openmp(void* parallel) {
  inlinevit::use_openmp(reinterpret_cast<inlinevit::OpenMP>(parallel));
}

INLINEVIT_EXPORT int inlinevit_attention_f32(const InlinevitAttention* shape, const float* qkv, const float* kernels,
                                             const float* bias, float* out, float* state) {
  return call(functions().attention_f32, shape, qkv, kernels, bias, out, state);
}

INLINEVIT_EXPORT int inlinevit_attention_f64(const InlinevitAttention* shape, const double* qkv, const double* kernels,
                                             const double* bias, double* out, double* state) {
  return call(functions().attention_f64, shape, qkv, kernels, bias, out, state);
}

INLINEVIT_EXPORT int inlinevit_attention_backward_f32(const InlinevitAttention* shape, const float* grad,
                                                      const float* qkv, const float* kernels, const float* state,
                                                      float* grad_qkv, float* grad_kernels, float* grad_bias) {
  return call(functions().attention_backward_f32, shape, grad, qkv, kernels, state, grad_qkv, grad_kernels, grad_bias);
}

INLINEVIT_EXPORT int inlinevit_attention_backward_f64(const InlinevitAttention* shape, const double* grad,
                                                      const double* qkv, const double* kernels, const double* state,
                                                      double* grad_qkv, double* grad_kernels, double* grad_bias) {
  return call(functions().attention_backward_f64, shape, grad, qkv, kernels, state, grad_qkv, grad_kernels, grad_bias);
}

INLINEVIT_EXPORT int inlinevit_local_kernels_f32(const InlinevitAttention* shape, const float* x, const float* weight1,
                                                 const float* bias1, const float* weight2, const float* bias2,
                                                 const float* added, float* out, float* state) {
  return call(functions().local_kernels_f32, shape, x, weight1, bias1, weight2, bias2, added, out, state);
}

INLINEVIT_EXPORT int inlinevit_local_kernels_f64(const InlinevitAttention* shape, const double* x,
                                                 const double* weight1, const double* bias1, const double* weight2,
                                                 const double* bias2, const double* added, double* out,
                                                 double* state) {
  return call(functions().local_kernels_f64, shape, x, weight1, bias1, weight2, bias2, added, out, state);
}

INLINEVIT_EXPORT int inlinevit_local_kernels_backward_f32(const InlinevitAttention* shape, const float* grad,
                                                          const float* state, const float* weight1,
                                                          const float* weight2, float* grad_mean, float* grad_x,
                                                          float* grad_weight1, float* grad_bias1, float* grad_weight2,
                                                          float* grad_bias2) {
  return call(functions().local_kernels_backward_f32, shape, grad, state, weight1, weight2, grad_mean, grad_x,
              grad_weight1, grad_bias1, grad_weight2, grad_bias2);
}

INLINEVIT_EXPORT int inlinevit_local_kernels_backward_f64(const InlinevitAttention* shape, const double* grad,
                                                          const double* state, const double* weight1,
                                                          const double* weight2, double* grad_mean, double* grad_x,
                                                          double* grad_weight1, double* grad_bias1,
                                                          double* grad_weight2, double* grad_bias2) {
  return call(functions().local_kernels_backward_f64, shape, grad, state, weight1, weight2, grad_mean, grad_x,
              grad_weight1, grad_bias1, grad_weight2, grad_bias2);
}

INLINEVIT_EXPORT int inlinevit_gelu(int64_t count, int64_t threads, const float* x, float* out) {
  return call(functions().gelu, count, threads, x, out);
}

INLINEVIT_EXPORT int inlinevit_gelu_backward(int64_t count, int64_t threads, const float* grad, const float* x,
                                             float* out) {
  return call(functions().gelu_backward, count, threads, grad, x, out);
}

INLINEVIT_EXPORT int inlinevit_blocks(const InlinevitBlock* blocks, int64_t count, const float* x, float* out) {
  return call(functions().blocks, blocks, count, x, out);
}

INLINEVIT_EXPORT int inlinevit_linear(const InlinevitLinear* layer, int64_t rows, int64_t threads, int64_t gelu,
                                      const float* x, float* out) {
  return call(functions().linear, layer, rows, threads, gelu, x, out);
}

INLINEVIT_EXPORT int inlinevit_patches(const InlinevitPatches* patches, const float* x, float* out) {
  return call(functions().patches, patches, x, out);
}

INLINEVIT_EXPORT int inlinevit_summarize(const InlinevitBlock* block, int64_t tokens, const float* x,
                                         const uint8_t* mask, double* count, double* mean, double* kernel_mean,
                                         double* covariance) {
  return call(functions().summarize, block, tokens, x, mask, count, mean, kernel_mean, covariance);
}

INLINEVIT_EXPORT int inlinevit_apply(const InlinevitBlock* block, const InlinevitRows* rows, const float* x,
                                     float* out) {
  return call(functions().apply, block, rows, x, out);
}
