// atomics.cpp: atomic updates of global memory.
//
// One fiber runs at a time, so an update is a plain read, addition and write in the calling thread; which thread comes
// first follows the schedule, and with Order::random the seed. Updates do not race with each other; an update and an
// ordinary access do.
// Source: PTX ISA, "atom", "red" (relaxed: only with fences around it does an update order other accesses).
#include <cstring>

#include "emu_ptx_sm90a.h"
#include "hopper.h"

namespace emu {

uint32_t atomic_add_global_u32(uint32_t* address, uint32_t value, Site site) {
  yield_point();
  polled(site);
  global_read(address, 4, 4, "atom.global.add", site, Atomic::yes);
  global_write(address, 4, 4, "atom.global.add", site, Atomic::yes);
  atomic_passes_knowledge(address);
  const uint32_t old = *address;
  *address = old + value;
  return old;
}

void red_add_global_f32(float* address, const float* values, int count, Site site) {
  yield_point();
  const size_t bytes = 4 * static_cast<size_t>(count);
  global_read(address, bytes, bytes, "red.global.add", site, Atomic::yes);
  global_write(address, bytes, bytes, "red.global.add", site, Atomic::yes);
  for (int i = 0; i < count; ++i) address[i] += values[i];
}

}  // namespace emu
