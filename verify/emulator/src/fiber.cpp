// fiber.cpp: one fiber per CUDA thread, the scheduler, and the report of a deadlock.
//
// A fiber runs until it must wait; then a ready lane of the same warp continues, else another warp. Ready lanes are
// bits: a warp is ready iff one of its lanes is. Which of several ready ones comes next is Config::order.
// Holds: `self`, threadIdx and the running stack belong to the same thread.
#include <algorithm>
#include <map>
#include <tuple>

#include "context.h"
#include "runtime.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emu {

Thread* self = nullptr;
int thread_count = 0, warp_count = 0;

namespace {

struct Fiber {
  Context context;
  char* stack = nullptr;
};

Thread threads[kMaxThreads];
Fiber fibers[kMaxThreads];
Warp warps[kMaxWarps];
Context main_context;
Body kernel_body;
uint32_t ready_warps;
int current_warp, living;
constexpr uint32_t kPolls = 1 << 22;  // more than any thread needs between two waits
uint32_t polls_in_a_row = 0;

int pick_bit(uint32_t bits) {
  if (config.order == Order::ascending) return __builtin_ctz(bits);
  if (config.order == Order::descending) return 31 - __builtin_clz(bits);
  for (uint32_t skip = random_bits() % __builtin_popcount(bits); skip > 0; --skip) bits &= bits - 1;
  return __builtin_ctz(bits);
}

void suspend(Thread& thread) {
  Warp& warp = warps[thread.warp];
  warp.ready &= ~(1u << thread.lane);
  if (!warp.ready) ready_warps &= ~(1u << warp.id);
}

bool progress_somewhere() {
  for (int i = 0; i < topic_count; ++i)
    if (topics[i]->progress && topics[i]->progress()) return true;
  return false;
}

Thread* next_thread() {
  if (config.timing == Timing::random && chance(16)) progress_somewhere();
  for (;;) {
    const Warp& warp = warps[current_warp];
    const bool leave = config.order == Order::random && chance(8);
    if (warp.ready && !leave) return &threads[32 * warp.id + pick_bit(warp.ready)];
    if (ready_warps)
      current_warp = pick_bit(ready_warps);
    else if (!progress_somewhere())
      return nullptr;
  }
}

void run(Thread& next) {
  self = &next;
  threadIdx = next.index;
  current_warp = next.warp;
  ++counters.switches;
}

constexpr size_t kListed = 3;  // groups in the sentence of a deadlock

// Threads that wait for the same thing at the same place.
struct Group {
  int count = 0;
  const Thread* first = nullptr;
};

bool is_hopeless(const Group& group) {
  const Wait& wait = group.first->wait;
  return wait.hopeless && wait.hopeless(wait);
}

std::string clause_of(const Group& group, bool names_place, bool describes) {
  const Wait& wait = group.first->wait;
  std::string text = group.count == 1
                         ? name(*group.first) + " waits"
                         : std::to_string(group.count) + " threads, the first is " + name(*group.first) + ", wait";
  text += std::string(" in ") + wait.what;
  if (names_place) text += " at " + place(wait.site);
  return describes && wait.describe ? text + " (" + wait.describe(wait) + ")" : text;
}

// The finding stands at the first group. Where some waits are hopeless, the others follow from them: only they are
// described.
void report_deadlock() {
  using Key = std::tuple<std::string, int, std::string, uint32_t, uint32_t>;  // file, line, what, object, detail
  std::map<Key, Group> groups;
  for (int i = 0; i < thread_count; ++i) {
    if (threads[i].done) continue;
    const Wait& wait = threads[i].wait;
    Group& group = groups[{wait.site.file ? wait.site.file : "", wait.site.line, wait.what, wait.object, wait.detail}];
    if (group.count++ == 0) group.first = &threads[i];
  }
  std::vector<Group> listed;
  for (const auto& [key, group] : groups) listed.push_back(group);
  std::stable_partition(listed.begin(), listed.end(), is_hopeless);
  const bool describes_all = !is_hopeless(listed[0]);
  std::string text;
  for (size_t i = 0; i < listed.size() && i < kListed; ++i)
    text += (i ? "; " : "") + clause_of(listed[i], i > 0, describes_all || is_hopeless(listed[i]));
  if (listed.size() > kListed) text += "; and " + std::to_string(listed.size() - kListed) + " more groups";
  const Thread& first = *listed[0].first;
  const Site other = listed.size() > 1 ? listed[1].first->wait.site : Site{};
  fatal("deadlock", first.wait.site, other, &first, "no thread of the block can run: %s", text.c_str());
}

void leave_to_next(Thread& from) {
  Thread* next = next_thread();
  if (!next) report_deadlock();
  if (next == &from) return;
  run(*next);
  switch_context(fibers[from.linear].context, fibers[next->linear].context);
}

void fiber_entry() {
  kernel_body.call(kernel_body.closure);
  Thread& thread = *self;
  for (int i = 0; i < topic_count; ++i)
    if (topics[i]->thread_exit) topics[i]->thread_exit(thread);
  thread.done = true;
  polls_in_a_row = 0;
  suspend(thread);
  --living;
  warps[thread.warp].alive &= ~(1u << thread.lane);
  warps[thread.warp].minimum_is_current = false;
  for (int i = 0; i < topic_count; ++i)
    if (topics[i]->thread_left) topics[i]->thread_left(thread);
  if (living == 0) {
    self = nullptr;
    switch_context(fibers[thread.linear].context, main_context);
  }
  leave_to_next(thread);
  __builtin_unreachable();
}

}  // namespace

