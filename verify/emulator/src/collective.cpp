// collective.cpp: what the lanes of a warp do together: they meet, and the last to arrive acts for all.
//
// Source: PTX ISA, "shfl.sync", "redux.sync", "vote.sync", "bar.warp.sync"; CUDA C++ Programming Guide, "Warp Shuffle
// Functions".
// Only __syncwarp orders memory; a shuffle moves values and nothing else.
// Holds: the masks of the open meetings of a warp are disjoint.
#include <cstring>

#include "runtime.h"

namespace emu {
namespace {

struct Meeting {
  const char* what;
  Site site;
  uint32_t mask, arrived;
  void* operands[32];
};

struct Meetings {
  uint32_t open = 0;  // a bit per slot
  Meeting slots[32];
};
Meetings meetings[kMaxWarps];
Clocks together;  // what the lanes of a __syncwarp know

bool same_text(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }
bool same_site(Site a, Site b) { return a.line == b.line && same_text(a.file, b.file); }

Meeting* find_meeting(Meetings& all, uint32_t mask) {
  for (uint32_t left = all.open; left; left &= left - 1) {
    Meeting& one = all.slots[__builtin_ctz(left)];
    if (one.mask & mask) return &one;
  }
  return nullptr;
}

Meeting& open_meeting(Meetings& all, const char* what, uint32_t mask, Site site) {
  const int slot = __builtin_ctz(~all.open);  // there is one: the masks are disjoint and this lane is in none of them
  all.open |= 1u << slot;
  Meeting& made = all.slots[slot];
  made = {what, site, mask, 0, {}};
  return made;
}

// "0-7, 12"
std::string lane_names(uint32_t lanes) {
  std::string text;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const int first = lane;
    while (lane < 31 && lanes >> (lane + 1) & 1) ++lane;
    text += (text.empty() ? "" : ", ") + std::to_string(first);
    if (lane > first) text += "-" + std::to_string(lane);
  }
  return text;
}

std::string describe_meeting(const Wait& wait) {
  // wait.object is the warp, wait.detail the mask
  const Meeting* one = find_meeting(meetings[wait.object], wait.detail);
  if (!one) return "complete";
  const uint32_t missing = one->mask & ~one->arrived;
  const Thread& first = lane_of(warp_at(int(wait.object)), __builtin_ctz(missing));
  const std::string warp = "warp " + std::to_string(wait.object) + " misses lanes " + lane_names(missing);
  return warp + ", of which lane " + std::to_string(first.lane) + " is in " + first.wait.what + " at " +
         place(first.wait.site);
}

// A lane that is missing waits at a barrier, to which a warp comes together or not at all.
bool never_meets(const Wait& wait) {
  const Meeting* one = find_meeting(meetings[wait.object], wait.detail);
  return one && at_barrier(lane_of(warp_at(int(wait.object)), __builtin_ctz(one->mask & ~one->arrived)));
}

// For all lanes of the mask: each knows what all of them knew.
void join_lanes(Warp& warp, void* const*, uint32_t mask) {
  if (!config.check) return;
  clear(together);
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) release(lane_of(warp, lane), together);
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) acquire(lane_of(warp, lane), together);
}

struct WarpgroupMeeting {
  int arrived = 0;  // warps
  void* operands[128];
  const char* what;
  Site site;
  WarpgroupAction action;
};
WarpgroupMeeting groups[kMaxWarps / 4];

void block_start() {
  for (int i = 0; i < warp_count; ++i) meetings[i].open = 0;
  for (WarpgroupMeeting& group : groups) group.arrived = 0;
  together = new_clocks();
}

void thread_exit(Thread& thread) {
  const Meeting* one = find_meeting(meetings[thread.warp], 1u << thread.lane);
  if (one)
    finding("exited-lane-in-mask", one->site, {}, &thread,
            "%s exits while other lanes of its warp wait for it in %s, whose mask 0x%08x names it",
            name(thread).c_str(), one->what, one->mask);
}

struct Shuffle {
  uint32_t value, result;
  int source;
};

void shuffle_lanes(Warp&, void* const* operands, uint32_t mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Shuffle& own = *static_cast<Shuffle*>(operands[lane]);
    const bool named = own.source >= 0 && own.source < 32 && mask >> own.source & 1;
    own.result = named ? static_cast<Shuffle*>(operands[own.source])->value : own.value;
  }
}

struct Maximum {
  int value, result;
};

void maximum_of_lanes(Warp&, void* const* operands, uint32_t mask) {
  int largest = INT32_MIN;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) largest = max(largest, static_cast<Maximum*>(operands[lane])->value);
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) static_cast<Maximum*>(operands[lane])->result = largest;
}

