// cp_async.cpp: copies from global to shared memory that run beside the thread that starts them.
//
// Source: PTX ISA, "cp.async", "cp.async.commit_group", "cp.async.wait_group". Groups belong to one thread and complete
// in order. Until the thread has waited, the destination is in flight: nobody may touch it. Afterwards the copy is an
// ordinary write of that thread, so that another thread needs a barrier besides.
#include <cstring>
#include <deque>

#include "runtime.h"

namespace emu {
namespace {

struct Copy {
  uint32_t destination;
  const void* source;
  int bytes, source_bytes;  // the rest of `bytes` is zero
  bool done;
  Site site;
};
using Group = std::vector<Copy>;

struct Pending {
  Group open;                // not committed yet
  std::deque<Group> groups;  // oldest first
};
Pending pending[kMaxThreads];

void perform(Copy& copy) {
  unsigned char* destination = shared_at(copy.destination);
  memcpy(destination, copy.source, copy.source_bytes);
  memset(destination + copy.source_bytes, 0, copy.bytes - copy.source_bytes);
  copy.done = true;
}

void block_start() {
  for (int i = 0; i < thread_count; ++i) {
    pending[i].open.clear();
    pending[i].groups.clear();
  }
}

void thread_exit(Thread& thread) {
  const Pending& own = pending[thread.linear];
  const Copy* left = own.open.empty() ? nullptr : &own.open.front();
  for (const Group& group : own.groups)  // pipelines commit empty groups, which are harmless
    if (!left && !group.empty()) left = &group.front();
  if (left)
    finding("exit-with-cp-async", left->site, {}, &thread, "%s exits without waiting for the cp.async issued here",
            name(thread).c_str());
}

}  // namespace

void cp_async_copy(uint32_t destination, const void* source, int bytes, int source_bytes, Site site) {
  yield_point();
  Thread& thread = *self;
  check_shared(destination, bytes, bytes, "cp.async", site, thread);
  if (source_bytes < 0 || source_bytes > bytes)
    fatal("bad-operand", site, {}, &thread, "%s reads %d bytes in a cp.async of %d", name(thread).c_str(), source_bytes,
          bytes);
  if (source_bytes > 0) global_read(source, source_bytes, bytes, "cp.async", site);
  Access access = generic_access("cp.async", site, thread);
  access.time = kInFlight;
  shared_write(destination, bytes, access);
  log_access(BankUse::cp_async, destination, bytes, site);
  Copy copy = {destination, source, bytes, source_bytes, false, site};
  if (perform_now())
    perform(copy);
  else
    shared_poison(destination, bytes);
  pending[thread.linear].open.push_back(copy);
}

void cp_async_commit_group() {
  Pending& own = pending[self->linear];
  own.groups.push_back(std::move(own.open));
  own.open.clear();
}

void cp_async_wait_group(int newest) {
  yield_point();
  Thread& thread = *self;
  Pending& own = pending[thread.linear];
  while (int(own.groups.size()) > newest) {
    for (Copy& copy : own.groups.front()) {
      if (!copy.done) perform(copy);
      if (config.check) shared_landed(copy.destination, copy.bytes, thread.linear, thread.now());
    }
    own.groups.pop_front();
  }
}

namespace cp_async {
const Topic topic = {nullptr, block_start, thread_exit, nullptr, nullptr, nullptr};
}

}  // namespace emu
