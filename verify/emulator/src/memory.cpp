// memory.cpp: global memory: the tensors that a kernel may touch, their traffic, and who wrote each element.
//
// Every access must lie inside one registered tensor. Bytes are counted as the kernel asks for them; caches are not
// modelled. The last write is kept per 2 bytes, the smallest element, with the reads since, of tensors that may be
// written: of an output, each must be written exactly once; and of two accesses, one of them a write and not both
// atomic, one must happen before the other (blocks.cpp).
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "report.h"
#include "runtime.h"

namespace emu {
namespace {

constexpr size_t kGranule = 2;  // bytes

struct Granule {
  GlobalAccess write;  // the last one since the tensor was registered
  bool atomic = false;
  bool expected = false;  // an output that must be written, once
};

using AccessLists = std::unordered_map<size_t, std::vector<GlobalAccess>>;  // by granule

struct Rows {
  char* base;
  size_t row_bytes;
  std::vector<int64_t> sizes, strides;  // in bytes
};

struct Tensor {
  char* base;
  size_t bytes;
  bool writable, once;
  std::string name;
  uint64_t read = 0, written = 0;
  std::vector<Rows> rows;         // that must be written; empty with `once`: everything
  std::vector<Granule> granules;  // made at the first access
  AccessLists reads;              // since the last write, not atomic
  AccessLists updates;            // atomic, of which later ones up to the last write did not know
  char* end() const { return base + bytes; }
};
std::vector<Tensor> tensors;
size_t last_hit = 0;

Tensor* find_tensor(const void* address, size_t bytes) {
  const char* first = static_cast<const char*>(address);
  const auto holds = [&](const Tensor& one) { return first >= one.base && first + bytes <= one.end(); };
  if (last_hit < tensors.size() && holds(tensors[last_hit])) return &tensors[last_hit];
  for (size_t i = 0; i < tensors.size(); ++i)
    if (holds(tensors[i])) {
      last_hit = i;
      return &tensors[i];
    }
  return nullptr;
}

// Where an address outside of all tensors lies: "16 bytes behind the end of k".
std::string nearest(const char* address) {
  std::string text = "no tensor is registered";
  size_t least = SIZE_MAX;
  for (const Tensor& one : tensors) {
    const bool before = address < one.base;
    const size_t away = before ? one.base - address : address >= one.end() ? address - one.end() : 0;
    if (away >= least) continue;
    least = away;
    text = away == 0 && !before && address < one.end() ? "it begins inside of '" + one.name + "' and ends beyond it"
           : away == 0 ? "the first bytes behind the end of '" + one.name + "'"
           : before ? std::to_string(away) + " bytes before the start of '" + one.name + "'"
                    : std::to_string(away) + " bytes behind the end of '" + one.name + "'";
  }
  return text;
}

std::string element_name(const Tensor& tensor, const void* address) {
  return "'" + tensor.name + "' at byte " + std::to_string(static_cast<const char*>(address) - tensor.base);
}

Tensor& checked_tensor(const void* address, size_t bytes, size_t alignment, const char* what, Site site) {
  if (reinterpret_cast<uintptr_t>(address) % alignment)
    fatal("global-misaligned", site, {}, self, "%s (%s) touches global memory at %p, which is not a multiple of %zu",
          name(*self).c_str(), what, address, alignment);
  Tensor* tensor = find_tensor(address, bytes);
  if (!tensor)
    fatal("global-out-of-bounds", site, {}, self,
          "%s (%s) touches %zu bytes of global memory outside of every tensor: %s", name(*self).c_str(), what, bytes,
          nearest(static_cast<const char*>(address)).c_str());
  return *tensor;
}

size_t granule_of(const Tensor& tensor, const char* address) { return (address - tensor.base) / kGranule; }

void expect(Tensor& tensor, const Rows& rows) {
  std::vector<int64_t> index(rows.sizes.size(), 0);
  for (const int64_t size : rows.sizes)
    if (size == 0) return;
  for (;;) {
    char* row = rows.base;
    for (size_t k = 0; k < index.size(); ++k) row += index[k] * rows.strides[k];
    const size_t end = (row + rows.row_bytes - tensor.base + kGranule - 1) / kGranule;
    for (size_t i = granule_of(tensor, row); i < end && i < tensor.granules.size(); ++i)
      tensor.granules[i].expected = true;
    size_t k = index.size();
    while (k > 0 && ++index[k - 1] == rows.sizes[k - 1]) index[--k] = 0;
    if (k == 0) return;
  }
}

bool is_output(const Tensor& tensor) { return tensor.once || !tensor.rows.empty(); }

void make_granules(Tensor& tensor) {
  if (!tensor.granules.empty()) return;
  tensor.granules.resize((tensor.bytes + kGranule - 1) / kGranule);
  if (tensor.once && tensor.rows.empty())
    for (Granule& granule : tensor.granules) granule.expected = true;
  for (const Rows& rows : tensor.rows) expect(tensor, rows);
}

void report_race(const Tensor& tensor, const char* address, const char* what, Site site, const char* verb,
                 const GlobalAccess& earlier, const char* earlier_verb) {
  const Site other = site_of(earlier.site);
  const std::string who = is_of_this_block(earlier) ? name(thread_at(earlier.thread))
                                                    : "block " + std::to_string(earlier.block) + " of the same launch";
  finding("global-race", site, other, self, "%s (%s) %s %s, which %s %s at %s, and nothing orders the two",
          name(*self).c_str(), what, verb, element_name(tensor, address).c_str(), who.c_str(), earlier_verb,
          place(other).c_str());
}

// The first access of a list that the running thread does not know of.
const GlobalAccess* unknown_one(const AccessLists& lists, size_t index) {
  const auto list = lists.find(index);
  if (list == lists.end()) return nullptr;
  const auto found = std::find_if_not(list->second.begin(), list->second.end(), knows_of);
  return found == list->second.end() ? nullptr : &*found;
}

// False after a finding.
bool check_write(Tensor& tensor, const char* address, const char* what, Site site, bool atomic) {
  const size_t index = granule_of(tensor, address);
  const Granule& granule = tensor.granules[index];
  if (is_output(tensor) && !granule.expected) {
    finding("written-outside", site, {}, self, "%s (%s) writes %s, which is no element of the output",
            name(*self).c_str(), what, element_name(tensor, address).c_str());
    return false;
  }
  if (const GlobalAccess* read = unknown_one(tensor.reads, index)) {
    report_race(tensor, address, what, site, "writes", *read, "read");
    return false;
  }
  const GlobalAccess* update = atomic ? nullptr : unknown_one(tensor.updates, index);
  const GlobalAccess& write = update ? *update : granule.write;
  if (write.launch == 0) return true;
  const bool is_repeated = is_output(tensor) && is_of_this_block(write);
  if (config.check && !is_repeated && !(atomic && granule.atomic) && !knows_of(write)) {
    report_race(tensor, address, what, site, "writes", write, "wrote");
    return false;
  }
  if (is_output(tensor)) {
    const Site other = site_of(write.site);
    finding("written-twice", site, other, self, "%s (%s) writes %s again, which was written at %s", name(*self).c_str(),
            what, element_name(tensor, address).c_str(), place(other).c_str());
    return false;
  }
  return true;
}

}  // namespace

void global_read(const void* address, size_t bytes, size_t alignment, const char* what, Site site, Atomic atomic) {
  Tensor& tensor = checked_tensor(address, bytes, alignment, what, site);
  tensor.read += bytes;
  if (!config.check || !tensor.writable || atomic == Atomic::yes) return;  // of an update, the write is checked
  make_granules(tensor);
  const char* first = static_cast<const char*>(address);
  const GlobalAccess read = global_access(site);
  for (const char* at = first; at < first + bytes; at += kGranule) {
    const size_t index = granule_of(tensor, at);
    const GlobalAccess* update = unknown_one(tensor.updates, index);
    const GlobalAccess& write = update ? *update : tensor.granules[index].write;
    if (write.launch && !knows_of(write)) {
      report_race(tensor, at, what, site, "reads", write, "wrote");
      return;
    }
    std::vector<GlobalAccess>& reads = tensor.reads[index];  // less those that whoever knows this one knows as well
    reads.erase(std::remove_if(reads.begin(), reads.end(), knows_of), reads.end());
    reads.push_back(read);
  }
}

void global_write(const void* address, size_t bytes, size_t alignment, const char* what, Site site, Atomic atomic,
                  Landing landing) {
  Tensor& tensor = checked_tensor(address, bytes, alignment, what, site);
  if (!tensor.writable)
    fatal("write-to-read-only", site, {}, self, "%s (%s) writes %s, which is an input", name(*self).c_str(), what,
          element_name(tensor, address).c_str());
  tensor.written += bytes;
  if (!config.check && !is_output(tensor)) return;
  make_granules(tensor);
  const char* first = static_cast<const char*>(address);
  GlobalAccess write = global_access(site);
  if (landing == Landing::later) write.time = kInFlight;
  bool clean = true;
  for (const char* at = first; at < first + bytes; at += kGranule) {
    clean = clean && check_write(tensor, at, what, site, atomic == Atomic::yes);
    const size_t index = granule_of(tensor, at);
    Granule& granule = tensor.granules[index];
    const bool joins = atomic == Atomic::yes && granule.atomic;
    if (joins && config.check && !knows_of(granule.write)) tensor.updates[index].push_back(granule.write);
    if (!joins && !tensor.updates.empty()) tensor.updates.erase(index);
    if (!tensor.reads.empty()) tensor.reads.erase(index);
    granule.write = write;
    granule.atomic = atomic == Atomic::yes;
  }
}

void global_landed(const void* address, size_t bytes) {
  if (!config.check) return;
  const char* first = static_cast<const char*>(address);
  Tensor& tensor = *find_tensor(address, bytes);
  const auto land = [](GlobalAccess& write) {
    if (write.time == kInFlight && write.thread == self->linear && is_of_this_block(write)) write.time = self->now();
  };
  for (const char* at = first; at < first + bytes; at += kGranule) {
    const size_t index = granule_of(tensor, at);
    land(tensor.granules[index].write);
    if (const auto updates = tensor.updates.find(index); updates != tensor.updates.end())
      for (GlobalAccess& update : updates->second) land(update);
  }
}

void load_global(const void* address, void* value, int bytes, Site site) {
  polled(site);
  global_read(address, bytes, bytes, "ld.global", site);
  memcpy(value, address, bytes);
}

void store_global(void* address, const void* value, int bytes, Site site) {
  global_write(address, bytes, bytes, "st.global", site);
  memcpy(address, value, bytes);
}

void forget_traffic() {
  for (Tensor& tensor : tensors) tensor.read = tensor.written = 0;
}

std::string tensors_json() {
  std::unordered_map<std::string, std::pair<uint64_t, uint64_t>> by_name;  // one name may stand for several ranges
  std::vector<std::string> names;
  for (const Tensor& one : tensors) {
    if (!by_name.count(one.name)) names.push_back(one.name);
    by_name[one.name].first += one.read;
    by_name[one.name].second += one.written;
  }
  std::string text = "{";
  for (const std::string& name : names)
    text += (text.size() > 1 ? ", \"" : "\"") + name + "\": {\"read\": " + std::to_string(by_name[name].first) +
            ", \"written\": " + std::to_string(by_name[name].second) + "}";
  return text + "}";
}

}  // namespace emu

