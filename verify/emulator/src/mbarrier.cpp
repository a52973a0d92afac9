// mbarrier.cpp: mbarrier objects: phases, pending arrivals, transaction bytes, and what a wait makes known.
//
// A phase ends when no arrival and no byte is pending; the next begins with `count` arrivals. The byte count may be
// negative for a while: a load may land before its expect_tx. try_wait.parity(P) is true iff a phase of parity P has
// ended last, so on a fresh barrier parity 1 passes at once and parity 0 waits.
// Source: PTX ISA, "mbarrier" (phase, expect-tx and complete-tx operations, mbarrier.try_wait).
//
// Always holds: an arrival releases the arriving thread's clocks into the barrier; a successful wait acquires the
// barrier's clocks as they were when its last phase ended, and with them the loads that landed in ended phases.
#include <cstring>

#include "emu_ptx_sm90a.h"
#include "hopper.h"

namespace emu {
namespace mbarrier {
namespace {

constexpr uint32_t kLargestCount = (1u << 20) - 1;

struct Barrier {
  uint32_t address = 0;
  uint32_t count = 0;
  uint32_t pending = 0;  // arrivals still missing in the running phase
  int64_t bytes = 0;     // expected minus landed
  int64_t expected = 0;  // in the running phase
  Site expect_site;      // the latest expect_tx
  Site ended_site;       // the latest of the phase that ended last
  uint32_t phase = 0;    // phases that have ended
  int component = -1;    // of its loads, from the first one on
  Clocks arriving, ended;
  std::vector<Thread*> waiting;
  Site init_site;
  int init_thread = 0;
  uint32_t init_time = 0;
  uint32_t fence_time = 0;  // when the initialising thread executed fence.mbarrier_init since; 0: it did not
  uint32_t observed = 0;   // the latest ended phase that a wait has seen
  uint32_t last_load = 0;  // the phase whose end completes the latest load, counted as `phase` then is; 0: none
  Site last_load_site;
  const char* last_load_name = nullptr;
};

std::vector<Barrier> barriers;

// What an intact barrier has in shared memory: the hardware's content is opaque, any 8 bytes of our own will do.
uint64_t mark(uint32_t address) { return 0x6d62617272696572ull ^ address; }

int slot_of(uint32_t address) {
  for (size_t i = 0; i < barriers.size(); ++i) {
    if (barriers[i].address == address) return static_cast<int>(i);
  }
  return -1;
}

const Barrier& waited_for(const Wait& wait) { return barriers[static_cast<size_t>(slot_of(wait.object))]; }

// What keeps the phase from ending, or what the waiting thread may have meant.
std::string describe(const Wait& wait) {
  const Barrier& barrier = waited_for(wait);
  std::string text = "phase " + std::to_string(barrier.phase) + " of the mbarrier at " + shared_name(barrier.address);
  text += ", initialised at " + place(barrier.init_site) + ", still wants " + std::to_string(barrier.pending) + " of " +
          std::to_string(barrier.count) + " arrivals";
  if (barrier.bytes) {
    const long long landed = barrier.expected - barrier.bytes;
    text += " and " + std::to_string(barrier.bytes) + " bytes: " + std::to_string(landed) + " landed, but " +
            std::to_string(barrier.expected) + " were expected";
    if (barrier.expect_site.file) text += " at " + place(barrier.expect_site);
    return text;
  }
  if (!barrier.pending) return text;
  const std::string ended = barrier.phase ? "phase " + std::to_string(barrier.phase - 1) : "no phase";
  return text + ": " + ended + " has ended, so parity " + std::to_string(wait.detail) + " waits and parity " +
         std::to_string(1 - wait.detail) + " would pass";
}

// All have arrived and more bytes landed than they expected: no arrival is left that could expect the rest.
bool never_ends(const Wait& wait) { return !waited_for(wait).pending && waited_for(wait).bytes < 0; }

void end_phase_if_complete(Barrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  barrier.expected = 0;
  barrier.ended_site = barrier.expect_site;
  if (config.check) {
    copy(barrier.ended, barrier.arriving);
    if (barrier.component >= 0) barrier.ended.order[barrier.component] = barrier.phase;
  }
  for (Thread* thread : barrier.waiting) wake(*thread);
  barrier.waiting.clear();
}

void check_bytes(const Barrier& barrier, Site site) {
  if (barrier.bytes > int64_t(kLargestCount) || barrier.bytes < -int64_t(kLargestCount)) {
    fatal("mbarrier-bytes", site, barrier.init_site, self,
          "the byte count %lld of the mbarrier at %s leaves the range of 20 bits",
          static_cast<long long>(barrier.bytes), shared_name(barrier.address).c_str());
  }
}

void arrive(uint32_t address, uint32_t bytes, const char* what, Site site) {
  yield_point();
  Barrier& barrier = barriers[static_cast<size_t>(find(address, what, site))];
  barrier.bytes += bytes;
  barrier.expected += bytes;
  if (bytes) barrier.expect_site = site;
  check_bytes(barrier, site);
  if (!barrier.pending) {
    fatal("over-arrived", site, barrier.init_site, self,
          "%s arrives at the mbarrier at %s, whose phase %u has all its %u arrivals and waits for %lld bytes",
          name(*self).c_str(), shared_name(address).c_str(), barrier.phase, barrier.count,
          static_cast<long long>(barrier.bytes));
  }
  --barrier.pending;
  release(*self, barrier.arriving);
  end_phase_if_complete(barrier);
}

void block_start() { barriers.clear(); }

// Only a wait tells that a load has landed. Without one it may write into shared memory that the next block owns.
void block_exit() {
  for (const Barrier& barrier : barriers) {
    if (barrier.last_load <= barrier.observed) continue;
    finding("exit-in-flight", barrier.last_load_site, {}, nullptr,
            "the block ends and no thread has waited for phase %u of the mbarrier at %s, which completes this %s",
            barrier.last_load - 1, shared_name(barrier.address).c_str(), barrier.last_load_name);
    return;
  }
}

}  // namespace

int find(uint32_t address, const char* what, Site site) {
  const int slot = slot_of(address);
  if (slot < 0) {
    fatal("no-mbarrier", site, {}, self, "%s by %s on %s, which no mbarrier.init has made an mbarrier", what,
          name(*self).c_str(), shared_name(address).c_str());
  }
  const Barrier& barrier = barriers[static_cast<size_t>(slot)];
  const uint64_t expected = mark(address);
  if (std::memcmp(shared_at(address), &expected, sizeof expected) != 0) {
    fatal("mbarrier-overwritten", site, barrier.init_site, self,
          "%s by %s on the mbarrier at %s, whose bytes were overwritten", what, name(*self).c_str(),
          shared_name(address).c_str());
  }
  if (config.check && self->clocks.order[barrier.init_thread] < barrier.init_time) {
    finding("race", site, barrier.init_site, self,
            "%s by %s on the mbarrier at %s, which thread %d initialised at %s with no barrier between", what,
            name(*self).c_str(), shared_name(address).c_str(), barrier.init_thread, place(barrier.init_site).c_str());
  }
  return slot;
}

Load start_load(uint32_t address, const char* what, Site site) {
  const int slot = find(address, what, site);
  Barrier& barrier = barriers[static_cast<size_t>(slot)];
  if (config.check && (!barrier.fence_time || self->clocks.order[barrier.init_thread] < barrier.fence_time)) {
    finding("no-fence-mbarrier-init", site, barrier.init_site, self,
            "%s by %s uses the mbarrier at %s, and thread %d that initialised it at %s executed no "
            "fence.mbarrier_init in between",
            what, name(*self).c_str(), shared_name(address).c_str(), barrier.init_thread,
            place(barrier.init_site).c_str());
  }
  if (barrier.component < 0 && config.check) barrier.component = new_component(Agent::mbarrier, int(address));
  barrier.last_load = barrier.phase + 1;
  barrier.last_load_site = site;
  barrier.last_load_name = what;
  return {slot, barrier.component, barrier.phase + 1};
}

void complete_load(const Load& load, uint32_t bytes, const char* what, Site site) {
  Barrier& barrier = barriers[static_cast<size_t>(load.slot)];
  if (barrier.phase + 1 != load.time) {
    finding("later-phase", site, barrier.init_site, nullptr,
            "%s of %u bytes started in phase %u of the mbarrier at %s and completes into its later phase %u: "
            "the bytes expected for phase %u at %s were too few",
            what, bytes, load.time - 1, shared_name(barrier.address).c_str(), barrier.phase, load.time - 1,
            place(barrier.ended_site).c_str());
  }
  barrier.bytes -= bytes;
  check_bytes(barrier, site);
  end_phase_if_complete(barrier);
}

const Topic topic = {nullptr, block_start, nullptr, nullptr, block_exit, nullptr};

}  // namespace mbarrier

void mbarrier_init(uint32_t address, uint32_t count, Site site) {
  using namespace mbarrier;
  yield_point();
  check_shared(address, 8, 8, "mbarrier.init", site, *self);
  if (count < 1 || count > kLargestCount) {
    fatal("mbarrier-count", site, {}, self, "mbarrier.init of %s with count %u, which is not in 1..2^20-1",
          shared_name(address).c_str(), count);
  }
  if (const int old = slot_of(address); old >= 0) {
    fatal("mbarrier-initialised", site, barriers[static_cast<size_t>(old)].init_site, self,
          "mbarrier.init by %s of %s, which is an mbarrier already", name(*self).c_str(), shared_name(address).c_str());
  }
  if (barriers.size() == static_cast<size_t>(kMaxMbarriers)) {
    fatal("mbarrier-limit", site, {}, self, "the emulator has room for %d mbarriers in a block", kMaxMbarriers);
  }
  shared_write(address, 8, generic_access("mbarrier.init", site, *self));
  const uint64_t content = mark(address);
  std::memcpy(shared_at(address), &content, sizeof content);
  Barrier barrier;
  barrier.address = address;
  barrier.count = barrier.pending = count;
  if (config.check) {
    barrier.arriving = new_clocks();
    barrier.ended = new_clocks();
    barrier.init_time = self->now();
  }
  barrier.init_site = site;
  barrier.init_thread = self->linear;
  barriers.push_back(std::move(barrier));
}

void fence_mbarrier_init(Site) {
  for (mbarrier::Barrier& barrier : mbarrier::barriers) {
    if (config.check && barrier.init_thread == self->linear && !barrier.fence_time) barrier.fence_time = self->now();
  }
}

void mbarrier_arrive(uint32_t address, Site site) { mbarrier::arrive(address, 0, "mbarrier.arrive", site); }

void mbarrier_arrive_expect_tx(uint32_t address, uint32_t bytes, Site site) {
  mbarrier::arrive(address, bytes, "mbarrier.arrive.expect_tx", site);
}

bool mbarrier_try_wait_parity(uint32_t address, uint32_t parity, Site site) {
  using namespace mbarrier;
  constexpr const char* what = "mbarrier.try_wait.parity";
  yield_point();
  const auto slot = static_cast<size_t>(find(address, what, site));
  if (parity > 1) {
    fatal("mbarrier-parity", site, {}, self, "%s by %s for parity %u, which is neither 0 nor 1", what,
          name(*self).c_str(), parity);
  }
  if ((barriers[slot].phase & 1) == parity) {          // not yet
    if (config.order == Order::random && chance(8)) {  // try_wait may give up at any time
      yield();
      return false;
    }
    barriers[slot].waiting.push_back(self);
    block_on({what, site, address, parity, describe, never_ends});
    if ((barriers[slot].phase & 1) == parity) return false;  // the next phase ended too before this thread ran
  }
  barriers[slot].observed = barriers[slot].phase;
  acquire(*self, barriers[slot].ended);
  return true;
}

void fence_proxy_async(Site) { fence_proxy(*self); }

}  // namespace emu
