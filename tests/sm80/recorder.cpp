// One emitted kernel, compiled by g++ with recorded.h in front of it, and its records for ctypes.
#include "forward_sm80.cu"

extern "C" {
void record(const int64_t* blocks, int64_t count, int attribute_error, int launch_error) {
  recorded::reads.clear();
  recorded::writes.clear();
  recorded::shared.clear();
  recorded::launches.clear();
  recorded::blocks.assign(blocks, blocks + count);
  recorded::attribute_error = attribute_error;
  recorded::launch_error = launch_error;
}
int64_t count(int what) {
  return what == 0   ? recorded::reads.size()
         : what == 1 ? recorded::writes.size()
         : what == 2 ? recorded::launches.size()
                     : recorded::shared.size();
}
const void* records(int what) {
  return what == 0   ? static_cast<const void*>(recorded::reads.data())
         : what == 1 ? static_cast<const void*>(recorded::writes.data())
         : what == 2 ? static_cast<const void*>(recorded::launches.data())
                     : static_cast<const void*>(recorded::shared.data());
}
uint32_t swizzled_byte(int panel, uint32_t row, uint32_t chunk) {
  return panel == 64 ? swizzled<64>(row, chunk) : panel == 32 ? swizzled<32>(row, chunk) : swizzled<16>(row, chunk);
}
}
