// One variant of the kernels: compiled with the flags of an instruction set, INLINEVIT_VARIANT and
// INLINEVIT_VECTOR_BYTES.
#include "attention.h"
#include "block.h"
#include "gelu.h"
#include "local.h"
#include "patches.h"
#include "stream.h"

namespace inlinevit {
namespace INLINEVIT_VARIANT {

extern const InlinevitFunctions functions = {
    attention_forward<float>,
    attention_forward<double>,
    attention_backward<float>,
    attention_backward<double>,
    local_kernels<float>,
    local_kernels<double>,
    local_kernels_backward<float>,
    local_kernels_backward<double>,
    gelu_forward,
    gelu_backward,
    blocks_forward,
    linear_forward,
    embed_patches,
    summarize_tokens,
    apply_rows,
};

}  // namespace INLINEVIT_VARIANT
}  // namespace inlinevit