extern "C" {

void emu_register(void* base, size_t bytes, int writable, int once, const char* name) {
  emu::tensors.push_back({static_cast<char*>(base), bytes, writable != 0, once != 0, name, 0, 0, {}, {}, {}, {}});
}

void emu_unregister_all() { emu::tensors.clear(); }

void emu_expect_written(void* base, size_t row_bytes, const int64_t* sizes, const int64_t* strides_bytes, int dims) {
  for (emu::Tensor& one : emu::tensors) {
    char* first = static_cast<char*>(base);
    if (first < one.base || first >= one.end()) continue;
    one.rows.push_back({first, row_bytes, {sizes, sizes + dims}, {strides_bytes, strides_bytes + dims}});
    one.granules.clear();
    return;
  }
}

int emu_check_outputs() {
  int found = 0;
  if (emu::stopped() || emu::last_launch_code() != 0) return 0;  // the rest was never meant to be complete
  for (emu::Tensor& one : emu::tensors) {
    if (!emu::is_output(one)) continue;
    emu::make_granules(one);
    size_t missing = 0, first = 0, before = SIZE_MAX;  // the last written one before the first that is missing, or any
    for (size_t i = one.granules.size(); i-- > 0;) {
      const emu::Granule& granule = one.granules[i];
      if (granule.expected && granule.write.launch == 0) {
        ++missing;
        first = i;
      } else if (granule.write.launch != 0 && (before == SIZE_MAX || before > first)) {
        before = i;
      }
    }
    if (!missing) continue;
    ++found;
    const emu::Site at = before == SIZE_MAX ? emu::Site{} : emu::site_of(one.granules[before].write.site);
    emu::finding("not-written", at, {}, nullptr,
                 "%zu bytes of the output '%s' were never written, the first at byte %zu%s", missing * emu::kGranule,
                 one.name.c_str(), first * emu::kGranule, at.file ? "; this line wrote its neighbours" : "");
  }
  return found;
}
}
