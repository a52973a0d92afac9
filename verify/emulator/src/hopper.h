// hopper.h: what the sm_90a parts of the runtime see of each other: mbarriers with their bulk loads, and the topics.
#pragma once
#include "runtime.h"

namespace emu {

namespace mbarrier {

// The mbarrier at `address`, by its slot; checked: it is initialised, intact, and `self` knows of its initialisation.
int find(uint32_t address, const char* what, Site site);

// A bulk load that will count its bytes on the mbarrier starts: its writes are (component, time), and whoever waits for
// the phase now running knows of them.
struct Load {
  int slot;
  int component;
  uint32_t time;
};
Load start_load(uint32_t address, const char* what, Site site);
void complete_load(const Load& load, uint32_t bytes, const char* what, Site site);

extern const Topic topic;
}  // namespace mbarrier

namespace tma {
extern const Topic topic;
}
namespace wgmma {
extern const Topic topic;
}
namespace registers {
extern const Topic topic;
}

}  // namespace emu
