// clock.cpp: vector clocks, one entry per component, and the edges of happens-before between threads.
//
// Source: Flanagan and Freund, "FastTrack" (PLDI 2009), for epochs; one more clock per thread, `fenced`, for what
// fence.proxy.async has made visible to the asynchronous proxy, and one, `published`, for what __threadfence has made
// visible to other blocks. They travel along the same edges as `order`.
//
// Holds: components in use are numbered without gaps; beyond `used` every clock is 0. `used` only grows in a block.
#include <algorithm>
#include <cstring>
#include <memory>

#include "runtime.h"

namespace emu {
namespace {

constexpr int kLane = 16;  // loops run over whole vectors of this many entries

int capacity = 0;  // entries of a clock
int used = 0;      // entries that may differ from 0, rounded up to kLane
bool has_published = false;  // false: no thread of the block has executed a __threadfence, all of `published` is 0
struct Component {
  Agent agent;
  int index;
};
std::vector<Component> components;

std::vector<std::unique_ptr<uint32_t[]>> arena;  // clocks of `arena_capacity` entries; the first `given` are in use
int arena_capacity = 0;
size_t given = 0;
std::vector<uint32_t> thread_entries;
Clocks minima[kMaxWarps];

int rounded_up(int n) { return (n + kLane - 1) / kLane * kLane; }

void join_entries(uint32_t* __restrict into, const uint32_t* __restrict from) {
  for (int i = 0; i < used; i += kLane)
    for (int j = i; j < i + kLane; ++j) into[j] = std::max(into[j], from[j]);
}

void meet_entries(uint32_t* __restrict into, const uint32_t* __restrict from) {
  for (int i = 0; i < used; i += kLane)
    for (int j = i; j < i + kLane; ++j) into[j] = std::min(into[j], from[j]);
}

uint32_t* new_entries() {
  if (given == arena.size()) arena.emplace_back(new uint32_t[arena_capacity]);
  uint32_t* entries = arena[given++].get();
  memset(entries, 0, sizeof(uint32_t) * arena_capacity);
  return entries;
}

void block_start() {
  if (!config.check) return;
  capacity = rounded_up(2 * thread_count + warp_count + kMaxMbarriers);
  if (arena_capacity != capacity) {
    arena.clear();
    arena_capacity = capacity;
  }
  given = 0;
  has_published = false;
  const size_t entries = size_t(3) * thread_count * capacity;
  if (thread_entries.size() == entries)  // beyond `used` of the last block all is 0
    for (size_t at = 0; at < entries; at += capacity) memset(&thread_entries[at], 0, sizeof(uint32_t) * used);
  else
    thread_entries.assign(entries, 0);
  components.clear();
  for (int i = 0; i < thread_count; ++i) components.push_back({Agent::thread, i});
  for (int i = 0; i < warp_count; ++i) components.push_back({Agent::wgmma, i});
  used = rounded_up(int(components.size()));
  for (int i = 0; i < thread_count; ++i) {
    uint32_t* own = thread_entries.data() + size_t(3) * i * capacity;
    thread_at(i).clocks = {own, own + capacity, own + 2 * capacity};
    own[i] = 1;  // 0 is the time of what never happened
  }
  for (int i = 0; i < warp_count; ++i) minima[i] = {};
}

}  // namespace

int thread_component(int thread) { return thread; }
int wgmma_component(int warp) { return thread_count + warp; }

// There is room for kMaxMbarriers and one bulk-store agent per thread, each of them made once in a block.
int new_component(Agent agent, int index) {
  if (int(components.size()) == capacity)
    fatal("emulator-limit", {}, {}, self, "the block has more than %d mbarriers", kMaxMbarriers);
  components.push_back({agent, index});
  used = rounded_up(int(components.size()));
  return int(components.size()) - 1;
}

std::string component_name(int component) {
  if (component < 0 || component >= int(components.size())) return "nobody";
  const Component& one = components[component];
  switch (one.agent) {
    case Agent::thread:
      return name(thread_at(one.index));
    case Agent::wgmma:
      return "wgmma of warp " + std::to_string(one.index);
    case Agent::mbarrier:
      return "a bulk load on the mbarrier at " + shared_name(uint32_t(one.index));
    case Agent::bulk_store:
      return "a bulk store of " + name(thread_at(one.index));
  }
  return "nobody";
}

Clocks new_clocks() {
  if (!config.check) return {};
  uint32_t* order = new_entries();
  uint32_t* fenced = new_entries();
  return {order, fenced, new_entries()};
}

void clear(Clocks clocks) {
  if (!config.check) return;
  memset(clocks.order, 0, sizeof(uint32_t) * used);
  memset(clocks.fenced, 0, sizeof(uint32_t) * used);
  if (has_published) memset(clocks.published, 0, sizeof(uint32_t) * used);
}

void copy(Clocks into, Clocks from) {
  if (!config.check) return;
  memcpy(into.order, from.order, sizeof(uint32_t) * used);
  memcpy(into.fenced, from.fenced, sizeof(uint32_t) * used);
  if (has_published) memcpy(into.published, from.published, sizeof(uint32_t) * used);
}

void join(Clocks into, Clocks from) {
  if (!config.check) return;
  join_entries(into.order, from.order);
  join_entries(into.fenced, from.fenced);
  if (has_published) join_entries(into.published, from.published);
}

void release(Thread& thread, Clocks into) {
  if (!config.check) return;
  join(into, thread.clocks);
  ++thread.clocks.order[thread.linear];
  warp_at(thread.warp).minimum_is_current = false;
}

void acquire(Thread& thread, Clocks from) {
  if (!config.check) return;
  join(thread.clocks, from);
  warp_at(thread.warp).minimum_is_current = false;
}

void learn(Thread& thread, int component, uint32_t time) {
  if (!config.check) return;
  uint32_t& known = thread.clocks.order[component];
  if (known < time) {
    known = time;
    warp_at(thread.warp).minimum_is_current = false;
  }
}

// After a fence the thread's time advances, so that what it does next is not taken for fenced.
void fence_proxy(Thread& thread) {
  if (!config.check) return;
  memcpy(thread.clocks.fenced, thread.clocks.order, sizeof(uint32_t) * used);
  ++thread.clocks.order[thread.linear];
  warp_at(thread.warp).minimum_is_current = false;
}

void fence_device(Thread& thread) {
  if (!config.check) return;
  has_published = true;
  memcpy(thread.clocks.published, thread.clocks.order, sizeof(uint32_t) * used);
  ++thread.clocks.order[thread.linear];
  warp_at(thread.warp).minimum_is_current = false;
}

// Nobody asks for `published` of a whole warp.
Clocks warp_minimum(Warp& warp) {
  if (!config.check) return {};
  Clocks& minimum = minima[warp.id];
  if (!minimum.order) minimum = new_clocks();
  if (warp.minimum_is_current) return minimum;
  bool first = true;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(warp.alive >> lane & 1)) continue;
    const Clocks one = lane_of(warp, lane).clocks;
    if (first) {
      copy(minimum, one);
    } else {
      meet_entries(minimum.order, one.order);
      meet_entries(minimum.fenced, one.fenced);
    }
    first = false;
  }
  warp.minimum_is_current = true;
  return minimum;
}

namespace clock_topic {
const Topic topic = {nullptr, block_start, nullptr, nullptr, nullptr, nullptr};
}

}  // namespace emu
