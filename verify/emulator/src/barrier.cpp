// barrier.cpp: the 16 named barriers of a block, and __syncthreads, which is barrier 0 for all threads.
//
// Source: PTX ISA, "bar.sync, bar.arrive": a phase ends when as many threads have arrived as its count says; the count
// is a multiple of the warp size; `aligned` means that the lanes of a warp execute the same instruction.
// bar.sync gives and takes what is known, bar.arrive only gives. An exited thread no longer counts for __syncthreads.
#include <cstring>

#include "runtime.h"

namespace emu {
namespace {

constexpr int kBarriers = 16;

struct Barrier {
  int expected = 0, arrived = 0;  // threads
  bool whole_block = false;       // expected follows the number of living threads
  Site first;                     // where the first thread of this phase arrived
  Site of_warp[kMaxWarps];        // where the first lane of each warp did; no file: none has
  std::vector<Thread*> waiting;
  Clocks known;  // of those that arrived in this phase
};
Barrier barriers[kBarriers];

void block_start() {
  for (Barrier& barrier : barriers) {
    barrier = Barrier{};
    barrier.known = new_clocks();
  }
}

std::string describe_barrier(const Wait& wait) {
  const Barrier& barrier = barriers[wait.object];
  return "barrier " + std::to_string(wait.object) + ", " + std::to_string(barrier.arrived) + " of " +
         std::to_string(barrier.expected) + " threads have arrived";
}

void complete(Barrier& barrier) {
  ++counters.barriers;
  for (Thread* thread : barrier.waiting) {
    acquire(*thread, barrier.known);
    wake(*thread);
  }
  for (int i = 0; i < warp_count; ++i) {
    if (!barrier.of_warp[i].file) continue;
    barrier.of_warp[i] = {};
    converged(warp_at(i));
  }
  barrier.waiting.clear();
  barrier.arrived = 0;
  clear(barrier.known);
}

// Counts the running thread in.
Barrier& arrive(int id, int threads, const char* what, Site site) {
  const Thread& thread = *self;
  if (id < 0 || id >= kBarriers)
    fatal("bad-barrier", site, {}, &thread, "%s executes %s on barrier %d, but a block has barriers 0 to 15",
          name(thread).c_str(), what, id);
  if (threads == 0 || (threads > 0 && threads % 32 != 0))
    fatal("bad-barrier", site, {}, &thread, "%s executes %s for %d threads, which is not a positive multiple of 32",
          name(thread).c_str(), what, threads);
  Barrier& barrier = barriers[id];
  const int expected = threads < 0 ? living_threads() : threads;
  if (barrier.arrived == 0) {
    barrier.first = site;
    barrier.expected = expected;
    barrier.whole_block = threads < 0;
  } else if (barrier.expected != expected) {
    fatal("barrier-count-mismatch", site, barrier.first, &thread,
          "%s brings the count %d to barrier %d, of which this phase began with %d at %s", name(thread).c_str(),
          expected, id, barrier.expected, place(barrier.first).c_str());
  }
  Site& of_warp = barrier.of_warp[thread.warp];
  if (!of_warp.file)
    of_warp = site;
  else if (of_warp.line != site.line || strcmp(of_warp.file, site.file) != 0)
    fatal("divergent-barrier", site, of_warp, &thread,
          "%s executes %s on barrier %d here and another lane of its warp at %s, but a warp executes it together",
          name(thread).c_str(), what, id, place(of_warp).c_str());
  ++barrier.arrived;
  release(*self, barrier.known);
  return barrier;
}

void thread_left(Thread&) {
  for (Barrier& barrier : barriers) {
    if (barrier.arrived == 0 || !barrier.whole_block) continue;
    barrier.expected = living_threads();
    if (barrier.arrived == barrier.expected) complete(barrier);
  }
}

}  // namespace

bool at_barrier(const Thread& thread) { return !thread.done && thread.wait.describe == describe_barrier; }

void barrier_sync(int id, int threads, const char* what, Site site) {
  yield_point();
  Barrier& barrier = arrive(id, threads, what, site);
  barrier.waiting.push_back(self);
  if (barrier.arrived == barrier.expected)
    complete(barrier);
  else
    block_on({what, site, uint32_t(id), 0, describe_barrier});
}

void barrier_arrive(int id, int threads, const char* what, Site site) {
  yield_point();
  Barrier& barrier = arrive(id, threads, what, site);
  if (barrier.arrived == barrier.expected) complete(barrier);
}

namespace barrier {
const Topic topic = {nullptr, block_start, nullptr, thread_left, nullptr, nullptr};
}

}  // namespace emu
