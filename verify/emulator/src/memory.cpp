// memory.cpp: global memory: the tensors that a kernel may touch, their traffic, and who wrote each element.
//
// Every access must lie inside one registered tensor. Bytes are counted as the kernel asks for them; caches are not
// modelled. Writes are kept per 2 bytes, the smallest element: of an output, each must be written exactly once; and
// what one block writes, another may write or read in the same launch only by atomics or behind a counter that both
// touch.
// Holds: blocks run one after the other: an earlier write in the record is by a block that has ended, or by this one.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "report.h"
#include "runtime.h"

namespace emu {
namespace {

constexpr size_t kGranule = 2;  // bytes

struct Granule {
  uint32_t launch = 0;  // that wrote it last; 0: none since the tensor was registered
  uint32_t block = 0;   // rank in that launch
  uint16_t site = 0;
  bool atomic = false;
  bool expected = false;  // an output that must be written, once
};

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
  std::vector<Granule> granules;  // made at the first write
  char* end() const { return base + bytes; }
};
std::vector<Tensor> tensors;
size_t last_hit = 0;
uint32_t launch_number = 0, block_rank = 0;

using Blocks = std::vector<bool>;                  // by rank
Blocks known_blocks;                               // those that the running block is ordered after
std::unordered_map<const void*, Blocks> known_at;  // what a counter passes on

void launch_start() {
  ++launch_number;
  known_at.clear();
}

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

bool ordered_after(const Granule& granule) {
  return granule.launch != launch_number || granule.block == block_rank ||
         (granule.block < known_blocks.size() && known_blocks[granule.block]);
}

// False after a finding.
bool check_write(const Tensor& tensor, const Granule& granule, const char* address, const char* what, Site site,
                 bool atomic) {
  const Site other = granule.launch ? site_of(granule.site) : Site{};
  if (is_output(tensor) && !granule.expected) {
    finding("written-outside", site, {}, self, "%s (%s) writes %s, which is no element of the output",
            name(*self).c_str(), what, element_name(tensor, address).c_str());
    return false;
  }
  if (granule.launch == 0) return true;
  if (!ordered_after(granule) && !(atomic && granule.atomic)) {
    finding("global-race", site, other, self, "%s (%s) writes %s, which block %u of the same launch wrote at %s",
            name(*self).c_str(), what, element_name(tensor, address).c_str(), granule.block, place(other).c_str());
    return false;
  }
  if (is_output(tensor)) {
    finding("written-twice", site, other, self, "%s (%s) writes %s again, which was written at %s", name(*self).c_str(),
            what, element_name(tensor, address).c_str(), place(other).c_str());
    return false;
  }
  return true;
}

}  // namespace

void global_read(const void* address, size_t bytes, size_t alignment, const char* what, Site site) {
  Tensor& tensor = checked_tensor(address, bytes, alignment, what, site);
  tensor.read += bytes;
  if (!config.check || tensor.granules.empty()) return;
  const char* first = static_cast<const char*>(address);
  for (const char* at = first; at < first + bytes; at += kGranule) {
    const Granule& granule = tensor.granules[granule_of(tensor, at)];
    if (granule.launch == 0 || granule.atomic || ordered_after(granule)) continue;
    const Site other = site_of(granule.site);
    finding("global-race", site, other, self, "%s (%s) reads %s, which block %u of the same launch wrote at %s",
            name(*self).c_str(), what, element_name(tensor, at).c_str(), granule.block, place(other).c_str());
    return;
  }
}

void global_write(const void* address, size_t bytes, size_t alignment, const char* what, Site site, Atomic atomic) {
  Tensor& tensor = checked_tensor(address, bytes, alignment, what, site);
  if (!tensor.writable)
    fatal("write-to-read-only", site, {}, self, "%s (%s) writes %s, which is an input", name(*self).c_str(), what,
          element_name(tensor, address).c_str());
  tensor.written += bytes;
  if (!config.check && !is_output(tensor)) return;
  make_granules(tensor);
  const char* first = static_cast<const char*>(address);
  const uint16_t id = site_id(site);
  bool clean = true;
  for (const char* at = first; at < first + bytes; at += kGranule) {
    Granule& granule = tensor.granules[granule_of(tensor, at)];
    clean = clean && check_write(tensor, granule, at, what, site, atomic == Atomic::yes);
    granule.launch = launch_number;
    granule.block = block_rank;
    granule.site = id;
    granule.atomic = atomic == Atomic::yes;
  }
}

void global_synchronise(const void* address) {
  if (!config.check) return;
  Blocks& here = known_at[address];
  here.resize(known_blocks.size());
  known_blocks[block_rank] = true;
  for (size_t i = 0; i < here.size(); ++i) here[i] = known_blocks[i] = here[i] || known_blocks[i];
}

void load_global(const void* address, void* value, int bytes, Site site) {
  global_read(address, bytes, bytes, "ld.global", site);
  memcpy(value, address, bytes);
}

void store_global(void* address, const void* value, int bytes, Site site) {
  global_write(address, bytes, bytes, "st.global", site);
  memcpy(address, value, bytes);
}

void memory_starts_block(int rank, int blocks) {
  block_rank = uint32_t(rank);
  known_blocks.assign(blocks, false);
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

namespace memory {
const Topic topic = {launch_start, nullptr, nullptr, nullptr, nullptr, nullptr};
}

}  // namespace emu

extern "C" {

void emu_register(void* base, size_t bytes, int writable, int once, const char* name) {
  emu::tensors.push_back({static_cast<char*>(base), bytes, writable != 0, once != 0, name, 0, 0, {}, {}});
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
      if (granule.expected && granule.launch == 0) {
        ++missing;
        first = i;
      } else if (granule.launch != 0 && (before == SIZE_MAX || before > first)) {
        before = i;
      }
    }
    if (!missing) continue;
    ++found;
    const emu::Site at = before == SIZE_MAX ? emu::Site{} : emu::site_of(one.granules[before].site);
    emu::finding("not-written", at, {}, nullptr,
                 "%zu bytes of the output '%s' were never written, the first at byte %zu%s", missing * emu::kGranule,
                 one.name.c_str(), first * emu::kGranule, at.file ? "; this line wrote its neighbours" : "");
  }
  return found;
}
}