// What each lane brings to its warp's part of a warpgroup's meeting.
struct GroupOperand {
  void* operands;
  const char* what;
  Site site;
  WarpgroupAction action;
  bool complete;  // the whole group has met, and acted
};

std::string describe_group(const Wait& wait) {
  return std::to_string(groups[wait.object].arrived) + " of the 4 warps of warpgroup " + std::to_string(wait.object) +
         " have arrived";
}

void warp_joins_group(Warp& warp, void* const* operands, uint32_t) {
  const int id = warp.id / 4;
  WarpgroupMeeting& group = groups[id];
  const GroupOperand& first = *static_cast<GroupOperand*>(operands[0]);
  if (group.arrived == 0) {
    group.what = first.what;
    group.site = first.site;
    group.action = first.action;
  } else if (!same_site(group.site, first.site) || !same_text(group.what, first.what)) {
    fatal("divergent-collective", first.site, group.site, self,
          "warp %d executes %s while another warp of its warpgroup is in %s at %s", warp.id, first.what, group.what,
          place(group.site).c_str());
  }
  for (int lane = 0; lane < 32; ++lane) group.operands[warp.id % 4 * 32 + lane] = operands[lane];
  if (++group.arrived < 4) return;
  group.arrived = 0;
  void* passed[128];
  for (int i = 0; i < 128; ++i) {
    GroupOperand& one = *static_cast<GroupOperand*>(group.operands[i]);
    passed[i] = one.operands;
    one.complete = true;
  }
  group.action(4 * id, passed);
  for (int i = 0; i < 128; ++i) wake(thread_at(128 * id + i));
}

}  // namespace

void collective(const char* what, uint32_t mask, void* operands, WarpAction action, Site site) {
  Thread& thread = *self;
  Warp& warp = own_warp();
  Meetings& all = meetings[warp.id];
  const uint32_t bit = 1u << thread.lane;
  if (!(mask & bit))
    fatal("lane-not-in-mask", site, {}, &thread, "%s executes %s with mask 0x%08x, which does not name its lane %d",
          name(thread).c_str(), what, mask, thread.lane);
  if (mask & ~warp.alive)
    fatal("exited-lane-in-mask", site, {}, &thread,
          "%s executes %s with mask 0x%08x, which names lanes that have exited or do not exist (alive: 0x%08x)",
          name(thread).c_str(), what, mask, warp.alive);
  Meeting* meeting = find_meeting(all, mask);
  if (!meeting) {
    meeting = &open_meeting(all, what, mask, site);
  } else if (meeting->mask != mask || !same_text(meeting->what, what) || !same_site(meeting->site, site)) {
    fatal("divergent-collective", site, meeting->site, &thread,
          "%s executes %s with mask 0x%08x while other lanes of its warp are in %s with mask 0x%08x at %s",
          name(thread).c_str(), what, mask, meeting->what, meeting->mask, place(meeting->site).c_str());
  }
  meeting->operands[thread.lane] = operands;
  meeting->arrived |= bit;
  if (meeting->arrived != mask) {
    block_on({what, site, uint32_t(warp.id), mask, describe_meeting, never_meets});
    return;
  }
  all.open &= ~(1u << (meeting - all.slots));
  if (mask == warp.alive) converged(warp);
  action(warp, meeting->operands, mask);
  for (uint32_t others = mask & ~bit; others; others &= others - 1) wake(lane_of(warp, __builtin_ctz(others)));
}

void warpgroup_collective(const char* what, void* operands, WarpgroupAction action, Site site) {
  GroupOperand own = {operands, what, site, action, false};
  const int group = self->warp / 4;
  if (128 * group + 128 > thread_count)
    fatal("divergent-collective", site, {}, self, "%s executes %s, but its warpgroup %d has fewer than 4 warps",
          name(*self).c_str(), what, group);
  collective(what, kFullMask, &own, warp_joins_group, site);
  while (!own.complete) block_on({what, site, uint32_t(group), 0, describe_group});
}

void syncwarp(uint32_t mask, Site site) {
  yield_point();
  collective("__syncwarp", mask, nullptr, join_lanes, site);
}

uint32_t shuffle(uint32_t mask, uint32_t value, int source, Site site) {
  Shuffle own = {value, 0, source};
  collective("shfl.sync", mask, &own, shuffle_lanes, site);
  return own.result;
}

int redux_max(int value, Site site) {
  Maximum own = {value, 0};
  collective("redux.sync", kFullMask, &own, maximum_of_lanes, site);
  return own.result;
}

bool vote_any(bool predicate, Site site) {
  Maximum own = {predicate, 0};
  collective("vote.sync", kFullMask, &own, maximum_of_lanes, site);
  return own.result != 0;
}

namespace collective_topic {
const Topic topic = {nullptr, block_start, thread_exit, nullptr, nullptr, nullptr};
}

}  // namespace emu
