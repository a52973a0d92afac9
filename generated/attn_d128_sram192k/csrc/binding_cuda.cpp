// Emitted by tileproof 0.1.0: codegen --sram 192KB --d 128
// Do not edit: `codegen --check` compares it with a regeneration.
// Templates: sha256 4a9bd5696a6c40a6
//
// The ops on CUDA tensors: runs the kernel that was compiled for the tensors' device, on the caller's current stream of
// that device. It never waits for the device, so it can be captured into a CUDA graph.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include <tuple>

#include "binding.h"
#include "binding_backward.h"

extern "C" {
int attention_forward_sm80(const ForwardArgs* args, int dtype, void* stream);
int64_t attention_backward_sm80_scratch(const BackwardArgs* args, int dtype);  // bytes
int attention_backward_sm80(const BackwardArgs* args, int dtype, void* scratch, void* stream);
}

namespace {

using binding::Call;
using torch::stable::Tensor;

struct Kernel {
  int capability;  // 10 * major + minor, which the code was compiled for
  int (*forward)(const ForwardArgs*, int, void*);
  int64_t (*scratch_bytes)(const BackwardArgs*, int);  // device memory that `backward` works in
  int (*backward)(const BackwardArgs*, int, void*, void*);
};

// recipe.py compiles for chosen devices only and says so: X(90, sm80) is kernel sm80, compiled for sm_90.
#define X(capability, target) \
  {capability, attention_forward_##target, \
   attention_backward_##target##_scratch, attention_backward_##target},
constexpr Kernel kKernels[] = {TILEPROOF_CUDA_KERNELS};
#undef X

constexpr const char* kDTypes[] = {"bf16", "fp16"};

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // so that the next call of this process does not meet the error again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// 10 * major + minor.
int capability_of(int device) {
  int major = 0, minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "compute capability");
  return 10 * major + minor;
}

// The kernel for the device. Raises RuntimeError when this build has none.
const Kernel& choose(int device) {
  const int capability = capability_of(device);
  std::string built;
  for (const Kernel& kernel : kKernels) {
    if (kernel.capability == capability) return kernel;
    built += (built.empty() ? "sm_" : ", sm_") + std::to_string(kernel.capability);
  }
  throw std::runtime_error("cuda:" + std::to_string(device) + " is sm_" + std::to_string(capability) +
                           "; this package was built for " + built);
}

// Rows of 16 bytes: the kernels load whole vectors.
constexpr int64_t kAlignment = 16;

void check_dtype(const Tensor& q) {
  const int code = binding::dtype_code(q);
  std::string dtypes;
  for (const char* name : kDTypes) {
    if (code >= 0 && std::string(name) == binding::kShortNames[code]) return;
    for (int other = 0; other < 4; ++other)
      if (std::string(name) == binding::kShortNames[other])
        dtypes += (dtypes.empty() ? "" : ", ") + std::string(binding::kDTypeNames[other]);
  }
  binding::refuse("this package has no cuda kernel for " + binding::dtype_name(q) + "; it has " + dtypes);
}

void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& key_lengths,
                  double scale, int64_t causal) {
  binding::check_tensors(q, k, v);
  check_dtype(q);
  binding::check_scale(scale, binding::dtype_code(q));
  binding::check_causal(causal);
  if (key_lengths) binding::check_key_lengths(*key_lengths, q);
}

Call checked(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& key_lengths,
             double scale, int64_t causal) {
  check_inputs(q, k, v, key_lengths, scale, causal);
  return binding::prepare(q, k, v, key_lengths, scale, causal, kAlignment);
}

void* current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

void compute(const Call& call) {
  if (call.is_empty) return;
  const int device = call.q.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = current_stream(device);
  const int status = choose(device).forward(&call.args, call.dtype, stream);
  check(static_cast<cudaError_t>(status), "the attention kernel was not launched");
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const std::optional<Tensor>& key_lengths, double scale, int64_t causal,
                                   std::optional<bool> /* of the backward pass */) {
  const Call call = checked(q, k, v, key_lengths, scale, causal);
  compute(call);
  return {call.o, call.lse};
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& dout, const std::optional<Tensor>& dlse, const Tensor& q,
                                            const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                                            const std::optional<Tensor>& key_lengths, double scale, int64_t causal,
                                            const std::vector<bool>& wanted, bool deterministic) {
  check_inputs(q, k, v, key_lengths, scale, causal);
  binding::check_results(dout, dlse, q, o, lse, wanted);
  const binding::BackwardCall call = binding::prepare_backward(dout, dlse, q, k, v, o, lse, key_lengths, scale, causal,
                                                               wanted, deterministic, kAlignment);
  if (!call.is_done) {
    const int device = q.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    const Kernel& kernel = choose(device);
    const int64_t bytes = kernel.scratch_bytes(&call.args, call.dtype);
    // Freed while the kernel may still run, which is right: the caching allocator gives it to this stream only.
    const Tensor scratch = torch::stable::new_empty(q, {bytes}, torch::headeronly::ScalarType::Byte);
    const int status = kernel.backward(&call.args, call.dtype, scratch.mutable_data_ptr(), current_stream(device));
    check(static_cast<cudaError_t>(status), "the backward attention kernel was not launched");
  }
  return {call.dq, call.dk, call.dv};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(TILEPROOF_NAMESPACE, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
