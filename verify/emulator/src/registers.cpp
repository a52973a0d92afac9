// registers.cpp: the pool of registers of a block, which setmaxnreg moves between warps.
//
// A block starts with the same number of registers for each thread. setmaxnreg.dec gives the warp's surplus to the
// block's pool; setmaxnreg.inc takes from it and waits until there is enough, so that too large a sum never ends: a
// deadlock, reported with what was asked and what is left. All four warps of a warpgroup must ask for the same.
// Source: PTX ISA, "setmaxnreg".
//
// Options: "registers_per_block", or "registers_per_thread" at launch, as ptxas states it ("Used 168 registers").
// Without one: what __launch_bounds__(threads, 1) allows, the largest multiple of 8 with which one block fits 64 Ki
// registers, at most 256. ptxas takes less if no setmaxnreg asks for more, so an increase to less is then no finding.
#include "emu_ptx_sm90a.h"
#include "hopper.h"

namespace emu {
namespace registers {
namespace {

constexpr int kRegistersOfMultiprocessor = 65536;

struct State {
  int per_thread = 0;          // of this warp
  std::vector<int> requested;  // in order, to compare the warps of a warpgroup
  Site last;
};

double block_option = 0, thread_option = 0;  // 0: not set
int available = 0;                           // registers in the pool
State states[kMaxWarps];
std::vector<Thread*> waiting;

int at_launch() {
  if (block_option > 0) return static_cast<int>(block_option) / thread_count;
  if (thread_option > 0) return static_cast<int>(thread_option);
  const int fits = kRegistersOfMultiprocessor / (32 * warp_count) / 8 * 8;
  return fits < 256 ? fits : 256;
}

struct Operands {
  int count;
  bool increase;
  Site site;
};

void request(Warp& warp, void* const* operands, uint32_t) {
  const auto& wanted = *static_cast<const Operands*>(operands[0]);
  State& state = states[warp.id];
  state.requested.push_back(wanted.count);
  state.last = wanted.site;
  const bool stated = block_option > 0 || thread_option > 0;
  const bool wrong = wanted.increase ? stated && wanted.count < state.per_thread : wanted.count > state.per_thread;
  if (wrong) {
    finding("setmaxnreg", wanted.site, {}, &lane_of(warp, 0),
            "setmaxnreg.%s to %d by warp %d, which has %d registers a thread", wanted.increase ? "inc" : "dec",
            wanted.count, warp.id, state.per_thread);
  }
  if (wanted.increase) return;
  available += 32 * (state.per_thread - wanted.count);
  state.per_thread = wanted.count;
  for (Thread* thread : waiting) wake(*thread);
  waiting.clear();
}

std::string describe(const Wait& wait) {
  const State& state = states[wait.object];
  return "warp " + std::to_string(wait.object) + " has " + std::to_string(state.per_thread) +
         " registers a thread and wants " + std::to_string(wait.detail) + ", " +
         std::to_string(32 * (static_cast<int>(wait.detail) - state.per_thread)) + " more in all; the pool has " +
         std::to_string(available);
}

void launch_start() {
  block_option = option("registers_per_block", 0);
  thread_option = option("registers_per_thread", 0);
}

void block_start() {
  const int count = at_launch();
  for (int warp = 0; warp < warp_count; ++warp) {
    states[warp].per_thread = count;
    states[warp].requested.clear();
  }
  available = block_option > 0 ? static_cast<int>(block_option) - count * thread_count : 0;
  waiting.clear();
}

void block_exit() {
  for (int warp = 0; warp < warp_count; ++warp) {
    const State &first = states[warp / 4 * 4], &state = states[warp];
    if (state.requested == first.requested) continue;
    const Site site = state.requested.empty() ? first.last : state.last;
    finding("setmaxnreg", site, first.last, &thread_at(32 * warp),
            "warps %d and %d of one warpgroup executed different setmaxnreg instructions", warp / 4 * 4, warp);
    return;
  }
}

}  // namespace

const Topic topic = {launch_start, block_start, nullptr, nullptr, block_exit, nullptr};

}  // namespace registers

void setmaxnreg(int count, bool increase, Site site) {
  using namespace registers;
  const char* what = increase ? "setmaxnreg.inc" : "setmaxnreg.dec";
  Operands operands{count, increase, site};
  collective(what, kFullMask, &operands, request, site);
  if (!increase) return;
  State& state = states[self->warp];
  while (state.per_thread < count) {  // the first lane that finds enough takes it for the warp
    const int wanted = 32 * (count - state.per_thread);
    if (available >= wanted) {
      available -= wanted;
      state.per_thread = count;
    } else {
      waiting.push_back(self);
      block_on({what, site, static_cast<uint32_t>(self->warp), static_cast<uint32_t>(count), describe});
    }
  }
}

}  // namespace emu