Thread& thread_at(int linear) { return threads[linear]; }
Warp& warp_at(int warp) { return warps[warp]; }
int living_threads() { return living; }
int own_lane() { return self->lane; }

void wake(Thread& thread) {
  warps[thread.warp].ready |= 1u << thread.lane;
  ready_warps |= 1u << thread.warp;
}

void block_on(const Wait& wait) {
  Thread& thread = *self;
  thread.wait = wait;
  polls_in_a_row = 0;
  suspend(thread);
  leave_to_next(thread);
}

void yield() { leave_to_next(*self); }

void polled(Site site) {
  if (++polls_in_a_row < kPolls) return;
  fatal("deadlock", site, {}, self,
        "%s looks at global memory for the %u-th time in a row, and no thread waits or exits meanwhile: what another "
        "block would write does not come before this block ends",
        name(*self).c_str(), kPolls);
}

void yield_point() {
  if (config.order == Order::random && chance(16)) yield();
}

void abandon_block() {
  Thread& thread = *self;
  self = nullptr;
  switch_context(fibers[thread.linear].context, main_context);
  __builtin_unreachable();
}

bool start_threads(dim3 block) {
  thread_count = int(block.x * block.y * block.z);
  warp_count = (thread_count + 31) / 32;
  for (int i = 0; i < thread_count; ++i) {
    Thread& thread = threads[i];
    thread = Thread{};
    thread.linear = i;
    thread.warp = i / 32;
    thread.lane = i % 32;
    thread.index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack = new_stack();
    if (!fiber.stack) return false;
    // Equal offsets would put the hot lines of all stacks into one set of the L1 cache.
    prepare(fiber.context, fiber.stack, i % 61 * 192, fiber_entry);
  }
  ready_warps = 0;
  for (int i = 0; i < warp_count; ++i) {
    warps[i] = Warp{};
    warps[i].id = i;
    warps[i].alive = warps[i].ready = 32 * i + 32 <= thread_count ? kFullMask : (1u << thread_count % 32) - 1;
    ready_warps |= 1u << i;
  }
  living = thread_count;
  polls_in_a_row = 0;
  current_warp = pick_bit(ready_warps);
  return true;
}

void run_threads(Body body) {
  kernel_body = body;
  Thread* first = next_thread();
  run(*first);
  switch_context(main_context, fibers[first->linear].context);
  self = nullptr;
}

}  // namespace emu
