// tma.cpp: bulk copies between global and shared memory: loads that complete on an mbarrier, stores and reductions in
// bulk groups.
//
// Loads complete in any order and at any time, so late means: only when no thread can run, the newest first. A store or
// reduction has two ends: its reading of shared memory, which late happens in either wait of the issuing thread, and
// its writing of global memory, which late happens in wait_group without .read or when the thread exits. What a load
// will write is poisoned at its issue. Elements outside of a tensor are read as zero and are not written; the mbarrier
// counts the whole box always.
// Source: PTX ISA, "cp.async.bulk", "cp.reduce.async.bulk", "cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor",
// "cp.async.bulk.commit_group", "cp.async.bulk.wait_group". Three rules are not in the manual, tests/data has them from
// an H200: coordinate 0 is a multiple of 16 bytes; a store or reduction has no negative coordinate; it writes the
// 16-byte chunk that holds the last element of a row as a whole.
//
// Always holds: a load is recorded, at its issue, as a write by its mbarrier in the phase then running; a store as a
// read by the issuing thread's bulk agent in the group then open.
#include <cstring>
#include <deque>

#include "emu_ptx_sm90a.h"
#include "hopper.h"
#include "tensor_map.h"

namespace emu {
namespace tma {
namespace {

// One instruction: a box of a tensor map, or `bytes` at `global` if the map is not valid.
struct Copy {
  const char* what;
  Site site;
  TensorMap map;
  int coordinates[5];
  uint32_t shared;
  char* global;
  uint32_t bytes;
  bool reduce;
  mbarrier::Load load;                // of a load
  std::vector<unsigned char> source;  // of a store: its shared memory, from when it has been read
  uint32_t group;
  bool written;
};

struct Groups {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> committed;
  std::deque<Copy> unwritten;  // read, but perhaps not yet written; in order
  uint32_t completed = 0;      // groups that have been read
  int component = -1;          // of the thread's bulk agent, from its first store on
  uint32_t next_time() const { return completed + static_cast<uint32_t>(committed.size()) + 1; }
};

std::vector<Copy> loads;  // in flight, in the order of issue
Groups groups[kMaxThreads];

// ---- Moving data

template <typename T, class Add>
void add_elements(char* global, const unsigned char* shared, uint32_t bytes, Add add) {
  for (uint32_t i = 0; i < bytes; i += sizeof(T)) {
    T sum, term;
    std::memcpy(&sum, global + i, sizeof sum);
    std::memcpy(&term, shared + i, sizeof term);
    sum = add(sum, term);
    std::memcpy(global + i, &sum, sizeof sum);
  }
}

void add_piece(int type, char* global, const unsigned char* shared, uint32_t bytes) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      add_elements<uint16_t>(global, shared, bytes, [](uint16_t a, uint16_t b) {
        return static_cast<uint16_t>(to_bf16(from_bf16(a) + from_bf16(b)));
      });
      break;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
      add_elements<uint16_t>(global, shared, bytes, [](uint16_t a, uint16_t b) {
        return static_cast<uint16_t>(to_f16(from_f16(a) + from_f16(b)));
      });
      break;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      add_elements<float>(global, shared, bytes, [](float a, float b) { return a + b; });
      break;
    default:
      add_elements<uint32_t>(global, shared, bytes, [](uint32_t a, uint32_t b) { return a + b; });
      break;
  }
}

bool can_add(int type) {
  return type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ||
         type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || type == CU_TENSOR_MAP_DATA_TYPE_INT32 ||
         type == CU_TENSOR_MAP_DATA_TYPE_UINT32;
}

bool is_box(const Copy& copy) { return copy.map.magic == TensorMap::kMagic; }

// From the first shared byte of the copy to behind its last one.
uint32_t extent(const Copy& copy) { return is_box(copy) ? copy.map.shared_bytes() : copy.bytes; }

// Calls visit(address, bytes) for the shared memory that the copy touches: all of its extent, or less of short rows.
template <class Visit>
void for_each_shared_range(const Copy& copy, Visit visit) {
  if (!is_box(copy) || copy.map.row_bytes() == copy.map.row_pitch()) {
    visit(copy.shared, extent(copy));
    return;
  }
  for_each_row(copy.map, copy.coordinates, copy.shared, [&](const BoxRow& row) {
    for_each_chunk(row, copy.map.swizzle, 0, copy.map.row_bytes(),
                   [&](uint32_t at, uint32_t, uint32_t bytes) { visit(at, bytes); });
  });
}

// The end of what a row of a store or reduction writes.
uint32_t written_end(const BoxRow& row) { return (row.end + 15) / 16 * 16; }

// Calls visit(global, bytes) for the contiguous parts that HBM sees.
template <class Visit>
void for_each_global_range(const Copy& copy, bool store, Visit visit) {
  if (!is_box(copy)) {
    visit(copy.global, copy.bytes);
    return;
  }
  for_each_row(copy.map, copy.coordinates, copy.shared, [&](const BoxRow& row) {
    const uint32_t end = store ? written_end(row) : row.end;
    if (row.begin < end) visit(row.global + row.begin, end - row.begin);
  });
}

void perform_load(const Copy& copy) {
  if (!is_box(copy)) {
    std::memcpy(shared_at(copy.shared), copy.global, copy.bytes);
    mbarrier::complete_load(copy.load, copy.bytes, copy.what, copy.site);
    return;
  }
  for_each_row(copy.map, copy.coordinates, copy.shared, [&](const BoxRow& row) {
    const auto zero = [](uint32_t at, uint32_t, uint32_t bytes) { std::memset(shared_at(at), 0, bytes); };
    for_each_chunk(row, copy.map.swizzle, 0, row.begin, zero);
    for_each_chunk(row, copy.map.swizzle, row.begin, row.end, [&](uint32_t at, uint32_t offset, uint32_t bytes) {
      std::memcpy(shared_at(at), row.global + offset, bytes);
    });
    for_each_chunk(row, copy.map.swizzle, row.end, copy.map.row_bytes(), zero);
  });
  mbarrier::complete_load(copy.load, copy.map.box_bytes(), copy.what, copy.site);
}

void read_source(Copy& copy) {
  const unsigned char* from = shared_at(copy.shared);
  if (copy.source.empty()) copy.source.assign(from, from + extent(copy));
}

void write_global(Copy& copy) {
  if (copy.written) return;
  copy.written = true;
  const auto write = [&](uint32_t at, char* global, uint32_t bytes) {
    const unsigned char* from = copy.source.data() + (at - copy.shared);
    if (copy.reduce) {
      add_piece(is_box(copy) ? copy.map.type : int(CU_TENSOR_MAP_DATA_TYPE_FLOAT32), global, from, bytes);
    } else {
      std::memcpy(global, from, bytes);
    }
  };
  if (!is_box(copy)) {
    write(copy.shared, copy.global, copy.bytes);
    return;
  }
  for_each_row(copy.map, copy.coordinates, copy.shared, [&](const BoxRow& row) {
    for_each_chunk(row, copy.map.swizzle, row.begin, written_end(row),
                   [&](uint32_t at, uint32_t offset, uint32_t bytes) { write(at, row.global + offset, bytes); });
  });
}

// Writes what groups up to `group` have left; from here on it is an ordinary write of the thread.
void write_groups(Groups& own, uint32_t group) {
  while (!own.unwritten.empty() && own.unwritten.front().group <= group) {
    Copy& copy = own.unwritten.front();
    write_global(copy);
    for_each_global_range(copy, true, global_landed);
    own.unwritten.pop_front();
  }
}

// ---- Issue

// Checks a tensor-map operand and gives the copy of one box.
Copy box_copy(const char* what, Site site, const CUtensorMap* map, uint32_t shared, const int* coordinates, int rank) {
  Copy copy = {};
  copy.what = what;
  copy.site = site;
  copy.shared = shared;
  if (reinterpret_cast<uintptr_t>(map) % 64) {
    fatal("tensor-map", site, {}, self, "the tensor map of %s by %s is not aligned to 64 bytes", what,
          name(*self).c_str());
  }
  std::memcpy(&copy.map, map, sizeof copy.map);
  if (copy.map.magic != TensorMap::kMagic) {
    fatal("tensor-map", site, {}, self, "the operand of %s by %s is no tensor map that cuTensorMapEncodeTiled made",
          what, name(*self).c_str());
  }
  if (copy.map.rank != rank) {
    fatal("tensor-map", site, {}, self, "%s with %d coordinates by %s on a tensor map of rank %d", what, rank,
          name(*self).c_str(), copy.map.rank);
  }
  for (int i = 0; i < rank; ++i) copy.coordinates[i] = coordinates[i];
  if (int64_t(coordinates[0]) * copy.map.element_bytes % 16) {
    fatal("tensor-coordinate", site, {}, self,
          "%s by %s at coordinate %d of dimension 0, which is not a multiple of 16 bytes", what, name(*self).c_str(),
          coordinates[0]);
  }
  return copy;
}

// A linear copy: the instruction moves multiples of 16 bytes between addresses that are multiples of 16.
Copy linear_copy(const char* what, Site site, const void* global, uint32_t shared, uint32_t bytes) {
  Copy copy = {};
  copy.what = what;
  copy.site = site;
  copy.shared = shared;
  copy.global = const_cast<char*>(static_cast<const char*>(global));
  copy.bytes = bytes;
  if (!bytes || bytes % 16) {
    fatal("bulk-size", site, {}, self, "%s of %u bytes by %s: the size is not a positive multiple of 16", what, bytes,
          name(*self).c_str());
  }
  return copy;
}

// A box must start where the swizzle pattern does, else wgmma and the kernel's own accesses see another pattern.
uint32_t alignment(const Copy& copy) {
  const uint32_t period = is_box(copy) ? swizzle_period(copy.map.swizzle) : 16;
  return is_box(copy) && period < 128 ? 128 : period;
}

void check_no_negative_coordinate(const Copy& copy) {
  for (int i = 0; is_box(copy) && i < copy.map.rank; ++i) {
    if (copy.coordinates[i] >= 0) continue;
    fatal("tensor-coordinate", copy.site, {}, self,
          "%s by %s at coordinate %d of dimension %d: a box is written from inside of the tensor on", copy.what,
          name(*self).c_str(), copy.coordinates[i], i);
  }
}

void issue_load(Copy copy, uint32_t bar) {
  yield_point();
  ++counters.tma;
  const size_t element = is_box(copy) ? copy.map.element_bytes : 16;
  check_shared(copy.shared, extent(copy), alignment(copy), copy.what, copy.site, *self);
  copy.load = mbarrier::start_load(bar, copy.what, copy.site);
  const Access access = {copy.what,           copy.site,           self,          self->clocks.order,
                         self->clocks.fenced, copy.load.component, copy.load.time};
  for_each_shared_range(copy, [&](uint32_t at, uint32_t bytes) { shared_write(at, bytes, access); });
  for_each_global_range(copy, false,
                        [&](char* at, uint32_t bytes) { global_read(at, bytes, element, copy.what, copy.site); });
  if (perform_now()) {
    perform_load(copy);
  } else {
    for_each_shared_range(copy, [](uint32_t at, uint32_t bytes) { shared_poison(at, bytes); });
    loads.push_back(copy);
  }
}

void issue_store(Copy copy) {
  yield_point();
  ++counters.tma;
  check_no_negative_coordinate(copy);
  Groups& own = groups[self->linear];
  if (own.component < 0 && config.check) own.component = new_component(Agent::bulk_store, self->linear);
  const size_t element = is_box(copy) ? copy.map.element_bytes : 16;
  check_shared(copy.shared, extent(copy), alignment(copy), copy.what, copy.site, *self);
  const Access access = {copy.what,           copy.site,     self,           self->clocks.order,
                         self->clocks.fenced, own.component, own.next_time()};
  for_each_shared_range(copy, [&](uint32_t at, uint32_t bytes) { shared_read(at, bytes, access); });
  const Atomic atomic = copy.reduce ? Atomic::yes : Atomic::no;
  for_each_global_range(copy, true, [&](char* at, uint32_t bytes) {
    if (copy.reduce) global_read(at, bytes, element, copy.what, copy.site, Atomic::yes);
    global_write(at, bytes, element, copy.what, copy.site, atomic, Landing::later);
  });
  copy.group = own.next_time();
  if (perform_now()) {
    read_source(copy);
    write_global(copy);
  }
  own.open.push_back(std::move(copy));
}

// ---- Hooks

void block_start() {
  loads.clear();
  for (int i = 0; i < thread_count; ++i) groups[i] = Groups();
}

void thread_exit(Thread& thread) {
  Groups& own = groups[thread.linear];
  write_groups(own, own.completed);
  const Copy* left = own.open.empty() ? nullptr : &own.open.front();
  const char* state = "never committed to a bulk group";
  for (auto group = own.committed.rbegin(); group != own.committed.rend(); ++group) {
    if (group->empty()) continue;  // an empty group is complete
    left = &group->front();
    state = "not waited for";
  }
  if (!left) return;
  const Site site = left->site;
  const char* what = left->what;
  own = Groups();
  finding("exit-in-flight", site, {}, &thread, "%s exits with its %s %s: shared memory may be gone before it is read",
          name(thread).c_str(), what, state);
}

bool progress() {
  if (loads.empty()) return false;
  const size_t last = loads.size() - 1;
  const size_t chosen = config.timing == Timing::random ? random_bits() % loads.size() : last;
  const Copy copy = loads[chosen];
  loads.erase(loads.begin() + static_cast<ptrdiff_t>(chosen));
  perform_load(copy);
  return true;
}

void wait(int newest, bool until_written) {
  yield_point();
  Groups& own = groups[self->linear];
  const uint32_t issued = own.next_time() - 1, oldest = issued - min(issued, static_cast<uint32_t>(newest));
  while (own.completed < oldest) {
    for (Copy& copy : own.committed.front()) {
      read_source(copy);
      own.unwritten.push_back(std::move(copy));
    }
    own.committed.pop_front();
    ++own.completed;
  }
  if (until_written) write_groups(own, oldest);
  if (own.component >= 0) learn(*self, own.component, own.completed);
}

}  // namespace

