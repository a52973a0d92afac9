// special_sm90a.cu: the error of the reciprocal and of the logarithm as the sm_90a kernels compute them.
#include <cmath>
#include <cstdint>

#include "ptx_sm90a.cuh"

namespace {

constexpr float kLn2 = 0.693147182f;  // as in forward_sm90a.cu

// worst[0]: largest relative error of 1 / x, worst[1]: largest error of ln x relative to max(|ln x|, 1), as bits of a
// double, over x of the bit patterns begin..end - 1.
__global__ void errors_kernel(uint32_t begin, uint32_t end, uint32_t stride, unsigned long long* worst) {
  for (uint64_t at = begin + (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * stride; at < end;
       at += uint64_t(gridDim.x) * blockDim.x * stride) {
    const float x = __uint_as_float(uint32_t(at));
    const double reciprocal = fabs(double(rcp_approx_ftz(x)) * double(x) - 1);
    const double want = log(double(x));
    const double logarithm = fabs(double(kLn2 * lg2_approx_ftz(x)) - want) / fmax(fabs(want), 1.0);
    atomicMax(&worst[0], (unsigned long long)__double_as_longlong(reciprocal));
    atomicMax(&worst[1], (unsigned long long)__double_as_longlong(logarithm));
  }
}

}  // namespace

// worst is device memory. Returns a cudaError_t.
extern "C" int reciprocal_and_log_errors(uint32_t begin, uint32_t end, uint32_t stride, unsigned long long* worst) {
  errors_kernel<<<2048, 256>>>(begin, end, stride, worst);
  const cudaError_t error = cudaGetLastError();
  return int(error != cudaSuccess ? error : cudaDeviceSynchronize());
}
