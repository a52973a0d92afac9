// device.cpp: what host code may ask of the emulated device.
//
// Source: CUDA runtime API, "Device Management".
#include "cuda.h"
#include "hopper.h"

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0 || attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = static_cast<int>(emu::option("multiprocessors", 2));
  return cudaSuccess;
}