const Topic topic = {nullptr, block_start, thread_exit, nullptr, nullptr, progress};

}  // namespace tma

void tma_load(uint32_t dst, const CUtensorMap* map, uint32_t bar, const int* coordinates, int rank, Site site) {
  tma::issue_load(tma::box_copy("TMA load", site, map, dst, coordinates, rank), bar);
}

void tma_store(const CUtensorMap* map, uint32_t src, const int* coordinates, int rank, bool reduce, Site site) {
  const char* what = reduce ? "TMA reduction" : "TMA store";
  tma::Copy copy = tma::box_copy(what, site, map, src, coordinates, rank);
  copy.reduce = reduce;
  if (reduce && !tma::can_add(copy.map.type)) {
    fatal("tensor-map", site, {}, self, "the TMA reduction by %s has a map of data type %d, which it cannot add",
          name(*self).c_str(), copy.map.type);
  }
  tma::issue_store(std::move(copy));
}

void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar, Site site) {
  tma::issue_load(tma::linear_copy("bulk load", site, src, dst, bytes), bar);
}

void bulk_store(void* dst, uint32_t src, uint32_t bytes, bool reduce, Site site) {
  tma::Copy copy = tma::linear_copy(reduce ? "bulk reduction" : "bulk store", site, dst, src, bytes);
  copy.reduce = reduce;
  tma::issue_store(std::move(copy));
}

void bulk_commit(Site) {
  tma::Groups& own = tma::groups[self->linear];
  own.committed.push_back(std::move(own.open));
  own.open.clear();
}

void bulk_wait(int newest, Site) { tma::wait(newest, true); }

void prefetch_tensormap(const CUtensorMap* map, Site site) {
  if (decode(map)) return;
  fatal("tensor-map", site, {}, self, "the operand of prefetch.tensormap by %s is no tensor map", name(*self).c_str());
}

void bulk_wait_read(int newest, Site) { tma::wait(newest, false); }

}  // namespace emu
