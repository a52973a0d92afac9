// blocks.cpp: which accesses to global memory happened before which, in one block and between the blocks of a launch.
//
// Inside a block the clocks of its threads tell. Between blocks an atomic update passes knowledge on, and only with
// fences around it, for the update alone is relaxed: write, __threadfence, update; then in a block whose update of the
// same address comes later: update, __threadfence, read. The fence may be another thread's, with a barrier between.
// Source: PTX ISA, "Memory Consistency Model" (release and acquire patterns, Fence-SC, causality order), "membar".
//
// Holds: blocks run one after the other, so what is on record of another block was done by one that has ended.
#include <algorithm>
#include <map>
#include <unordered_map>

#include "runtime.h"

namespace emu {
namespace {

using Times = std::vector<uint32_t>;          // by thread: all that it did up to then
using Knowledge = std::map<uint32_t, Times>;  // by rank of the block

// What a thread has met in an atomic update; it counts for whoever knows of a fence behind that.
struct Observation {
  int thread;
  uint32_t time;
  Knowledge met;
};

uint32_t launch_number = 0, block_rank = 0;
std::vector<Observation> observations;                 // of this block
std::unordered_map<const void*, Knowledge> passed_on;  // by the address of the updates

void launch_start() {
  ++launch_number;
  passed_on.clear();
}

void block_start() {
  block_rank = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  observations.clear();
}

void join(Knowledge& into, uint32_t block, const uint32_t* times) {
  Times& known = into[block];
  known.resize(thread_count);
  for (int i = 0; i < thread_count; ++i) known[i] = std::max(known[i], times[i]);
}

bool counts_for(const Thread& thread, const Observation& one) {
  return thread.clocks.published[one.thread] >= one.time;
}

}  // namespace

void thread_fence() { fence_device(*self); }

GlobalAccess global_access(Site site) {
  const uint32_t time = config.check ? self->now() : 0;
  return {launch_number, block_rank, time, uint16_t(self->linear), site_id(site)};
}

bool is_of_this_block(const GlobalAccess& access) {
  return access.launch == launch_number && access.block == block_rank;
}

bool knows_of(const GlobalAccess& earlier) {
  if (earlier.launch != launch_number) return true;
  if (is_of_this_block(earlier) && self->clocks.order[earlier.thread] >= earlier.time) return true;
  return std::any_of(observations.begin(), observations.end(), [&](const Observation& one) {
    const auto met = one.met.find(earlier.block);
    return met != one.met.end() && met->second[earlier.thread] >= earlier.time && counts_for(*self, one);
  });
}

void atomic_passes_knowledge(const void* address) {
  if (!config.check) return;
  Knowledge& here = passed_on[address];
  Knowledge met = here;
  const uint32_t* own = self->clocks.published;
  if (std::any_of(own, own + thread_count, [](uint32_t time) { return time > 0; })) {
    join(here, block_rank, own);
    for (const Observation& one : observations)
      if (counts_for(*self, one))
        for (const auto& [block, times] : one.met) join(here, block, times.data());
  }
  if (!met.empty()) observations.push_back({self->linear, self->now(), std::move(met)});
}

namespace blocks {
const Topic topic = {launch_start, block_start, nullptr, nullptr, nullptr, nullptr};
}

}  // namespace emu
