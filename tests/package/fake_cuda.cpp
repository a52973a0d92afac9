// A CUDA runtime and kernels that only note what they were asked: binding_cuda.cpp on CPU tensors, without a GPU.
//
// Built with the binding of a package whose tests/package/packages.py planned the targets sm80 and sm90a, linked with
// -Bsymbolic so that these definitions stand before torch's.
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>

#include "backward.h"
#include "forward.h"

namespace {

int capability = 90, answer = cudaSuccess, calls = 0;
const char* unit = "";
ForwardArgs seen = {};
const void* seen_scratch = nullptr;
BackwardArgs seen_backward = {};
int backward_calls = 0;

int note(const char* name, const ForwardArgs* args, const void* scratch, int code) {
  unit = name;
  seen = *args;
  seen_scratch = scratch;
  ++calls;
  return code;
}

}  // namespace

#define VISIBLE extern "C" __attribute__((visibility("default")))

// ---- For the test

// The capability of every device, and what the kernels in code for one capability answer.
VISIBLE void fake_set(int new_capability, int new_answer) {
  capability = new_capability;
  answer = new_answer;
  unit = "";
  calls = 0;
}
VISIBLE const char* fake_unit() { return unit; }
VISIBLE int fake_calls() { return calls; }
VISIBLE const void* fake_scratch() { return seen_scratch; }
VISIBLE void fake_args(ForwardArgs* to) { std::memcpy(to, &seen, sizeof seen); }

VISIBLE int fake_backward_calls() { return backward_calls; }
VISIBLE void fake_backward_args(BackwardArgs* to) { std::memcpy(to, &seen_backward, sizeof seen_backward); }

// ---- Kernels

extern "C" int attention_forward_sm80(const ForwardArgs* args, int, void*) { return note("sm80", args, nullptr, 0); }
#define EXACT(NAME)                                                                              \
  extern "C" int attention_forward_##NAME(const ForwardArgs* args, int, void* scratch, void*) { \
    return note(#NAME, args, scratch, answer);                                                   \
  }
EXACT(sm90a_0)
EXACT(sm90a_1)
EXACT(sm90a_2)
EXACT(sm90a_3)

extern "C" int64_t attention_backward_sm80_scratch(const BackwardArgs*, int) { return 512; }
extern "C" int attention_backward_sm80(const BackwardArgs* args, int, void* scratch, void*) {
  std::memset(scratch, 0, 512);
  seen_backward = *args;
  seen_scratch = scratch;
  ++backward_calls;
  return answer;
}

// ---- CUDA and torch

extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "another error";
}
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
extern "C" AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle*) { return 0; }
extern "C" AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }
