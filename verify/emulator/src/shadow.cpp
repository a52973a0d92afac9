// shadow.cpp: the shared memory of a block, and beside it who wrote and who read each part of it, when and where.
//
// Every access is compared with the earlier ones that it must be ordered after: a read with the last write, a write
// with the last write and all reads since. Races are found by the clocks, whatever the order in which the fibers
// happened to run. Writes are kept per 4 bytes; reads per 16 bytes, or per 4 for narrow ones.
// Source: FastTrack (PLDI 2009): of reads only those are kept that no later read is ordered after.
//
// Holds: two reads in one list are of different components, and neither reader knew of the other's read.
#include <cstring>

#include "runtime.h"

namespace emu {

uint32_t shared_size = 0;

namespace {

constexpr uint16_t kNobody = 0xffff;

struct Record {
  uint32_t time;
  uint16_t component, site;
  bool operator==(const Record& other) const {
    return time == other.time && component == other.component && site == other.site;
  }
};

// A list of reads; 0 ends it.
struct Node {
  Record read;
  uint32_t next;
};

alignas(1024) unsigned char storage[kSharedBase + kSharedLimit];
std::vector<Record> writes;          // by word of 4 bytes
std::vector<uint32_t> chunk_reads;   // by chunk of 16 bytes: list
std::vector<uint32_t> narrow_reads;  // by word: list
std::vector<Node> nodes(1);
uint32_t free_nodes = 0;

uint32_t word_of(uint32_t address) { return (address - kSharedBase) / 4; }
uint32_t address_of(uint32_t word) { return kSharedBase + 4 * word; }

void block_start() {
  memset(storage + kSharedBase, 0xff, shared_size);
  if (!config.check) return;
  const size_t chunks = (shared_size + 15) / 16;
  writes.assign(4 * chunks, Record{0, kNobody, 0});
  chunk_reads.assign(chunks, 0);
  narrow_reads.assign(4 * chunks, 0);
  nodes.resize(1);
  free_nodes = 0;
}

void remember(uint32_t& list, const Record& read, const uint32_t* order) {
  bool is_kept = false;
  for (uint32_t* link = &list; *link;) {
    Node& node = nodes[*link];
    const bool is_implied = order[node.read.component] >= node.read.time || node.read.component == read.component;
    if (is_implied && is_kept) {
      const uint32_t unlinked = *link;
      *link = node.next;
      node.next = free_nodes;
      free_nodes = unlinked;
      continue;
    }
    if (is_implied) node.read = read;  // whoever is ordered after this read is ordered after the earlier one
    is_kept = is_kept || is_implied;
    link = &node.next;
  }
  if (is_kept) return;
  uint32_t made = free_nodes;
  if (made) {
    free_nodes = nodes[made].next;
    nodes[made] = {read, list};
  } else {
    made = uint32_t(nodes.size());
    nodes.push_back({read, list});
  }
  list = made;
}

void forget(uint32_t& list) {
  while (list) {
    const uint32_t at = list;
    list = nodes[at].next;
    nodes[at].next = free_nodes;
    free_nodes = at;
  }
}

// The first read of the list that the access is not ordered after.
const Record* unordered_read(uint32_t list, const Access& access) {
  for (uint32_t at = list; at; at = nodes[at].next)
    if (access.order[nodes[at].read.component] < nodes[at].read.time) return &nodes[at].read;
  return nullptr;
}

std::string who(const Access& access) { return name(*access.thread) + " (" + access.what + ")"; }

// What the earlier write is called: "thread 5 wrote it at k.cu:12".
std::string writer(const Record& write) {
  return component_name(write.component) + " wrote at " + place(site_of(write.site));
}

void report_unordered_write(const Record& write, uint32_t word, const Access& access, const char* verb) {
  const Site other = site_of(write.site);
  const std::string where = shared_name(address_of(word));
  if (write.time == kInFlight)
    finding("race", access.site, other, access.thread,
            "%s %s %s while the asynchronous copy that %s issued at %s is in flight: %snothing waited for it",
            who(access).c_str(), verb, where.c_str(), component_name(write.component).c_str(), place(other).c_str(),
            access.time == kInFlight ? "the two copies overlap and " : "");
  else
    finding("race", access.site, other, access.thread, "%s %s %s, which %s, and nothing orders the two",
            who(access).c_str(), verb, where.c_str(), writer(write).c_str());
}

// False after a finding.
bool check_against_write(const Record& write, uint32_t word, const Access& access, const char* verb) {
  if (access.order[write.component] < write.time) {
    report_unordered_write(write, word, access, verb);
    return false;
  }
  if (access.fenced && write.component < thread_count && access.fenced[write.component] < write.time) {
    finding("missing-proxy-fence", access.site, site_of(write.site), access.thread,
            "%s %s %s through the asynchronous proxy, which %s, and no fence.proxy.async lies between",
            who(access).c_str(), verb, shared_name(address_of(word)).c_str(), writer(write).c_str());
    return false;
  }
  return true;
}

bool check_against_reads(uint32_t list, uint32_t word, const Access& access) {
  const Record* read = unordered_read(list, access);
  if (!read) return true;
  const Site other = site_of(read->site);
  finding("race", access.site, other, access.thread, "%s writes %s, which %s read at %s, and nothing orders the two",
          who(access).c_str(), shared_name(address_of(word)).c_str(), component_name(read->component).c_str(),
          place(other).c_str());
  return false;
}

}  // namespace

unsigned char* shared_at(uint32_t address) { return storage + address; }

void check_shared(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what, Site site,
                  const Thread& thread) {
  if (address < kSharedBase || bytes > shared_size || address - kSharedBase > shared_size - bytes)
    fatal("shared-out-of-bounds", site, {}, &thread, "%s (%s) touches %u bytes at %s, but the block has %u",
          name(thread).c_str(), what, bytes, shared_name(address).c_str(), shared_size);
  if (address % alignment)
    fatal("shared-misaligned", site, {}, &thread, "%s (%s) touches %s, which is not a multiple of %u",
          name(thread).c_str(), what, shared_name(address).c_str(), alignment);
}

void shared_read(uint32_t address, uint32_t bytes, const Access& access) {
  if (!config.check) return;
  const uint32_t first = word_of(address), end = word_of(address + bytes + 3);
  for (uint32_t word = first; word < end; ++word) {
    const Record& write = writes[word];
    if (word > first && write == writes[word - 1]) continue;
    if (write.component == kNobody) {
      finding("uninitialised-read", access.site, {}, access.thread, "%s reads %s, which nobody has written",
              who(access).c_str(), shared_name(address_of(word)).c_str());
      return;
    }
    if (!check_against_write(write, word, access, "reads")) return;
  }
  const Record read = {access.time, uint16_t(access.component), site_id(access.site)};
  if (address % 16 == 0 && bytes % 16 == 0) {
    for (uint32_t chunk = first / 4; chunk < end / 4; ++chunk) remember(chunk_reads[chunk], read, access.order);
  } else {
    for (uint32_t word = first; word < end; ++word) remember(narrow_reads[word], read, access.order);
  }
}

void shared_write(uint32_t address, uint32_t bytes, const Access& access) {
  if (!config.check) return;
  const uint32_t first = word_of(address), end = word_of(address + bytes + 3);
  bool clean = true;
  for (uint32_t chunk = first / 4; clean && chunk < (end + 3) / 4; ++chunk)
    clean = check_against_reads(chunk_reads[chunk], max(first, 4 * chunk), access);
  for (uint32_t word = first; clean && word < end; ++word)
    if (narrow_reads[word]) clean = check_against_reads(narrow_reads[word], word, access);
  for (uint32_t word = first; clean && word < end; ++word) {
    const Record& write = writes[word];
    if (write.component != kNobody && !(word > first && write == writes[word - 1]))
      clean = check_against_write(write, word, access, "overwrites");
  }
  const Record record = {access.time, uint16_t(access.component), site_id(access.site)};
  for (uint32_t word = first; word < end; ++word) {
    writes[word] = record;
    forget(narrow_reads[word]);
  }
  for (uint32_t chunk = (first + 3) / 4; chunk < end / 4; ++chunk) forget(chunk_reads[chunk]);
}

void shared_landed(uint32_t address, uint32_t bytes, int component, uint32_t time) {
  if (!config.check) return;
  for (uint32_t word = word_of(address); word < word_of(address + bytes + 3); ++word)
    if (writes[word].component == component && writes[word].time == kInFlight) writes[word].time = time;
}

void shared_poison(uint32_t address, uint32_t bytes) { memset(shared_at(address), 0xff, bytes); }

void load_shared(uint32_t address, void* value, int bytes, Site site) {
  yield_point();
  check_shared(address, bytes, bytes, "ld.shared", site, *self);
  shared_read(address, bytes, generic_access("ld.shared", site, *self));
  log_access(BankUse::ld, address, bytes, site);
  memcpy(value, shared_at(address), bytes);
}

void store_shared(uint32_t address, const void* value, int bytes, Site site) {
  yield_point();
  check_shared(address, bytes, bytes, "st.shared", site, *self);
  shared_write(address, bytes, generic_access("st.shared", site, *self));
  log_access(BankUse::st, address, bytes, site);
  memcpy(shared_at(address), value, bytes);
}

namespace shadow {
const Topic topic = {nullptr, block_start, nullptr, nullptr, nullptr, nullptr};
}

}  // namespace emu
